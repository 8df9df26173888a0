"""Tokens -> batches. A batch is a function of (seed, step), so a resumed run needs only its step number.

A window is block_size + 1 consecutive tokens: block_size inputs, and the same shifted by one as targets.
"""

from functools import lru_cache, partial

import numpy as np
import torch


class Batches:
    """An endless sequence of training batches.

    Epoch e cuts the tokens into windows that start at phase + w * block_size. The phase and the order of the windows
    are drawn from (seed, e). The windows of all epochs form one sequence, and batch `step` has those from
    step * batch_size on, so a batch may contain the end of one epoch and the start of the next.

    Args:
        tokens: Tokens to train on.
        block_size: input tokens per window.
        batch_size: windows per step, over all devices; at least 1.
        seed: at least 0.

    Raises:
        ValueError: there are fewer than block_size + 1 tokens.
    """

    def __init__(self, tokens, block_size, batch_size, seed):
        _check_block_size(tokens, block_size)
        self.ids = tokens.ids
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed
        self.windows = max(1, (len(self.ids) - block_size) // block_size)  # per epoch
        # Every phase leaves room for all windows; a phase of block_size would be phase 0 again.
        self.phases = min(block_size, len(self.ids) - self.windows * block_size)
        # Every step asks again; a batch that crosses into the next epoch needs two.
        self._starts = lru_cache(maxsize=2)(self._draw_starts)

    def batch(self, step, rows=slice(None)):
        """Batch number `step`, or some of its rows.

        Args:
            step: at least 0.
            rows: slice of range(batch_size), for the share of one rank.

        Returns:
            (inputs, targets), each [rows, block_size] int64 on the CPU; targets[:, t] follows inputs[:, t].
        """
        places = self._places(step)[rows]
        return _gather(self.ids, [self._starts(epoch)[window] for epoch, window in places], self.block_size)

    def describe(self, step):
        """Which batch `step` is, in words."""
        epoch, window = self._places(step)[0]
        return f"batch {step} of seed {self.seed}: its first window is at token {self._starts(epoch)[window]}"

    def _places(self, step):
        """[(epoch, window)] of each row of a batch: the number of its epoch, and of its window in the epoch."""
        return [divmod(step * self.batch_size + row, self.windows) for row in range(self.batch_size)]

    def _draw_starts(self, epoch):
        """[windows] int64: the first token of each window of an epoch, in the order of training."""
        # Raw bits and a stable sort, because other versions of numpy may shuffle differently.
        draws = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(1 + self.windows)
        phase = int(draws[0] % np.uint64(self.phases))
        return phase + np.argsort(draws[1:], kind="stable") * self.block_size


def validation_batches(tokens, block_size, batch_size, max_batches=None):
    """Batches for evaluation, as functions that load them: the same windows every time, in order, without overlap.

    Args:
        tokens: Tokens to evaluate on.
        block_size, batch_size: input tokens per window, windows per batch.
        max_batches: at most this many batches, with windows spread evenly over the text; None takes all windows.

    Returns:
        list of functions; each returns (inputs, targets), [rows, block_size] int64 on the CPU. The last batch may have
        fewer rows than batch_size, so weight the mean loss of a batch by targets.numel().

    Raises:
        ValueError: there are fewer than block_size + 1 tokens.
    """
    _check_block_size(tokens, block_size)
    windows = (len(tokens) - 1) // block_size
    count = windows if max_batches is None else min(windows, max_batches * batch_size)
    starts = np.arange(count) * windows // count * block_size
    batches = (starts[i : i + batch_size] for i in range(0, count, batch_size))
    return [partial(_gather, tokens.ids, batch, block_size) for batch in batches]


def _gather(ids, starts, block_size):
    """(inputs, targets), each [len(starts), block_size] int64, of the windows at `starts`."""
    windows = np.lib.stride_tricks.sliding_window_view(ids, block_size + 1)[starts]
    return torch.from_numpy(windows[:, :-1].astype(np.int64)), torch.from_numpy(windows[:, 1:].astype(np.int64))


def _check_block_size(tokens, block_size):
    if block_size >= len(tokens):
        raise ValueError(f"block_size={block_size} must be below {len(tokens)}, the tokens in a part of the text")
