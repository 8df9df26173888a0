"""Prepared corpora: text -> prepared/<name>-<tokenizer>/ with three files.

train.bin, val.bin    the ids, little-endian: uint16 for vocabularies of up to 65,536 tokens, otherwise uint32
corpus.json           version, title and sha256 of the text, tokenizer, and size and sha256 of both parts
"""

import hashlib
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

from data.files import atomic_file, data_folder
from data.sources import PLAY, SHAKESPEARE, SHAKESPEARE_URL, read_source
from data.tokenizer import CharTokenizer, encode_text, from_state, make_tokenizer, to_state, tokenizer_name

VERSION = 2  # of the prepared files


@dataclass(frozen=True)
class Tokens:
    """The tokens of the training or validation part.

    Attributes:
        ids: [count] uint16 or uint32, memory-mapped.
        sha256: hex digest of the ids.
        text_bytes: length of this part of the text in UTF-8.
    """

    ids: np.memmap
    sha256: str
    text_bytes: int

    @property
    def bytes_per_token(self):
        return self.text_bytes / len(self.ids)

    def __len__(self):
        return len(self.ids)


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, open for reading.

    Attributes:
        train, val: the two parts.
        tokenizer: the tokenizer that made them.
        folder: where the prepared files are.
        source, source_sha256: title of the text, and hex digest of the whole text in UTF-8.
    """

    train: Tokens
    val: Tokens
    tokenizer: tiktoken.Encoding | CharTokenizer
    folder: Path
    source: str
    source_sha256: str

    @property
    def bytes_per_token(self):
        """Bytes of validation text per token: bits per byte = nats per token / ln 2 / bytes_per_token."""
        return self.val.bytes_per_token

    @property
    def sha256(self):
        """Hex digest of the tokens of both parts; it is made from the stored digests, not from the ids."""
        return hashlib.sha256(bytes.fromhex(self.train.sha256 + self.val.sha256)).hexdigest()


def open_corpus(name, tokenizer_spec, input=None, *, sha256=None, quiet=False):
    """Open a corpus; prepare it first if it was never prepared, its text has changed or its files are unusable.

    Args:
        name, tokenizer_spec, input: as for `prepare`, which also lists the errors.
        sha256: a prepared corpus with this `Corpus.sha256` is opened even if its text has changed or is gone.
        quiet: print nothing unless a download fails; for all processes of a run except the first.

    Returns:
        Corpus.
    """
    folder = _corpus_folder(name, tokenizer_spec, input)
    corpus = None
    with suppress(OSError, ValueError):  # never prepared, damaged, or by another version of this module
        corpus = _load_corpus(folder, json.loads((folder / "corpus.json").read_text()))
    if corpus and input and corpus.sha256 != sha256 and corpus.source_sha256 != read_source(name, input)[2]:
        corpus = None
    if corpus is None:
        if not quiet:
            print(f"preparing {name} with tokenizer {tokenizer_spec} in {folder}", file=sys.stderr)
        corpus = prepare(name, tokenizer_spec, input)
    if name == "shakespeare" and corpus.source == PLAY and not quiet:
        print(
            f"NOTICE: this is NOT {SHAKESPEARE} but {PLAY}, data/play.txt. For the real text, save {SHAKESPEARE_URL} "
            f"as FILE and run: python -m data.prepare shakespeare --input FILE --tokenizer {tokenizer_spec}",
            file=sys.stderr,
        )
    return corpus


def prepare(name, tokenizer_spec, input=None):
    """Tokenize a corpus, replacing what an earlier call prepared, and open it.

    The text is split before it is tokenized: the first 90% of its characters are for training. `bpe` is trained on
    the training part only. `char` uses the characters of the whole text, as nanoGPT does.

    Args:
        name, input: see data.sources.read_source.
        tokenizer_spec: see data.tokenizer.make_tokenizer.

    Returns:
        Corpus.

    Raises:
        ValueError: an argument is wrong, or the text is empty or not UTF-8.
        OSError: a file cannot be read or written.
    """
    folder = _corpus_folder(name, tokenizer_spec, input)
    title, text, text_sha256 = read_source(name, input)
    split = int(0.9 * len(text))  # as in nanoGPT
    parts = {"train": text[:split], "val": text[split:]}
    tokenizer = make_tokenizer(tokenizer_spec, text if tokenizer_spec == "char" else parts["train"])
    dtype = "<u2" if tokenizer.n_vocab <= 1 << 16 else "<u4"
    about = {"version": VERSION, "source": title, "source_sha256": text_sha256, "dtype": dtype}
    folder.mkdir(exist_ok=True)
    (folder / "corpus.json").unlink(missing_ok=True)  # written last, so that a killed preparation is not used
    for part, part_text in parts.items():
        ids = encode_text(tokenizer, part_text).astype(dtype)
        with atomic_file(folder / f"{part}.bin") as file:
            file.write(ids)
        sha256, text_bytes = hashlib.sha256(ids).hexdigest(), len(part_text.encode())
        about[part] = {"count": len(ids), "sha256": sha256, "text_bytes": text_bytes}
    about["tokenizer"] = to_state(tokenizer)
    with atomic_file(folder / "corpus.json") as file:
        file.write(json.dumps(about).encode())
    return _load_corpus(folder, about)


def _corpus_folder(name, tokenizer_spec, input):
    """Path of the prepared corpus, whether it exists or not."""
    parts = [name, tokenizer_name(tokenizer_spec).replace(":", "-")]
    if name == "text" and input:  # so that two files with the same name have two folders
        parts.append(hashlib.sha256(os.fsencode(Path(input).resolve())).hexdigest()[:8])
    return data_folder("prepared") / "-".join(parts)


def _load_corpus(folder, about):
    """The Corpus in `folder` that corpus.json describes; ValueError or OSError if the files are unusable."""
    if about["version"] != VERSION:
        raise ValueError(f"{folder} has version {about['version']}, not {VERSION}")
    parts = []
    for part in ("train", "val"):
        count = about[part].pop("count")
        ids = np.memmap(folder / f"{part}.bin", about["dtype"], "r", shape=count)  # ValueError if the file is shorter
        parts.append(Tokens(ids, **about[part]))
    return Corpus(*parts, from_state(about["tokenizer"]), folder, about["source"], about["source_sha256"])
