"""Between text and tokens, token by token."""

import codecs
import sys

from data.tokenizer import END_OF_TEXT, encode, end_of_text, mend
from errors import UserError, require

NEW_TEXT = "\n"


def encode_prompt_text(tokenizer, text):
    """Token ids of a prompt. Where the tokenizer has an end of text, "<|endoftext|>" is that token, not plain text.

    An empty prompt is the end-of-text token; UserError if there is none.
    """
    text, end, ids = mend(text), end_of_text(tokenizer), []
    for part in [text] if end is None else text.split(END_OF_TEXT):
        ids += [end, *encode(tokenizer, part).tolist()]
    if len(ids) > 1:
        return ids[1:]
    require(end is not None, "the prompt is empty; give at least one character")
    return [end]


def opening(tokenizer):
    """The prompt that begins a text: a line break unless the tokenizer has an end of text, or no line break."""
    if end_of_text(tokenizer) is not None:
        return ""
    try:
        encode(tokenizer, NEW_TEXT)
        return NEW_TEXT
    except UserError:  # characters of another kind of text, such as DNA
        return tokenizer.decode([0])


def marked(prompt):
    """A prompt as it is printed before its continuation: dim on a terminal."""
    return f"\x1b[2m{prompt}\x1b[22m" if prompt.strip() and sys.stdout.isatty() else prompt


class TextStream:
    """Turns the tokens of one sample into pieces of text: whole characters only, ending before a stop text.

    stop: texts that end the sample. ends: tokens that end the sample.

    Attributes:
        ended: whether a stop text or the end token has come.
    """

    def __init__(self, tokenizer, stop=(), ends=()):
        self.tokenizer, self.stop, self.ends = tokenizer, stop, ends
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.held = ""  # text that may be the beginning of a stop text
        self.ended = False

    def add(self, token):
        """Add a token; returns the text, often "", that no later token can change."""
        if token in self.ends:
            return self.finish()
        self.held += self.decoder.decode(self.tokenizer.decode_bytes([token]))
        found = [self.held.find(text) for text in self.stop if text in self.held]
        self.ended = bool(found)
        begun = [n for text in self.stop for n in range(1, len(text)) if self.held.endswith(text[:n])]
        cut = min(found, default=len(self.held) - max(begun, default=0))
        piece, self.held = self.held[:cut], self.held[cut:]
        return piece

    def finish(self):
        """The rest of the text, after the last token."""
        self.ended = True
        piece, self.held = self.held + self.decoder.decode(b"", final=True), ""
        return piece
