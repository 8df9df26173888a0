"""Conversations -> windows: each holds whole conversations and begins with one."""

import numpy as np

from errors import require


class Windows:
    """The conversations of a split in windows of block_size + 1 tokens, which best fit fills and padding completes.

    Window w is windows([w * block_size], block_size + 1), as of a text. A conversation that is too long ends after its
    last answer that fits; it is left out if none does.

    Attributes:
        count: number of windows. cut: number of conversations that were too long.
    """

    def __init__(self, tokens, block_size):
        self.tokens, self.block_size, self.turns = tokens, block_size, tokens.turns
        starts, _, ends = tokens.answers.T
        fits = ends - starts <= block_size
        self.starts, number = np.unique(starts[fits], return_inverse=True)
        self.lengths = np.zeros(len(self.starts), np.int64)  # without the end-of-text token
        np.maximum.at(self.lengths, number, (ends - starts)[fits])
        self.cut = len(np.unique(starts[~fits]))
        self.bins = best_fit(self.lengths + 1, block_size + 1)
        self.count = len(self.bins)
        rule = f"no answer of a split ends within block_size={block_size} tokens"
        require(self.bins, f"{rule}; give a larger one, or shorter conversations")

    def __len__(self):
        return self.count * self.block_size + 1

    def windows(self, starts, length):
        """[len(starts), length] array of ids, for starts that are multiples of block_size."""
        _, padding, end_of_text = self.turns
        rows = np.full((len(starts), length), padding, self.tokens.shards[0].dtype)
        for row, start in zip(rows, starts, strict=True):
            at = 0
            for index in self.bins[start // self.block_size]:
                count = self.lengths[index]
                row[at : at + count] = self.tokens.windows(self.starts[index : index + 1], count)[0]
                row[at + count] = end_of_text
                at += count + 1
        return rows


def best_fit(sizes, room):
    """Put each index, from the largest size on, into the bin with the least room that is enough; returns the bins."""
    bins, by_room, rooms = [], [[] for _ in range(room + 1)], 0  # bit n of rooms: by_room[n] has a bin
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        if enough := rooms >> size:
            left = size + (enough & -enough).bit_length() - 1
            number = by_room[left].pop()
            rooms ^= 0 if by_room[left] else 1 << left
        else:
            left, number = room, len(bins)
            bins.append([])
        bins[number].append(index)
        by_room[left - size].append(number)
        rooms |= 1 << left - size
    return bins
