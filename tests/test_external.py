"""Token files of nanoGPT, llm.c and modded-nanogpt, used as they are."""

import base64
import hashlib
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data import external, sources, tokenizer
from data.build import Options
from data.corpus import open_corpus, prepare
from data.loader import Batches, validation_batches
from data.shards import Tokens, header

END = 256  # id of end-of-text with bytes+eot
TEXTS = [f"The river bends at mile {mile}, naïve 東京 🦉.\n" for mile in range(50)]
VAL = [*TEXTS[0].encode(), END, *TEXTS[1].encode(), END]
TRAIN = [index for text in TEXTS[2:] for index in [*text.encode(), END]]


pytestmark = pytest.mark.usefixtures("data_root")


def write(path, ids, dtype="<u2", plain=False):
    """Write a token file with the 1,024-byte header, or without it as nanoGPT does."""
    ids = np.array(ids, dtype)
    path.write_bytes((b"" if plain else header(dtype, len(ids))) + ids.tobytes())


def nanogpt(folder):
    write(folder / "train.bin", TRAIN, plain=True)
    write(folder / "val.bin", VAL, plain=True)


def modded(folder):
    """Three training shards of different lengths; they are read in the order of their names."""
    for number, (start, end) in {3: (1500, None), 1: (0, 700), 2: (700, 1500)}.items():
        write(folder / f"fineweb_train_{number:06}.bin", TRAIN[start:end])
    write(folder / "fineweb_val_000000.bin", VAL)


def large_ids(folder):
    """llm.c's files for Llama 3 have ids of 32 bits."""
    write(folder / "x_train_0.bin", TRAIN, "<u4")
    write(folder / "x_val_0.bin", VAL, "<u4")


PROGRAMS = {"nanoGPT": (nanogpt, 1), "modded-nanogpt": (modded, 3), "llm.c, 32 bits": (large_ids, 1)}


@pytest.fixture(params=PROGRAMS.values(), ids=PROGRAMS)
def tokens(request, tmp_path):
    """(folder with the token files of a program, number of training files)."""
    make, count = request.param
    (tmp_path / "tokens").mkdir()
    make(tmp_path / "tokens")
    return tmp_path / "tokens", count


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokens").mkdir()
    nanogpt(tmp_path / "tokens")
    return tmp_path / "tokens"


@pytest.fixture
def gpt2(tmp_path, monkeypatch):
    """(spec, tokenizer) of a rank file in GPT-2's format. The real one is too large to keep here."""
    words = [b" river", b" bends", b"The", b" mile", b"\xe6\x9d\xb1\xe4"]
    parts = [word[:end] for word in words for end in range(2, len(word) + 1)]
    tokens = [*(bytes([value]) for value in range(256)), *dict.fromkeys(parts)]
    path = tmp_path / "ranks"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))
    monkeypatch.setattr(tokenizer, "GPT2_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return f"gpt2:{path}", tokenizer.make_tokenizer(f"gpt2:{path}")


def ids_of(part):
    return part.windows(np.array([0]), len(part))[0].tolist()


def error_of(folder, spec="bytes+eot"):
    """The message of the error that preparing tokens gives: one line, and nothing counts as prepared."""
    with pytest.raises(ValueError) as raised:
        prepare("tokens", spec, folder)
    assert "\n" not in str(raised.value)
    root = Path(os.environ["GPT_DATA"])
    assert not list(root.rglob("manifest.json"))
    return str(raised.value)


def test_files_are_used_as_they_are(tokens, data_root, capsys):
    folder, count = tokens
    before = {path: path.read_bytes() for path in folder.iterdir()}
    found = open_corpus("tokens", "bytes+eot", folder)
    assert "preparing tokens" in capsys.readouterr().err
    assert ids_of(found.train) == TRAIN and ids_of(found.val) == VAL
    assert len(found.train.shards) == count and len(found.val.shards) == 1
    assert (found.train.documents, found.val.documents) == (48, 2)
    assert found.source == "tokens" and found.tokenizer.name == "bytes+eot" and found.bad_lines == 0
    assert before == {path: path.read_bytes() for path in folder.iterdir()}
    assert not list(data_root.rglob("*.bin"))  # no copies
    again = open_corpus("tokens", "bytes+eot", folder, verify=True)
    assert again.sha256 == found.sha256 and capsys.readouterr().err == ""


def test_bits_per_byte_come_from_the_decoded_tokens(tokens):
    found = prepare("tokens", "bytes+eot", tokens[0])
    decoded = "".join(TEXTS[:2])
    assert found.val.text_bytes == len(decoded.encode()) == len(VAL) - 2
    assert found.tokenizer.decode([index for index in ids_of(found.val) if index != END]) == decoded
    assert found.bytes_per_token == found.val.text_bytes / len(VAL)


def test_tokens_of_several_bytes(folder, gpt2):
    """Not only bytes: the small stand-in of GPT-2's ranks has words, and its last id is end-of-text."""
    spec, made = gpt2
    ids = [index for text in TEXTS for index in [*made.encode_ordinary(text), made.eot_token]]
    assert len(ids) < 0.7 * len("".join(TEXTS).encode())
    write(folder / "val.bin", ids, plain=True)
    write(folder / "train.bin", ids[::-1], plain=True)
    found = prepare("tokens", spec, folder)
    assert found.val.text_bytes == found.train.text_bytes == len("".join(TEXTS).encode())
    assert found.val.documents == len(TEXTS) and ids_of(found.val) == ids


def test_our_own_shards(tmp_path):
    """The folder of a prepared corpus is a folder of token files, too."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, text in enumerate(TEXTS):
        (texts / f"{number}.txt").write_text(text)
    made = prepare("text", "bytes+eot", texts, Options(shard_tokens="500"))
    assert len(made.train.shards) > 3
    found = prepare("tokens", "bytes+eot", made.folder)
    assert found.folder != made.folder and found.sha256 == made.sha256
    for part, other in ((found.train, made.train), (found.val, made.val)):
        assert ids_of(part) == ids_of(other)
        assert (part.documents, part.text_bytes) == (other.documents, other.text_bytes)


def test_batches_are_those_of_one_array(tmp_path):
    modded(tmp_path)
    found = prepare("tokens", "bytes+eot", tmp_path)
    one = Tokens((np.array(TRAIN, np.uint16),), "", 1, 1)
    assert len(found.train.shards) == 3 and len(found.train) == len(one)
    ours, theirs = (Batches(part, block_size=64, batch_size=8, seed=1) for part in (found.train, one))
    assert ours.windows * 2 < 8 * 10  # two epochs
    for step in range(10):
        for a, b in zip(ours.batch(step), theirs.batch(step), strict=True):
            assert torch.equal(a, b)
    for load, other in zip(*(validation_batches(part, 64, 8) for part in (found.train, one)), strict=True):
        assert torch.equal(load()[0], other()[0]) and torch.equal(load()[1], other()[1])


def test_windows_span_shards(tmp_path):
    modded(tmp_path)
    train = prepare("tokens", "bytes+eot", tmp_path).train
    starts = np.array([0, 650, 699, 700, 1499, len(TRAIN) - 100])
    assert train.windows(starts, 100).tolist() == [TRAIN[start : start + 100] for start in starts]
    assert train.windows(np.array([600]), 1000)[0].tolist() == TRAIN[600:1600]  # over the whole second shard


@pytest.mark.parametrize("dtype, index", [("<u2", 257), ("<u2", 65535), ("<u4", 65536), ("<u4", 2**32 - 1)])
@pytest.mark.parametrize("part", ["train", "val"])
def test_id_outside_the_vocabulary(tmp_path, part, dtype, index):
    for name, ids in (("train", TRAIN), ("val", VAL)):
        write(tmp_path / f"x_{name}_0.bin", [*ids, index] if name == part else ids, dtype)
    message = error_of(tmp_path)
    assert f"x_{part}_0.bin has the id {index}, but bytes+eot has 257 tokens" in message and "--tokenizer" in message


def test_all_ids_are_checked(folder, monkeypatch):
    """Files are checked in parts; a wrong id in the last one is found, and all are counted."""
    monkeypatch.setattr(external, "CHUNK", 7)
    assert prepare("tokens", "bytes+eot", folder).val.text_bytes == len(VAL) - 2
    write(folder / "val.bin", [*VAL, 999], plain=True)
    with pytest.raises(ValueError, match="the id 999"):
        prepare("tokens", "bytes+eot", folder)


@pytest.mark.parametrize("spec", ["char", "char+eot", "bpe:512"])
def test_tokenizers_that_are_made_from_text(folder, spec):
    assert "name gpt2 or bytes" in error_of(folder, spec)


def test_other_tokenizer(folder):
    """The ids of bytes+eot are not all in the vocabulary of bytes; each tokenizer has a manifest of its own."""
    assert "has the id 256, but bytes has 256 tokens" in error_of(folder, "bytes")
    write(folder / "train.bin", [index for index in TRAIN if index != END], plain=True)
    write(folder / "val.bin", [index for index in VAL if index != END], plain=True)
    found = prepare("tokens", "bytes", folder)
    assert found.val.documents == 1 and found.val.text_bytes == len(found.val)  # without end-of-text
    assert found.folder != prepare("tokens", "bytes+eot", folder).folder


DAMAGES = {
    "no val": (lambda folder: (folder / "fineweb_val_000000.bin").unlink(), r"no val.bin and no \*_val_\*.bin"),
    "no files": (lambda folder: [path.unlink() for path in folder.iterdir()], "no train.bin"),
    "truncated": (lambda folder: os.truncate(folder / "fineweb_train_000002.bin", 1100), "000002.bin has 1,100 bytes"),
    "truncated header": (lambda folder: os.truncate(folder / "fineweb_train_000002.bin", 600), "000002.bin has 600"),
    "half a token": (lambda folder: (folder / "val.bin").write_bytes(b"123"), "val.bin has 3 bytes"),
    "empty": (lambda folder: (folder / "val.bin").write_bytes(b""), "val.bin"),
    "no tokens": (lambda folder: write(folder / "fineweb_val_000000.bin", []), "fineweb_val_000000.bin"),
    "two types": (lambda folder: write(folder / "fineweb_val_000000.bin", VAL, "<u4"), "another type"),
}


@pytest.mark.parametrize("damage, message", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files(tmp_path, damage, message):
    (tmp_path / "tokens").mkdir()
    modded(tmp_path / "tokens")
    damage(tmp_path / "tokens")
    found = error_of(tmp_path / "tokens")
    assert re.search(message, found), found


def test_no_folder(tmp_path, folder):
    for input in (None, "", tmp_path / "nowhere", folder / "val.bin"):
        with pytest.raises(ValueError, match="--input FOLDER"):
            prepare("tokens", "bytes+eot", input)
        with pytest.raises(ValueError, match="--input FOLDER"):
            open_corpus("tokens", "bytes+eot", input)


def test_working_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert ids_of(open_corpus("tokens", "bytes+eot", ".").val) == VAL


class Malicious:
    """Unpickling an instance creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_meta_pkl_is_never_read(folder, tmp_path):
    """nanoGPT's meta.pkl may run any code when it is read."""
    (folder / "meta.pkl").write_bytes(pickle.dumps(Malicious(tmp_path / "ran")))
    assert ids_of(open_corpus("tokens", "bytes+eot", folder).val) == VAL
    open_corpus("tokens", "bytes+eot", folder, verify=True)
    assert not (tmp_path / "ran").exists()
    pickle.loads((folder / "meta.pkl").read_bytes()).close()
    assert (tmp_path / "ran").exists()  # what this test would have noticed


CHANGES = {
    "longer file": lambda folder: write(folder / "fineweb_val_000000.bin", VAL * 2),
    "new file": lambda folder: write(folder / "fineweb_train_000004.bin", VAL),
    "removed file": lambda folder: (folder / "fineweb_train_000003.bin").unlink(),
    "renamed file": lambda folder: (folder / "fineweb_train_000001.bin").rename(folder / "fineweb_train_9.bin"),
    "files of nanoGPT": nanogpt,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_files_are_noticed(tmp_path, change, capsys):
    (tmp_path / "tokens").mkdir()
    modded(tmp_path / "tokens")
    before = open_corpus("tokens", "bytes+eot", tmp_path / "tokens")
    capsys.readouterr()
    change(tmp_path / "tokens")
    after = open_corpus("tokens", "bytes+eot", tmp_path / "tokens")
    assert after.sha256 != before.sha256 and "preparing tokens" in capsys.readouterr().err
    assert after.sha256 == prepare("tokens", "bytes+eot", tmp_path / "tokens").sha256


def test_changed_time_or_other_files_are_not(folder, capsys):
    before = open_corpus("tokens", "bytes+eot", folder)
    capsys.readouterr()
    os.utime(folder / "val.bin", (0, 0))
    (folder / "readme.txt").write_text("new")
    assert open_corpus("tokens", "bytes+eot", folder).sha256 == before.sha256 and capsys.readouterr().err == ""


def test_opening_reads_no_tokens(folder, monkeypatch):
    before = open_corpus("tokens", "bytes+eot", folder)
    monkeypatch.setattr(external, "map_shard", None)
    monkeypatch.setattr(external, "file_sha256", None)
    assert open_corpus("tokens", "bytes+eot", folder).sha256 == before.sha256


def test_changed_contents_are_found_by_verify(folder, monkeypatch, capsys):
    monkeypatch.setattr(sources, "SMALL", 0)
    before = open_corpus("tokens", "bytes+eot", folder)
    write(folder / "val.bin", VAL[::-1], plain=True)
    capsys.readouterr()
    assert open_corpus("tokens", "bytes+eot", folder).sha256 == before.sha256  # only sizes are compared
    after = open_corpus("tokens", "bytes+eot", folder, verify=True)
    assert after.sha256 != before.sha256 and "sha256" in capsys.readouterr().err


def test_command(folder, data_root):
    command = [sys.executable, "-m", "data.prepare", "tokens", "--tokenizer", "bytes+eot"]
    options = dict(cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60)
    done = subprocess.run([*command, "--input", folder], **options)
    assert done.returncode == 0 and done.stderr == "" and str(data_root) in done.stdout
    assert f"{len(VAL)} tokens, 2 documents" in done.stdout
    done = subprocess.run(command, **options)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
