"""Batches: which windows of a text are in the batch of a step."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import loader
from data.loader import Batches, validation_batches
from data.shards import Tokens


def make_tokens(count):
    """Tokens whose ids are their positions, so that a window shows where it was cut. They span three shards."""
    ids = np.arange(count, dtype=np.uint32)
    return Tokens(tuple(np.split(ids, [count // 3, count // 3 + 1])), documents=1, text_bytes=count)


def starts_of(batches, steps):
    return torch.cat([batches.batch(step)[0][:, 0] for step in steps]).tolist()


@given(st.integers(2, 300), st.integers(1, 40), st.integers(1, 9), st.integers(0, 3), st.sampled_from([1, 4, 7, 1000]))
@settings(max_examples=100, deadline=None)
def test_epochs_cover_every_window_once(count, block, size, seed, group):
    block = min(block, count - 1)
    batches = Batches(make_tokens(count), block, size, seed)
    windows = max(1, (count - block) // block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "GROUP", group)
        starts = starts_of(batches, range(-(-3 * windows // size)))
    for epoch in range(3):
        found = sorted(starts[epoch * windows : (epoch + 1) * windows])
        phase = found[0]
        assert found == [phase + window * block for window in range(windows)]
        assert 0 <= phase < block and found[-1] + block < count


def test_a_group_is_spread_over_the_text(monkeypatch):
    monkeypatch.setattr(loader, "GROUP", 10)
    batches = Batches(make_tokens(1001), 10, 10, seed=0)  # 99 windows in 10 groups
    groups = [starts_of(batches, [step]) for step in range(9)]
    for group in groups:
        assert max(np.diff(sorted(group))) == 100 and group != sorted(group)
    assert len({tuple(np.argsort(group)) for group in groups}) > 5  # each in an order of its own


def test_batches_are_a_function_of_seed_and_step():
    data = make_tokens(997)
    forward = [Batches(data, 10, 7, seed=5).batch(step)[0] for step in range(60)]
    jumping = Batches(data, 10, 7, seed=5)
    for step in (59, 0, 30, 31, 29, 0, 14, 13):
        assert torch.equal(jumping.batch(step)[0], forward[step])
    assert not torch.equal(Batches(data, 10, 7, seed=6).batch(0)[0], forward[0])
    first, second = starts_of(jumping, range(14)), starts_of(jumping, range(14, 28))
    assert first != second and first != sorted(first)  # shuffled, and anew in each epoch


def test_batches_never_change():
    """A resumed run must get the same batches, even with another version of numpy."""
    first, second = [43, 19, 83, 27, 75, 67, 11, 59, 51, 35, 3], [85, 5, 21, 13, 77, 53, 61, 29, 37, 69, 45]
    batches = Batches(make_tokens(100), 8, 11, seed=7)
    assert starts_of(batches, [0, 1]) == first + second
    assert batches.describe(1) == "batch 1 of seed 7: its first window is at token 85"


@pytest.mark.parametrize("count, size", [(1000, 8), (100, 7), (30, 64)], ids=["within", "across", "many"])
def test_sequences_of_ranks_are_those_of_the_whole_batch(count, size):
    batches = Batches(make_tokens(count), 10, size, seed=1)
    for step in range(5):
        inputs, targets = batches.batch(step)
        assert torch.equal(targets, inputs + 1) and torch.equal(inputs, inputs[:, :1] + torch.arange(10))
        ranks = [batches.batch(step, sequences) for sequences in (slice(0, 2), slice(2, 3), slice(3, None))]
        for whole, *pieces in zip((inputs, targets), *ranks, strict=True):
            assert torch.equal(torch.cat(pieces), whole)


def test_block_size_that_does_not_fit():
    Batches(make_tokens(9), 8, 2, seed=0).batch(0)
    with pytest.raises(ValueError, match=r"has 9 tokens, .* block_size=9"):
        Batches(make_tokens(9), 9, 2, 0)


def test_validation_batches_cover_the_text_in_order():
    batches = validation_batches(make_tokens(105), 10, 4)
    for _ in range(2):  # every evaluation reads them again
        inputs, targets = zip(*(load() for load in batches), strict=True)
        assert [len(sequences) for sequences in inputs] == [4, 4, 2]
        assert torch.equal(torch.cat(inputs).flatten(), torch.arange(100))
        assert torch.equal(torch.cat(targets), torch.cat(inputs) + 1)
    few = validation_batches(make_tokens(1001), 10, 4, max_batches=5)
    assert torch.cat([load()[0][:, 0] for load in few]).tolist() == list(range(0, 1000, 50))  # spread over the text
    assert len(validation_batches(make_tokens(1001), 10, 4, max_batches=99)) == 25
