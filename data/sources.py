"""The corpora by name: which files they consist of, and how to get them."""

import hashlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

from data.documents import FORMATS
from data.files import atomic_file, data_folder, download
from data.hub import DATASETS, HubFile, dataset_files
from data.shards import file_sha256

SHAKESPEARE = "tiny Shakespeare"
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_FILE = "tinyshakespeare.txt"  # its name in downloads/
PLAY = "the embedded play"
PLAY_FILE = Path(__file__).parent / "play.txt"

SMALL = 1 << 25  # bytes of a corpus whose contents are compared when it is opened; of larger ones names and sizes


@dataclass(frozen=True)
class Source:
    """What a corpus is made from.

    Attributes:
        title: for people.
        files: local paths, or HubFiles.
        sha256: hex digest of names and sizes, and of the contents if they are small or from the hub.
    """

    title: str
    files: list[Path | HubFile]
    sha256: str
    sizes: list[int] = field(repr=False)

    @property
    def is_remote(self):
        return isinstance(self.files[0], HubFile)

    def local(self, index):
        """Path of a file on this machine; a file from the hub is downloaded."""
        file = self.files[index]
        return file.download() if self.is_remote else file

    def delete_downloads(self, files):
        """Delete what was downloaded of files [slice], because they are done."""
        for file in self.files[files] if self.is_remote else ():
            (data_folder("downloads") / file.name).unlink(missing_ok=True)


def find_source(name, input=None, sample="10BT"):
    """The Source of a corpus.

    Args:
        name: shakespeare, text, or a key of DATASETS.
        input: for text, a file or folder. For shakespeare, a local copy; None uses an earlier copy or download, or
            downloads it, or takes the embedded play if the download fails.
        sample: of fineweb-edu.

    Raises:
        ValueError: the name is unknown, no file has a known format, or the local copy is another text.
        OSError: a file cannot be read, or the hub cannot be reached.
    """
    if name == "text" and input:
        path = Path(input)
        files = _files_below(path) if path.is_dir() else [path]
        names = [str(file.relative_to(path)) if file != path else file.name for file in files]
        return _source(path.resolve().name, files, names, [file.stat().st_size for file in files])
    if name == "shakespeare":
        title, path = _find_shakespeare(input)
        return _source(title, [path], [path.name], [path.stat().st_size])
    if name in DATASETS:
        files = dataset_files(name, sample)
        title = f"{name} {sample}" if name == "fineweb-edu" else name
        digest = hashlib.sha256(repr([(file.name, file.sha256) for file in files]).encode()).hexdigest()
        return Source(title, files, digest, [file.size for file in files])
    raise ValueError(f"corpus {name!r} must be shakespeare, {', '.join(DATASETS)}, or text with --input FILE_OR_FOLDER")


def _source(title, files, names, sizes):
    contents = [file_sha256(file) for file in files] if sum(sizes) <= SMALL else []
    digest = hashlib.sha256(repr((names, sizes, contents)).encode()).hexdigest()
    return Source(title, files, digest, sizes)


def _files_below(folder):
    """All files of known formats below a folder, by name, without hidden ones."""
    files = [file for file in folder.rglob("*") if file.name.lower().endswith(FORMATS) and file.is_file()]
    files = [file for file in files if not any(part[0] == "." for part in file.relative_to(folder).parts)]
    if not files:
        raise ValueError(f"{folder} has no file to read; their names must end in one of {' '.join(FORMATS)}")
    return sorted(files)


def _find_shakespeare(input):
    """(title, path); a local copy is put where the download would be."""
    if input:
        contents = Path(input).read_bytes()
        if hashlib.sha256(contents).hexdigest() != SHAKESPEARE_SHA256:
            raise ValueError(
                f"{input} is not {SHAKESPEARE} (its sha256 differs); for other texts: text --input {input}"
            )
        with atomic_file(data_folder("downloads") / SHAKESPEARE_FILE) as file:
            file.write(contents)
    try:
        return SHAKESPEARE, download(SHAKESPEARE_URL, SHAKESPEARE_FILE, SHAKESPEARE_SHA256)
    except OSError as error:
        print(f"using {PLAY} instead of {SHAKESPEARE}: {error}", file=sys.stderr)
        return PLAY, PLAY_FILE
