"""Fixtures of all tests. Kernels run on the GPU if there is one, else in Triton's interpreter, on the CPU."""

import dataclasses
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# Triton's interpreter multiplies matrices with NumPy's OpenBLAS, whose code for Haswell and Zen rounds q k^T and k q^T
# differently. GPUs do not, nor does OpenBLAS's code for Sandy Bridge. It must be chosen before NumPy is imported.
os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # pytest-xdist runs several workers, which share the cores

import torch

# A shell starts background jobs, such as a CI job, with Ctrl-C ignored, and nohup ignores hang-ups. The commands under
# test would inherit both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.path.insert(0, str(Path(__file__).parents[1]))
torch.set_num_threads(1)  # as OpenBLAS
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic runs need it; set before cuBLAS is first used
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # set before triton.jit is first used


def mend_interpreter():
    """Let the interpreters of Triton 3.6 to 3.8 run the kernels as that of 3.9 does."""
    import triton
    from triton.language import core
    from triton.runtime import interpreter

    # there a constexpr plus a tensor is a constexpr of a tensor, which few functions take
    core.constexpr.__new__ = lambda cls, value=None: value if isinstance(value, core.tensor) else object.__new__(cls)
    if triton.__version__.startswith("3.6."):  # it also forgets the names in a NamedTuple
        old, patch = core._unwrap_if_constexpr, interpreter._patch_lang_tensor

        def unwrap(x):
            return type(x)(*map(unwrap, x)) if isinstance(x, tuple) and hasattr(x, "_fields") else old(x)

        def patch_lang_tensor(tensor, scope):
            patch(tensor, scope)
            tensor.__index__ = lambda self: int(self.handle.data.squeeze())  # NumPy 2.4 converts no array of one number

        core._unwrap_if_constexpr = unwrap
        interpreter._patch_lang_tensor = patch_lang_tensor


def hasten_interpreter():
    """Skip work of Triton's interpreter that has no effect: two thirds of its time.

    The interpreter patches triton.language in every call of a jit function and undoes this at the end of the launch.
    Only the first call from each module changes anything, so the others are skipped. It also computes whether integers
    overflow, but uses the result only with the option `debug`, which is off.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_lang(function):
        module = id(function.__globals__)
        if module in patched:
            return None  # inside a kernel, where the interpreter ignores the result
        scope = patch(function)
        undo = scope.restore

        def restore():
            patched.clear()
            undo()

        scope.restore = restore
        patched.add(module)
        return scope

    interpreter._patch_lang = patch_lang
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


if not find_spec("triton"):  # on a Mac, for example; tests of nothing but kernels
    kernels = "attention attention_calls attention_pairs attention_qkv attention_tiles cross_entropy hopper linear mlp"
    collect_ignore = [f"test_{name}.py" for name in (*kernels.split(), "score_mod", "simple_attention")]
elif not torch.cuda.is_available():
    mend_interpreter()
    hasten_interpreter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Without Triton, skip what needs it in tests of attention and FP8. No other test may need it."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if error.name != "triton" or not item.path.name.startswith(("test_attention", "test_decode", "test_fp8")):
            raise
        pytest.skip("needs Triton")


@pytest.fixture(scope="session")
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def poisoned(monkeypatch):
    """Fill new tensors with NaN, so that a test fails if a kernel leaves an element unwritten."""

    def nan(make):
        def empty(*args, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return empty

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, nan(getattr(owner, name)))


@pytest.fixture(autouse=True)
def seed():
    """The same random inputs in every run, so that comparisons of rounding errors always give the same result."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def clean_gpu():
    """Free cached memory, as workers share the GPU, and compiled functions: only eight of one function are allowed."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()


@pytest.fixture
def data_root(tmp_path, monkeypatch):
    """A folder for this test's prepared corpora and downloads; loopback is reached without a proxy."""
    monkeypatch.setenv("GPT_DATA", str(tmp_path / "root"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield tmp_path / "root"
    assert not list(tmp_path.rglob(".*.tmp"))  # no test leaves a temporary file


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder with a small text, corpus.txt, that is easy to learn."""
    (tmp_path / "corpus.txt").write_text("the sea keeps what the sea has taken. " * 200)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPT_DATA", str(tmp_path / "prepared"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # otherwise the loss kernel would be interpreted
    yield tmp_path
    from helpers import end_processes  # not at the top, because kernel tests also run without train.py

    end_processes()


@pytest.fixture
def run(folder, capsys, monkeypatch):
    """Call train.py in this process: run(*argv, **options) -> (exit code, standard error).

    It draws no loss.png, which takes half of the time of a short run.
    """
    from helpers import FAST, in_process
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda *args, **options: None)

    def run(*argv, **options):
        result = in_process(capsys, *argv, **FAST | options)
        return result.returncode, result.stderr

    return run


@pytest.fixture
def trains(run):
    """Call train.py as the fixture run does; it must end with exit code 0. Returns its standard error."""

    def trains(*argv, **options):
        code, err = run(*argv, **options)
        assert code == 0, err
        return err

    return trains
