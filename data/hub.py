"""Data sets on the Hugging Face hub, downloaded file by file."""

from contextlib import contextmanager, suppress
from pathlib import Path

from data.files import optional
from data.shards import file_sha256
from errors import UserError, require

HUB = "hub:"  # OWNER/NAME or OWNER/NAME/FOLDER follows, in --input
DATASETS = {  # {} stands for --sample
    "fineweb-edu": "hub:HuggingFaceFW/fineweb-edu/sample/{}",  # 28 GB of downloads for 10B tokens
    "openwebtext": "hub:Skylion007/openwebtext/plain_text",  # 24 GB for 9B
}


def list_dataset(repository, folder):
    """(commit, {path of a parquet file: (bytes, sha256)} in the order of the paths) of a folder of a data set.

    The sha256 is None for a file that is in git itself, not in LFS.
    """
    tree, where = [], f"{folder} of {repository}" if folder else repository
    with one_sentence(f"list {where}") as hub:
        api = hub.HfApi()
        commit = api.dataset_info(repository, timeout=30).sha
        with suppress(hub.errors.EntryNotFoundError):  # no such folder
            tree += api.list_repo_tree(repository, folder or None, repo_type="dataset", revision=commit, recursive=True)
    found = (entry for entry in tree if hasattr(entry, "lfs") and entry.path.lower().endswith(".parquet"))  # no folder
    files = {entry.path: (entry.size, entry.lfs and entry.lfs.sha256) for entry in found}
    remedy = "name a folder that has some, hub:OWNER/NAME/FOLDER, or of fineweb-edu another --sample, such as 10BT"
    require(files, f"{where} has no parquet files; {remedy}")
    return commit, dict(sorted(files.items()))


def download_file(repository, commit, files, folder, name):
    """Download a file of list_dataset() to a folder, and compare its sha256."""
    with one_sentence(f"download {name} of {repository}") as hub:
        path = Path(hub.hf_hub_download(repository, name, repo_type="dataset", revision=commit, local_dir=folder))
        if files[name][1] not in (None, file_sha256(path)):
            path.unlink()
            raise UserError("its sha256 is not the hub's")


@contextmanager
def one_sentence(action):
    """The module huggingface_hub; its errors become a UserError of one sentence."""
    hub = optional("huggingface_hub", "the hub")
    try:
        yield hub
    except Exception as error:  # of huggingface_hub, httpx and others, which have no common base class
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise UserError(f"cannot {action} ({reason}); check the network and try again: finished files stay") from None
