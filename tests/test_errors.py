"""How every command ends: after a mistake of its user or in the code, and after Ctrl-C at any moment."""

import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import (
    FAST,
    ROOT,
    contents,
    environment,
    finish,
    flags,
    in_process,
    losses,
    one_sentence,
    run_script,
    start,
    started,
    wait_for,
    wait_for_step,
)
from test_sample import save

from data.tokenizer import make_tokenizer
from errors import fold
from model import Block

TRAIN = "--data text --input corpus.txt --tokenizer bytes --device cpu --steps 2 --n_layer 1 --batch_size 2 --attention"
# script -> arguments, mistaken ones, words of the sentence about them, the main thread's call at which Ctrl-C comes
COMMANDS = {
    "train.py": (f"{TRAIN} sdpa", f"{TRAIN} hopper", "attention='auto'", "GPT.__init__"),
    "sample.py": ("tiny", "--prompt FILE:none", "none: No such file", "Block.forward"),
    "evaluate.py": ("--text corpus.txt", "--text none", "none", "Block.forward"),
    "plot.py": ("tiny", "runs/none", "runs/none", "FigureBase.subplots"),
    "data/prepare.py": ("text --input corpus.txt", "text --input none", "none does not exist", "make_tokenizer"),
    "export.py": ("tiny out", "none out", "none does not", "save_file"),
}
# Python runs this file when it starts. It sends Ctrl-C to its own process at the moment that a function is called.
INTERRUPT = """
import os, signal, sys

def look(frame, event, argument):
    code = frame.f_code
    if event == "call" and f"{code.co_filename}:{code.co_qualname}".endswith(os.environ["MOMENT"]):
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)

sys.setprofile(look)
"""


def invocation(script):
    """What Python is given to run a script, as README does."""
    return ["-m", script.removesuffix(".py").replace("/", ".")] if "/" in script else [str(ROOT / script)]


@pytest.fixture
def tiny(folder):
    """A folder with a run."""
    save(folder / "runs/tiny/checkpoint.pt", make_tokenizer("bytes"))
    (folder / "runs/tiny/config.json").write_text('{"tokenizer": "bytes", "batch_size": 8, "block_size": 32}')
    (folder / "runs/tiny/metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n')
    yield folder
    assert os.listdir("runs") == ["tiny"] and not list(folder.glob("*out*"))  # nothing is left behind


def test_a_mistake_in_the_code_keeps_its_traceback(tiny, monkeypatch, capsys):
    """And an error before the first step leaves no run behind."""

    def wrong(*args, **kwargs):
        raise ValueError("not enough values to unpack")

    monkeypatch.setattr(Block, "forward", wrong)
    with pytest.raises(ValueError, match="not enough values"):
        run_script(monkeypatch, capsys, "train.py", *COMMANDS["train.py"][0].split())


@pytest.mark.parametrize("script", COMMANDS)
def test_a_mistake_of_the_user_is_one_sentence(tiny, monkeypatch, capsys, script):
    _, mistake, words, _ = COMMANDS[script]
    code, _, err = run_script(monkeypatch, capsys, script, *mistake.split())
    one_sentence(err if code == 1 else f"{err}{code}\n", words)  # sys.exit() prints a sentence


@pytest.mark.parametrize(
    "script, moment",
    [(script, "numpy/__init__.py:<module>") for script in COMMANDS]
    + [pytest.param(script, moment, marks=pytest.mark.slow) for script, (*_, moment) in COMMANDS.items()],
)
def test_ctrl_c_ends_a_command_at_once(tiny, script, moment):
    (tiny / "site").mkdir()
    (tiny / "site/sitecustomize.py").write_text(INTERRUPT)
    paths = os.pathsep.join([str(tiny / "site"), environment(tiny)["PYTHONPATH"]])
    first, *rest = invocation(script)
    variables = dict(PYTHONPATH=paths, MOMENT=moment)
    process = start(tiny, *rest, *COMMANDS[script][0].split(), script=first, variables=variables)
    _, err = finish(process, 130)
    assert "Traceback" not in err and "Interrupt" not in err


def shell(folder, script, *argv, outputs=""):
    """Type a command; `outputs` redirects them, as a shell does. Returns a CompletedProcess."""
    typed = ["bash", "-o", "pipefail", "-c", f'"$@" {outputs}', "bash", sys.executable, *invocation(script), *argv]
    return subprocess.run(typed, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("script", [script for script in COMMANDS if script != "train.py"])
def test_a_command_whose_output_cannot_be_written_ends(tiny, script):
    """Those whose result is a file succeed. The others say why, unless nobody is there to read."""
    needed = int(script in ("sample.py", "evaluate.py"))
    for outputs, code in {"| true": needed, ">&- 2>&-": 0, "2>/dev/full": 0, ">/dev/full": needed}.items():
        result = shell(tiny, script, *COMMANDS[script][0].split(), outputs=outputs)
        assert result.returncode == code and "Traceback" not in result.stderr, (outputs, result)
        assert ("No space left" in result.stderr) == (outputs == ">/dev/full" and needed), result.stderr
        assert script != "export.py" or (tiny / "out/model.safetensors").exists()
        shutil.rmtree(tiny / "out", ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("outputs", ["| head -3", ">/dev/full 2>&1", ">&- 2>&-", "2>&1 | true"])
def test_a_run_goes_on_without_its_outputs(folder, outputs):
    options = FAST | dict(steps=4, eval_every=2, sample_every=1)
    assert shell(folder, "train.py", *flags((), options), outputs=outputs).returncode == 0
    assert contents("runs/run/checkpoint.pt")["step"] == 4 and len(losses(folder)) == 4
    assert Path("runs/run/loss.png").stat().st_size > 10_000


ENDLESS = FAST | dict(steps=100_000, eval_every=100_000)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["a closed terminal", "Ctrl-C that also ends tee"])
def test_a_run_whose_reader_ends_saves_and_stops(folder, end):
    if end == "a closed terminal":
        terminal, inside = pty.openpty()
        process = start(folder, terminal=inside, **ENDLESS)
        os.close(inside)

        def has_trained():
            if select.select([terminal], [], [], 0)[0]:  # else it would wait for a reader
                os.read(terminal, 65536)
            return losses(folder) if Path("runs/run/metrics.jsonl").exists() else []

        wait_for(has_trained, seconds=60)
        os.close(terminal)
    else:  # a terminal sends it to all processes of a command
        typed = shlex.join([sys.executable, str(ROOT / "train.py"), *flags((), ENDLESS)])
        command = f"{{ {typed}; echo $? > code; }} 2>&1 | tee log"
        process = subprocess.Popen(["bash", "-c", command], env=environment(folder), start_new_session=True)
        started.append(process)
        wait_for_step(folder, 3)
        os.killpg(process.pid, signal.SIGINT)
    code = process.wait(timeout=60)
    if end == "Ctrl-C that also ends tee":
        wait_for(Path("code").exists, seconds=60)
        code = int(Path("code").read_text())
    assert code == 0 and contents("runs/run/checkpoint.pt")["step"] == len(losses(folder))
    assert Path("runs/run/loss.png").exists()


def test_a_file_whose_name_is_no_text(folder, capsys):
    name = os.fsdecode(b"caf\xe9.txt")
    Path("corpus.txt").rename(name)
    result = in_process(capsys, **FAST | dict(input=name, steps=2, eval_every=2))
    assert result.returncode == 0 and "caf?.txt" in result.stdout, result.stderr
    assert in_process(capsys, "--resume", "--steps", "3", "--allow_changes").returncode == 0


@pytest.mark.slow
def test_compilation_without_a_compiler(folder):
    variables = dict(PATH="/nowhere", TORCHINDUCTOR_CACHE_DIR=str(folder / "cache"))
    process = start(folder, variables=variables, **FAST | dict(compile="model"))
    one_sentence(finish(process, 1)[1], "C++ compiler", "--compile off")
    assert not list(Path("runs").iterdir())


@pytest.mark.parametrize("columns, lines", [("80", 3), ("", 2)])
def test_long_lines_break_between_words(monkeypatch, columns, lines):
    monkeypatch.setenv("COLUMNS", columns)
    text = f"data       {'seventeen letters ' * 9}end"
    found = fold(text, 11).splitlines()
    assert len(found) == lines and max(map(len, found)) <= int(columns or 100)
    assert " ".join(line.strip() for line in found) == text and all(line.startswith(" " * 11) for line in found[1:])
