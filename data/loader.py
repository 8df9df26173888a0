"""Tokens -> batches: a pure function of (seed, step), so that a resumed run needs only its step number.

A window is block_size + 1 consecutive tokens: block_size inputs, and the same shifted by one as targets.
Batches are int64 CPU tensors [rows, block_size].
"""

from collections.abc import Sequence

import numpy as np
import torch


class Batches:
    """Training batches without end.

    Epoch e cuts the tokens into windows that begin at phase + w * block_size. The phase and the order of the
    windows are drawn from (seed, e). Batch `step` is the windows number step * batch_size and following of
    the sequence of all epochs, so a batch may end one epoch and begin the next.

    Args:
        tokens: Tokens to train on.
        block_size: tokens of input per window.
        batch_size: windows per step, of all devices together.
        seed: >= 0.

    Raises:
        ValueError: fewer than block_size + 1 tokens, or a negative seed.
    """

    def __init__(self, tokens, block_size, batch_size, seed):
        check_block_size(tokens, block_size)
        if batch_size < 1 or seed < 0:
            raise ValueError(f"batch_size={batch_size} must be at least 1 and seed={seed} at least 0")
        self.ids = tokens.ids
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed
        self.windows = max(1, (len(self.ids) - block_size) // block_size)  # per epoch
        # Every phase leaves room for all windows; a phase of block_size would be phase 0 again.
        self.phases = min(block_size, len(self.ids) - self.windows * block_size)
        self._epochs = {}

    def batch(self, step, rows=slice(None)):
        """Batch number `step`, or some rows of it.

        Args:
            step: >= 0.
            rows: slice of range(batch_size), for the share of a device or of a micro-batch.

        Returns:
            (inputs, targets), each [rows, block_size] int64; targets[:, t] is the token after inputs[:, t].
        """
        epochs, windows = self._place(step, rows)
        starts = np.empty(len(windows), dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            starts[chosen] = self._epoch(int(epoch))[windows[chosen]]
        return gather(self.ids, starts, self.block_size)

    def describe(self, step):
        """Which tokens batch `step` holds, for people."""
        epochs, windows = self._place(step, slice(None))
        start = self._epoch(int(epochs[0]))[windows[0]]
        return (
            f"batch {step} of seed {self.seed}: windows {windows[0]} of epoch {epochs[0]} to {windows[-1]} of epoch "
            f"{epochs[-1]}, the first at token {start}"
        )

    def _place(self, step, rows):
        """(epochs, windows), each [rows]: where the windows of a batch are in the sequence of all epochs."""
        return np.divmod(step * self.batch_size + np.arange(self.batch_size)[rows], self.windows)

    def _epoch(self, epoch):
        """[windows] int64: where the windows of an epoch start, in their order."""
        order = self._epochs.get(epoch)
        if order is None:
            # Raw bits and a stable sort: numpy may change what Generator.permutation draws, but not these.
            draws = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(1 + self.windows)
            phase = int(draws[0] % np.uint64(self.phases))
            order = phase + np.argsort(draws[1:], kind="stable") * self.block_size
            # Two, which a batch across two epochs needs for each of its micro-batches; a new dict, for other threads.
            self._epochs = dict(list(self._epochs.items())[-1:]) | {epoch: order}
        return order


class WindowBatches(Sequence):
    """Batches of given windows in order, as often as one likes; the last one may have fewer rows.

    Args:
        ids: [count] tokens.
        starts: [windows] int64, where each window starts.
        block_size, batch_size: tokens of input per window, windows per batch.
    """

    def __init__(self, ids, starts, block_size, batch_size):
        self.ids, self.starts, self.block_size, self.batch_size = ids, starts, block_size, batch_size

    def __len__(self):
        return -(-len(self.starts) // self.batch_size)

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        first = index * self.batch_size
        return gather(self.ids, self.starts[first : first + self.batch_size], self.block_size)


def validation_batches(tokens, block_size, batch_size, max_batches=None):
    """The same windows at every evaluation: side by side, in order, without overlap.

    Args:
        tokens: Tokens to evaluate on.
        block_size, batch_size: tokens of input per window, windows per batch.
        max_batches: take at most so many batches, of windows spread evenly over the text; None takes all
            windows, which is all of the text but an end shorter than block_size.

    Returns:
        Sequence of (inputs, targets), each [rows, block_size] int64. The last batch may have fewer rows than
        batch_size, so weigh each mean by targets.numel().

    Raises:
        ValueError: fewer than block_size + 1 tokens.
    """
    check_block_size(tokens, block_size)
    windows = (len(tokens) - 1) // block_size
    wanted = windows if max_batches is None else min(windows, max_batches * batch_size)
    starts = np.arange(wanted) * windows // wanted * block_size
    return WindowBatches(tokens.ids, starts, block_size, batch_size)


def gather(ids, starts, block_size):
    """(inputs, targets), each [len(starts), block_size] int64, of the windows at `starts`."""
    windows = ids.windows(starts, block_size + 1).astype(np.int64)
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


def check_block_size(tokens, block_size):
    """Raise ValueError unless `tokens` hold at least one window."""
    if not 1 <= block_size < len(tokens.ids):
        raise ValueError(
            f"block_size={block_size} must be from 1 to {len(tokens.ids) - 1}, because a part of the corpus "
            f"has only {len(tokens.ids)} tokens; choose a smaller block_size or a longer text"
        )
