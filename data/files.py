"""Data folders, atomic files and downloads."""

import json
import os
import threading
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

TIMEOUT = (3, 10)  # seconds to connect to one address of a server, and to wait for its next data


def data_folder(name):
    """Path of the folder `name` in $GPT_DATA, or beside this module if that is not set; it is created if missing."""
    folder = Path(os.environ.get("GPT_DATA") or Path(__file__).parent) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def optional(module, purpose):
    """Import a module of the extra "hub"; ValueError if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ValueError(f"{purpose} needs the package {package}; install it: pip install -e '.[hub]'") from None


def read_json(path):
    """The dict in a JSON file; ValueError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); mend it or get it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no JSON object; mend it or get it again")
    return value


def require_file(path, remedy):
    """Raise ValueError unless the path is a file."""
    if not path.is_file():
        raise ValueError(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}; {remedy}")


@contextmanager
def writing(path):
    """Replace an OSError of this block, which writes a file, by one that says what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror or error}); make room or make it writable") from error


@contextmanager
def atomic_file(path):
    """Open a binary file; it appears at `path` only if the block succeeds. OSError if it cannot be written."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with writing(path):
            with open(temporary, "wb") as file:
                yield file
            publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def publish(temporary, path):
    """Rename a written file to its final name, so that even a power cut leaves no half-written file there."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())  # otherwise the file may be empty after a power cut
    os.replace(temporary, path)
    with suppress(OSError):  # some systems cannot open a folder
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # otherwise a power cut may undo the rename
        os.close(folder)


def download(url, file_name, sha256):
    """Path of downloads/`file_name`; the file is downloaded from `url` if it is missing or has another sha256.

    Raises:
        OSError: there is no answer in time, an error status, or a file with another sha256.
    """
    import pooch  # imported here, since most runs download nothing

    pooch.get_logger().setLevel("WARNING")
    folder, downloader = data_folder("downloads"), pooch.HTTPDownloader(timeout=TIMEOUT)
    try:
        return Path(pooch.retrieve(url, f"sha256:{sha256}", file_name, folder, downloader=downloader))
    except (OSError, ValueError) as error:
        raise OSError(f"cannot download {file_name} ({error}); save it as {folder / file_name}") from None
