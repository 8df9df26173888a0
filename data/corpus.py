"""Prepared corpora: text -> prepared/<name>-<tokenizer>/ with train.bin, val.bin and tokenizer.json."""

import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.files import atomic_file, atomic_folder, data_folder, make_data_folder
from data.sources import PLAY, SHAKESPEARE_SHA256, SHAKESPEARE_URL, check_name, read_source
from data.tokenizer import encode_text, from_state, make_tokenizer, to_state, tokenizer_name
from data.tokens import TokenFileError, Tokens, check_tokenizer, read_tokens, remedy, write_tokens
from say import say

PIECE = 1 << 22  # tokens in memory at once while all are read
TRAIN_SHARE = 0.9  # of the characters, from the start; the rest is for validation (as nanoGPT)


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, open for reading.

    Attributes:
        name: "shakespeare" or "text".
        train, val: Tokens of the two parts.
        tokenizer: the tokenizer that made them.
        folder: where they are.
    """

    name: str
    train: Tokens
    val: Tokens
    tokenizer: Any
    folder: Path
    digests: dict = field(default_factory=dict, repr=False, compare=False)  # stamps of the files -> digest

    @property
    def source(self):
        """What the text is, for people."""
        return self.train.source

    @property
    def bytes_per_token(self):
        """Bytes of validation text per token: bits per byte = nats per token / ln 2 / this."""
        return self.val.bytes_per_token

    def digest(self):
        """sha256 hex digest of the tokens of both parts: seconds per gigabyte, microseconds until they are written to.

        Files that were replaced, as `prepare` does, stay open here.
        """
        if (stamps := self._stamps()) not in self.digests:
            digest = hashlib.sha256()
            for part in (self.train, self.val):
                of_part = hashlib.sha256()
                for start in range(0, len(part), PIECE):
                    of_part.update(part.ids.read(start, start + PIECE))
                digest.update(of_part.digest())
            self.digests[stamps] = digest.hexdigest()
        return self.digests[stamps]

    def trust(self, digest):
        """Take a digest that another process has just computed of the same files."""
        self.digests[self._stamps()] = digest

    def _stamps(self):
        return self.train.ids.stamp(), self.val.ids.stamp()

    def check_unchanged(self, digest):
        """TokenFileError if the `digest()` is another one now."""
        if self.digest() != digest:
            advice = remedy(self.train.ids.path)
            raise TokenFileError(f"the tokens in {self.folder} were changed while they were in use; {advice}")


def prepare(name, tokenizer_spec, input=None):
    """Tokenize a corpus, replacing what an earlier call made of it.

    The text is divided before it is tokenized: the first 90% of the characters for training. `bpe` learns
    from the training part only; `char` takes the characters of the whole, as nanoGPT, so that the
    validation part has no unknown one.

    Args:
        name, input: as for data.sources.read_source.
        tokenizer_spec: as for data.tokenizer.make_tokenizer.

    Returns:
        Path of the folder with train.bin, val.bin and tokenizer.json. It appears whole or not at all.

    Raises:
        ValueError, OSError: one sentence that says what to do.
    """
    folder = corpus_folder(name, tokenizer_spec, input)
    return _prepare(folder, read_source(name, input), tokenizer_spec)


def open_corpus(name, tokenizer_spec, input=None, *, digest=None, quiet=False):
    """Open a corpus, preparing it if it never was or if its text has changed.

    Args:
        name, input, tokenizer_spec: as for `prepare`.
        digest: of prepared tokens that will do, whatever has become of the text since.
        quiet: say nothing, for all but one of many processes.

    Returns:
        Corpus.

    Raises:
        ValueError, OSError: one sentence that says what to do.
    """
    folder = corpus_folder(name, tokenizer_spec, input)
    corpus = read_corpus(name, folder) if folder.is_dir() else None
    will_do = corpus and digest and corpus.digest() == digest
    # Tiny Shakespeare can only be itself or the play; of a file of the user's only its contents tell.
    source = read_source(name, input) if (input or name == "text") and not will_do else None
    if corpus and (source is None or source.sha256 == corpus.train.source_sha256):
        if name == "shakespeare" and corpus.source == PLAY and not quiet:
            _notice_play(tokenizer_spec, f"prepared without it in {folder}")
        return corpus
    if not quiet:
        say(f"preparing {name} with tokenizer {tokenizer_spec} in {folder}", sys.stderr)
    source = source or read_source(name, input)
    return read_corpus(name, _prepare(folder, source, tokenizer_spec, quiet))


def corpus_folder(name, tokenizer_spec, input=None):
    """Path of the prepared corpus, whether it exists or not."""
    check_name(name)
    parts = [name, tokenizer_name(tokenizer_spec).replace(":", "-")]
    if name == "text" and input:  # two files of the same name are two corpora; tiny Shakespeare is always one
        parts.append(hashlib.sha256(os.fsencode(Path(input).resolve())).hexdigest()[:8])
    return data_folder("prepared") / "-".join(parts)


def _prepare(folder, source, tokenizer_spec, quiet=False):
    """Tokenize `source` into `folder`."""
    if source.excuse and not quiet:
        _notice_play(tokenizer_spec, f"cannot download it: {source.excuse}")
    split = int(TRAIN_SHARE * len(source.text))
    parts = {"train.bin": source.text[:split], "val.bin": source.text[split:]}
    lesson = source.text if tokenizer_spec == "char" else parts["train.bin"]
    tokenizer = make_tokenizer(tokenizer_spec, lesson)
    about = {"source": source.title, "source_sha256": source.sha256}
    make_data_folder("prepared")
    with atomic_folder(folder) as new:
        for file_name, text in parts.items():
            ids = encode_text(tokenizer, text)
            write_tokens(new / file_name, ids, tokenizer, text_bytes=len(text.encode()), **about)
        with atomic_file(new / "tokenizer.json") as file:
            file.write(json.dumps(to_state(tokenizer)).encode())
    return folder


def read_corpus(name, folder):
    """The Corpus that `prepare` left in `folder`, after checking that its files belong together."""
    path = folder / "tokenizer.json"
    try:
        tokenizer = from_state(json.loads(path.read_bytes()))
    except FileNotFoundError:
        message = f"{path} is missing; remove {folder} and prepare the corpus again"
        raise FileNotFoundError(message) from None
    except ValueError:  # JSON's and UTF-8's errors are ValueErrors too
        raise ValueError(f"{path} is damaged; remove {folder} and prepare the corpus again") from None
    train, val = read_tokens(folder / "train.bin"), read_tokens(folder / "val.bin")
    check_tokenizer(train, tokenizer)
    if (train.tokenizer_sha256, train.source_sha256) != (val.tokenizer_sha256, val.source_sha256):
        raise ValueError(f"train.bin and val.bin in {folder} are of two corpora; prepare the corpus again")
    return Corpus(name, train, val, tokenizer, folder)


def _notice_play(tokenizer_spec, reason):
    """The one loud line of a run that does not use the text it is named after."""
    say(
        f"NOTICE: this is NOT tiny Shakespeare but {PLAY}, data/play.txt ({reason}). For the real text, save "
        f"{SHAKESPEARE_URL} (sha256 {SHAKESPEARE_SHA256[:12]}..) as FILE and run: "
        f"python -m data.prepare shakespeare --input FILE --tokenizer {tokenizer_spec}",
        sys.stderr,
    )
