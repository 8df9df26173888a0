"""Where data lives, and how it gets there whole: atomic files, atomic folders, downloads with a deadline."""

import errno
import hashlib
import http.client
import os
import queue
import tempfile
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

from tqdm import tqdm


class DownloadError(OSError):
    """An address could not be read in time, or what it holds is not what was expected."""


def data_folder(name):
    """The folder `name` for prepared corpora or downloads: beside this module, or in $GPT_DATA."""
    return Path(os.environ.get("GPT_DATA") or Path(__file__).parent) / name


def make_data_folder(name):
    """`data_folder(name)`, made if it is missing.

    Raises:
        OSError: the place cannot be written; the message names $GPT_DATA as the way out.
    """
    folder = data_folder(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        message = f"cannot write to {folder} ({reason}); set GPT_DATA to a folder that can be written"
        raise OSError(message) from None
    return folder


def spare_path(path, suffix):
    """`path` with a suffix, numbered if such a file is there already."""
    number, spare = 1, Path(f"{path}{suffix}")
    while spare.exists():
        number += 1
        spare = Path(f"{path}-{number}{suffix}")
    return spare


@contextmanager
def atomic_file(path):
    """A binary file to write; it appears at `path` only when the block ends without an error.

    Raises:
        OSError: it cannot be written; the message names the path and the way out.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave the new name with no contents
        os.replace(temporary, path)
        with suppress(OSError):  # the new name itself; not every system lets a folder be opened
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror or error}); make room or make it writable") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path):
    """An empty folder to fill; it replaces `path` only when the block ends without an error.

    Whoever opened files of a replaced folder keeps reading the old ones. Two processes may do this at
    once: the last one wins, and a reader sees one of the two folders whole.
    """
    path = Path(path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        yield new
        for attempt in range(100):
            try:
                new.rename(path)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            with suppress(FileNotFoundError):  # another process may have been faster
                path.rename(Path(scratch, f"old{attempt}"))  # a filled folder cannot be renamed over
        raise OSError(f"{path} is being replaced by other processes all the time; stop them and try again")


def download(url, *, size, sha256, timeout=15.0):
    """The contents of `url`.

    A thread reads and this one waits, because nothing else bounds the time of a name look-up, of several
    addresses tried in turn, and of a server that sends a byte now and then.

    Args:
        url: http or https address.
        size: bytes to expect.
        sha256: hex digest to expect.
        timeout: seconds for everything together.

    Returns:
        bytes of length `size`.

    Raises:
        DownloadError: no answer in time, a status other than 200, or other contents. Its message is only
            the reason; the caller says what it was for.
    """
    deadline = time.monotonic() + timeout
    answers = queue.SimpleQueue()  # pieces of the file, then b"" or an exception
    gave_up = threading.Event()

    def read():
        try:
            with urllib.request.urlopen(url, timeout=timeout) as response:
                if response.status != 200:
                    raise OSError(f"status {response.status}")
                while not gave_up.is_set() and (piece := response.read1(1 << 16)):
                    answers.put(piece)
            answers.put(b"")
        except (OSError, ValueError, http.client.HTTPException) as error:
            answers.put(error)

    threading.Thread(target=read, daemon=True).start()
    contents = bytearray()
    name = url.rsplit("/", 1)[-1]
    try:
        with tqdm(total=size, unit="B", unit_scale=True, desc=name, disable=None, leave=False) as bar:
            while piece := answers.get(timeout=max(0.0, deadline - time.monotonic())):
                if isinstance(piece, Exception):
                    raise DownloadError(str(piece).strip("<>"))
                contents += piece
                bar.update(len(piece))
                if len(contents) > size:
                    break
                if time.monotonic() > deadline:
                    raise queue.Empty
    except queue.Empty:
        raise DownloadError(f"not complete after {timeout:g} s") from None
    finally:
        gave_up.set()
    if len(contents) != size or hashlib.sha256(contents).hexdigest() != sha256:
        found = f"{len(contents):,} bytes" if len(contents) <= size else f"more than {size:,} bytes"
        raise DownloadError(f"{found} with another sha256 than the {size:,} bytes of {sha256[:12]}..")
    return bytes(contents)


def download_once(url, file_name, *, size, sha256, timeout=15.0):
    """The contents of `url`, kept as downloads/`file_name`: from there if an earlier call left it there."""
    path = data_folder("downloads") / file_name
    if path.exists():
        contents = path.read_bytes()
        if hashlib.sha256(contents).hexdigest() == sha256:
            return contents
    contents = download(url, size=size, sha256=sha256, timeout=timeout)
    with atomic_file(make_data_folder("downloads") / file_name) as file:
        file.write(contents)
    return contents
