"""Prepared corpora: prepared/NAME-TOKENIZER/ with shards of tokens and manifest.json."""

import hashlib
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import tiktoken

from data.build import VERSION, Options, build, read_manifest, write_manifest
from data.chat import turns_of, with_turns
from data.documents import BadRecord
from data.external import index_tokens
from data.files import data_folder, lock_file
from data.hub import DATASETS, HUB
from data.hub_tokenizer import HubTokenizer
from data.shards import HEADER_BYTES, SPLITS, Tokens, file_sha256, map_shard
from data.sources import PLAY, find_source
from data.tokenizer import from_state, is_untrained, make_tokenizer, to_state, tokenizer_name
from errors import UserError, fold, quote, require, tell


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, open for reading."""

    train: Tokens
    val: Tokens
    tokenizer: tiktoken.Encoding | HubTokenizer
    folder: Path
    sha256: str  # of the tokens of both splits
    source: str  # title of the text
    bad_lines: int  # lines or rows that were left out


def open_corpus(name, tokenizer_spec, input=None, *, sha256=None, verify=False):
    """Open a corpus, without reading its tokens.

    A text that is new, has changed or whose tokens are damaged is prepared first, with the same options as before.
    Changes are detected by the contents of up to 32 MB, above by names and sizes.

    Args:
        name, tokenizer_spec, input: as for `prepare`.
        sha256: open the prepared corpus with this `Corpus.sha256`, if there is one, wherever its text is now.
        verify: read all tokens and compare their sha256 with the manifest's.
    """
    if sha256 and (corpus := _find_tokens(sha256, tokenizer_spec, verify)):
        return corpus
    place = f" --input {quote(input)}" if input else ""
    command = f"python -m data.prepare {name}{place} --tokenizer {quote(tokenizer_spec)}"
    on_hub = name in DATASETS or str(input).startswith(HUB)
    source = None if on_hub or name == "shakespeare" else find_source(name, input)
    folder, reason = corpus_folder(name, tokenizer_spec, input), ""
    if manifest := read_manifest(folder):
        try:
            corpus = load_corpus(folder, manifest, verify)
            if not source or source.sha256 == manifest["request"]["source_sha256"]:
                return corpus
            reason = ", whose files have changed"
        except UserError as error:
            reason = f" ({error})"
    require(not on_hub, f"{name} is not prepared{reason}; type {command} (--tokens 1B prepares a part)")
    options = _last_options(folder, name, input)
    changed = {key: value for key, value in asdict(options).items() if value != getattr(Options, key)}
    typed = "".join(f" --{key} {quote(value)}" for key, value in changed.items())
    action = "checking" if name == "tokens" else "tokenizing"
    print(f"{action} {name}{reason} with {tokenizer_spec}{typed}", file=sys.stderr)
    try:
        return prepare(name, tokenizer_spec, input, options)
    except BadRecord as error:
        typed += " --force" if read_manifest(folder) or read_manifest(_unfinished(folder)) else ""
        raise UserError(f"{error.rule}; mend it, or first type {command}{typed} {error.options}") from None


def prepare(name, tokenizer_spec, input=None, options=None, threads=None, replace=True):
    """Prepare a corpus and open it. An older one from another source or options is replaced at the end.

    An interrupted preparation goes on after the last finished input file. A complete one is only verified.
    replace: if False, one with other options, even if it is unfinished, is a UserError.

    Args:
        name, input: as for data.sources.find_source. tokenizer_spec: as for data.tokenizer.make_tokenizer.
        options: Options, None takes their defaults. threads: that tokenize; None takes one for each core.
    """
    options, folder = options or Options(), corpus_folder(name, tokenizer_spec, input)
    source = find_source(name, input, options.sample)
    about = dict(source=source.title, source_sha256=source.sha256, options=asdict(options))
    request = dict(version=VERSION, tokenizer=tokenizer_name(tokenizer_spec), **about)
    new = _unfinished(folder)
    lock = lock_file(folder.with_name(f".{folder.name}.lock"))  # waits while another process prepares this corpus
    try:
        manifest = read_manifest(folder)
        if manifest and manifest["request"] == request:
            with suppress(UserError):  # a shard is damaged
                return load_corpus(folder, manifest, verify=True)
        if not replace and name != "tokens":
            _require_options(folder, request["options"])
            # a bad line may have ended it, after which the same command with --skip_bad begins anew
            _require_options(new, {k: v for k, v in request["options"].items() if k != "skip_bad"})
        if name == "tokens":
            new.mkdir(exist_ok=True)
            write_manifest(new, {"request": request} | index_tokens(source, tokenizer_spec))
        else:
            build(new, source, request, tokenizer_spec, options, threads)
        if folder.exists():
            shutil.rmtree(folder)  # a run that has it open keeps its tokens
        new.rename(folder)
        return load_corpus(folder, read_manifest(folder))
    finally:
        lock.release()


def _last_options(folder, name, input):
    """The Options with which this text was last prepared, if only in part or for another tokenizer."""
    others = sorted(folder.parent.glob(f"{name}-*-{_digest(input)}*")) if input else []
    for path in (folder, _unfinished(folder), *others):
        if manifest := read_manifest(path):
            return Options(**manifest["request"]["options"])
    return Options()


def _unfinished(folder):
    """The folder of a corpus while it is prepared."""
    return folder.with_name(f"{folder.name}.building")


def _require_options(folder, options):
    """UserError if a folder has tokens that were prepared with other options."""
    if manifest := read_manifest(folder):
        tokens = sum(manifest[split]["tokens"] for split in SPLITS)
        before = manifest["request"]["options"].items()
        others = ", ".join(f"{key}={value}" for key, value in before if value != options.get(key, value))
        remedy = "replace them with --force, or keep both by setting GPT_DATA to another folder"
        require(not (tokens and others), f"{folder} has {tokens:,} tokens, prepared with {others}; {remedy}")


def _find_tokens(sha256, tokenizer_spec, verify):
    """The prepared corpus with these tokens, or None."""
    for folder in data_folder("prepared").iterdir():
        manifest = read_manifest(folder)
        if manifest and _tokens_sha256(manifest) == sha256:
            of_run = tokenizer_spec.startswith("run:")  # that run may be gone
            if of_run or manifest["request"]["tokenizer"] == tokenizer_name(tokenizer_spec):
                with suppress(UserError):  # a shard is missing or damaged
                    return load_corpus(folder, manifest, verify)
    return None


def corpus_folder(name, tokenizer_spec, input):
    """Path of the prepared corpus, whether it exists or not."""
    made = tokenizer_name(tokenizer_spec)
    words = [name, made.replace(":", "-")]
    if input:  # so that two files with the same name have two folders
        words.append(_digest(input))
    folder = data_folder("prepared") / "-".join(words)
    run = make_tokenizer(tokenizer_spec) if tokenizer_spec.startswith("run:") else None
    if run and not is_untrained(run):  # it may have been trained on another text
        state = to_state(with_turns(run) if name == "chat" else run)
        if (read_manifest(folder) or {}).get("tokenizer") != state:
            folder = folder.with_name(f"{folder.name}-{hashlib.sha256(repr(state).encode()).hexdigest()[:8]}")
    return folder


def _digest(input):
    place = str(input) if str(input).startswith(HUB) else Path(input).resolve()
    return hashlib.sha256(os.fsencode(place)).hexdigest()[:8]


def load_corpus(folder, manifest, verify=False):
    """The Corpus that a manifest describes; UserError if a shard is missing or has another size or, verify, sha256."""
    tokenizer, request, splits = from_state(manifest["tokenizer"]), manifest["request"], []
    turns = turns_of(tokenizer) if manifest.get("chat") else None
    for split in SPLITS:
        entry, arrays = manifest[split], []
        for shard in entry["shards"]:
            path = folder / shard["file"]
            arrays.append(map_shard(path, manifest["dtype"], shard["tokens"], shard.get("offset", HEADER_BYTES)))
            require(not verify or file_sha256(path) == shard["sha256"], f"{path} is damaged: its sha256 is another")
        about = f"the split {split} of {request['source']}"
        splits.append(Tokens(tuple(arrays), entry["documents"], entry["text_bytes"], turns, about))
    if request["source"] == PLAY:
        notice = f"NOTICE: this is {PLAY}, data/play.txt, as tiny Shakespeare could not be downloaded"
        command = f"python -m data.prepare shakespeare --tokenizer {request['tokenizer']}"
        tell(fold(f"{notice}; once online, type {command}"))
    return Corpus(
        *splits,
        tokenizer=tokenizer,
        folder=folder,
        sha256=_tokens_sha256(manifest),
        source=request["source"],
        bad_lines=manifest.get("bad", 0),
    )


def _tokens_sha256(manifest):
    """Hex digest of the tokens of both splits; it is made from the stored digests, not from the ids."""
    shards = ["".join(shard["sha256"] for shard in manifest[split]["shards"]) for split in SPLITS]
    splits = [hashlib.sha256(bytes.fromhex(digests)).digest() for digests in shards]
    return hashlib.sha256(b"".join(splits)).hexdigest()
