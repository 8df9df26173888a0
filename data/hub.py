"""Data sets on the Hugging Face hub, downloaded file by file."""

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from data.files import data_folder, optional
from data.shards import file_sha256

# name: (repository, folder in it, downloads and disk space)
DATASETS = {
    "fineweb-edu": (
        "HuggingFaceFW/fineweb-edu",
        "sample/{}",
        "28 GB of downloads, 20 GB of disk for 10 billion tokens",
    ),
    "openwebtext": ("Skylion007/openwebtext", "plain_text", "24 GB of downloads, 18 GB of disk for 9 billion tokens"),
}


TIMEOUT = 30  # seconds


@dataclass(frozen=True)
class HubFile:
    """A file of a data set at one commit. sha256: as the hub gives it; None for small files kept in git."""

    repository: str
    commit: str
    name: str
    size: int
    sha256: str | None

    def download(self):
        """Path of the file in downloads/.

        Raises:
            OSError: the hub cannot be reached, or the file arrived with another sha256.
        """
        folder = data_folder("downloads")
        with _one_sentence(f"download {self.name} of {self.repository}") as hub:
            path = hub.hf_hub_download(
                self.repository, self.name, repo_type="dataset", revision=self.commit, local_dir=folder
            )
            found = file_sha256(path)
            if self.sha256 is not None and found != self.sha256:
                (folder / self.name).unlink()
                raise OSError(f"its sha256 is {found[:12]} instead of {self.sha256[:12]}")
        return folder / self.name


def dataset_files(name, sample):
    """The parquet files of a data set, in the order of their names.

    Raises:
        ValueError: the package huggingface_hub is missing, or there are no such files.
        OSError: the hub cannot be reached.
    """
    repository, folder, _ = DATASETS[name]
    folder = folder.format(sample)
    files = [file for file in _files_below(repository, folder) if file.name.endswith(".parquet")]
    if not files:
        raise ValueError(f"{folder} of {repository} has no parquet files; name another --sample, such as 10BT")
    return files


def find_file(repository, name):
    """A HubFile by its path in a data set. Raises ValueError and OSError as dataset_files does."""
    for file in _files_below(repository, name.rpartition("/")[0]):
        if file.name == name:
            return file
    raise ValueError(
        f"{repository} has no file {name}; look there for its new place, and give that or the downloaded file"
    )


def _files_below(repository, folder):
    with _one_sentence(f"list {folder} of {repository}") as hub:
        api, tree = hub.HfApi(), []
        commit = api.dataset_info(repository, timeout=TIMEOUT).sha
        with suppress(hub.errors.EntryNotFoundError):  # no such folder
            tree += api.list_repo_tree(repository, folder, repo_type="dataset", revision=commit, recursive=True)
        return [
            HubFile(repository, commit, entry.path, entry.size, entry.lfs and entry.lfs.sha256)
            for entry in sorted(tree, key=lambda entry: entry.path)
            if isinstance(entry, hub.hf_api.RepoFile)
        ]


def download_files(repository, names):
    """Folder in the hub's own cache with these files of a model; errors as of dataset_files()."""
    with _one_sentence(f"download {repository}") as hub:
        try:
            paths = [hub.hf_hub_download(repository, name, local_files_only=True) for name in names]
        except hub.errors.LocalEntryNotFoundError:
            hub.HfApi().model_info(repository, timeout=TIMEOUT)  # fails at once; a download tries for half a minute
            paths = [hub.hf_hub_download(repository, name) for name in names]
    return Path(paths[0]).parent


@contextmanager
def _one_sentence(action):
    """The module huggingface_hub; its errors become an OSError of one sentence."""
    hub = optional("huggingface_hub", "the hub")
    try:
        yield hub
    except Exception as error:  # of huggingface_hub, httpx and others, which have no common base class
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise OSError(f"cannot {action} ({reason}); check the network and try again; finished files are kept") from None
