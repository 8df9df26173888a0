"""Between text and tokens, token by token."""

import codecs

from data.tokenizer import END_OF_TEXT, end_of_text


def encode(tokenizer, text):
    """Token ids of a prompt. Where the tokenizer has an end of text, "<|endoftext|>" is that token, not plain text."""
    end = end_of_text(tokenizer)
    if end is None:
        return tokenizer.encode_ordinary(text)
    first, *others = text.split(END_OF_TEXT)
    ids = tokenizer.encode_ordinary(first)
    for part in others:
        ids += [end, *tokenizer.encode_ordinary(part)]
    return ids


class TextStream:
    """Turns the tokens of one sample into pieces of text: whole characters only, ending before a stop text.

    stop: texts that end the sample. end: token that ends the sample, or None.

    Attributes:
        ended: whether a stop text or the end token has come.
    """

    def __init__(self, tokenizer, stop=(), end=None):
        self.tokenizer, self.stop, self.end = tokenizer, stop, end
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.held = ""  # text that may be the beginning of a stop text
        self.ended = False

    def add(self, token):
        """Add a token; returns the text, often "", that no later token can change."""
        if token == self.end:
            return self.finish()
        self.held += self.decoder.decode(self.tokenizer.decode_bytes([token]))
        found = [self.held.find(text) for text in self.stop if text in self.held]
        if found:
            self.ended = True
            piece, self.held = self.held[: min(found)], ""
            return piece
        wait = max((overlap(self.held, text) for text in self.stop), default=0)
        cut = len(self.held) - wait
        piece, self.held = self.held[:cut], self.held[cut:]
        return piece

    def finish(self):
        """The rest of the text, after the last token."""
        self.ended = True
        piece, self.held = self.held + self.decoder.decode(b"", final=True), ""
        return piece


def overlap(text, stop):
    """Length of the longest end of `text` with which a longer stop text begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
