"""The texts: tiny Shakespeare, the embedded play that stands in for it offline, and files of the user's."""

import difflib
import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data.files import DownloadError, atomic_file, data_folder, download_once, make_data_folder

NAMES = ("shakespeare", "text")

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_BYTES = 1_115_394
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_FILE = "tinyshakespeare.txt"  # its name in downloads/
DOWNLOAD_SECONDS = 15.0

PLAY_FILE = Path(__file__).parent / "play.txt"
PLAY = "the embedded play"


@dataclass(frozen=True)
class Source:
    """A text to prepare, its title, and why it is not the text that was asked for (excuse, or "")."""

    text: str
    title: str
    excuse: str = ""

    @cached_property
    def sha256(self):
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_source(name, input=None):
    """The text of the corpus `name`.

    Args:
        name: "shakespeare" or "text".
        input: for "text" a UTF-8 text file or a folder of them; for "shakespeare" a local copy of it, or
            None to use an earlier copy or download, the address, and else the embedded play.

    Raises:
        ValueError: an unknown name, an empty or non-UTF-8 text, a file that is not tiny Shakespeare.
        OSError: a file that cannot be read.
    """
    check_name(name)
    if name == "text":
        if not input:
            raise ValueError("corpus 'text' needs --input FILE: a text file, or a folder of *.txt and *.md")
        return read_text(input)
    if input:
        return _local_shakespeare(Path(input))
    file = {"size": SHAKESPEARE_BYTES, "sha256": SHAKESPEARE_SHA256, "timeout": DOWNLOAD_SECONDS}
    try:
        contents = download_once(SHAKESPEARE_URL, SHAKESPEARE_FILE, **file)
    except DownloadError as error:
        return Source(_decode(PLAY_FILE), PLAY, excuse=str(error))
    return Source(contents.decode(), "tiny Shakespeare")


def check_name(name):
    """Raise ValueError unless `name` is a corpus."""
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "for a file of yours use: text --input FILE"
        raise ValueError(f"corpus {name!r} must be one of {', '.join(NAMES)}; {hint}")


def read_text(path):
    """Source of a text file, or of all *.txt and *.md files below a folder: sorted, a blank line between two.

    Line ends become \\n, and a byte order mark is dropped, as everywhere in Python's text mode.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"input {path} does not exist; give a text file or a folder of them")
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _is_text(file, path))
        if not files:
            raise ValueError(f"folder {path} holds no *.txt or *.md file; give one that does, or a file")
        texts = [text.rstrip("\n") for text in map(_decode, files) if text.strip()]
        text = "\n\n".join(texts) + "\n" if texts else ""
    else:
        text = _decode(path)
    if len(text.strip()) < 2:  # one character cannot be divided in a training and a validation part
        raise ValueError(f"input {path} is empty; give a text much longer than the block size")
    title = os.fsencode(path.resolve().name).decode(errors="replace")
    return Source(text, title)


def _is_text(file, folder):
    """Whether a path below `folder` is a text to read; hidden files, and files in hidden folders, are not."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.suffix.lower() in (".txt", ".md") and not hidden and file.is_file()


def _decode(path):
    """The str in a UTF-8 file; ValueError names the file and the first byte that is not UTF-8."""
    contents = path.read_bytes()
    try:
        text = contents.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{contents[error.start]:02x}, {error.reason}; "
            "convert it, for example with: iconv -f LATIN1 -t UTF-8"
        ) from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _local_shakespeare(path):
    """Source of a local copy, kept in downloads/ so that other tokenizers find it too."""
    if not path.is_file():
        raise FileNotFoundError(f"input {path} is not a file; give the file that {SHAKESPEARE_URL} holds")
    contents = path.read_bytes()
    digest = hashlib.sha256(contents).hexdigest()
    if digest != SHAKESPEARE_SHA256:
        raise ValueError(
            f"{path} is not tiny Shakespeare: {len(contents):,} bytes with sha256 {digest[:12]}.., not "
            f"{SHAKESPEARE_BYTES:,} with {SHAKESPEARE_SHA256[:12]}..; for any text use: text --input {path}"
        )
    if not (data_folder("downloads") / SHAKESPEARE_FILE).exists():
        with atomic_file(make_data_folder("downloads") / SHAKESPEARE_FILE) as file:
            file.write(contents)
    return Source(contents.decode(), "tiny Shakespeare")
