"""Options: defaults < config file < flags, what --resume allows, and errors that name the option."""

import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, flags, in_process, make_gpt2_small

from data.tokenizer import make_tokenizer
from training.checkpoint import save_checkpoint
from training.config import Config, load_config
from weights import FORMAT

SHIPPED = sorted((ROOT / "configs").glob("*.py"))
MODERN = ROOT / "configs" / "modern.py"


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "mine.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def refuse(folder, capsys):
    """train.py must refuse argv with a message that has these words, and train nothing."""

    def refuse(*argv, words):
        result = in_process(capsys, *argv)
        assert result.returncode and "Traceback" not in result.stderr and not list(folder.glob("runs/*/*.jsonl"))
        assert all(word in result.stderr for word in words.split()), result.stderr

    return refuse


def make_run(name, age=0, **options):
    """The folder of a run of these options that was started `age` seconds ago and has no checkpoint yet."""
    path = Path("runs") / name / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(dict(name=name, device="cpu") | options))
    os.utime(path, (time.time() - age,) * 2)
    return path.parent


def test_defaults_then_file_then_flags(config_file):
    """The file may stand after flags and compute its values; modules, functions and classes in it are no options."""
    path = config_file(
        "import math\nfrom math import sqrt\nhalf = lambda x: x // 2\nn_layer = half(int(sqrt(9)))\nsteps = 7"
    )
    for argv in (["--steps", "5"], ["--steps=5"], ["--steps", "5", "--deterministic"]):
        config = load_config([*argv, path, "--learning_rate", "1", "--n_head=2", "--n_head", "4"])
        assert (config.n_layer, config.steps, config.learning_rate, config.n_head) == (1, 5, 1.0, 4)
        assert config.n_embd == Config().n_embd and config.name == "mine"


def test_cpu_sizes_of_a_file(config_file):
    """Only the final options are checked: a file may need a flag, and its GPU sizes need not fit the user's flags."""
    path = config_file("n_head = 6\nn_embd = 384\ndata = 'text'\ncpu = dict(n_head=4, n_embd=128)\n")
    config = load_config([path, "--device", "cpu", "--n_embd", "256", "--input", "x.txt"])
    assert (config.n_head, config.n_embd, config.input) == (4, 256, "x.txt")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs(path, tmp_path, monkeypatch, capsys):
    """Without a GPU, large networks become small ones, and a note says so; that of talk.py is small everywhere."""
    make_gpt2_small(monkeypatch)
    gpt2 = dict(vocab_size=257, n_positions=128, n_layer=4, n_head=4, n_embd=128, layer_norm_epsilon=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(gpt2 | dict(model_type="gpt2")))
    (tmp_path / "model.safetensors").touch()
    weights = ("--init_from", str(tmp_path)) if path.stem in ("finetune_shakespeare", "chat") else ()
    weights += ("--input", "x.jsonl") if path.stem == "chat" else ()
    config = load_config([str(path), "--device", "cpu", *weights])
    assert config.n_layer == (config.depth or {"talk": 2}.get(path.stem, 4))
    assert config.name == {"gpt2": "gpt2_fineweb"}.get(path.stem, path.stem)  # gpt2 is OpenAI's
    assert config.eval_batches > 0  # a long text must not take minutes at each evaluation
    is_toy = path.stem != "talk" and "cpu = " not in path.read_text()
    assert ("note: without a GPU this is a toy" in capsys.readouterr().err) == is_toy


def test_depth_sets_the_rest(folder, capsys):
    """The file's formulas need the corpus; given flags win, and a resumed run has the numbers, not the formulas."""
    (folder / "corpus.txt").write_text("To be, or not to be. " * 200)
    (folder / "mine.py").write_text(
        "data, input, tokenizer, device = 'text', 'corpus.txt', 'bytes', 'cpu'\n"
        "block_size, depth, learning_rate = 32, 2, 1e-2\n"
        "def dial(depth, batch_size, vocab_size, corpus_tokens):\n"
        "    return dict(n_layer=depth, n_head=1, n_embd=32, vocab_size=vocab_size, steps=corpus_tokens // 1000,\n"
        "                batch_size=batch_size or 2, eval_batches=1, learning_rate=5e-3)\n"
    )
    result = in_process(capsys, "mine.py", "--depth", "1", "--batch_size=3", "--n_head", "2")
    config = json.loads(Path("runs/mine/config.json").read_text())
    assert not result.returncode and "depth      1: " in result.stdout
    names = ("n_layer", "n_head", "vocab_size", "batch_size", "learning_rate", "depth")
    assert [config[name] for name in names] == [1, 2, 256, 3, 5e-3, 1] and 1 < config["steps"] < 5
    (folder / "mine.py").unlink()
    again = load_config(["--resume", "--steps", "9", "--allow_changes"])
    assert (again.n_embd, again.steps, again.depth) == (32, 9, 1)
    assert not in_process(capsys, "--resume", "--steps", "9", "--allow_changes").returncode


@pytest.mark.parametrize(
    "depth, vocab_size, tokens, expected",
    [(12, 50257, 48_000_000, (768, 6, 50304, 32, 1465, True)), (4, 8192, 0, (256, 4, 8192, 32, 1600, False))],
)
def test_dial_of_the_shipped_config(depth, vocab_size, tokens, expected):
    """Depth 12 with 48M tokens is the recipe that was tuned. Steps and decay follow from a given batch and rate."""

    def config(corpus_tokens, **more):
        corpus = SimpleNamespace(tokenizer=SimpleNamespace(n_vocab=vocab_size), train=range(corpus_tokens))
        argv = flags((), dict(device="cpu", block_size=1024, depth=depth, tokens=tokens, eval_batches=50) | more)
        return load_config([str(MODERN), *argv]).completed(corpus)

    found, again = config(60_000_000), config(1_000_000)
    assert found.n_layer == depth and found.dropout == 0
    shape = (found.n_embd, found.n_head, found.vocab_size)
    assert (*shape, found.batch_size, found.steps, found.tie_head) == expected
    assert again.dropout > 0 and again.weight_decay > found.weight_decay  # 48 epochs and more
    if depth == 12:
        assert (found.learning_rate, found.warmup_steps) == (2e-3, 50) and found.weight_decay == pytest.approx(0.1)
    other = config(60_000_000, batch_size=2 * found.batch_size, learning_rate=2 * found.learning_rate)
    assert (
        other.steps == pytest.approx(found.steps / 2, abs=1) and other.min_learning_rate == 2 * found.min_learning_rate
    )
    assert other.weight_decay == pytest.approx(found.weight_decay, rel=0.01)


def test_the_embedding_has_a_row_for_each_token():
    for asked, rows in ((0, 256), (10, 256), (300, 300)):
        assert Config(vocab_size=asked).gpt_config(make_tokenizer("bytes")).vocab_size == rows


def test_values_of_every_kind(config_file):
    argv = ["--n_kv_head", "2", "--logit-softcap=None", "--name", "a=b", "--mlp", "swiglu", "--micro_batch", "auto"]
    config = load_config([config_file("n_kv_head = None\nlogit_softcap = 15\nqk_norm = True\ninput = ''"), *argv])
    assert config.n_kv_head == 2 and config.logit_softcap is None and config.qk_norm is True
    assert (config.name, config.mlp, config.micro_batch, config.input) == ("a=b", "swiglu", "auto", "")
    text = "import numpy\nfrom pathlib import Path\ninput = Path('a') / 'b'\nlearning_rate = numpy.float32(2)"
    config = load_config([config_file(text)])
    assert (config.input, config.learning_rate) == ("a/b", 2.0)
    for typed, value in (([], True), (["True"], True), (["False"], False)):  # a boolean flag alone means True
        config = load_config(["--cuda-graph", *typed, "--micro_batch", "4", "--deterministic", *typed])
        assert (config.cuda_graph, config.micro_batch, config.deterministic) == (value, 4, value)


def test_short_names_and_numbers():
    config = load_config(["shakespeare", "--device", "cpu", "--steps", "1e3", "--batch_size=1.5K", "--seed", "43M"])
    assert (config.name, config.n_layer) == ("shakespeare", 4)
    assert (config.steps, config.batch_size, config.seed) == (1000, 1500, 43_000_000)


@pytest.mark.parametrize(
    "argv, expected",
    [
        ("shakespeare --input x.txt", ("text", "x.txt")),
        ("gpt2 --input x.txt", ("text", "x.txt")),
        ("modern --depth 4 --input x.txt", ("text", "x.txt")),
        ("modern --data shakespeare", ("shakespeare", "")),
        ("shakespeare --data tokens --input x", ("tokens", "x")),
        ("--resume old", ("shakespeare", "copy.txt")),  # of a version in which this was tiny Shakespeare
        ("--resume old --data text", ("text", "copy.txt")),
        ("--resume old --input x.txt", ("text", "x.txt")),
        ("--resume talk --input x.txt", ("chat", "x.txt")),
    ],
)
def test_input_alone_is_a_text(folder, argv, expected):
    make_run("old", input="copy.txt"), make_run("talk", data="chat", input="copy.txt")
    config = load_config([*argv.split(), "--device", "cpu"])
    assert (config.data, config.input) == expected


def test_without_arguments_the_configs_are_listed(folder, capsys):
    result = in_process(capsys)
    assert not result.returncode and not (folder / "runs").exists()
    assert set(re.findall(r"^  (\w+)", result.stdout, re.MULTILINE)) == {
        path.stem for path in MODERN.parent.glob("*.py")
    }


OUT_OF_RANGE = ["n_head 0", "window 0", "n_kv_head 0", "dropout 1.5", "beta2 1.5", "epochs nan", "epochs -1.0"]
OUT_OF_RANGE += ["learning_rate nan", "learning_rate inf", "muon_scale -1.0", "seed 5000000000000000000"]


@pytest.mark.parametrize(
    "argv, words",  # separated by blanks
    [
        *((f"--{option}", option.replace(" ", "=")) for option in OUT_OF_RANGE),
        ("--learning_rat 1", "--learning_rat --learning_rate"),
        ("--dev cpu", "--dev --device"),  # no abbreviations
        ("--lr 1e-3", "--lr --learning_rate"),
        ("--wandb", "--wandb off offline online"),
        ("--steps 1.5", "--steps 1.5 number"),
        ("--learning_rate --seed 1", "--learning_rate number"),
        ("--deterministic yes", "--deterministic yes True False"),
        ("--micro_batch all", "--micro_batch all number auto"),
        ("shakespeare extra", "extra"),
        ("--resume shakespere", "shakespere"),
        ("shakespere", "shakespere shakespeare"),
        ("--n_kv_head 4", "n_head=6 n_kv_head=4"),
        ("--key_offset True", "key_offset=True --position"),
        ("--learning_rate 1e-5", "learning_rate=1e-05 min_learning_rate=0.0001"),
        ("--device cuda:99", "device='cuda:99'"),
        ("--data text", "--input"),
        ("--data shakespeare --input x.txt", "--data shakespeare --input"),
        ("shakespeare --input none.txt", "none.txt --input"),
        ("--text_field=body", "--text_field data.prepare"),
        ("--tokens 400", "--depth configs/modern.py"),
        (f"{MODERN} --steps 5", "--depth --tokens"),
        (f"{MODERN} --depth 0", "depth=0"),
        (f"{MODERN} --depth x", "--depth x number"),
        (f"{MODERN} --init_from gpt2", "--init_from"),
        ("--name ../x", "name='../x'"),
        ("--name gpt2", "name='gpt2' OpenAI's --name"),
        ("--resume gpt2", "OpenAI's runs/gpt2"),
        ("nowhere.py", "nowhere.py"),
        ("--max_iters 5", "max_iters nanoGPT --steps"),
        ("--init_from=resume", "init_from nanoGPT --resume"),
        ("--compile=False", "compile nanoGPT off"),
        ("--resume", "train.py"),  # how to make a run
        (f"{MODERN} --resume runs/x", "--resume config"),
        (f"--resume {MODERN}", "modern.py --resume"),
    ],
)
def test_mistakes_on_the_command_line(refuse, argv, words):
    refuse(*argv.split(), words=words)


@pytest.mark.parametrize(
    "text, words",
    [
        ("learning_rat = 1", "mine.py --learning_rat=1 --learning_rate"),
        ("head_dim = 16\nn_embd = head_dim * 4", "mine.py head_dim _head_dim"),
        ("max_iters = 5", "max_iters nanoGPT --steps"),
        ("init_from = 'resume'", "init_from nanoGPT --resume"),
        ("resume = 'x'", "mine.py resume"),
        ("steps = '3'", "mine.py steps='3' number"),
        ("cpu = 3", "mine.py cpu=3"),
        ("depth = 1\ndef dial(depth): return dict(steps=4.0)", "mine.py steps=4.0 number"),
        ("depth = 1\ndef dial(depth): return dict(stepz=4)", "mine.py --stepz=4 --steps"),
    ],
)
def test_mistakes_in_a_file(config_file, refuse, text, words):
    refuse(config_file(text), "--device", "cpu", words=words)


def test_a_run_without_a_step_cannot_be_resumed(folder, refuse):
    """As one that was killed before; its options are not stored yet."""
    Path("runs/new").mkdir(parents=True)
    refuse("--resume", "new", words="runs/new step")


def test_resume_alone_takes_the_newest_run(folder):
    make_run("new", age=10, steps=100), make_run("old", age=20, steps=101), make_run("gpt2", age=30)
    assert load_config(["--resume", "runs/gpt2"]).name == "gpt2"  # of a version that made such runs
    for argv in (["--resume"], ["--resume", "--keep", "3"], ["--keep=3", "--resume"]):
        config = load_config(argv)
        assert (config.resume, config.steps) == ("runs/new", 100)
    for named in ("runs/old", "runs/old/", "old"):
        config = load_config(["--keep", "3", "--resume", named])
        assert (config.resume, config.steps) == ("runs/old", 101)
    Path("runs/old/checkpoint.pt").touch()  # the newest file decides
    assert load_config(["--resume"]).resume == "runs/old"
    save_checkpoint(Path("runs/old/checkpoint.pt"), dict(format=FORMAT, step=101))  # it is finished
    assert load_config(["--resume"]).resume == "runs/new"
    assert load_config(["--resume", "--steps", "200", "--allow_changes"]).resume == "runs/old"


def test_a_changed_option_needs_allow_changes(folder, refuse):
    resume = ["--resume", str(make_run("run", steps=100, dropout=0.1, allow_changes=True))]
    assert load_config(resume).allow_changes is False  # it was allowed for an earlier resumption only
    free = dict(keep=5, wandb="offline", input="moved.txt", log_every=1, max_bad_steps=3)
    config = load_config([*resume, "--steps", "100", *flags((), free)])
    assert {name: getattr(config, name) for name in free} == free
    for name, value in dict(steps=200, dropout=0.2, seed=7).items():
        refuse(*resume, f"--{name}", str(value), words=f"--{name} {value} --allow_changes")
        assert getattr(load_config([*resume, f"--{name}", str(value), "--allow_changes"]), name) == value


def test_help(capsys, config_file, monkeypatch):
    """The config file, then all options by subject, each with its value and a paragraph that fits the terminal."""
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit) as end:
        load_config([config_file("n_layer = 3\nname = 'x'\ncpu = dict(n_head=2)"), "--device", "cpu", "--help"])
    out = capsys.readouterr().out
    options = dict(re.findall(r"^  --(\w+) \S+(?: +\[(.*)\])?$", out, re.MULTILINE))
    assert end.value.code in (0, None) and set(options) == set(Config.__dataclass_fields__)
    assert (options["n_layer"], options["n_head"], options["name"], options["n_embd"]) == ("3", "2", "x", "384")
    assert "      Steps over which the learning rate rises.\n" in out
    assert all(len(line) <= 60 for line in out.splitlines() if line.startswith("    "))
