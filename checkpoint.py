"""Run folders and checkpoints: one atomic file holds everything a run needs to go on.

    runs/NAME/checkpoint.pt           the newest
    runs/NAME/checkpoint-STEP.pt      older ones, as many as --keep leaves
    runs/NAME/best.pt                 the weights of the lowest validation loss

A checkpoint is written to a temporary name, flushed to disk, read back, and only then renamed. When one is damaged
later, the newest good one takes its place. All are zip files (torch.save) of tensors and plain values, with checksums.
"""

import errno
import hashlib
import json
import os
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import filelock
import torch

from data import atomic_file, from_state, spare_path
from model import GPT, GPTConfig
from say import say

RUNS = Path("runs")
FORMAT = 1


def new_run(config, tokens_sha256):
    """Make and return runs/NAME, or runs/NAME-2, -3, ... if that exists: a new run overwrites nothing.

    It appears with its config.json, so that it can be resumed from the first moment.
    """
    number = 1
    try:
        RUNS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=RUNS, prefix=".") as scratch:
            new = Path(scratch, "new")
            new.mkdir()
            write_config(new, config, tokens_sha256)
            while True:
                folder = RUNS / (config.name if number == 1 else f"{config.name}-{number}")
                try:
                    return new.rename(folder)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                number += 1
    except OSError as error:
        raise OSError(
            f"cannot make a folder in {RUNS} ({error.strerror or error}); start where you may write"
        ) from None


def newest_run(*also):
    """The run folder in which a checkpoint, or a file that matches one of the patterns `also`, was written last."""
    found = [path for pattern in ("checkpoint*.pt", *also) for path in RUNS.glob(f"*/{pattern}")]
    if not found:
        raise ValueError(
            f"no run with a checkpoint in {RUNS}/; train one first: python train.py configs/shakespeare.py"
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent


def write_config(folder, config, tokens_sha256):
    """Write config.json: the options of a run, the digest of its tokens, and one of both, which shows edits."""
    record = asdict(config) | {"tokens_sha256": tokens_sha256}
    record["sha256"] = _digest(record)
    with atomic_file(folder / "config.json") as file:
        file.write((json.dumps(record, indent=2) + "\n").encode())


class Record(NamedTuple):
    """What a run's config.json holds."""

    options: dict
    tokens_sha256: str | None  # None if it is not known, or not to be trusted
    edited: bool  # by hand, or by a version that wrote no digest


def read_config(folder, quiet=False):
    """The Record of a run folder; with the options of its newest good checkpoint if config.json is damaged or gone.

    Args:
        folder: the run folder. quiet: do not say so.

    Raises:
        ValueError: there is neither.
    """
    path = folder / "config.json"
    try:
        record = json.loads(path.read_text())
        if not isinstance(record, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        paths = checkpoints(folder)
        if not paths:
            raise ValueError(f"{path} cannot be read ({error}); --resume needs the folder of a run") from error
        good, _ = first_good(paths, quiet)
        if not quiet:
            say(f"warning: {path} cannot be read ({error}); the run's options are those of {good}", sys.stderr)
        return Record(load_checkpoint(good, ("config",))["config"], None, True)
    edited = record.pop("sha256", None) != _digest(record)
    tokens_sha256 = record.pop("tokens_sha256", None)
    return Record(record, None if edited else tokens_sha256, edited)


def _digest(record):
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def checkpoints(folder):
    """Paths of the folder's checkpoints that a run can go on from, newest first; damaged ones may be among them."""
    steps = (path.stem.partition("-")[2] for path in folder.glob("checkpoint-*.pt"))
    older = sorted((int(step) for step in steps if step.isdecimal()), reverse=True)
    names = ["checkpoint.pt", *(f"checkpoint-{step}.pt" for step in older)]
    return [path for name in names if (path := folder / name).exists()]


def peek(path, name):
    """What a checkpoint has under a name, its tensors not loaded; None if that is not there, or the file not good."""
    try:
        check_file(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)[name]
    except Exception:  # torch.load raises a dozen types; who loads the file says what is wrong
        return None


def first_good(paths, quiet=False):
    """(path, damaged): the first of some checkpoints that is not damaged, and those before it, with warnings.

    ValueError if all are damaged.
    """
    damaged = []
    for path in paths:
        try:
            check_file(path)
        except ValueError as error:
            damaged.append(path)
            if not quiet:
                say(f"warning: {error}", sys.stderr)
        else:
            return path, damaged
    raise ValueError(f"no good checkpoint is left in {damaged[0].parent}; use a copy of it")


def save_checkpoint(path, before_rename=lambda: None, **contents):
    """Write contents (tensors, numbers, strings, lists, dicts): to a temporary name, flushed, checked, then renamed."""
    with atomic_file(path) as file:
        torch.save({"format": FORMAT, **contents}, file)
        file.flush()
        os.fsync(file.fileno())  # before older checkpoints change their names
        with suppress(OSError, AttributeError):  # read it from the disk, not from the memory that it was written from
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        check_file(file.name)
        before_rename()


class Saver:
    """The checkpoints of the one process that trains a run, each written in a thread while the training goes on.

    A checkpoint that cannot be written costs a warning; the last one, in `close`, an error.

    Args:
        folder: the run folder; locked against other processes for as long as this one lives.
        keep: how many checkpoints to keep, besides best.pt.

    Attributes:
        step: of the newest checkpoint, None without one.

    Raises:
        ValueError: another process has the lock.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder, keep):
        self.folder, self.keep, self.step = folder, keep, None
        self.pool, self.writing, self.error = ThreadPoolExecutor(1), None, None
        self.unsaved_best = None  # weights that the next save writes to best.pt, because the last one could not
        self.lock = filelock.FileLock(folder / ".lock", timeout=0)
        try:
            self.lock.acquire()
        except NotImplementedError:
            message = f"the file system of {folder} has no locks (flock); train on one that has them"
            raise OSError(message) from None
        except filelock.Timeout:
            message = f"another process is training {folder}; stop it first, or name another run with --resume"
            raise ValueError(message) from None
        except OSError as error:
            message = f"cannot write to {folder} ({error.strerror}); make it writable to go on with it"
            raise OSError(message) from None
        for leftover in folder.glob(".*.tmp"):  # of a process that was killed while it wrote
            leftover.unlink(missing_ok=True)

    def newest(self):
        """The checkpoint to go on from, None if there is none yet; newer ones that are damaged get another name."""
        paths = checkpoints(self.folder)
        path, damaged = first_good(paths) if paths else (None, [])
        for bad in damaged:
            bad.rename(spare_path(bad, ".damaged"))
        return path

    def go_on(self, config, tokens_sha256, step):
        """Keep the run's config.json, and go on from the checkpoint of a step, or from the start if that is None."""
        write_config(self.folder, config, tokens_sha256)
        self.step = step
        if step is None:
            self._begin_again()

    def _begin_again(self):
        """Make room for a run from the start: what an earlier one left here gets a name that ends in .old."""
        say(f"no checkpoint in {self.folder}: it begins again")
        for path in [path for name in ("metrics.jsonl", "best.pt") if (path := self.folder / name).exists()]:
            path.rename(spare_path(path, ".old"))

    def save(self, weights, parts, is_best):
        """Copy two dicts to the host and begin to write them: checkpoint.pt has both, best.pt only the weights'."""
        self.wait()  # one at a time, so that memory holds one copy
        try:
            copies = to_host((weights, parts), {})
        except (RuntimeError, MemoryError) as error:  # torch has no type of its own for a host without memory
            if "memory" not in f"{type(error)} {error}".lower():
                raise
            self._write(weights, parts, is_best, None)  # from where they are, while the training waits
            self.unsaved_best = None  # goes on changing
            return
        copied = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
        self.writing = self.pool.submit(self._write, *copies, is_best, copied)

    def wait(self):
        """Until what was begun is on disk, or has failed."""
        if self.writing is not None:
            self.writing.result()

    def last_good(self):
        """The newest checkpoint on disk, in words, once what was begun is there."""
        self.wait()
        return self._last_good()

    def close(self):
        """Wait until all is on disk; OSError if the last checkpoint could not be written."""
        try:
            self.pool.shutdown()
            if self.error is not None:
                raise OSError(self.error)
        finally:
            self.lock.release()

    def _write(self, weights, parts, is_best, copied):
        if is_best:
            self.unsaved_best = weights
        try:
            if copied:
                copied.synchronize()
            if self.unsaved_best:
                save_checkpoint(self.folder / "best.pt", **self.unsaved_best)
                self.unsaved_best = None
            save_checkpoint(self.folder / "checkpoint.pt", self._make_room, **weights, **parts)
            self.step, self.error = weights["step"], None
            for path in checkpoints(self.folder)[self.keep :]:
                path.unlink(missing_ok=True)
        except Exception as error:  # in a thread: of what is not caught here nobody would hear
            while error.__context__:  # to a full disk torch.save adds an error of its own
                error = error.__context__
            reason = getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
            self.error = (
                f"the checkpoint of step {weights['step']} cannot be written to {self.folder} ({reason}); make room or "
                f"make it writable; the last good one is {self._last_good()}"
                + ("; best.pt is not the best one yet" if self.unsaved_best else "")
            )
            say(f"warning: {self.error}", sys.stderr)

    def _last_good(self):
        paths = checkpoints(self.folder)  # none where somebody made room by deleting them
        if not paths or self.step is None:
            return "none"
        return f"{paths[0]} of step {paths[0].stem.partition('-')[2] or self.step}"

    def _make_room(self):
        """Give the newest checkpoint the name of an older one."""
        if self.keep > 1 and self.step is not None:
            with suppress(FileNotFoundError):
                (self.folder / "checkpoint.pt").rename(self.folder / f"checkpoint-{self.step}.pt")


def to_host(value, copies):
    """Nested dicts, lists and tuples with their tensors copied to the host; those that share memory still do.

    Those from a GPU go to pinned memory, behind the work queued there: an event recorded now tells when they are done.
    Where there is no more memory to pin, the copy waits for that work instead.
    """
    if isinstance(value, dict):
        return {name: to_host(part, copies) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_host(part, copies) for part in value)
    if not isinstance(value, torch.Tensor):
        return value
    key = (value.data_ptr(), value.shape, value.dtype)
    if key not in copies:
        try:
            host = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        except RuntimeError:
            host = torch.empty_like(value, device="cpu")
        copies[key] = host.copy_(value, non_blocking=value.is_cuda)
    return copies[key]


def check_file(path):
    """ValueError if a checkpoint is damaged: each of its parts has a checksum, which torch.load does not look at."""
    try:
        with zipfile.ZipFile(path) as file:
            broken = file.testzip()
        reason = broken and f"wrong checksum of {broken}"
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # zipfile raises a dozen types for a damaged file
        reason = str(error) or type(error).__name__
    if reason:
        raise ValueError(f"checkpoint {path} is damaged or not a checkpoint ({reason[:120]})")


def load_checkpoint(path, needed=()):
    """The contents of a checkpoint, on the CPU; nothing in the file is executed (weights_only).

    ValueError unless it holds a model, its tokenizer and all that is `needed` besides.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"checkpoint {path} does not exist; give a run folder or a checkpoint.pt in one")
    check_file(path)
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises a dozen types for a file that is not ours
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        raise ValueError(f"checkpoint {path} is not one of this project ({reason}); use another one") from error
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path} is not of this project's format {FORMAT}; train again or use another one")
    if missing := [name for name in ("model", "model_config", "tokenizer", *needed) if name not in contents]:
        raise ValueError(f"checkpoint {path} lacks {', '.join(missing)}; use a checkpoint.pt, or another one")
    return contents


def restore_model(contents, path):
    """The GPT of a loaded checkpoint, on the CPU, and its tokenizer; `path` is for the error message."""
    try:  # by whatever implementation this machine has
        model = GPT(GPTConfig(**contents["model_config"] | {"attention": "auto"}))
    except TypeError as error:
        raise ValueError(f"checkpoint {path} describes another model ({error}); use one of this version") from error
    load_weights(model, contents, path)
    tokenizer = from_state(contents["tokenizer"])
    if tokenizer.n_vocab > model.config.vocab_size:
        raise ValueError(
            f"checkpoint {path} has a tokenizer of {tokenizer.n_vocab} tokens and a model of "
            f"{model.config.vocab_size}; it is damaged: use another one"
        )
    return model, tokenizer


def load_weights(model, contents, path):
    """Copy the weights of a loaded checkpoint into a model of the same configuration (but for dropout)."""
    stored = asdict(GPTConfig(**contents["model_config"]))
    for name, value in asdict(model.config).items():
        if stored[name] != value and name not in ("dropout", "attention"):
            raise ValueError(
                f"checkpoint {path} holds another model: its {name} is {stored[name]!r}, not {value!r}; change it back"
            )
    try:
        model.load_state_dict(contents["model"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        message = f"checkpoint {path} holds another model ({reason}); use the configuration it was trained with"
        raise ValueError(message) from None
