"""Text <-> token ids.

A tokenizer is a tiktoken.Encoding, or a HubTokenizer with the part of its interface that this repository uses. In a
text, the name of a special token, such as "<|endoftext|>", is plain text; `end_of_text` gives the id.
"""

import base64
import hashlib
import os
import re
from itertools import chain

import numpy as np
import rustbpe
import tiktoken
from tiktoken.load import load_tiktoken_bpe

from data.files import GPT2_SIZES, data_folder, find_run, read_json
from data.hub_tokenizer import END_OF_TEXT, HubTokenizer, byte_letters, read_tokenizer_json
from errors import UserError, require

# GPT-4's pattern: words with one leading character, up to three digits, punctuation.
GPT4_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
LINE_PATTERN = r"[^\n]+|\n+"  # any pattern would do for bytes, which are never merged
CHARACTER_PATTERN = r"[\s\S]"  # of char: each character is a token, also if it has several bytes

GPT2_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
GPT2_VOCABULARY = 50257  # tokens, the last of which is end-of-text
PROBE = "It's 1,234 o'clock:  naïve\r\n\n 東京"  # shows whether another pre-tokenizer is GPT-2's

STORED = "kestrel.json"  # file of a run or exported folder whose field "tokenizer" is to_state()
UNTRAINED = ("gpt2", "bytes", "bytes+eot")  # the same for any text
CHUNK = 1 << 19  # characters that are encoded at once
# Places that no pattern above matches across: "word| word", "word|," or "word|\n", between lines "\n|word", and before
# the last of several blanks. A run of blanks is cut too, because tiktoken and rustbpe fail at a million of them.
CUT = re.compile(
    r"(?<=[^\W\d_])(?= [^\W\d_])|(?<=[^\W_])(?=[\n\",.:;、。\uff0c\uff1a\uff1b\uff01\uff1f])|(?<=\S\n)(?=[^\W_])"
    r"|(?<=\s)(?=[ \t\xa0\u3000]\S)|(?<=\s{1000})(?=\s)"
)
ANYWHERE = re.compile(r"(?=[\s\S])")


def end_of_text(tokenizer):
    """Id of the token that ends a document; None if the tokenizer has none."""
    return tokenizer._special_tokens.get(END_OF_TEXT)


def is_char(tokenizer):
    """Whether it is `char`: a token for each character, by their codes as in nanoGPT, then end-of-text if wanted."""
    return tokenizer.name in ("char", "char+eot")


def never_merges(name):
    """Whether a tokenizer with this name gives each character tokens of its own, so that a text can be cut anywhere."""
    return name.partition("+")[0] in ("bytes", "char")


def is_untrained(tokenizer):
    """Whether its name alone says which tokenizer it is: one that is the same for any text, without tokens of turns."""
    return tokenizer.name in UNTRAINED and len(tokenizer._special_tokens) < 2


def tokenizer_name(spec):
    """The name of the tokenizer `spec`, without its file; UserError if there is no such tokenizer."""
    kind, _, argument = spec.partition(":")
    if kind == "run":
        return make_tokenizer(spec).name
    if spec in ("bytes", "char", "bytes+eot", "char+eot") or kind == "gpt2":
        return kind
    if kind == "bpe" and argument.isdecimal() and int(argument) > 257:
        return f"bpe:{int(argument)}"
    kinds = "bytes, bytes+eot, char, char+eot, bpe:N with N > 257, gpt2, gpt2:RANK_FILE or run:PATH"
    raise UserError(f"tokenizer {spec!r} must be {kinds}; +eot adds an end-of-text token")


def make_tokenizer(spec, texts=(), many_documents=False):
    """Make a tokenizer.

    Args:
        spec: bytes or char (+eot adds an end-of-text token), bpe:N (N tokens, of which 256 are bytes), gpt2 or
            gpt2:RANK_FILE, run:PATH (the tokenizer of a run or of a Hugging Face folder, named as for sample.py).
        texts: iterable of str; `char` takes its characters from them and `bpe` is trained on them.
        many_documents: whether the last of the N tokens of `bpe` is end-of-text. A single document needs none.
    """
    kind, _, argument = spec.partition(":")
    if kind == "run" and argument not in GPT2_SIZES:
        path = find_run(argument)
        folder = path if path.is_dir() else path.parent
        tokenizer = tokenizer_of(folder)
        rule = "run:PATH must be a run, or a Hugging Face folder whose tokenizer.json has all tokens"
        require(tokenizer, f"{folder / STORED} does not exist; {rule}")
        return tokenizer
    if kind == "run":
        kind, argument = "gpt2", ""
    if kind == "gpt2":
        return _encoding(kind, GPT2_PATTERN, _gpt2_ranks(argument), ends=True)
    name = tokenizer_name(spec)
    if kind == "bpe":
        return _train_bpe(name, int(argument), texts, many_documents)
    ends = name.endswith("+eot")
    if name.startswith("bytes"):
        return _encoding(name, LINE_PATTERN, [bytes([value]) for value in range(256)], ends)
    characters = set(chain.from_iterable(texts))
    return _encoding(name, CHARACTER_PATTERN, sorted(map(str.encode, characters)), ends)


def tokenizer_of(folder):
    """The tokenizer of a run or of a Hugging Face folder, by the first rule that applies, or None:

    1. Ours, of kestrel.json.
    2. gpt2, if all tokens are GPT-2's, besides one for padding, which is in no text, and tokenizer.json, if there is
       one, encodes PROBE alike. Without a file of tokens, if config.json is GPT-2's.
    3. That of tokenizer.json, if it has all tokens.
    """
    if (folder / STORED).is_file():
        return from_state(read_json(folder / STORED)["tokenizer"])
    names = ("config", "tokenizer_config", "vocab", "added_tokens")
    config, options, vocabulary, added = (
        read_json(path) if (path := folder / f"{name}.json").is_file() else {} for name in names
    )
    added |= {_content(token): int(index) for index, token in options.get("added_tokens_decoder", {}).items()}
    found, stored = None, folder / "tokenizer.json"
    if stored.is_file():
        found = read_tokenizer_json(stored, _content(options.get("eos_token", END_OF_TEXT)))
        vocabulary = found.vocabulary
    elif not vocabulary:
        is_gpt2 = (config.get("model_type"), config.get("vocab_size")) == ("gpt2", GPT2_VOCABULARY)
        return make_tokenizer("gpt2") if is_gpt2 else None
    theirs = vocabulary | added
    if (padding := _content(options.get("pad_token"))) != END_OF_TEXT:
        theirs.pop(padding, None)
    gpt2 = _gpt2_of(theirs)
    if gpt2 and (not found or found.encode_ordinary(PROBE) == gpt2.encode_ordinary(PROBE)):
        return gpt2
    return found if added.keys() <= vocabulary.keys() else None


def _content(token):
    """The text of a token in tokenizer_config.json, where it may be a dict; None if there is no such token."""
    return token["content"] if isinstance(token, dict) else token


def _gpt2_of(vocabulary):
    """GPT-2's tokenizer, from a vocabulary {text: id}; None if it is another."""
    if not vocabulary.get(END_OF_TEXT) == len(vocabulary) - 1 == GPT2_VOCABULARY - 1:
        return None
    values = {letter: byte for byte, letter in enumerate(byte_letters())}
    texts = sorted(vocabulary, key=vocabulary.get)[:-1]
    tokens = [bytes(values.get(letter, 0) for letter in text) for text in texts]
    ranks = b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    same = hashlib.sha256(ranks).hexdigest() == GPT2_SHA256
    return _encoding("gpt2", GPT2_PATTERN, tokens, ends=True) if same else None


def encode(tokenizer, text):
    """[count] uint32 ids of a text of any length; UserError if `char` has no token for one of its characters."""
    if is_char(tokenizer):
        for character in dict.fromkeys(text):
            known = character.encode() in tokenizer._mergeable_ranks
            require(known, f"the char tokenizer has no token for {character!r}; leave this character out")
    pieces = chunks([text], anywhere=never_merges(tokenizer.name))
    ids = [tokenizer.encode_to_numpy(piece, disallowed_special=()) for piece in pieces]
    return np.concatenate([np.empty(0, np.uint32), *ids])


def mend(text):
    """The text with U+FFFD for halves of surrogate pairs, as which Python holds bytes that are not UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def chunks(pieces, size=CHUNK, anywhere=False):
    """Cut a text, an iterable of str, into chunks of `size` characters or a little more.

    The tokens of all chunks are those of the whole text: it is cut only where no pattern matches across, or in a run of
    more than a thousand blanks. anywhere: cut after any character, for a tokenizer that never_merges().
    """
    held, searched, cut = "", 0, ANYWHERE if anywhere else CUT
    for part in (piece[i : i + size] for piece in pieces for i in range(0, len(piece), size)):
        held += part
        while found := cut.search(held, max(size, searched)):
            yield held[: found.start()]
            held, searched = held[found.start() :], 0
        searched = len(held) - 1  # the last character may be one before which the next allows a cut
    if held:
        yield held


def to_state(tokenizer):
    """A dict of str, int, list and dict, for JSON and checkpoints; `from_state` turns it back into the tokenizer."""
    if isinstance(tokenizer, HubTokenizer):
        return {"kind": "hub", "json": tokenizer.text, "end": tokenizer.end}
    ranks, special, name = tokenizer._mergeable_ranks, tokenizer._special_tokens, tokenizer.name
    tokens = sorted(ranks, key=ranks.get)
    if is_char(tokenizer):
        return dict(kind="char", name=name, characters=b"".join(tokens).decode(), end_of_text=bool(special))
    tokens = [base64.b64encode(token).decode() for token in tokens]
    return dict(kind="bpe", name=name, pattern=tokenizer._pat_str, tokens=tokens, special=dict(special))


def from_state(state):
    """The tokenizer that `to_state` turned into `state`."""
    if state["kind"] == "char":
        characters = map(str.encode, state["characters"])
        return _encoding(state["name"], CHARACTER_PATTERN, list(characters), state.get("end_of_text", False))
    if state["kind"] == "hub":
        return HubTokenizer(state["json"], state["end"])
    tokens = [base64.b64decode(token) for token in state["tokens"]]
    return _encoding(state["name"], state["pattern"], tokens, special=state["special"])


def _encoding(name, pattern, tokens, ends=False, special=None):
    """tiktoken.Encoding whose token of rank i is tokens[i]. ends: whether the only special token is end-of-text."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    special = {END_OF_TEXT: len(tokens)} if ends else special or {}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def _train_bpe(name, size, texts, many_documents):
    """Train byte-pair encoding on texts: `size` tokens, or fewer if the texts have too few pairs."""
    trainer, learned = rustbpe.Tokenizer(), (chunk for text in texts for chunk in chunks([text]))
    trainer.train_from_iterator(learned, size - many_documents, pattern=GPT4_PATTERN)
    # two merges may give the same bytes; tiktoken identifies tokens by their bytes, so keep one
    tokens = list(dict.fromkeys(bytes(token) for token, _ in trainer.get_mergeable_ranks()))
    return _encoding(name, GPT4_PATTERN, tokens, many_documents)


def _gpt2_ranks(path):
    """GPT-2's 50,256 tokens in the order of their ids, from a rank file; without one it is downloaded."""
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(data_folder("downloads")))
    try:
        ranks = load_tiktoken_bpe(path or GPT2_URL, GPT2_SHA256)
    except (OSError, ValueError) as error:  # of requests, whose texts are long, and another sha256
        known = "its sha256 differs" if isinstance(error, ValueError) else error.strerror
        rule = f"cannot {f'read {path}' if path else 'download the tokens of GPT-2'} ({known or type(error).__name__})"
        raise UserError(f"{rule}; get {GPT2_URL} and name it: --tokenizer gpt2:RANK_FILE") from None
    return sorted(ranks, key=ranks.get)
