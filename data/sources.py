"""The corpora by name: their files, and how to get them."""

import hashlib
import sys
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from data.documents import FORMATS
from data.files import atomic_file, data_folder, download
from data.hub import DATASETS, HubFile, dataset_files
from data.shards import PARTS, file_sha256, token_files

SHAKESPEARE = "tiny Shakespeare"
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_FILE = "tinyshakespeare.txt"  # its name in downloads/
PLAY = "the embedded play"
PLAY_FILE = Path(__file__).parent / "play.txt"

SMALL = 1 << 25  # bytes up to which a corpus is compared by contents when it is opened; above, by names and sizes


@dataclass(frozen=True)
class Source:
    """What a corpus is made from.

    Attributes:
        title: a description to print.
        files: local paths, or HubFiles.
        names, sizes: of the files, as the manifest lists them.
        sha256: hex digest of names and sizes, and of the contents if they are small or from the hub.
    """

    title: str
    files: list[Path | HubFile]
    names: list[str]
    sizes: list[int]
    sha256: str

    @property
    def is_remote(self):
        return isinstance(self.files[0], HubFile)

    @cached_property
    def offsets(self):
        """Bytes before each file, then bytes of all files."""
        return [0, *accumulate(self.sizes)]

    def listing(self, count):
        """[(name, size)] of the first files."""
        return [list(pair) for pair in zip(self.names[:count], self.sizes[:count], strict=True)]

    def local(self, index):
        """Path of a file on this machine; a file from the hub is downloaded."""
        file = self.files[index]
        return file.download() if self.is_remote else file

    def delete_downloads(self, files):
        """Delete the downloads of files [slice], because they have been read."""
        for file in self.files[files] if self.is_remote else ():
            (data_folder("downloads") / file.name).unlink(missing_ok=True)


def find_source(name, input=None, sample="10BT"):
    """The Source of a corpus.

    Args:
        name: shakespeare, text, tokens, or a key of DATASETS.
        input: file or folder for text, folder for tokens. For shakespeare, a local copy; None uses an earlier copy or
            download, or downloads it, or takes the embedded play if the download fails.
        sample: of fineweb-edu.

    Raises:
        ValueError: the name is unknown, no file has a known format, or the local copy is another text.
        OSError: a file cannot be read, or the hub cannot be reached.
    """
    if name == "shakespeare":
        title, path = _find_shakespeare(input)
        return _local_source(title, path.parent, [path])
    if name in DATASETS and not input:
        files = dataset_files(name, sample)
        names = [f"{file.repository}@{file.commit}/{file.name}, sha256 {file.sha256}" for file in files]
        title, digest = f"{name} {sample}" if name == "fineweb-edu" else name, hashlib.sha256(repr(names).encode())
        return Source(title, files, names, [file.size for file in files], digest.hexdigest())
    if name == "tokens" and not (input and Path(input).is_dir()):
        raise ValueError("data='tokens' needs --input FOLDER, a folder with token files")
    if name not in ("text", "tokens") or not input:
        raise ValueError(
            f"corpus {name!r} must be shakespeare; {' or '.join(DATASETS)}, without --input; or text or tokens, with "
            "--input FILE_OR_FOLDER"
        )
    path = Path(input)
    if name == "tokens":
        files = [file for part in PARTS for file in token_files(path, part)]
    else:
        files = _files_below(path) if path.is_dir() else [path]
    return _local_source(path.resolve().name, path if path.is_dir() else path.parent, files)


def _local_source(title, folder, files):
    try:
        names, sizes = [str(file.relative_to(folder)) for file in files], [file.stat().st_size for file in files]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error.filename} does not exist; check --input") from None
    contents = [file_sha256(file) for file in files] if sum(sizes) <= SMALL else []
    return Source(title, files, names, sizes, hashlib.sha256(repr((names, sizes, contents)).encode()).hexdigest())


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
