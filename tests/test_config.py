"""Options: precedence of defaults, file and flags, and one clear sentence for each mistake."""

import dataclasses

import pytest

from config import Config, load_config, resolve_device


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "mine.py"
        path.write_text(text)
        return str(path)

    return write


def test_defaults_then_file_then_flags(config_file):
    path = config_file("n_layer = 3\nlearning_rate = 5e-4\nmin_learning_rate = 0.0\n")
    config = load_config([path, "--learning_rate", "1", "--n_head=2"])
    assert (config.n_layer, config.learning_rate, config.n_head) == (3, 1.0, 2)
    assert config.n_embd == Config().n_embd and config.name == "mine"


def test_cpu_sizes_hold_on_a_cpu_only_and_below_flags(config_file):
    path = config_file("n_layer = 12\nn_embd = 768\ncpu = dict(n_layer=2, n_embd=96)\n")
    config = load_config([path, "--device", "cpu", "--n_embd", "192"])
    assert (config.n_layer, config.n_embd) == (2, 192)


@pytest.mark.parametrize("name", ["shakespeare", "shakespeare_char", "gpt2"])
def test_shipped_configs(name):
    assert load_config([f"configs/{name}.py"]).name == name
    assert load_config([f"configs/{name}.py", "--device", "cpu"]).n_layer == 4


def test_the_network_that_results_is_what_is_checked(config_file):
    """Not the file's GPU size under the user's flags, nor the file before them."""
    path = config_file("n_head = 6\nn_embd = 384\ncpu = dict(n_head=4, n_embd=128)\n")
    assert load_config([path, "--device", "cpu", "--n_embd", "256"]).n_head == 4
    assert load_config([config_file("data = 'text'"), "--input", "x.txt"]).input == "x.txt"


def test_values_of_every_kind():
    config = load_config(
        ["--cuda_graph", "False", "--n_kv_head", "2", "--logit-softcap=None", "--name", "a=b", "--mlp", "swiglu"]
    )
    assert config.cuda_graph is False and config.n_kv_head == 2 and config.logit_softcap is None
    assert config.name == "a=b" and config.mlp == "swiglu"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--learning_rat", "1"], "unknown option --learning_rat; did you mean --learning_rate?"),
        (["--zzz", "1"], "unknown option --zzz; --help lists all"),
        (["--steps", "many"], "--steps 'many' has the wrong type; it must be int"),
        (["--steps", "4.5"], "must be int"),
        (["--mlp", "relu"], "one of 'gelu', 'relu2', 'swiglu'"),
        (["--steps"], "--steps needs a value"),
        (["--n_kv_head", "4"], "n_head=6 must be a multiple of n_kv_head=4"),
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--data", "text"], "needs --input FILE"),
        (["--name", "../x"], "one folder name"),
        (["nowhere.py"], "nowhere.py does not exist"),
        (["--batch_size", "8", "extra"], "'extra' is not an option"),
        (["--min_learning_rate", "1"], "min_learning_rate=1.0"),
        (["--muon_scale", "0"], "muon_scale=0.0 must be positive"),
        (["configs/gpt2.py", "--resume", "runs/x"], "leave out configs/gpt2.py"),
        (["--resume", "runs/none"], "cannot be read"),
        (["--resume=runs/none"], "cannot be read"),
        (["--learning_rate", "nan"], "learning_rate=nan must be finite"),
        (["--seed", "99999999999999999999"], "seed=99999999999999999999 must be"),
    ],
)
def test_mistakes_on_the_command_line(argv, message):
    with pytest.raises(ValueError) as error:
        load_config(argv)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("learning_rat = 1", "unknown option learning_rat; did you mean learning_rate?"),
        ("learning_rate = '1e-3'", "learning_rate='1e-3' has the wrong type; it must be float"),
        ("steps = True", "steps=True has the wrong type"),
        ("steps = 4.5", "must be int"),
        ("cpu = dict(n_layr=1)", "unknown option n_layr; did you mean n_layer?"),
        ("steps = (", "does not run: SyntaxError"),
        ("cpu = 5", "must be a dict"),
        ("resume = 'x'", "give it as the flag"),
    ],
)
def test_mistakes_in_a_file(config_file, text, message):
    with pytest.raises(ValueError) as error:
        load_config([config_file(text)])
    assert message in str(error.value)


@pytest.mark.parametrize("device", ["cuda:99", "cpu:1", "gpu", "cuda:x", "mps:1"])
def test_device_that_is_absent(device):
    with pytest.raises(ValueError, match=f"device='{device}' is"):
        resolve_device(device)


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().steps = 3


def test_resuming_another_run_needs_a_flag(tmp_path):
    (tmp_path / "config.json").write_text('{"steps": 100, "dropout": 0.1}')
    resume = ["--resume", str(tmp_path)]
    assert load_config([*resume, "--steps", "100", "--keep", "5", "--wandb", "offline"]).keep == 5
    for flag, value, before in (("steps", 200, 100), ("dropout", 0.2, 0.1), ("micro_batch", 4, 0)):
        with pytest.raises(ValueError, match=f"--{flag} {value} would make .* another run: it now has {before}; "):
            load_config([*resume, f"--{flag}", str(value)])
        assert getattr(load_config([*resume, f"--{flag}", str(value), "--allow_changes", "True"]), flag) == value
