"""train.main() and the other scripts in notebooks and programs: pictures, mistakes and interrupts."""

import os
import signal
import threading

import nbformat
import pytest
from helpers import FAST, ROOT, at_step, contents, environment, flags, losses, wait_for_step
from jupyter_client import KernelManager
from nbclient import NotebookClient

import export
import plot
import sample
import train
from errors import UserError

ENDLESS = FAST | dict(steps=100_000, eval_every=100_000)


@pytest.fixture
def execute(folder, monkeypatch):
    """Run the cells of a notebook in a kernel of this Python, offline: execute(cells, folder) -> their outputs."""
    for name in ("JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(folder / name))

    def execute(cells, where, manager=None):
        nowhere = dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
        book = nbformat.v4.new_notebook(cells=cells)
        place = dict(metadata=dict(path=str(where)))
        NotebookClient(book, timeout=300, resources=place, km=manager).execute(env=environment(folder) | nowhere)
        return [cell.get("outputs", ()) for cell in book.cells]

    return execute


def printed(outputs):
    return "".join(output.get("text", "") for output in outputs)


def test_the_example(folder, execute):
    """It runs as it stands, but for the cells that only Colab needs, in a folder like a checkout."""
    for path in ROOT.iterdir():
        if path.name not in ("examples", "runs"):
            (folder / path.name).symlink_to(path)
    (folder / "examples").mkdir()
    cells = nbformat.read(ROOT / "examples/colab.ipynb", 4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    outputs = execute([cell for cell in cells if "colab" not in cell.metadata.get("tags", ())], folder / "examples")
    *_, trained, _, plotted, sampled = outputs
    assert plotted[-1].data["image/png"]
    assert "step 30/30" in printed(trained) and printed(sampled).startswith("ROMEO:")
    assert (folder / "runs/notebook/best.pt").exists() and (folder / "losses.png").exists()


def test_a_kernel_outlives_mistakes_and_interrupts(folder, execute):
    manager = KernelManager(kernel_name="python3")

    def interrupt():
        wait_for_step(folder, 3)
        manager.interrupt_kernel()

    threading.Thread(target=interrupt, daemon=True).start()
    sources = [
        "import train\nfrom errors import UserError",
        "try:\n    train.main(['nowhere.py'])\nexcept UserError as error:\n    print(error)",
        f"train.main({flags((), ENDLESS)})",
        "import signal\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler",
    ]
    _, mistake, stopped, _ = execute([*map(nbformat.v4.new_code_cell, sources)], folder, manager)
    assert "nowhere.py" in printed(mistake)
    assert "stopped at step" in printed(stopped)
    assert contents("runs/run/checkpoint.pt")["step"] == len(losses(folder)) >= 3


@pytest.mark.parametrize(
    "script, argv, words",
    [
        (train, ["nowhere.py"], "nowhere.py"),
        (train, ["--data", "text", "--input", "none"], "none"),
        (train, ["--device", "cuda:99"], "cuda:99"),
        (sample, ["none"], "none"),
        (plot, ["none"], "none"),
        (plot, [], "run"),
        (export, ["none", "out"], "none"),
    ],
)
def test_mistakes_raise_in_a_program(folder, script, argv, words):
    with pytest.raises(UserError) as error:
        script.main(argv)
    assert words in str(error.value) and not (folder / "runs").exists()


def test_the_second_interrupt_raises_and_the_run_can_go_on(folder, monkeypatch, capfd):
    """Although the traceback, which a notebook keeps, refers to the run."""
    options = FAST | dict(steps=8, eval_every=2)
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)])
        with pytest.raises(KeyboardInterrupt) as kept:
            train.main(flags((), options))
    train.main(["--resume"])
    assert kept and len(losses(folder)) == 8 and "Ctrl-C" in capfd.readouterr().err


def test_an_error_before_the_first_step_leaves_nothing(folder, monkeypatch):
    monkeypatch.setattr(train, "compile_and_wrap", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.main(flags((), FAST))
    assert os.listdir("runs") == []
