"""Prepared corpora: prepared/NAME-TOKENIZER/ with shards of tokens and manifest.json."""

import hashlib
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import filelock
import tiktoken

from data.build import PARTS, Options, build, make_request, read_record, same_request
from data.external import index_tokens, listing_sha256
from data.files import data_folder
from data.hub import DATASETS
from data.shards import HEADER_BYTES, Tokens, file_sha256, map_shard
from data.sources import PLAY, SHAKESPEARE, SHAKESPEARE_URL, find_source
from data.tokenizer import CharTokenizer, from_state, tokenizer_name


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, open for reading.

    Attributes:
        train, val: the two parts.
        tokenizer: the tokenizer that made them.
        folder: where the prepared files are.
        source: title of the text.
        bad_lines: number of lines that were left out.
    """

    train: Tokens
    val: Tokens
    tokenizer: tiktoken.Encoding | CharTokenizer
    folder: Path
    source: str
    bad_lines: int = 0

    @property
    def bytes_per_token(self):
        """Bytes of validation text per token: bits per byte = nats per token / ln 2 / bytes_per_token."""
        return self.val.bytes_per_token

    @property
    def sha256(self):
        """Hex digest of the tokens of both parts; it is made from the stored digests, not from the ids."""
        return _joined_sha256(self.train.sha256, self.val.sha256)


def open_corpus(name, tokenizer_spec, input=None, *, sha256=None, quiet=False, verify=False):
    """Open a corpus, without reading its text or tokens.

    A text that was never prepared, has changed or lacks prepared files is prepared first, with the options that it was
    prepared with before.

    Args:
        name, tokenizer_spec, input: as for `prepare`, which also lists the errors.
        sha256: a prepared corpus with this `Corpus.sha256` is opened even if its text has changed.
        quiet: print nothing unless a download fails; for all processes of a run except the first.
        verify: read all tokens and compare their sha256 with the manifest's.

    Raises:
        ValueError: also if a data set from the hub is not prepared, or not complete.
    """
    folder, options = corpus_folder(name, tokenizer_spec, input), Options()
    reason, corpus = "it is not prepared yet", None
    if record := read_record(folder / "manifest.json"):
        options = Options(**record["request"]["options"])
        try:
            corpus = load_corpus(folder, record, verify)
        except ValueError as error:
            reason = str(error)
    # A text may be deleted once it is prepared.
    if corpus and input and corpus.sha256 != sha256 and Path(input).exists():
        found = listing_sha256(input) if name == "tokens" else find_source(name, input).sha256
        if found != record["request"]["source_sha256"]:
            reason, corpus = "its files have changed", None
    if corpus is None:
        if name in DATASETS:
            command = f"python -m data.prepare {name} --tokenizer {tokenizer_spec}"
            raise ValueError(
                f"{name} cannot be used: {reason}; type {command} (about {DATASETS[name][2]}; --tokens 1B takes a part)"
            )
        if not quiet:
            print(f"preparing {name} with tokenizer {tokenizer_spec} in {folder}: {reason}", file=sys.stderr)
        corpus = prepare(name, tokenizer_spec, input, options)
    if name == "shakespeare" and corpus.source == PLAY and not quiet:
        print(
            f"NOTICE: this is NOT {SHAKESPEARE} but {PLAY}, data/play.txt. For the real text, save {SHAKESPEARE_URL} "
            f"as FILE and run: python -m data.prepare shakespeare --input FILE --tokenizer {tokenizer_spec}",
            file=sys.stderr,
        )
    return corpus


def prepare(name, tokenizer_spec, input=None, options=None, threads=None):
    """Prepare a corpus, replacing what was prepared from another source or with other options, and open it.

    An interrupted preparation goes on where it was; of a finished one the sha256 of all shards are checked. See
    data.build.build for the split into the two parts.

    Args:
        name: shakespeare, text, fineweb-edu, openwebtext, or tokens (see data.external).
        tokenizer_spec: see data.tokenizer.make_tokenizer.
        input: file or folder of text or tokens.
        options: Options, None takes their defaults.
        threads: that tokenize; None = one for each core.

    Returns:
        Corpus.

    Raises:
        ValueError: an argument is wrong, or a file cannot be used.
        OSError: a file cannot be read, downloaded or written.
    """
    folder = corpus_folder(name, tokenizer_spec, input)
    folder.mkdir(exist_ok=True)
    options, manifest = options or Options(), folder / "manifest.json"
    with filelock.FileLock(folder.with_name(f".{folder.name}.lock")):
        if name == "tokens":
            index_tokens(folder, input, tokenizer_spec)
            return load_corpus(folder, read_record(manifest))
        source = find_source(name, input, options.sample)
        request = make_request(source, tokenizer_spec, options)
        if (record := read_record(manifest)) and same_request(record["request"], request):
            with suppress(ValueError):  # a shard is damaged
                return load_corpus(folder, record, verify=True)
        build(folder, source, tokenizer_spec, options, threads)
        return load_corpus(folder, read_record(manifest))


def corpus_folder(name, tokenizer_spec, input):
    """Path of the prepared corpus, whether it exists or not."""
    parts = [name, tokenizer_name(tokenizer_spec).replace(":", "-")]
    if input and name != "shakespeare":  # so that two files with the same name have two folders
        parts.append(hashlib.sha256(os.fsencode(Path(input).resolve())).hexdigest()[:8])
    return data_folder("prepared") / "-".join(parts)


def load_corpus(folder, record, verify=False):
    """The Corpus that a manifest describes.

    Raises:
        ValueError: a shard is missing or has another size, or with verify another sha256.
    """
    parts = []
    for part in PARTS:
        shards, arrays = record[part]["shards"], []
        for shard in shards:
            path = folder / shard["file"]
            arrays.append(map_shard(path, record["dtype"], shard["tokens"], shard.get("offset", HEADER_BYTES)))
            if verify and file_sha256(path) != shard["sha256"]:
                raise ValueError(f"{path} is damaged: its sha256 is not the manifest's; prepare the corpus again")
        sha256 = _joined_sha256(*(shard["sha256"] for shard in shards))
        parts.append(Tokens(tuple(arrays), sha256, record[part]["documents"], record[part]["text_bytes"]))
    return Corpus(*parts, from_state(record["tokenizer"]), folder, record["request"]["source"], record.get("bad", 0))


def _joined_sha256(*digests):
    return hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest()
