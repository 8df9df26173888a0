"""Prepared corpora: prepared/NAME-TOKENIZER/ with shards of tokens and manifest.json."""

import hashlib
import os
import shutil
import sys
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock
import tiktoken

from data.build import Options, build, make_request, read_record, same_request, write_record
from data.external import index_tokens
from data.files import data_folder, writing
from data.hub import DATASETS
from data.shards import HEADER_BYTES, PARTS, Tokens, file_sha256, map_shard
from data.sources import PLAY, SHAKESPEARE, SHAKESPEARE_URL, find_source
from data.tokenizer import CharTokenizer, from_state, make_tokenizer, to_state, tokenizer_name


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
    """Open a corpus, without reading its tokens.

    A text that is new, has changed or lacks files is prepared first, with the same options as before. Changes are
    detected by the contents of up to 32 MB, above by names and sizes.

    Args:
        name, tokenizer_spec, input: as for `prepare`, which also lists the errors.
        sha256: open a prepared corpus with this `Corpus.sha256` even if its text has changed.
        quiet: print only if a download fails; for all processes of a run except the first.
        verify: read all tokens and compare their sha256 with the manifest's.

    Raises:
        ValueError: also if a data set from the hub is not prepared, or not complete.
    """
    folder = corpus_folder(name, tokenizer_spec, input)
    record, corpus, reason = read_record(folder / "manifest.json"), None, "it is not prepared yet"
    begun = record or read_record(building(folder) / "progress.json")
    options = Options(**begun["request"]["options"]) if begun else Options()
    if record:
        try:
            corpus = load_corpus(folder, record, verify)
        except ValueError as error:
            reason = str(error)
    # a prepared text may be deleted
    comparable = corpus and input and corpus.sha256 != sha256 and Path(input).exists()
    if comparable and find_source(name, input).sha256 != record["request"]["source_sha256"]:
        reason, corpus = "its files have changed", None
    if corpus is None and name in DATASETS:
        changed = {name: value for name, value in asdict(options).items() if value != getattr(Options(), name)}
        flags = "".join(f" --{name} {value}" for name, value in {"tokenizer": tokenizer_spec, **changed}.items())
        raise ValueError(
            f"{name} cannot be used: {reason}; type python -m data.prepare {name}{flags} (about {DATASETS[name][2]}"
            + ("; --tokens 1B prepares a part)" if options.tokens == "all" else ")")
        )
    if corpus is None:
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
    """Prepare a corpus and open it. An older one from another source or options is replaced at the end.

    An interrupted preparation continues. If the corpus is complete, the sha256 of its shards is checked. See
    data.build.build for the split into two parts.

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
    options = options or Options()
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads} must be at least 1")
    if name in DATASETS and tokenizer_spec.startswith("char"):
        raise ValueError(
            f"tokenizer {tokenizer_spec!r} would have to read all of {name} first; take bytes, bpe:N or gpt2"
        )
    folder = corpus_folder(name, tokenizer_spec, input)
    source = find_source(name, input, options.sample)
    request = make_request(source, tokenizer_spec, options)
    with locked(folder):
        if (record := read_record(folder / "manifest.json")) and same_request(record["request"], request, "skip_bad"):
            with suppress(ValueError):  # a shard is damaged
                return load_corpus(folder, record, verify=True)
        new = building(folder)
        if name == "tokens":
            new.mkdir(exist_ok=True)
            write_record(new / "manifest.json", index_tokens(source, tokenizer_spec))
        else:
            build(new, source, tokenizer_spec, options, threads)
        if folder.exists():
            shutil.rmtree(folder)  # a run that has it open keeps its tokens
        new.rename(folder)
        return load_corpus(folder, read_record(folder / "manifest.json"))


def building(folder):
    """The folder in which a corpus is prepared, until it is complete."""
    return folder.with_name(f"{folder.name}.building")


@contextmanager
def locked(folder):
    """A lock, so that only one process at a time prepares a corpus."""
    path = folder.with_name(f".{folder.name}.lock")
    with writing(path):
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=1)
        except filelock.Timeout:
            print(f"another process prepares {folder}; waiting for it", file=sys.stderr)
            lock.acquire()
    with lock:
        yield


def corpus_folder(name, tokenizer_spec, input):
    """Path of the prepared corpus, whether it exists or not."""
    parts = [name, tokenizer_name(tokenizer_spec).replace(":", "-")]
    if input and name != "shakespeare":  # so that two files with the same name have two folders
        parts.append(hashlib.sha256(os.fsencode(Path(input).resolve())).hexdigest()[:8])
    folder = data_folder("prepared") / "-".join(parts)
    if tokenizer_spec.startswith("run:"):  # whose tokenizer may have been trained on another text
        state = to_state(make_tokenizer(tokenizer_spec))
        if (read_record(folder / "manifest.json") or {}).get("tokenizer") != state:
            folder = folder.with_name(f"{folder.name}-{hashlib.sha256(repr(state).encode()).hexdigest()[:8]}")
    return folder


def load_corpus(folder, record, verify=False):
    """The Corpus that a manifest describes.

    Raises:
        ValueError: the manifest is inconsistent; a shard is missing, or has another size or (with verify) sha256.
    """
    try:
        tokenizer, title = from_state(record["tokenizer"]), record["request"]["source"]
        parts = [_load_part(folder, record["dtype"], record[part], verify) for part in PARTS]
    except (LookupError, TypeError) as error:
        raise ValueError(f"{folder / 'manifest.json'} is damaged ({error!r})") from None
    if tokenizer.name != record["request"]["tokenizer"]:
        raise ValueError(f"{folder} has the tokenizer {tokenizer.name}, not {record['request']['tokenizer']}")
    return Corpus(*parts, tokenizer, folder, title, record.get("bad", 0))


def _load_part(folder, dtype, about, verify):
    if about["tokens"] != sum(shard["tokens"] for shard in about["shards"]) or not about["shards"]:
        raise ValueError(f"{folder / 'manifest.json'} lacks a shard: its tokens do not add up to {about['tokens']:,}")
    arrays = []
    for shard in about["shards"]:
        path = folder / shard["file"]
        arrays.append(map_shard(path, dtype, shard["tokens"], shard.get("offset", HEADER_BYTES)))
        if verify and file_sha256(path) != shard["sha256"]:
            raise ValueError(f"{path} is damaged: its sha256 is not the manifest's")
    sha256 = _joined_sha256(*(shard["sha256"] for shard in about["shards"]))
    return Tokens(tuple(arrays), sha256, about["documents"], about["text_bytes"])


def _joined_sha256(*digests):
    return hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest()
