"""One test suite for every machine: kernels run on the GPU if there is one, else in the Triton interpreter."""

import dataclasses
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
torch.set_num_threads(1)  # the parallel workers of pytest-xdist share the cores
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before cuBLAS is first used: what deterministic runs ask for
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton.jit is first used


def hasten_interpreter():
    """Keep Triton's interpreter from what has no effect, two thirds of its time.

    It replaces all of triton.language anew in each call of a jit function: only the first call from a module changes
    anything, until the end of the launch, which undoes what its start did. And it computes whether integers overflow,
    but asserts that they do not only with an option `debug` that it leaves off.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_lang(function):
        module = id(function.__globals__)
        if module in patched:
            return None  # from within a kernel, which drops it
        scope = patch(function)
        undo = scope.restore

        def restore():
            patched.clear()
            undo()

        scope.restore = restore
        patched.add(module)
        return scope

    if hasattr(interpreter, "_LangPatchScope"):  # else a Triton that does it otherwise
        interpreter._patch_lang = patch_lang
    options = interpreter.interpreter_builder.options
    if hasattr(options, "sanitize_overflow") and not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


if not torch.cuda.is_available() and find_spec("triton"):
    hasten_interpreter()


@pytest.fixture(scope="session")
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def poisoned(monkeypatch):
    """Fill what kernels write to with NaN first: an element they forget shows."""

    def nan(make):
        def empty(*args, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return empty

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, nan(getattr(owner, name)))


@pytest.fixture(autouse=True)
def seed():
    """The same random inputs in every run: a comparison of two rounding errors must not fail by luck of the draw."""
    torch.manual_seed(0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a corpus that is easy to learn."""
    (tmp_path / "corpus.txt").write_text("the sea keeps what the sea has taken. " * 200)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPT_DATA", str(tmp_path / "prepared"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # a user's shell; the loss kernel would be interpreted
    yield tmp_path
    from helpers import end_processes  # not for the kernels, whose tests also run without train.py

    end_processes()


@pytest.fixture
def run(folder, capsys):
    """Call train.py in this process: run(*argv, **options) -> (exit code, what it wrote to standard error)."""
    from helpers import FAST, in_process

    def run(*argv, **options):
        result = in_process(capsys, *argv, **FAST | options)
        return result.returncode, result.stderr

    return run
