"""sample.py: runs and prompts, several samples, the interactive mode, and errors that name the mistake."""

import gzip
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, finish, run_script, save_model, start, wait_for

from data.tokenizer import make_tokenizer
from generation import Generator
from model import GPT, GPTConfig
from sample import generate, load

SCRIPT = str(ROOT / "sample.py")
FLAGS = ("--device", "cpu", "--max_tokens", "20")
SMALL = dict(vocab_size=256, block_size=16, n_layer=2, n_head=2, n_embd=32)
CHARACTERS = make_tokenizer("char", "abcdef\n")


def save(path, tokenizer):
    """Write the checkpoint of an untrained model; returns its contents."""
    return save_model(path, GPT(GPTConfig(**SMALL | dict(vocab_size=max(8, tokenizer.n_vocab)))), tokenizer)


@pytest.fixture
def run(folder):
    """A run folder with one checkpoint, for the characters a to f and newline."""
    save(folder / "runs/tiny/checkpoint.pt", CHARACTERS)
    return folder / "runs/tiny"


@pytest.fixture
def call(run, monkeypatch, capsys):
    """sample.py in this process: call(*flags) -> (exit code, out, err)."""
    return lambda *flags: run_script(monkeypatch, capsys, SCRIPT, *FLAGS, *flags)


def until_prompt(process):
    """Standard output up to the next prompt, at which the process waits for a line."""
    out = ""
    while not out.endswith(">"):
        out += process.stdout.read(1)
        assert process.poll() is None
    # a signal that comes between the prompt and the wait would be handled after the next line only
    wait_for(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].startswith("S"))
    return out


def test_the_command_takes_the_newest_run(run):
    """On a terminal that lacks a character, another stands in its place. Ctrl-C at the prompt ends nothing."""
    save(run / "checkpoint.pt", make_tokenizer("char", "abcdeж\n"))
    options = dict(script=SCRIPT, stdin=subprocess.PIPE, variables={"PYTHONIOENCODING": "latin-1"})
    process = start(run.parents[1], *FLAGS, "--interactive", **options)
    until_prompt(process)
    print("abc", file=process.stdin, flush=True)
    text = until_prompt(process)
    assert len(text) == len(" \n>") + 20 and set(text) == set(" abcde?\n>")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        until_prompt(process)
    process.stdin.write("exit\n")
    err = finish(process)[1]
    assert "runs/tiny/checkpoint.pt" in err and err.count("tokens/s") == 2 and "Traceback" not in err


def test_a_closed_pipe_ends_the_program_silently(run):
    process = start(run.parents[1], *FLAGS, "--prompt", "abc", script=SCRIPT)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=120) == 1 and "rror: " not in err, err


def test_prompts(call, run, folder, monkeypatch):
    """As a flag, from a file or standard input, with a byte order mark as Windows writes it; and the default one."""
    (folder / "prompt.txt").write_text("\ufefffade\n", encoding="utf-8")
    (folder / "latin.txt").write_bytes("d\u00e9j\u00e0".encode("latin-1"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbffade\n")))
    flag, file, pipe = (call("--prompt", prompt, "--temperature", "0") for prompt in ("fade\n", "FILE:prompt.txt", "-"))
    assert flag[:2] == file[:2] == pipe[:2] and flag[0] == 0
    assert flag[1].startswith("fade\n") and len(flag[1]) == 5 + 20 + 1
    (folder / "prompt.md.gz").write_bytes(gzip.compress(b"fade\n"))
    assert call("--prompt", "FILE:prompt.md.gz", "--temperature", "0")[1] == flag[1]
    assert call("--prompt", "FILE:prompt.jsonl")[0].startswith("error: prompt.jsonl has documents")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), errors="surrogateescape"))
    for prompt, name in (("FILE:latin.txt", "latin.txt"), ("-", "standard input")):
        code, out, _ = call("--prompt", prompt)
        assert code.startswith(f"error: {name} is not UTF-8 text") and "\n" not in code and out == ""
    for flags in ([], ["--prompt", ""]):  # a line break, or the end-of-text token where there is one
        assert call(*flags)[1].startswith("\n")
    save(run / "checkpoint.pt", make_tokenizer("char+eot", "abcdef\n"))
    assert call()[2].splitlines()[-1].startswith("prompt 1 tokens")
    assert not call("--ignore_eot")[1].startswith("\n")
    monkeypatch.setattr(sys, "stdin", None)
    for flags in (["--prompt", "-"], ["--interactive"]):
        assert "standard input is closed" in call(*flags)[0]


def test_a_typed_line_that_is_not_utf8(run):
    """Its bytes are replaced, and the next line is answered too."""
    options = dict(script=SCRIPT, stdin=subprocess.PIPE, variables={"PYTHONIOENCODING": "utf-8"})
    process = start(run.parents[1], *FLAGS, "--interactive", **options)
    process.stdin.buffer.write(b"ab\xe9\nabc\nexit\n")
    _, err = finish(process)
    assert "no token for" in err and "prompt 3 tokens" in err, err


def test_interactive(call, run, monkeypatch):
    """Two texts, a mistake, too little memory, Ctrl-C during a text, an empty line, and Ctrl-D.

    What was typed is not printed again. A text begins with a character that the tokenizer has.
    """
    save(run / "checkpoint.pt", make_tokenizer("char", "ACGT"))
    lines, stream = iter(["AC", "AC", "xyz", "bad", "ACG", ""]), Generator.stream

    def interrupted(*args):
        yield next(stream(*args))
        raise KeyboardInterrupt

    def without_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. And much more")

    def answer(prompt):
        line = next(lines, None)
        if line is None:
            raise EOFError
        monkeypatch.setattr(Generator, "stream", {"ACG": interrupted, "bad": without_memory}.get(line, stream))
        return line

    monkeypatch.setattr("builtins.input", answer)
    code, out, err = call("--interactive")
    assert code == 0 and err.count("error: ") == 2 and "'x'" in err and err.count("tokens/s") == 3 * 2
    assert "error: CUDA out of memory; type a shorter prompt\n" in err
    first, second, stopped, last, end = out.split("\n")[:5]
    assert first != second and [len(text) for text in (first, second, last)] == [20] * 3 and len(stopped) <= 1
    assert set(last) <= set("ACGT") and end == ""


def test_python(run):
    """load() prefers best.pt, and takes folders and files."""
    best = save(run / "best.pt", CHARACTERS)
    model, tokenizer, contents = load("", "cpu")  # the newest run
    assert contents["path"] == Path("runs/tiny/best.pt") and model.source == "runs/tiny/best.pt, step 1,"
    assert all(torch.equal(weight, best["model"][name]) for name, weight in model.state_dict().items())
    text = "".join(generate(model, tokenizer, "abc", max_tokens=12))
    assert len(text) == 12 and set(text) <= set("abcdef\n")
    for path in (run / "checkpoint.pt", run / "best.pt"):
        assert load(str(path), "cpu")[2]["path"] == path
    save(run.parent / "other/best.pt", CHARACTERS)
    for name in (str(run.parent / "other"), ""):  # the newest run
        assert load(name, "cpu")[2]["path"].resolve() == run.parent / "other/best.pt"


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--prompt", "xyz"], ["'x'"]),
        (["--stop"], ["--stop", "value", "text"]),
        (["--max_tokens", "0"], ["error: max_tokens=0"]),
        (["--prompt", "abc", "--interactive"], ["--prompt", "--interactive"]),
        (["--top_p", "0"], ["top_p=0.0", "(0, 1]"]),
        (["--start", "abc"], ["start", "nanoGPT", "--prompt"]),
    ],
)
def test_mistakes(call, flags, words):
    message, out, _ = call(*flags)  # sys.exit() prints it
    assert out == "" and all(word in message for word in words), message


def test_damaged_and_foreign_checkpoints(run, call, monkeypatch):
    """Reading a large one has a line of its own."""
    monkeypatch.setattr("device.LARGE", 100)
    (run / "best.pt").write_bytes(b"damaged")
    code, _, err = call()
    assert code == 0 and "best.pt" in err and "runs/tiny/checkpoint.pt on cpu" in err
    assert "reading runs/tiny/checkpoint.pt" in err and "reading runs/tiny/best.pt" not in err
    os.remove(run / "best.pt")
    path = run / "checkpoint.pt"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"nonsense", b""):
        path.write_bytes(damaged)
        code, out, _ = call()
        assert code.startswith("error: ") and "checkpoint.pt" in code and out == ""
    for contents in ({"format": 0}, [1]):
        torch.save(contents, path)
        assert "format" in call()[0]
    torch.save({"format": 1}, path)
    assert re.search(r"checkpoint.pt has the older format 1; to read it, git checkout \w{7}$", call()[0])
