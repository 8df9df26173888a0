"""Every command in README.md and docs/guide.md runs, in the order of the page, with a small network and few steps.

Flags that a sentence names with their values run too, and the guide's Python.
"""

import importlib.util
import io
import re
import runpy
import shlex
import sys

import pyarrow
import pytest
import torch
from helpers import ROOT

pytest.importorskip("transformers")
from hub_server import running  # needs the extra hub
from huggingface_hub import constants
from pyarrow import parquet
from test_hub import FINEWEB, file_of
from test_weights import gpt2

from data import tokenizer
from training import weights

pytestmark = pytest.mark.slow
TRAIN = "--device cpu --steps 4 --eval_every 2 --eval_batches 1 --warmup_steps 0 --batch_size 4 --micro_batch 4"
NETWORK = "--n_layer 1 --n_head 2 --n_kv_head None --n_embd 32 --block_size 32 --vocab_size 0 --attention sdpa"
CORPUS = "--data text --input corpus.txt"
TEXT = f"{CORPUS} --tokenizer bytes"
ELSEWHERE = ("pip", "pytest", "git")  # .ci/run types the first two


def commands(page):
    """The commands of a page, in code blocks and within sentences."""
    text = (ROOT / page).read_text()
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    inline = re.findall(r"`((?:python|torchrun|--[a-z]\w*) [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in [*lines, *inline]:
        for command in line.partition("  #")[0].split(" && "):
            yield shlex.split(command)


def parquet_of(rows):
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def small(words):
    """The same command in a small form, without "python"; None if it is run elsewhere."""
    if words[0] in ELSEWHERE:
        return None
    replaced = {"FILE": "corpus.txt", "N": "8", "online": "offline"}
    words = [word.replace("FILE_OR_FOLDER", "corpus.txt").replace("NAME", "shakespeare") for word in words]
    words = [replaced.get(word, word) for word in words]
    if words[0].startswith("--"):
        script = {"--tasks": "evaluate.py", "--stride": "evaluate.py", "--y": "plot.py runs/shakespeare"}.get(words[0])
        return shlex.split(script or f"train.py configs/shakespeare.py {TRAIN} {NETWORK} {CORPUS}") + words
    words = words[1 if words[0] == "python" else words.index("train.py") :]
    added = {"sample.py": "--device cpu --max_tokens 5", "evaluate.py": "--device cpu"}
    if words[0] == "train.py" and "--resume" in words:
        added["train.py"] = "--steps 8 --allow_changes"
    elif "configs/finetune_shakespeare.py" in words:
        added["train.py"] = f"{TRAIN} {TEXT} --tokenizer gpt2 --block_size 32"
    elif "configs/gpt2.py" in words:
        added["train.py"] = f"{TRAIN} {NETWORK}"
    else:
        added["train.py"] = f"{TRAIN} {NETWORK} {'' if '--data' in words else TEXT}"
    return words + shlex.split(added.get(words[0], ""))


@pytest.fixture
def hub(folder, monkeypatch, data_root):
    """A hub with documents of FineWeb-Edu, a tiny GPT-2 and tasks, and a tokenizer gpt2 of 257 tokens."""
    monkeypatch.setattr(tokenizer, "_gpt2_ranks", lambda path: [bytes([value]) for value in range(256)])
    monkeypatch.setattr(weights, "GPT2_VOCABULARY", 257)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    gpt2(folder / "tiny", vocab_size=257)
    files = {name: (folder / "tiny" / name).read_bytes() for name in ("config.json", "model.safetensors")}
    documents = {"sample/10BT/000_00000.parquet": file_of([f"Page {n}: the river bends.\n" * 9 for n in range(1500)])}
    question = dict(
        activity_label="Sea", ctx_a="The sea", ctx_b="keeps", endings=["all", "it", "us", "them"], label="1"
    )
    arc = dict(question="What takes?", choices=dict(text=["the sea", "it"], label=["A", "B"]), answerKey="A")
    repositories = {
        "openai-community/gpt2": files,
        FINEWEB: documents,
        "Rowan/hellaswag": {"data/validation-00000-of-00001.parquet": parquet_of([question] * 3)},
        "allenai/ai2_arc": {"ARC-Easy/test-00000-of-00001.parquet": parquet_of([arc] * 3)},
        "EleutherAI/lambada_openai": {"data/lambada_test.jsonl": b'{"text": "what the sea has taken"}\n' * 3},
    }
    with running(monkeypatch, data_root / "downloads", repositories):
        yield


@pytest.mark.parametrize("page, count", [("README.md", 20), ("docs/guide.md", 25)])
def test_commands(page, count, folder, hub, monkeypatch, capsys):
    for name in ("configs", "data"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "start.txt").write_text("the sea")
    ran = 0
    for words in commands(page):
        if not (words_ := small(words)):
            continue
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        module = words_[0] == "-m"
        script, *flags = words_[1:] if module else words_
        monkeypatch.setattr(sys, "argv", [script, *flags])
        path = importlib.util.find_spec(script).origin if module else str(ROOT / script)
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"{shlex.join(words)}: {end.code}, {capsys.readouterr().err}"
        finally:
            torch.set_float32_matmul_precision("highest")
        ran += 1
    assert ran == count
    if page == "docs/guide.md":
        [block] = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        names = {}
        exec(block, names)  # reads the export
        assert names["model"].config.vocab_size == len(names["tokenizer"])
