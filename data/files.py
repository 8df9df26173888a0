"""Folders of data and of runs, atomic files and locks."""

import errno
import json
import os
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import filelock

from errors import UserError, perhaps, require

RUNS = Path(os.environ.get("GPT_RUNS") or "runs")
GPT2_SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # OpenAI's models, whatever folders have these names


def data_root():
    return Path(os.environ.get("GPT_DATA") or Path(__file__).parent)


def data_folder(name):
    """Path of the folder `name` in $GPT_DATA, or beside this module if that is not set; it is created if missing."""
    return make_folders(data_root() / name)


@contextmanager
def can_write(path):
    """Name the option or variable that moves a folder elsewhere if this block is not allowed to write there."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        is_data = data_root() in path.parents and RUNS not in (path, *path.parents)
        moved_by = "the variable GPT_DATA" if is_data else "--runs or the variable GPT_RUNS"
        rule = f"cannot write {path} ({error.strerror})"
        raise UserError(f"{rule}; name a folder where you can by {moved_by}") from None


def make_folders(path):
    """Make a folder, unless it exists, and those above it; returns its path."""
    try:
        with can_write(path):
            path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        rule = "must be a folder, but is a file or a link to a folder that is gone"
        raise UserError(f"{error.filename} {rule}; remove it") from None
    return path


def find_run(name, *also, runs=RUNS, fits=None):
    """Path of what a user names: runs/NAME if there is such a run, else NAME.

    UserError if it does not exist or is a size of GPT-2.
    "" is the run with the newest .pt file, or newest file that matches one of the patterns `also`. With `fits`, a
    function of a run's folder, it is the newest run for which that is true, or else the newest.
    """
    if not name:
        found = [path for pattern in ("*.pt", *also) for path in runs.glob(f"*/{pattern}")]
        require(found, f"no run in {runs}/; train one first: python train.py configs/shakespeare.py")
        folders = [path.parent for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]
        return next(filter(fits, folders), folders[0])
    require(str(name) not in GPT2_SIZES, f"{name} is OpenAI's model; a run of this name is {runs}/{name}")
    path = Path(name)
    if str(path) == path.name != "..":
        if str(name) != path.name:  # ./NAME or NAME/
            path = path.absolute()
        elif (runs / path).is_dir():
            path = runs / path
    similar = perhaps(path.name, [*GPT2_SIZES, *(folder.name for folder in runs.glob("*/"))])
    there = path.exists() or path.suffix == ".pt"  # a run's tokenizer is read although its checkpoint is gone
    require(there, f"{path} does not exist{similar}; give the NAME of {runs}/NAME, or a path")
    return path


def optional(module, purpose):
    """Import a module of the extra "hub"; UserError if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{purpose} needs the package {package}; install it: pip install -e '.[hub]'") from None


def read_json(path):
    """The dict in a JSON file; UserError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); mend it or get it again") from None
    require(isinstance(value, dict), f"{path} is no JSON object; mend it or get it again")
    return value


@contextmanager
def writing(path):
    """Replace an OSError of this block, which writes a file, by a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or error}); make room or make it writable") from error


@contextmanager
def atomic_file(path):
    """Open a binary file; it appears at `path` only if the block succeeds. UserError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # otherwise the file may be empty after a power cut
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def lock_file(path, timeout=-1):
    """A lock on a file, for release(); filelock.Timeout if another process still has it after `timeout` seconds."""
    lock = filelock.FileLock(path)
    try:
        with can_write(path):
            lock.acquire(timeout)
    except OSError as error:  # filelock.Timeout, too
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # as some NFS and Lustre answer
            raise
        print(f"warning: {error.strerror} in this file system: start nothing twice at once", file=sys.stderr)
    return lock
