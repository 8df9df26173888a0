"""Options: defaults < config file < flags, what --resume allows, and errors that name the option."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from data import tokenizer
from training.config import Config, load_config, parse_flags, read_config_file, resolve_device, to_flags

SHIPPED = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "mine.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def refuse(capsys):
    """load_config() must refuse argv; returns its message. tyro prints its own messages and exits with 2."""

    def refuse(*argv):
        capsys.readouterr()
        with pytest.raises((ValueError, SystemExit)) as caught:
            load_config(argv)
        printed = capsys.readouterr().err
        if caught.type is SystemExit:
            assert caught.value.code == 2
            return printed
        assert printed == ""
        return str(caught.value)

    return refuse


def make_run(name, age=0, **options):
    """The folder of a run of these options that was started `age` seconds ago and has no checkpoint yet."""
    path = Path("runs") / name / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(dict(name=name, device="cpu") | options))
    os.utime(path, (time.time() - age,) * 2)
    return path.parent


def test_defaults_then_file_then_flags(config_file):
    path = config_file("n_layer = 3\nlearning_rate = 5e-4\nmin_learning_rate = 0.0\n")
    config = load_config([path, "--learning_rate", "1", "--n_head=2", "--n_head", "4"])
    assert (config.n_layer, config.learning_rate, config.n_head) == (3, 1.0, 4)
    assert config.n_embd == Config().n_embd and config.name == "mine"


def test_cpu_sizes_of_a_file(config_file):
    path = config_file("n_layer = 12\nn_embd = 768\ncpu = dict(n_layer=2, n_embd=96)\n")
    config = load_config([path, "--device", "cpu", "--n_embd", "192"])
    assert (config.n_layer, config.n_embd) == (2, 192)
    settings = read_config_file(Path(path))
    assert settings["n_layer"] == 12 and settings["cpu"]["n_layer"] == 2


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs(path, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "_gpt2_ranks", lambda path: [bytes([value]) for value in range(256)])
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 4}')
    (tmp_path / "model.safetensors").touch()
    weights = ("--init_from", str(tmp_path)) if path.stem == "finetune_shakespeare" else ()
    config = load_config([str(path), "--device", "cpu", *weights])
    assert config.n_layer == 4 and bool(config.init_from) == bool(weights)
    settings = read_config_file(path)
    settings.pop("cpu")
    on_gpu = parse_flags(Config, to_flags(settings))
    assert on_gpu.name == path.stem and (weights or on_gpu.n_layer == settings["n_layer"] > 4)


def test_only_the_final_options_are_checked(config_file):
    """A file may need a flag, and its GPU sizes need not fit the user's flags."""
    path = config_file("n_head = 6\nn_embd = 384\ncpu = dict(n_head=4, n_embd=128)\n")
    assert load_config([path, "--device", "cpu", "--n_embd", "256"]).n_head == 4
    assert load_config([config_file("data = 'text'"), "--input", "x.txt"]).input == "x.txt"


def test_values_of_every_kind(config_file):
    argv = ["--n_kv_head", "2", "--logit-softcap=None", "--name", "a=b", "--mlp", "swiglu", "--micro_batch", "auto"]
    config = load_config([config_file("n_kv_head = None\nlogit_softcap = 15\nqk_norm = True\ninput = ''"), *argv])
    assert config.n_kv_head == 2 and config.logit_softcap is None and config.qk_norm is True
    assert (config.name, config.mlp, config.micro_batch, config.input) == ("a=b", "swiglu", "auto", "")
    assert load_config(["--micro_batch", "4"]).micro_batch == 4


@pytest.mark.parametrize("typed, value", [([], True), (["True"], True), (["False"], False)])
def test_a_boolean_flag_alone_means_true(typed, value):
    config = load_config(["--steps", "3", "--deterministic", *typed, "--seed", "5"])
    assert config.deterministic is value and config.seed == 5
    assert load_config(["--cuda_graph", *typed]).cuda_graph is value


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--learning_rat", "1"], ["--learning_rat", "Perhaps", "--learning_rate"]),
        (["--zzz", "1"], ["--zzz"]),
        (["--dev", "cpu"], ["--dev", "--device"]),  # no abbreviations
        (["--steps", "many"], ["--steps", "many"]),
        (["--steps", "4.5"], ["--steps", "4.5"]),
        (["--steps"], ["--steps"]),
        (["--deterministic", "maybe"], ["--deterministic", "maybe"]),
        (["--micro_batch", "some"], ["--micro_batch", "some"]),
        (["--mlp", "relu"], ["--mlp", "relu2"]),
        (["--n_kv_head", "4"], ["n_head=6", "n_kv_head=4"]),
        (["--steps", "0"], ["steps=0"]),
        (["--weight_decay", "-1"], ["weight_decay=-1.0"]),
        (["--cooldown", "1.5"], ["cooldown=1.5"]),
        (["--ema", "1"], ["ema=1.0"]),
        (["--data", "text"], ["--input"]),
        (["--name", "../x"], ["name='../x'"]),
        (["--batch_size", "8", "extra"], ["extra"]),
        (["--learning_rate", "1e-5"], ["learning_rate=1e-05", "min_learning_rate=0.0001"]),
        (["--muon_scale", "0"], ["muon_scale=0.0"]),
        (["--embed_scale", "-1"], ["embed_scale=-1.0"]),
        (["--window", "0"], ["window=0"]),
        (["--learning_rate", "nan"], ["learning_rate=nan"]),
        (["nowhere.py"], ["nowhere.py"]),
        ([str(SHIPPED[0]), "--resume", "runs/x"], ["--resume", "config file"]),
        (["--resume", "runs/none"], ["runs/none"]),
        (["--resume=runs/none"], ["runs/none"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else None,
)
def test_mistakes_on_the_command_line(refuse, argv, words):
    message = refuse(*argv)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "text, words",
    [
        ("n_layer = 'six'", ["n_layer", "six"]),
        ("steps = True", ["steps", "True"]),
        ("steps = 4.5", ["steps", "4.5"]),
        ("deterministic = 1", ["deterministic"]),
        ("learning_rat = 1", ["learning_rat=", "Perhaps", "--learning_rate"]),
        ("cpu = dict(n_layr=1)", ["n_layr=", "Perhaps", "--n_layer"]),
        ("zzz = 1", ["zzz", "--help"]),
        ("import math", ["math"]),
        ("cpu = 5", ["cpu"]),
        ("resume = 'x'", ["resume"]),
    ],
)
def test_mistakes_in_a_file(config_file, refuse, text, words):
    message = refuse(config_file(text), "--device", "cpu")
    assert all(word in message for word in words), message


@pytest.mark.parametrize("device", ["cuda:99", "cpu:1", "gpu", "cuda:x", "mps:1"])
def test_absent_devices(device):
    with pytest.raises(ValueError, match=f"device='{device}'"):
        resolve_device(device)


def test_resume_alone_takes_the_newest_run(folder, refuse):
    assert "train.py" in refuse("--resume")  # how to make one
    make_run("new", age=10, steps=100), make_run("old", age=20, steps=101)
    for argv in (["--resume"], ["--resume", "--keep", "3"], ["--keep=3", "--resume"]):
        config = load_config(argv)
        assert (config.resume, config.steps) == ("runs/new", 100)
    for argv in (["--resume", "runs/old"], ["--resume=runs/old"], ["--keep", "3", "--resume", "runs/old/"]):
        config = load_config(argv)
        assert (config.resume, config.steps) == ("runs/old", 101)
    Path("runs/old/checkpoint.pt").touch()  # the newest file decides
    assert load_config(["--resume"]).resume == "runs/old"


def test_a_changed_option_needs_allow_changes(folder, refuse):
    resume = ["--resume", str(make_run("run", steps=100, dropout=0.1, allow_changes=True))]
    assert load_config(resume).allow_changes is False  # it was allowed for an earlier resumption only
    free = dict(keep=5, wandb="offline", input="moved.txt", log_every=1, max_bad_steps=3)
    config = load_config([*resume, "--steps", "100", *to_flags(free)])
    assert {name: getattr(config, name) for name in free} == free
    for name, value in dict(steps=200, dropout=0.2, micro_batch=4, seed=7, dtype="float32").items():
        message = refuse(*resume, f"--{name}", str(value))
        assert f"--{name} {value}" in message and "--allow_changes" in message, message
        assert getattr(load_config([*resume, f"--{name}", str(value), "--allow_changes"]), name) == value


def test_resume_ignores_an_option_that_is_gone_only_if_it_was_off(folder, refuse):
    assert load_config(["--resume", str(make_run("off", polar_express=False, head_scale=1.0, steps=7))]).steps == 7
    assert "polar_express" in refuse("--resume", str(make_run("on", polar_express=True)))


def test_help_lists_the_options_by_subject(capsys):
    with pytest.raises(SystemExit) as end:
        load_config(["--help"])
    options = re.findall(r"^\W*(--(?!help)\w+) \S", capsys.readouterr().out, re.MULTILINE)
    assert end.value.code == 0 and len(options) == len(Config.__dataclass_fields__)
    first = ["--vocab_size", "--data", "--batch_size", "--steps", "--name", "--eval_every"]  # of each subject
    assert [name for name in options if name in first] == first
