"""Data folders, atomic files and downloads."""

import os
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

TIMEOUT = (3, 10)  # seconds to connect to one address of a server, and to wait for its next data


def data_folder(name):
    """Path of the folder `name` in $GPT_DATA, or beside this module if that is not set; it is created if missing."""
    folder = Path(os.environ.get("GPT_DATA") or Path(__file__).parent) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def atomic_file(path):
    """Open a binary file; it appears at `path` only if the block succeeds. OSError if it cannot be written."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # otherwise the file may be empty after a power cut
        os.replace(temporary, path)
        with suppress(OSError):  # some systems cannot open a folder
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)  # otherwise a power cut may undo the rename
            os.close(folder)
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror or error}); make room or make it writable") from error
    finally:
        temporary.unlink(missing_ok=True)


def download(url, file_name, sha256):
    """Path of downloads/`file_name`; the file is downloaded from `url` if it is missing or has another sha256.

    Raises:
        OSError: there is no answer in time, an error status, or a file with another sha256.
    """
    import pooch  # only here: most runs download nothing

    pooch.get_logger().setLevel("WARNING")
    folder, downloader = data_folder("downloads"), pooch.HTTPDownloader(timeout=TIMEOUT)
    try:
        return Path(pooch.retrieve(url, f"sha256:{sha256}", file_name, folder, downloader=downloader))
    except (OSError, ValueError) as error:
        raise OSError(f"cannot download {file_name} ({error}); save it as {folder / file_name}") from None
