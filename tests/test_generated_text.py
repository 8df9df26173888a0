"""From prompts to tokens, and from tokens to pieces of text."""

import pytest
from test_generation import BYTES, ENDED

from data import make_tokenizer
from data.tokenizer import end_of_text
from generation.text import TextStream, encode


@pytest.mark.parametrize("spec", ["bytes", "char"])
def test_streamed_text_has_whole_characters(spec):
    text = "naïve 🌊 waves"
    tokenizer = make_tokenizer(spec, text)
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer.encode_ordinary(text)] + [stream.finish()]
    assert "".join(pieces) == text and len([piece for piece in pieces if piece]) == len(text)


@pytest.mark.parametrize(
    "stop, expected",
    [
        ([], "to be or END not"),
        (["END"], "to be or "),
        (["ENDS"], "to be or END not"),
        (["ND", "or E", "zz"], "to be "),
        (["not"], "to be or END "),
        (["notable"], "to be or END not"),
    ],
)
def test_a_sample_ends_before_a_stop_text(stop, expected):
    stream, pieces = TextStream(BYTES, stop), []
    for token in BYTES.encode_ordinary("to be or END not"):
        if not stream.ended:
            pieces.append(stream.add(token))
    pieces.append("" if stream.ended else stream.finish())
    assert "".join(pieces) == expected


def test_the_end_of_text_in_prompts():
    assert end_of_text(BYTES) is None and end_of_text(ENDED) == 256
    assert encode(ENDED, "ab<|endoftext|>c<|endoftext|>") == [97, 98, 256, 99, 256] and encode(ENDED, "") == []
    assert encode(BYTES, "<|endoftext|>") == list(b"<|endoftext|>")
    assert encode(make_tokenizer("char", "ab"), "ba") == [1, 0]
