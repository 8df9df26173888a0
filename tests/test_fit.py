"""--micro_batch auto: the search on a real network, with a limit in the place of a GPU's memory."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from fit import choose_micro_batch, fits, largest, largest_micro_batch
from model import GPT, GPTConfig

DIVISORS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]


@pytest.fixture
def network(monkeypatch):
    """A network that can take no more than 8 sequences at a time."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    network = GPT(GPTConfig(vocab_size=8, n_layer=1, n_head=1, n_embd=8, block_size=8, attention="sdpa"))

    def limit(module, inputs):
        if len(inputs[0]) > 8:
            raise torch.OutOfMemoryError("8 sequences at most")

    network.blocks[0].register_forward_pre_hook(limit)
    return network


def test_largest_that_fits_and_nothing_stays_of_the_trials(network):
    before = {name: value.clone() for name, value in network.state_dict().items()}
    tried = []

    def good(rows):
        tried.append(rows)
        return fits(network, rows, nullcontext(), copies=3)

    assert largest(DIVISORS, good) == 8 and len(tried) <= 4
    assert all(parameter.grad is None for parameter in network.parameters())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_every_limit():
    for limit in DIVISORS:
        assert largest(DIVISORS, lambda rows, limit=limit: rows <= limit) == limit
    with pytest.raises(ValueError, match="not even a micro-batch of 1 fits the GPU's memory; take a smaller"):
        largest(DIVISORS, lambda rows: False)


def test_other_errors_are_not_taken_for_a_lack_of_memory(network):
    network.blocks[0].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        fits(network, 2, nullcontext(), copies=2)


def test_on_a_cpu_it_divides_the_share_without_a_trial(network):
    assert [largest_micro_batch(network, share, nullcontext(), 1, False) for share in (8, 48, 60, 37)] == [8, 24, 30, 1]


def test_a_resumed_run_keeps_what_it_found():
    config = SimpleNamespace(micro_batch="auto", dropout=0.0, resume="runs/run")
    assert choose_micro_batch(config, 48, None, lambda: 16) == 16
    assert choose_micro_batch(config, 48, 12, lambda: 16) == 12
    assert choose_micro_batch(config, 20, 12, lambda: 10) == 10  # another number of processes
    config.dropout = 0.1
    with pytest.raises(ValueError, match=r"micro-batches of 12, which 20 sequences .* --micro_batch 20 --allow_ch"):
        choose_micro_batch(config, 20, 12, lambda: 10)
    config.micro_batch = 4
    assert choose_micro_batch(config, 20, 12, lambda: 10) == 4
