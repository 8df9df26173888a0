"""A server on loopback with the endpoints of the Hugging Face hub that a download needs."""

import hashlib
import json
from contextlib import contextmanager
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import huggingface_hub
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http
from loopback import LoopbackHandler, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Handler(LoopbackHandler):
    """Answers for a server whose `repositories` are {name: {file name: contents}}.

    The server's `mode` says what goes wrong, or names a file that fails.
    """

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        path, hub = unquote(urlsplit(self.path).path), self.server
        hub.requests.append(path)
        if hub.mode == "error" or path.endswith(hub.mode):
            return self.send(500, b"the hub is ill" if body else b"")
        for repository, files in hub.repositories.items():
            if path in (f"/api/datasets/{repository}", f"/api/models/{repository}"):
                return self.send(200, json.dumps({"id": repository, "sha": COMMIT}).encode())
            tree = f"/api/datasets/{repository}/tree/{COMMIT}"
            if path.startswith(tree):
                return self.tree(files, (path.removeprefix(tree) + "/").lstrip("/"))
            for start in (f"/{repository}/resolve/main/", f"/datasets/{repository}/resolve/{COMMIT}/"):
                if (name := path.removeprefix(start)) in files and path.startswith(start):
                    return self.file(name, files[name], body)
        self.send(404, b"", **{"X-Error-Code": "RepoNotFound"})

    def tree(self, files, folder):
        entries = [{"type": "directory", "path": f"{folder}old.parquet", "oid": "0" * 40}]
        for name, contents in files.items():
            if name.startswith(folder):
                entry = {"type": "file", "path": name, "size": len(contents), "oid": "0" * 40}
                if name.endswith(".parquet"):  # other files are in git itself
                    entry["lfs"] = {"oid": hashlib.sha256(contents).hexdigest(), "size": 1, "pointerSize": 130}
                entries.append(entry)
        if len(entries) == 1:
            return self.send(404, b"", **{"X-Error-Code": "EntryNotFound"})
        self.send(200, json.dumps(entries).encode())

    def file(self, name, contents, body):
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(contents).hexdigest()}"'}
        headers["Content-Length"] = str(len(contents))
        if not body:
            return self.send(200, b"", **headers)
        self.server.downloads.append(name)
        self.server.present.append(sorted(path.name for path in self.server.folder.rglob("*.parquet")))
        if self.server.mode == "changed":
            contents = contents[:50] + bytes([contents[50] ^ 255]) + contents[51:]
        self.send(200, contents, **headers)


def files_of(folder):
    """Those of a model, for running()."""
    return {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}


@contextmanager
def running(monkeypatch, folder, repositories):
    """The server with repositories {name: {file name: contents}}; huggingface_hub uses it and waits for nothing.

    folder: where files of data sets are expected; `present` lists those that were there when one was sent.
    """
    with serving(Handler) as server:
        server.repositories, server.mode, server.folder = repositories, "good", folder
        server.requests, server.downloads, server.present = [], [], []  # paths; names of files
        huggingface_hub.close_session()  # whose connections may use a proxy
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        for module in (_http, file_download):
            monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))
        yield server
        huggingface_hub.close_session()
