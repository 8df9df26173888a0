"""Tokenizers: what they make of a text and give back, what is stored of them, and what they refuse."""

import json
import time
from itertools import chain

import pytest
from helpers import rank_file
from hypothesis import given, settings
from hypothesis import strategies as st

from data import tokenizer
from data.tokenizer import END_OF_TEXT, end_of_text, from_state, make_tokenizer, to_state
from errors import UserError
from generation.text import encode_prompt_text

VERSE = "".join(f"ANNE:\nThe river bends at mile {mile}, and not before.\n\n" for mile in range(80))
ODD = "naïve 東京 🦉\r\n\ttabs  and   spaces\x00 <|endoftext|> 12345's\n\n\n"
SPECS = ["bytes", "char", "bpe:300"]
BYTES, BPE = make_tokenizer("bytes"), make_tokenizer("bpe:300", [VERSE])


def to_list(encoding):
    return [encoding.decode_single_token_bytes(index) for index in range(encoding.n_vocab)]


GPT2_CUT = tokenizer._encoding("cut", tokenizer.GPT2_PATTERN, to_list(BPE))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("text", ["", VERSE, ODD], ids=["empty", "verse", "odd"])
def test_tokenizer_round_trip(spec, text):
    made = make_tokenizer(spec, [VERSE, ODD])
    again = from_state(json.loads(json.dumps(to_state(made))))
    ids = made.encode_ordinary(text)
    assert made.decode(ids) == text and made.decode_bytes(ids) == text.encode()
    assert all(type(index) is int and 0 <= index < made.n_vocab for index in ids)
    assert again.encode_ordinary(text) == ids and again.decode(ids) == text
    assert (again.name, again.n_vocab) == (made.name, made.n_vocab) == (spec, made.n_vocab)


PIECES = ["word", "7", "\n", "\n\n", " ", "  ", "'s", "'", "!", "…", "é", "東", "½", "_", "\r\n", "\t", " a", "\u0301"]
PIECES += ["\u3000", "\xa0", "\x1c", "。", ",", "“"]


@given(st.lists(st.sampled_from(PIECES)), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_chunks_do_not_change_the_tokens(parts, size):
    text = "".join(parts)
    chunks = list(tokenizer.chunks(parts, size))
    assert "".join(chunks) == text
    for made in (BYTES, BPE, GPT2_CUT):
        assert list(chain(*map(made.encode_ordinary, chunks))) == made.encode_ordinary(text)


@pytest.mark.parametrize("text", ["ACGTTGCA" * 10**6, "\u3000\u3000飛“飛”。\n" * 10**6, "the sea " * 10**7], ids=len)
@pytest.mark.parametrize("anywhere", [False, True])
@pytest.mark.parametrize("piece", [1 << 19, 1 << 30])
def test_chunks_take_linear_time(text, anywhere, piece):
    began, pieces = time.process_time(), [text[i : i + piece] for i in range(0, len(text), piece)]
    found = list(tokenizer.chunks(pieces, anywhere=anywhere))
    assert time.process_time() - began < 2 and "".join(found) == text  # seconds; 0.8 here, and 3 or more if quadratic
    assert max(map(len, found)) < tokenizer.CHUNK + 10 or (text[0] == "A" and not anywhere)


def test_a_million_blanks():
    text = "sea" + " \t\u3000" * 333_400 + "sea"
    for made in (make_tokenizer("bpe:259", [text]), GPT2_CUT):
        ids = tokenizer.encode(made, text)
        assert made.decode(ids.tolist()) == text and encode_prompt_text(made, text) == ids.tolist()


def test_prompt_that_is_not_utf8():
    """Python turns such bytes of a command line into halves of surrogate pairs."""
    assert BYTES.decode(encode_prompt_text(BYTES, "Stra\udcdfe")) == "Stra\ufffde"
    with pytest.raises(UserError, match="no token for"):
        encode_prompt_text(make_tokenizer("char", ["Strae"]), "Stra\udcdfe")


def test_tokenizer_of_a_run(tmp_path):
    with pytest.raises(UserError, match=r"kestrel\.json does not exist; run:PATH"):
        make_tokenizer(f"run:{tmp_path}")
    (tmp_path / "kestrel.json").write_text(json.dumps({"tokenizer": to_state(BPE)}))
    for path in (tmp_path, tmp_path / "best.pt"):
        assert to_state(make_tokenizer(f"run:{path}")) == to_state(BPE)


def test_char_is_nanogpts():
    made = make_tokenizer("char", ["hello\n"])
    assert made.encode_ordinary("\nehlo") == [0, 1, 2, 3, 4] and end_of_text(made) is None
    with pytest.raises(UserError, match="no token for 'é'"):
        tokenizer.encode(made, "éhéé")
    assert end_of_text(make_tokenizer("char+eot", ["hello\n"])) == 5


def test_bpe_learns_the_same_from_the_same_text():
    assert to_state(make_tokenizer("bpe:300", [VERSE])) == to_state(BPE) != to_state(make_tokenizer("bpe:301", [VERSE]))
    assert make_tokenizer("bpe:5000", ["ab ab"]).n_vocab < 300  # the text has no more pairs


def test_gpt2(tmp_path, monkeypatch):
    spec = f"gpt2:{tmp_path / 'ranks'}"
    (tmp_path / "ranks").write_bytes(rank_file(monkeypatch, to_list(BPE)))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    made = from_state(to_state(make_tokenizer(spec)))
    assert (made.name, made.n_vocab, end_of_text(made)) == ("gpt2", 301, 300)
    assert made.decode(made.encode_ordinary(ODD)) == ODD and 300 not in made.encode_ordinary(END_OF_TEXT)
    (tmp_path / "other").write_bytes(b"eA== 0\n")
    with pytest.raises(UserError, match=r"r50k_base\.tiktoken and name it: .*gpt2:RANK_FILE"):
        make_tokenizer(f"gpt2:{tmp_path / 'other'}")
    monkeypatch.setattr(tokenizer, "GPT2_URL", "http://127.0.0.1:9/r50k_base.tiktoken")  # nobody listens there
    with pytest.raises(UserError, match=r"name it: .*gpt2:RANK_FILE") as error:
        make_tokenizer("gpt2")
    assert len(str(error.value)) < 200 and "HTTP" not in str(error.value)


@pytest.mark.parametrize("spec", ["", "bep:300", "bpe", "bpe:", "bpe:256", "bpe:-5", "gpt-2"])
def test_wrong_specifications(spec):
    with pytest.raises(UserError, match="bpe:N"):
        make_tokenizer(spec, [VERSE])
