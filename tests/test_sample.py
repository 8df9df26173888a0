"""sample.py: runs and prompts, several samples, the interactive mode, and errors that name the mistake."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import run_script

from data import make_tokenizer, to_state
from generation import Generator
from model import GPT, GPTConfig
from sample import generate, load
from training.checkpoint import FORMAT, save_checkpoint

SCRIPT = str(Path(__file__).parents[1] / "sample.py")
FLAGS = ("--device", "cpu", "--max_tokens", "20")
SMALL = dict(vocab_size=256, block_size=16, n_layer=2, n_head=2, n_embd=32)


def save(path, tokenizer, **changes):
    """Write the checkpoint of an untrained model; returns its contents."""
    config = SMALL | dict(vocab_size=8)
    contents = dict(format=FORMAT, model=GPT(GPTConfig(**config)).state_dict(), model_config=config, step=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(path, contents | dict(tokenizer=to_state(tokenizer)) | changes)
    return contents


@pytest.fixture
def run(folder):
    """A run folder with one checkpoint, for the characters a to f and newline."""
    save(folder / "runs/tiny/checkpoint.pt", make_tokenizer("char", "abcdef\n"))
    return folder / "runs/tiny"


@pytest.fixture
def call(run, monkeypatch, capsys):
    """sample.py in this process: call(*flags) -> (exit code, out, err)."""

    return lambda *flags: run_script(monkeypatch, capsys, SCRIPT, *FLAGS, *flags)


def test_the_command_takes_the_newest_run(run):
    command = [sys.executable, SCRIPT, *FLAGS, "--prompt", "abc", "--num_samples", "2"]
    result = subprocess.run(command, cwd=run.parents[1], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "runs/tiny/checkpoint.pt" in result.stderr, result.stderr
    first, second = result.stdout.split("---------------\n")
    assert first != second and set(first + second) <= set("abcdef\n") and len(second) <= len("abc") + 20 + 1
    assert first.startswith("abc") and second.startswith("abc")


def test_greedy_samples_and_a_prompt_file(call, folder):
    (folder / "prompt.txt").write_text("fade\n")
    samples = [call("--prompt", prompt, "--temperature", "0") for prompt in ("fade\n", "FILE:prompt.txt")]
    assert samples[0][:2] == samples[1][:2] and samples[0][0] == 0
    assert samples[0][1].startswith("fade\n") and len(samples[0][1]) == 5 + 20 + 1


def test_prompt_from_standard_input(call, monkeypatch):
    expected = call("--prompt", "fade\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"fade\n")))
    assert call("--prompt", "-")[:2] == expected[:2]


def test_prompts_that_are_not_utf8(call, folder, monkeypatch):
    (folder / "latin.txt").write_bytes("d\u00e9j\u00e0".encode("latin-1"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), errors="surrogateescape"))
    for prompt, name in (("FILE:latin.txt", "latin.txt"), ("-", "standard input")):
        code, out, _ = call("--prompt", prompt)
        assert code.startswith(f"error: {name} is not UTF-8 text") and "\n" not in code and out == ""


def test_the_default_prompt(run, call):
    """A line break, or the end-of-text token where there is one."""
    assert call("--run", str(run))[1].startswith("\n")
    save(run / "checkpoint.pt", make_tokenizer("char+eot", "abcdef\n"))
    assert call("--run", str(run))[2].splitlines()[-1].startswith("prompt 1 tokens")
    assert not call("--run", str(run), "--ignore_eot")[1].startswith("\n")


def test_a_closed_pipe_ends_the_program_silently(run):
    command = [sys.executable, SCRIPT, *FLAGS, "--prompt", "abc"]
    process = subprocess.Popen(command, cwd=run.parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=120) == 1 and "Error" not in err and "rror: " not in err, err


def test_speed_is_printed_last(call):
    code, _, err = call("--prompt", "abc", "--num_samples", "3")
    last = err.splitlines()[-1]
    assert code == 0 and last.startswith("prompt 3 tokens in ") and "; text 57 tokens in " in last
    assert last.count("tokens/s") == 2


def test_stop_texts(call):
    texts = [call("--prompt", "abc", *flags)[1] for flags in ([], ["--stop", "a", "zz"])]
    assert len(texts[0]) == 24 and "a" in texts[0][3:]
    assert texts[1][:-1] == "abc" + texts[0][3:].split("a")[0]


def test_interactive(call, monkeypatch):
    """Two texts, an unknown character, too little memory, Ctrl-C at the prompt, Ctrl-C during a text, and Ctrl-D."""
    lines = iter(["abc", "abc", "xyz", "bad", KeyboardInterrupt, "fed", EOFError])
    stream = Generator.stream

    def interrupted(*args):
        yield next(stream(*args))
        raise KeyboardInterrupt

    def without_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. And much more")

    def answer(prompt):
        line = next(lines)
        if isinstance(line, str):
            changed = {"fed": interrupted, "bad": without_memory}
            monkeypatch.setattr(Generator, "stream", changed.get(line, stream))
            return line
        raise line

    monkeypatch.setattr("builtins.input", answer)
    code, out, err = call("--interactive")
    assert code == 0 and err.count("error: ") == 2 and "'x'" in err and err.count("tokens/s") == 2 * 2
    assert "error: CUDA out of memory; type a shorter prompt\n" in err
    first, second = out[:24], out[24:48]
    assert first.startswith("abc") and second.startswith("abc") and first != second
    assert out[48:].startswith("\nfed") and out[48:].count("\n") <= 4


def test_python(run):
    model, tokenizer, _ = load("runs/tiny", "cpu")
    text = "".join(generate(model, tokenizer, "abc", max_tokens=12))
    assert len(text) == 12 and set(text) <= set("abcdef\n")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--prompt", "xyz"], ["'x'"]),
        (["--prompt", ""], ["prompt"]),
        (["--prompt", "FILE:none.txt"], ["none.txt"]),
        (["--prompt", "FILE:"], ["FILE:", "names no file"]),
        (["--prompt", "abc", "--interactive"], ["--prompt", "--interactive"]),
        (["--run", "runs/none"], ["runs/none"]),
        (["--device", "gpu"], ["device='gpu'"]),
        (["--temperature", "-1"], ["temperature=-1.0"]),
        (["--top_p", "nan"], ["top_p=nan"]),
        (["--top_p", "0"], ["top_p=0.0", "(0, 1]"]),
        (["--top_p", "1.5"], ["top_p=1.5", "(0, 1]"]),
        (["--num_samples", "0"], ["num_samples=0"]),
        (["--num_samples", "1000000000"], ["num_samples=1000000000", "GiB", "at most"]),
        (["--num_samples", "2", "--interactive"], ["num_samples=2", "--interactive"]),
        (["--seed", "-1"], ["seed=-1"]),
        (["--run", "."], ["has no checkpoint"]),
        (["--temprature", "1"], ["--temprature", "--temperature"]),
    ],
)
def test_mistakes(call, flags, words):
    code, out, err = call(*flags)
    message = str(code)
    if code == 2:  # tyro has printed it
        message = err
    else:  # sys.exit() prints it
        assert code.startswith("error: ") and "\n" not in code
    assert all(word in message for word in words) and out == "", message


def test_load_prefers_best_and_takes_folders_and_files(run):
    tokenizer = make_tokenizer("char", "abcdef\n")
    best = save(run / "best.pt", tokenizer)
    model, loaded_tokenizer, contents = load("", "cpu")  # the newest run
    assert contents["path"] == Path("runs/tiny/best.pt") and loaded_tokenizer.decode([0, 1]) == tokenizer.decode([0, 1])
    assert all(torch.equal(weight, best["model"][name]) for name, weight in model.state_dict().items())
    for path in (run / "checkpoint.pt", run / "best.pt"):
        assert load(str(path), "cpu")[2]["path"] == path
    save(run.parent / "other/best.pt", tokenizer)
    assert load(str(run.parent / "other"), "cpu")[2]["path"] == run.parent / "other/best.pt"


def test_a_damaged_best_gives_way_to_the_newest_checkpoint(run, capsys):
    (run / "best.pt").write_bytes(b"damaged")
    assert load(str(run), "cpu")[2]["path"] == run / "checkpoint.pt"
    assert "best.pt" in capsys.readouterr().err


def test_damaged_and_foreign_checkpoints(run, call):
    path = run / "checkpoint.pt"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"nonsense", b""):
        path.write_bytes(damaged)
        code, out, _ = call()
        assert code.startswith("error: ") and "checkpoint.pt" in code and out == ""
    for contents in ({"format": 0}, [1]):
        torch.save(contents, path)
        assert "format" in call()[0]
