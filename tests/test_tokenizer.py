"""Tokenizers: what they make of a text and give back, what is stored of them, and what they refuse."""

import json
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import tokenizer
from data.tokenizer import from_state, make_tokenizer, to_state

VERSE = "".join(f"ANNE:\nThe river bends at mile {mile}, and not before.\n\n" for mile in range(80))
ODD = "naïve 東京 🦉\r\n\ttabs  and   spaces\x00 <|endoftext|> 12345's\n\n\n"
SPECS = ["bytes", "char", "bpe:300"]


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
    assert to_state(again) == to_state(made)


BYTES, BPE = make_tokenizer("bytes"), make_tokenizer("bpe:300", [VERSE])


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_any_text_round_trips(text):
    assert BYTES.encode_ordinary(text) == list(text.encode())
    for made in (BYTES, BPE):
        assert made.decode(made.encode_ordinary(text)) == text


@given(st.lists(st.integers(0, 255)))
@settings(max_examples=100, deadline=None)
def test_any_bytes_decode(ids):
    """A model may sample ids whose bytes together are not UTF-8."""
    assert BYTES.decode_bytes(ids) == bytes(ids)
    assert BPE.decode_bytes(ids) == b"".join(BPE.decode_single_token_bytes(index) for index in ids)
    assert isinstance(BPE.decode(ids), str)


PIECES = ["word", "7", "\n", "\n\n", " ", "  ", "'s", "'", "!", "…", "é", "東", "½", "_", "\r\n", "\t", " a", "\u0301"]


@given(st.lists(st.sampled_from(PIECES)), st.integers(1, 9))
@settings(max_examples=500, deadline=None)
def test_chunks_do_not_change_the_tokens(parts, size):
    text = "".join(parts)
    chunks = list(tokenizer.chunks(parts, size))
    assert "".join(chunks) == text
    gpt2_cut = tokenizer._encoding("cut", tokenizer.GPT2_PATTERN, to_list(BPE))
    for made in (BYTES, BPE, gpt2_cut):
        assert list(chain(*map(made.encode_ordinary, chunks))) == made.encode_ordinary(text)


def to_list(encoding):
    return [encoding.decode_single_token_bytes(index) for index in range(encoding.n_vocab)]


def test_state_travels_in_a_checkpoint(tmp_path):
    for spec in SPECS:
        made = make_tokenizer(spec, [VERSE])
        torch.save({"tokenizer": to_state(made)}, tmp_path / "checkpoint.pt")
        loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["tokenizer"]
        assert from_state(loaded).n_vocab == made.n_vocab and to_state(from_state(loaded)) == to_state(made)


def test_states_differ():
    texts = [("bytes", VERSE), ("char", VERSE), ("char", VERSE + "é"), ("bpe:300", VERSE), ("bpe:301", VERSE)]
    assert len({json.dumps(to_state(make_tokenizer(spec, [text]))) for spec, text in texts}) == len(texts)
    assert to_state(make_tokenizer("bpe:300", [VERSE])) == to_state(BPE)


def test_char_order_is_nanogpts():
    assert make_tokenizer("char", ["hello\n"]).encode_ordinary("\nehlo") == [0, 1, 2, 3, 4]


def test_char_names_an_unknown_character():
    with pytest.raises(ValueError, match="no token for 'é'"):
        make_tokenizer("char", ["helo"]).encode_ordinary("éhéé")


def test_bpe_says_when_the_text_is_used_up(capsys):
    assert make_tokenizer("bpe:5000", ["ab ab"]).n_vocab < 300
    assert "bpe:5000: the training text has pairs for only" in capsys.readouterr().err


@pytest.mark.parametrize("spec", ["", "bep:300", "bpe", "bpe:", "bpe:256", "bpe:-5", "gpt-2"])
def test_wrong_specifications(spec):
    with pytest.raises(ValueError, match="bpe:N"):
        make_tokenizer(spec, [VERSE])
