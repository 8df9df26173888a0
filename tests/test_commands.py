"""Every command in README.md and docs/guide.md runs, in the order of the page, with few steps.

Flags that a sentence names with their values run too, and the guide's Python.
"""

import io
import json
import re
import shlex
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import requests
from helpers import ROOT, make_gpt2_small, run_script

pytest.importorskip("transformers")
import pyarrow  # this and the next ones need the extra hub
from hub_server import files_of, running
from pyarrow import parquet
from test_hub import FINEWEB, file_of
from test_weights import gpt2

from data import sources

pytestmark = pytest.mark.slow
CONVERSATIONS = [
    [dict(role="user", content=f"What is {n}?"), dict(role="assistant", content="A number.")] for n in range(100)
]
OTHERS = ("git", "cd", "python3", "source", "pip", "pytest", "hf", "llama-completion")  # other tests, or none
SHORT = "--device cpu --steps 4 --eval_every 2 --eval_batches 1 --batch_size 4 --block_size 128"


def commands(page):
    """The commands of a page, in code blocks and within sentences."""
    text = (ROOT / page).read_text()
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    sentences = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    inline = re.findall(r"`((?:python|torchrun|pip|--[a-z]\w*) [^`]+)`", sentences)
    for line in [*lines, *inline]:
        for command in line.partition("  #")[0].split(" && "):
            words = shlex.split(command)
            if words[0] not in OTHERS and "--tasks" not in words:
                yield words


def short(words, run):
    """The same command with few steps or tokens, from its script on. run: the NAME."""
    replaced = {"FILE": "corpus.txt", "FILE_OR_FOLDER": "corpus.txt", "N": "8", "online": "offline"}
    words = [replaced.get(word, word.replace("NAME", run)) for word in words]
    if words[0].startswith("--"):
        scripts = {"--stride": "evaluate.py", "--y": f"plot.py {run}", "--prompt": f"sample.py {run}"}
        scripts["--init_from"] = "train.py configs/finetune_shakespeare.py"
        words = [*scripts.get(words[0], "train.py configs/shakespeare.py").split(), *words]
    else:
        words = words[1 if words[0] == "python" else words.index("train.py") :]
        if words[0] == "-m":
            words = [words[1].replace(".", "/") + ".py", *words[2:]]
        if "--epochs" in words:  # SHORT has --steps
            del words[(at := words.index("--epochs")) : at + 2]
    added = {"sample.py": "--device cpu --max_tokens 5", "evaluate.py": "--device cpu", "train.py": SHORT}
    if words[0] == "train.py" and "--resume" in words:
        added["train.py"] = "--steps 8 --allow_changes"
    elif "configs/modern.py" in words:
        added["train.py"] = SHORT.replace("--steps 4", "--tokens 2048")
    return words + added.get(words[0], "").split()


@pytest.fixture
def hub(folder, monkeypatch, data_root):
    """A hub with documents of FineWeb-Edu, conversations, a tiny GPT-2, and a tokenizer gpt2 of 257 tokens."""
    make_gpt2_small(monkeypatch)
    monkeypatch.setattr(requests, "get", Mock(side_effect=requests.ConnectionError("offline")))
    gpt2(folder / "tiny", vocab_size=257, n_positions=128)
    files = files_of(folder / "tiny")
    documents = {"sample/10BT/000_00000.parquet": file_of([f"Page {n}: the river bends.\n" * 9 for n in range(1500)])}
    parquet.write_table(pyarrow.table({"messages": CONVERSATIONS}), file := io.BytesIO())
    conversations = {"data/everyday-conversations/train.parquet": file.getvalue()}
    repositories = {"openai-community/gpt2": files, FINEWEB: documents, "HuggingFaceTB/smoltalk": conversations}
    with running(monkeypatch, data_root / "downloads", repositories):
        yield


@pytest.mark.parametrize("page, run", [("README.md", "shakespeare"), ("docs/guide.md", "mine")])
def test_commands(page, run, folder, hub, monkeypatch, capsys):
    for name in ("configs", "data", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "start.txt").write_text("the sea")
    lines = [json.dumps(dict(messages=messages)) + "\n" for messages in CONVERSATIONS]
    (folder / "FILE.jsonl").write_text("".join(lines))
    (folder / "corpus.txt").write_bytes(sources.PLAY_FILE.read_bytes()[:80_000])
    (folder / "books/train").mkdir(parents=True)
    for name, part in (("a", slice(60_000)), ("b", slice(60_000, None))):
        (folder / f"books/train/{name}.md").write_bytes(sources.PLAY_FILE.read_bytes()[part])
    for words in commands(page):
        script, *flags = short(words, run)
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        code, _, err = run_script(monkeypatch, capsys, script, *flags)
        assert not code, f"{shlex.join(words)}: {code}, {err}"
    assert Path("runs/mine/loss.png").exists()  # the text of one's own
    if page == "docs/guide.md":
        assert Path("plain.gguf").read_bytes()[:4] == b"GGUF"
        [block] = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        names = {}
        exec(block, names)  # reads the export
        assert names["model"].config.vocab_size == len(names["tokenizer"])
