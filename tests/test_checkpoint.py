"""What checkpoint.py promises of each file it writes; whole runs are in test_reliability_files.py."""

import os
import threading

import pytest
import torch

import checkpoint
from checkpoint import Saver, save_checkpoint

WEIGHTS = dict(step=7, model={"weight": torch.ones(3)}, config={"allow_changes": False})


@pytest.fixture
def saver(tmp_path):
    return Saver(tmp_path, keep=2)


def test_a_checkpoint_is_flushed_and_read_back_before_it_gets_its_name(tmp_path, monkeypatch):
    path, said = tmp_path / "checkpoint.pt", []

    def record(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (said.append(name), function(*args))[1])

    for owner, name in ((os, "fsync"), (os, "posix_fadvise"), (checkpoint, "check_file"), (os, "replace")):
        record(owner, name)
    save_checkpoint(path, lambda: said.append("make room"), **WEIGHTS)
    places = [said.index(name) for name in ("fsync", "posix_fadvise", "check_file", "make room", "replace")]
    assert places == sorted(places)


def test_a_checkpoint_that_reads_back_wrong_replaces_nothing(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, **WEIGHTS)
    good, check = path.read_bytes(), checkpoint.check_file

    def damage_and_check(name):
        with open(name, "r+b") as file:
            file.seek(len(good) // 2)
            file.write(b"broken by the disk")
        check(name)

    monkeypatch.setattr(checkpoint, "check_file", damage_and_check)
    with pytest.raises(ValueError):
        save_checkpoint(path, **WEIGHTS | dict(step=8))
    assert path.read_bytes() == good and [x.name for x in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_training_goes_on_while_a_checkpoint_is_written(saver, monkeypatch):
    may_write, save = threading.Event(), checkpoint.save_checkpoint

    def slow(*args, **contents):
        assert may_write.wait(60)
        save(*args, **contents)

    monkeypatch.setattr(checkpoint, "save_checkpoint", slow)
    weight = torch.ones(3)
    saver.save(WEIGHTS | dict(model={"weight": weight}), {}, False)
    weight.zero_()  # the next step
    may_write.set()
    saver.close()
    assert torch.equal(torch.load(saver.folder / "checkpoint.pt", weights_only=True)["model"]["weight"], torch.ones(3))


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory"), MemoryError()], ids=["CUDA", "host"])
def test_a_host_without_memory_for_the_copy(saver, monkeypatch, error):
    """It is written without one, before the next step changes the weights."""

    def fail(*_):
        raise error

    monkeypatch.setattr(checkpoint, "to_host", fail)
    weight = torch.ones(3)
    saver.save(WEIGHTS | dict(model={"weight": weight}), {}, True)
    weight.zero_()
    saver.close()
    for name in ("checkpoint.pt", "best.pt"):
        found = torch.load(saver.folder / name, weights_only=True)
        assert found["step"] == 7 and torch.equal(found["model"]["weight"], torch.ones(3))


def test_another_error_of_the_device_is_not_hidden(saver, monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(checkpoint, "to_host", fail)
    with pytest.raises(RuntimeError, match="device-side"):
        saver.save(WEIGHTS, {}, True)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()], ids=["disk", "memory"])
def test_a_last_checkpoint_that_cannot_be_written_is_an_error(saver, monkeypatch, error):
    """Also where somebody has deleted those before it, to make room."""
    saver.save(WEIGHTS, {}, False)
    saver.last_good()
    (saver.folder / "checkpoint.pt").unlink()

    def fail(*args, **contents):
        raise error

    monkeypatch.setattr(checkpoint, "save_checkpoint", fail)
    saver.save(WEIGHTS | dict(step=8), {}, False)
    with pytest.raises(OSError, match=r"step 8 cannot be written.*the last good one is none"):
        saver.close()
