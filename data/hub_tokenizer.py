"""The tokenizer of another's Hugging Face folder, by the package tokenizers."""

from functools import cache, cached_property

import numpy as np

from data.files import optional, read_json
from errors import require

END_OF_TEXT = "<|endoftext|>"
TURNS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")  # see data.chat


class HubTokenizer:
    """A byte-level BPE. text: of its tokenizer.json. end: the name of the token that ends a document, or None."""

    name = "hub"

    def __init__(self, text, end):
        self.text, self.end = text, end
        self._tokenizer = optional("tokenizers", "tokenizer.json").Tokenizer.from_str(text)
        self._tokenizer.encode_special_tokens = True  # as any text
        self._tokenizer.no_truncation()
        names, self.vocabulary = {END_OF_TEXT: end} | {name: name for name in TURNS}, self._tokenizer.get_vocab()
        self._special_tokens = {name: self.vocabulary[x] for name, x in names.items() if x in self.vocabulary}
        self.n_vocab = 1 + max(self.vocabulary.values())
        added = self._tokenizer.get_added_tokens_decoder()
        self._reserved = {*self._special_tokens.values(), *(index for index, token in added.items() if token.special)}

    @cached_property
    def _bytes(self):
        """{id: bytes}. In the text of a token, byte_letters() stand for bytes, except in added tokens."""
        values = {letter: byte for byte, letter in enumerate(byte_letters())}
        added = {index: token.content.encode() for index, token in self._tokenizer.get_added_tokens_decoder().items()}
        return {i: bytes(map(values.get, text)) for text, i in self.vocabulary.items() if i not in added} | added

    def with_tokens(self, names):
        """This tokenizer with special tokens after its others."""
        tokenizer = HubTokenizer(self.text, self.end)._tokenizer
        tokenizer.add_special_tokens(names)
        return HubTokenizer(tokenizer.to_str(), self.end or END_OF_TEXT)

    def encode_ordinary(self, text):
        found = self._tokenizer.encode(text, add_special_tokens=False)
        if self._reserved.isdisjoint(found.ids):
            return found.ids
        ids = []
        for index, (start, end) in zip(found.ids, found.offsets, strict=True):
            if index in self._reserved and end - start > 1:  # its name is in the vocabulary of texts: cut it in two
                ids += self.encode_ordinary(text[start : start + 1]) + self.encode_ordinary(text[start + 1 : end])
            else:
                ids.append(index)
        return ids

    def encode_to_numpy(self, text, disallowed_special=()):
        return np.array(self.encode_ordinary(text), np.uint32)

    def decode_bytes(self, ids):
        return b"".join(self._bytes.get(index, b"") for index in ids)

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", "replace")


def read_tokenizer_json(path, end):
    """The HubTokenizer of a tokenizer.json; UserError if its tokens do not stand for bytes."""
    kind = (read_json(path).get("decoder") or {}).get("type")
    require(kind == "ByteLevel", f"{path} has the decoder {kind}, but only ByteLevel can be read; take another model")
    return HubTokenizer(path.read_text(encoding="utf-8"), end)


@cache
def byte_letters():
    """The visible character that stands for each byte in GPT-2's vocabulary: itself, or one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
