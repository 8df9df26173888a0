"""The texts: tiny Shakespeare, the play that replaces it offline, and the user's own files."""

import hashlib
import sys
from pathlib import Path

from data.files import atomic_file, data_folder, download

SHAKESPEARE = "tiny Shakespeare"
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_FILE = "tinyshakespeare.txt"  # its name in downloads/
PLAY = "the embedded play"
PLAY_FILE = Path(__file__).parent / "play.txt"


def read_source(name, input=None):
    """Read the text of a corpus: (title, text, sha256 hex digest of the text in UTF-8).

    Args:
        name: "shakespeare" or "text".
        input: for "text", a UTF-8 text file or a folder of them. For "shakespeare", a local copy; None uses an
            earlier copy or download, or downloads it, or reads the embedded play if the download fails.

    Raises:
        ValueError: the name is unknown, the text is empty or not UTF-8, or the local copy is another text.
        OSError: a file cannot be read.
    """
    if name == "text" and input:
        title, text = _read_text(Path(input))
    elif name == "shakespeare":
        title, text = _read_shakespeare(input)
    else:
        raise ValueError(f"corpus {name!r} must be shakespeare, or text with --input FILE_OR_FOLDER")
    return title, text, hashlib.sha256(text.encode()).hexdigest()


def _read_shakespeare(input):
    """(title, text); a local copy is put where the download would be."""
    if input:
        contents = Path(input).read_bytes()
        if hashlib.sha256(contents).hexdigest() != SHAKESPEARE_SHA256:
            raise ValueError(
                f"{input} is not {SHAKESPEARE} (its sha256 differs); for other texts: text --input {input}"
            )
        with atomic_file(data_folder("downloads") / SHAKESPEARE_FILE) as file:
            file.write(contents)
    try:
        return SHAKESPEARE, _decode(download(SHAKESPEARE_URL, SHAKESPEARE_FILE, SHAKESPEARE_SHA256))
    except OSError as error:
        print(f"using {PLAY} instead of {SHAKESPEARE}: {error}", file=sys.stderr)
        return PLAY, _decode(PLAY_FILE)


def _read_text(path):
    """(title, text) of a text file, or of all *.txt and *.md files below a folder, joined by blank lines."""
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in (".txt", ".md") and file.is_file()]
        visible = [file for file in files if not any(part[0] == "." for part in file.relative_to(path).parts)]
        text = "\n\n".join(text.rstrip("\n") for text in map(_decode, visible) if text.strip()) + "\n"
    else:
        text = _decode(path)
    if len(text.strip()) < 2:  # the training and the validation part need a character each
        raise ValueError(f"{path} has no text; --input must be a text file, or a folder with *.txt or *.md files")
    return path.resolve().name, text


def _decode(path):
    """The text of a UTF-8 file, with \\n as line ends and without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); convert it, for example with iconv") from None
