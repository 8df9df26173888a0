"""Tokens -> batches. A batch is a function of (seed, step), so a resumed run needs only its step number.

A window is block_size + 1 consecutive tokens: block_size inputs, and the same shifted by one as targets.
"""

from collections import deque
from functools import lru_cache, partial

import numpy as np
import torch

from data.chat import Windows, is_answer
from errors import require

GROUP = 1 << 16  # windows shuffled together; their order takes half a megabyte


class Batches:
    """An endless sequence of training batches. batch_size: windows per step, over all devices.

    Epoch e cuts the tokens into windows that start at phase + w * block_size. Windows w with the same remainder modulo
    the number of groups form a group, so that each group is spread over the whole text. The windows of a group are
    shuffled. Groups follow each other, and so do epochs. The phase is drawn from (seed, e), the order from (seed, e,
    group). Batch `step` starts at window step * batch_size, so it may contain the end of one epoch and the start of the
    next. The windows of conversations are those of data.chat, and their only phase is 0.
    """

    def __init__(self, tokens, block_size, batch_size, seed):
        tokens = self.tokens = windowed(tokens, block_size)
        if not tokens.turns:
            rule = f"{tokens.about} has {len(tokens)} tokens, too few for block_size={block_size}"
            require(block_size < len(tokens), f"{rule}; give more text, or a smaller --block_size")
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed
        self.windows_per_epoch = tokens.count if tokens.turns else max(1, (len(tokens) - block_size) // block_size)
        # Every phase leaves room for all windows; a phase of block_size would be phase 0 again.
        self.phases = min(block_size, len(tokens) - self.windows_per_epoch * block_size)
        # Every step asks again; a batch that crosses into the next group needs two.
        self._order = lru_cache(maxsize=2)(self._draw_order)

    def batch(self, step, sequences=slice(None)):
        """Batch number `step`, or the sequences of one rank, a slice of range(batch_size).

        Returns:
            (inputs, targets), each [sequences, block_size] int64 on the CPU; targets[:, t] follows inputs[:, t], or is
            -100 if it belongs to no answer in a conversation.
        """
        numbers = range(step * self.batch_size, (step + 1) * self.batch_size)
        starts = [self._start(number) for number in numbers[sequences]]
        return _load(self.tokens, np.array(starts), self.block_size)

    def counted(self, step):
        """Number of targets of a whole batch that are not -100."""
        return int((self.batch(step)[1] >= 0).sum()) if self.tokens.turns else self.batch_size * self.block_size

    def describe(self, step):
        """Which batch `step` is, in words."""
        start = self._start(step * self.batch_size)
        return f"batch {step} of seed {self.seed}: its first window is at token {start}"

    def _start(self, number):
        """Position of the first token of a window. number: of the window, counted from the first epoch on."""
        epoch, position = divmod(number, self.windows_per_epoch)
        groups = -(-self.windows_per_epoch // GROUP)
        size, larger = divmod(self.windows_per_epoch, groups)  # the first `larger` groups have a window more
        group, index = divmod(position, size + 1)
        if group >= larger:
            group, index = divmod(position - larger, size)
        phase, order = self._order(epoch, group, size + (group < larger))
        return phase + (int(order[index]) * groups + group) * self.block_size

    def _draw_order(self, epoch, group, size):
        """(phase of the epoch, order [size] of the group's windows)."""
        # Raw bits and a stable sort, because other versions of numpy may shuffle differently.
        phase, *_ = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(1)
        draws = np.random.PCG64(np.random.SeedSequence([self.seed, epoch, group])).random_raw(1 + size)
        order = np.argsort(draws[1:], kind="stable")  # with the first draw, the batches of older runs would change
        return int(phase % np.uint64(self.phases)), order


def validation_batches(tokens, block_size, batch_size, max_batches=None):
    """Batches for evaluation: the same windows every time, in order, without overlap. A shorter text is one window.

    max_batches: at most this many batches, with windows spread evenly over the text; None takes all windows.

    Returns:
        list of functions; each returns (inputs, targets), [sequences, block_size] int64 on the CPU. The last batch may
        have fewer sequences than batch_size, so weight the mean loss of a batch by the targets that are not -100.
    """
    tokens = windowed(tokens, block_size)
    block_size = min(block_size, len(tokens) - 1)
    available = (len(tokens) - 1) // block_size  # windows
    count = available if max_batches is None else min(available, max_batches * batch_size)
    starts = np.arange(count) * available // count * block_size
    return [partial(_load, tokens, starts[i : i + batch_size], block_size) for i in range(0, count, batch_size)]


def _load(tokens, starts, block_size):
    """(inputs, targets), each [len(starts), block_size] int64, of the windows at `starts`."""
    windows = tokens.windows(starts, block_size + 1)
    inputs, targets = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
    if tokens.turns:
        targets[~is_answer(windows, *tokens.turns[:2])] = -100
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def map_ahead(pool, function, items, count):
    """Yield (item, function(item)) in order, while threads of `pool` compute up to `count` of them ahead."""
    waiting = deque()
    for item in items:
        waiting.append((item, pool.submit(function, item)))
        if len(waiting) > count:
            item, future = waiting.popleft()
            yield item, future.result()
    for item, future in waiting:
        yield item, future.result()


def windowed(tokens, block_size):
    """The tokens, of conversations as data.chat.Windows."""
    return Windows(tokens, block_size) if tokens.turns and not isinstance(tokens, Windows) else tokens
