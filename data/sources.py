"""The corpora by name: their files, and how to get them."""

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from data.documents import RECORDS, SUFFIXES, suffix_of
from data.external import token_files
from data.files import atomic_file, data_folder
from data.hub import DATASETS, HUB, download_file, list_dataset
from data.shards import SPLITS, file_sha256
from errors import perhaps, require

OWN = ("text", "chat", "tokens")  # corpora that --input names
BOOKS = Path("books")  # input of two configs
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
PLAY_FILE = Path(__file__).parent / "play.txt"

CARDS = "readme|licen[cs]e|copying|notice|citation|changelog|contributing|requirements|data(set)?[-_ ]?(card|sheet)"
CARD = re.compile(rf"({CARDS})([^a-z].*)?\.(md|txt)(\.\w+)?", re.IGNORECASE)  # files about a data set
PLAY = "the embedded play"  # title of PLAY_FILE
SMALL = 1 << 25  # bytes up to which a corpus is compared by contents when it is opened; above, by names and sizes


@dataclass(frozen=True)
class Source:
    """The files that a corpus is made from."""

    title: str
    folder: Path
    names: list[str]  # of the files in the folder
    offsets: list[int]  # bytes before each file, then bytes of all files
    sha256: str  # of names and sizes, and of the contents if they are small or on the hub
    others: int = 0  # files in the folder that are left out
    fetch: Callable | None = None  # downloads the file with a name to the folder
    chat: bool = False  # whether the files hold conversations

    def path(self, index):
        """Path of a file, which is downloaded first if it is on the hub."""
        if self.fetch:
            self.fetch(self.names[index])
        return self.folder / self.names[index]

    def delete_downloads(self, count):
        """Delete the downloads of the first files, because they have been read."""
        for name in self.names[:count] if self.fetch else ():
            (self.folder / name).unlink(missing_ok=True)


def find_source(name, input=None, sample="10BT"):
    """The Source of a corpus: shakespeare, a key of DATASETS, or one of OWN.

    input: of OWN: a file, folder or hub:OWNER/NAME[/FOLDER]; a folder for tokens. sample: of fineweb-edu.
    """
    if name == "shakespeare" and not input:
        return _find_shakespeare()
    if name in DATASETS and not input:
        return _on_the_hub(f"{name} {sample}" if name == "fineweb-edu" else name, DATASETS[name].format(sample))
    require(name not in OWN or input, f"{name} needs --input FILE_OR_FOLDER")
    known = name == "shakespeare" or name in DATASETS
    require(not known, f"{name} takes no --input; take text in its place (train.py: --data text)")
    names = f"shakespeare, {', '.join(DATASETS)} and, with --input, {', '.join(OWN)}"
    require(name in OWN, f"there is no corpus {name!r}; there are {names}")
    path, chat = Path(input), name == "chat"
    if name != "tokens" and str(input).startswith(HUB):
        return _on_the_hub(str(input).removeprefix(HUB), str(input), chat)
    remedy = "docs/data.md says how to make it, or give" if BOOKS in path.parents else "give"
    similar = perhaps(path.name, [file.name for file in path.parent.glob("*")])
    require(path.exists(), f"{path} does not exist{similar}; {remedy} --input FILE_OR_FOLDER")
    if name == "tokens":
        require(path.is_dir(), f"--data tokens needs --input FOLDER, and {path} is no folder")
        return _of_files(path, [file for split in SPLITS for file in token_files(path, split)])
    if path.is_dir():
        return _in_folder(path, chat)
    require(path.is_file(), f"{path} is no file, but a pipe or device, which cannot be read twice; write it to a file")
    return _of_files(path.parent, [path], path.resolve().name, chat=chat)


def _in_folder(folder, chat):
    """The Source of the files in a folder and its visible sub-folders. Links are followed; a folder is read once."""
    files, seen = [], set()

    def fail(error):
        raise error

    for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        place = os.path.realpath(root)
        if place in seen:
            folders.clear()
            continue
        seen.add(place)
        files += [Path(root, name) for name in names]
        folders[:] = sorted(name for name in folders if name[0] != ".")
    suffixes = [suffix for suffix in SUFFIXES if suffix in RECORDS or not chat]
    known, data_sets = [], set()
    for file in sorted(files):
        if file.name[0] != ".":
            require(file.exists(), f"{file} is a link to a file that is not there; mend or remove it")
            if suffix_of(file) in suffixes and file.is_file():
                known.append(file)
                data_sets.update(file.parents if suffix_of(file) in RECORDS else ())
    known = [file for file in known if not (CARD.fullmatch(file.name) and file.parent in data_sets)]
    require(known, f"{folder} has no file to read; their names must end in one of {' '.join(suffixes)}")
    return _of_files(folder, known, others=len(files) - len(known), chat=chat)


def _on_the_hub(title, place, chat=False):
    found = re.fullmatch(r"hub:([^/]+/[^/]+)/?(.*?)/?", place)
    require(found, f"input={place!r} must be hub:OWNER/NAME or hub:OWNER/NAME/FOLDER, as the hub writes them")
    repository, folder = found.groups()
    commit, files = list_dataset(repository, folder)
    about = [f"{repository}@{commit}/{path}, sha256 {sha256}" for path, (_, sha256) in files.items()]
    digest = hashlib.sha256(repr(about).encode()).hexdigest()
    downloads = data_folder(f"downloads/{repository}")
    fetch = partial(download_file, repository, commit, files, downloads)
    offsets = [0, *accumulate(size for size, _ in files.values())]
    return Source(title, downloads, list(files), offsets, digest, fetch=fetch, chat=chat)


def _of_files(folder, files, title=None, **about):
    """The Source of local files."""
    names, sizes = [str(file.relative_to(folder)) for file in files], [file.stat().st_size for file in files]
    contents = [file_sha256(file) for file in files] if sum(sizes) <= SMALL else []
    digest = hashlib.sha256(repr((names, sizes, contents)).encode()).hexdigest()
    return Source(title or folder.resolve().name, folder, names, [0, *accumulate(sizes)], digest, **about)


def _find_shakespeare():
    path = data_folder("downloads") / "tinyshakespeare.txt"
    if not _is_shakespeare(path):
        import requests  # here, since that takes a third of a second, and most runs download nothing

        with suppress(requests.RequestException):
            answer = requests.get(SHAKESPEARE_URL, timeout=(3, 10))  # seconds to connect, and between bytes
            answer.raise_for_status()
            if hashlib.sha256(answer.content).hexdigest() == SHAKESPEARE_SHA256:  # no page of a network's own
                with atomic_file(path) as file:
                    file.write(answer.content)
    if _is_shakespeare(path):
        return _of_files(path.parent, [path], "tiny Shakespeare")
    return _of_files(PLAY_FILE.parent, [PLAY_FILE], PLAY)


def _is_shakespeare(path):
    return path.is_file() and file_sha256(path) == SHAKESPEARE_SHA256
