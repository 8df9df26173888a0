"""Text <-> token ids.

A tokenizer is a tiktoken.Encoding, or a CharTokenizer with the part of its interface that this repository uses:

    name, n_vocab, encode_ordinary(text) -> list[int], decode(ids) -> str, decode_bytes(ids) -> bytes

`encode_ordinary` treats the names of special tokens, such as "<|endoftext|>", as plain text.
"""

import base64
import hashlib
import re
import sys
from pathlib import Path

import numpy as np
import rustbpe
import tiktoken
from tqdm import tqdm

from data.files import download

# GPT-4's pattern: words with one leading character, up to three digits, punctuation.
GPT4_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
LINE_PATTERN = r"[^\n]+|\n+"  # for bytes, which are never merged, any pattern would do

GPT2_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"

CHUNK = 1 << 20  # characters that are encoded at once


class CharTokenizer:
    """One token per character, as in nanoGPT; `characters` is a str of all of them in the order of their ids."""

    name = "char"

    def __init__(self, characters):
        self.characters = characters
        self._ids = {character: index for index, character in enumerate(characters)}

    @property
    def n_vocab(self):
        return len(self.characters)

    def encode_ordinary(self, text):
        """list[int], one id per character; ValueError if a character is not in the vocabulary."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise ValueError(f"the char tokenizer has no token for {error}; leave this character out") from None

    def decode(self, ids):
        return "".join(self.characters[index] for index in ids)

    def decode_bytes(self, ids):
        return self.decode(ids).encode()


def tokenizer_name(spec):
    """The name of the tokenizer `spec`: bytes, char, bpe:N or gpt2; ValueError if it is none of these."""
    kind, _, argument = spec.partition(":")
    if spec in ("bytes", "char") or kind == "gpt2":
        return kind
    if kind == "bpe" and argument.isdecimal() and int(argument) > 256:
        return f"bpe:{int(argument)}"
    raise ValueError(f"tokenizer {spec!r} must be bytes, char, gpt2, gpt2:RANK_FILE or bpe:N with N > 256")


def make_tokenizer(spec, text):
    """Make a tokenizer, a tiktoken.Encoding or CharTokenizer, from its specification.

    Args:
        spec: bytes, char, bpe:N (N tokens, the first 256 of them bytes), gpt2 or gpt2:RANK_FILE.
        text: str; `char` takes its characters from it and `bpe` is trained on it; the others ignore it.

    Raises:
        ValueError: the specification or the rank file is wrong.
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
    """Encode a nonempty text in chunks, with a progress bar; returns the ids as a uint32 array."""
    bar = tqdm(chunks(text), total=-(-len(text) // CHUNK), unit="chunk", disable=None, leave=False)
    return np.concatenate([np.array(tokenizer.encode_ordinary(chunk), dtype=np.uint32) for chunk in bar])


def chunks(text, size=CHUNK):
    """Cut `text` into chunks of at least `size` characters, so that their tokens are those of the whole text.

    Each cut is between a letter or digit and a newline; no pattern above matches across the two.
    """
    cut = re.compile(r"(?<=[^\W_])\n")
    start = 0
    while start < len(text):
        found = cut.search(text, start + size)
        stop = found.start() if found else len(text)
        yield text[start:stop]
        start = stop


def to_state(tokenizer):
    """A dict of str, int, list and dict, for JSON and checkpoints; `from_state` turns it back into the tokenizer."""
    if isinstance(tokenizer, CharTokenizer):
        return {"kind": "char", "name": tokenizer.name, "characters": tokenizer.characters}
    ranks, special = tokenizer._mergeable_ranks, dict(tokenizer._special_tokens)
    tokens = [base64.b64encode(token).decode() for token in sorted(ranks, key=ranks.get)]
    names = {"kind": "bpe", "name": tokenizer.name, "pattern": tokenizer._pat_str}
    return names | {"tokens": tokens, "special": special}


def from_state(state):
    """The tokenizer that `to_state` turned into `state`."""
    if state["kind"] == "char":
        return CharTokenizer(state["characters"])
    tokens = [base64.b64decode(token) for token in state["tokens"]]
    return _encoding(state["name"], state["pattern"], tokens, state["special"])


def _encoding(name, pattern, tokens, special=None):
    """tiktoken.Encoding whose token of rank i is tokens[i]."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special or {})


def _train_bpe(name, size, text):
    """Train byte-pair encoding on `text`; it has `size` tokens, or fewer if the text has too few pairs."""
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(chunks(text), size, pattern=GPT4_PATTERN)
    # Two merges may give the same bytes; tiktoken identifies a token by its bytes, so it is kept once.
    tokens = list(dict.fromkeys(bytes(token) for token, _ in trainer.get_mergeable_ranks()))
    if len(tokens) < size:
        print(f"{name}: the training text has pairs for only {len(tokens):,} tokens", file=sys.stderr)
    return _encoding(name, GPT4_PATTERN, tokens)


def _gpt2_ranks(path):
    """GPT-2's 50,256 tokens in the order of their ids, from a rank file; "" downloads it."""
    contents = Path(path or download(GPT2_URL, "r50k_base.tiktoken", GPT2_SHA256)).read_bytes()
    if hashlib.sha256(contents).hexdigest() != GPT2_SHA256:
        raise ValueError(f"{path} is not GPT-2's rank file (its sha256 differs); get r50k_base.tiktoken of {GPT2_URL}")
    return [base64.b64decode(line.split()[0]) for line in contents.splitlines() if line]
