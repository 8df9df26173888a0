"""Text <-> token ids.

A tokenizer is a tiktoken.Encoding or looks like one:

    name, n_vocab, encode_ordinary(text) -> list[int], decode(ids) -> str, decode_bytes(ids) -> bytes

`encode_ordinary` is the one spelling for encoding: special tokens spelt out in a text are just text.
A tokenizer is written as a specification: bytes, char, bpe:N, gpt2 or gpt2:RANK_FILE.
"""

import base64
import hashlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import rustbpe
import tiktoken
from tqdm import tqdm

from data.files import DownloadError, download_once
from say import say

# How GPT-4 cuts text before merging: letters with one leading character, up to three digits, punctuation.
GPT4_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
LINE_PATTERN = r"[^\n]+|\n+"  # any cut does for bytes, which never merge

GPT2_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
GPT2_BYTES = 835_554
GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"

MAX_BPE = 1_000_000


class CharTokenizer:
    """One token per character; ids follow the sorted order of the characters, as in nanoGPT.

    Args:
        characters: the vocabulary, a str of distinct characters in the order of their ids.
    """

    name = "char"

    def __init__(self, characters):
        self.characters = characters
        self._ids = {character: index for index, character in enumerate(characters)}
        self._characters = dict(enumerate(characters))  # a dict, so that an id of -1 is a KeyError

    @property
    def n_vocab(self):
        return len(self.characters)

    def encode_ordinary(self, text):
        """list[int], one id per character of `text`; ValueError names the characters it does not have."""
        try:
            return [self._ids[character] for character in text]
        except KeyError:
            unknown = sorted(set(text) - self._ids.keys())
            names = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
            raise ValueError(
                f"the char tokenizer has no token for {names}: it knows the {self.n_vocab} characters of its "
                "training text; leave these out, or train with --tokenizer bytes or bpe:N"
            ) from None

    encode = encode_ordinary

    def decode(self, ids):
        return "".join(self._characters[index] for index in ids)

    def decode_bytes(self, ids):
        return self.decode(ids).encode()

    def __repr__(self):
        return f"<CharTokenizer of {self.n_vocab}>"


def tokenizer_name(spec):
    """The name of the tokenizer that `spec` asks for: bytes, char, bpe:N or gpt2.

    Raises:
        ValueError: `spec` is none of these.
    """
    kind, colon, argument = spec.partition(":")
    if spec in ("bytes", "char", "gpt2") or (kind == "gpt2" and argument):
        return kind
    if kind == "bpe" and argument.isascii() and argument.isdigit() and 257 <= int(argument) <= MAX_BPE:
        return f"bpe:{int(argument)}"
    if kind == "bpe" and colon:
        raise ValueError(f"tokenizer {spec!r}: the vocabulary size must be 257 to {MAX_BPE}, as in bpe:1024")
    raise ValueError(f"tokenizer {spec!r} must be bytes, char, bpe:N (say bpe:1024), gpt2 or gpt2:RANK_FILE")


def make_tokenizer(spec, text):
    """The tokenizer of a specification.

    Args:
        spec: bytes, char, bpe:N (N tokens, of which 256 are bytes), gpt2 or gpt2:RANK_FILE.
        text: str that `char` takes its characters from and `bpe` is trained on; the others ignore it.

    Raises:
        ValueError: a wrong specification or rank file.
        OSError: the rank file of gpt2 cannot be read or downloaded.
    """
    name = tokenizer_name(spec)
    if name == "bytes":
        return _encoding(name, LINE_PATTERN, [bytes([value]) for value in range(256)])
    if name == "char":
        return CharTokenizer("".join(sorted(set(text))))
    if name == "gpt2":
        ranks = _gpt2_ranks(spec.partition(":")[2])
        return _encoding(name, GPT2_PATTERN, ranks, {"<|endoftext|>": len(ranks)})
    return _train_bpe(name, int(name.partition(":")[2]), text)


def encode_text(tokenizer, text):
    """uint32 array of what encode_ordinary returns, in less memory and with a progress bar."""
    arrays = []
    with tqdm(total=len(text), unit="char", unit_scale=True, disable=None, leave=False) as bar:
        for chunk in chunks(text):
            arrays.append(np.array(tokenizer.encode_ordinary(chunk), dtype=np.uint32))
            bar.update(len(chunk))
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.uint32)


def chunks(text, size=1 << 20):
    """Cut `text` into parts of at least `size` characters, between a letter or digit and a newline.

    No pattern above joins the two or looks from one to the other, so the tokens are those of the whole text.
    """
    cut = re.compile(r"(?<=[^\W_])\n")
    start = 0
    while start < len(text):
        found = cut.search(text, start + size)
        stop = found.start() if found else len(text)
        yield text[start:stop]
        start = stop


def to_state(tokenizer):
    """A dict of str, int and list for JSON and checkpoints; `from_state` makes the tokenizer again."""
    if isinstance(tokenizer, CharTokenizer):
        return {"kind": "char", "name": tokenizer.name, "characters": tokenizer.characters}
    ranks = sorted(tokenizer._mergeable_ranks.items(), key=lambda item: item[1])
    return {
        "kind": "bpe",
        "name": tokenizer.name,
        "pattern": tokenizer._pat_str,
        "tokens": [base64.b64encode(token).decode() for token, _ in ranks],  # in the order of their ids
        "special": dict(tokenizer._special_tokens),
    }


def from_state(state):
    """The tokenizer whose `to_state` is `state`; ValueError if it is no such dict."""
    try:
        if state["kind"] == "char":
            return CharTokenizer(state["characters"])
        tokens = [base64.b64decode(token, validate=True) for token in state["tokens"]]
        return _encoding(state["name"], state["pattern"], tokens, state["special"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"this is no stored tokenizer ({error!r}); prepare the corpus, or train, again"
        raise ValueError(message) from None


def fingerprint(tokenizer):
    """sha256 hex digest of all that decides what the tokenizer's ids mean."""
    state = json.dumps(to_state(tokenizer), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(state.encode()).hexdigest()


def _encoding(name, pattern, tokens, special=None):
    """tiktoken.Encoding whose token of rank i is tokens[i]."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special or {})


def _train_bpe(name, size, text):
    """Byte-pair encoding with `size` tokens learned from `text`, or as many as it has pairs for."""
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(chunks(text), size, pattern=GPT4_PATTERN)
    # Two different merges may spell the same bytes; a token is its bytes, so it is kept once.
    tokens = list(dict.fromkeys(bytes(token) for token, _ in trainer.get_mergeable_ranks()))
    if len(tokens) < size:
        say(f"{name}: the training text has pairs for only {len(tokens):,} tokens", sys.stderr)
    return _encoding(name, GPT4_PATTERN, tokens)


def _gpt2_ranks(path):
    """GPT-2's 50,256 tokens in the order of their ids: from a rank file or, if `path` is "", downloaded."""
    if path:
        try:
            contents = Path(path).read_bytes()
        except OSError as error:
            message = f"cannot read rank file {path} ({error.strerror}); give the path of r50k_base.tiktoken"
            raise type(error)(message) from None
        digest = hashlib.sha256(contents).hexdigest()
        if digest != GPT2_SHA256:
            raise ValueError(
                f"{path} has sha256 {digest[:12]}.., but GPT-2's rank file has {GPT2_SHA256[:12]}..; "
                f"give the r50k_base.tiktoken of {GPT2_URL}"
            )
    else:
        try:
            contents = download_once(GPT2_URL, "r50k_base.tiktoken", size=GPT2_BYTES, sha256=GPT2_SHA256)
        except DownloadError as error:
            raise DownloadError(
                f"cannot download {GPT2_URL} ({error}); fetch it elsewhere and use --tokenizer gpt2:FILE"
            ) from None
    return [base64.b64decode(line.split()[0]) for line in contents.splitlines() if line]
