"""The kernels never visit tiles that are fully hidden. This observes the kernels, not a copy of their formulas."""

import itertools
from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
from problems import ON_GPU, kernels, make_problem, results

from attention import table
from attention.launcher import Launcher
from attention.portable import backward, dkdv, forward

# Multiples of all tile sizes: those of the GPU tables, or those of the interpreter.
BLOCK_Q, BLOCK_K = (128, 128) if ON_GPU else (table.INTERPRETER.block_q, table.INTERPRETER.block_k)
LONG = 3 * BLOCK_Q + 7

CASES = {
    "causal": {},
    "full": dict(causal=False, k_len=LONG // 2),
    "more_queries": dict(k_len=LONG // 2),
    "window": dict(window=BLOCK_Q + 2 * BLOCK_K),
    "window_of_one": dict(window=1),
    "window_full": dict(window=BLOCK_K // 2 + 3, causal=False, k_len=LONG + 9),
    "window_more_keys": dict(window=BLOCK_K, q_len=LONG // 2, k_len=LONG),
    "lengths": dict(lengths=[LONG - BLOCK_K - 5, 0], batch=2),
    "lengths_window_full": dict(lengths=[LONG - 5, 3], batch=2, window=BLOCK_Q + 2 * BLOCK_K, causal=False),
    "prefix": dict(prefix_lengths=[BLOCK_K + 5, 2 * BLOCK_K], batch=2, k_len=LONG + 9),
    "prefix_bias": dict(prefix_lengths=[LONG, BLOCK_K], lengths=[LONG - BLOCK_K - 5, 9], batch=2, bias=(LONG, LONG)),
    "packed": dict(packed=[0, LONG - BLOCK_Q - 3, LONG - BLOCK_Q - 3, LONG - 3]),
    "packed_pair_window": dict(
        packed=([0, LONG - BLOCK_Q, LONG], [0, LONG, LONG + BLOCK_K + 1]), k_len=LONG + 2 * BLOCK_K, window=BLOCK_Q
    ),
    "grouped": dict(heads=2, kv_heads=1, q_len=LONG // 2, k_len=8 * BLOCK_K, window=BLOCK_K + 3),
    "bias": dict(bias=(LONG // 2, LONG), q_len=LONG // 2, k_len=LONG, window=BLOCK_K + 3),
    "bias_of_keys": dict(bias=(LONG // 2,), q_len=LONG // 2, window=BLOCK_K + 3),
}


class Bounds(NamedTuple):
    """Where a sequence lies, and which keys its queries see: [queries, keys], by the definition of the mask."""

    row: int
    q_start: int
    k_start: int
    sees: torch.Tensor


def make_case(case, device, dtype=torch.float32, **sizes):
    problem = make_problem(device, dtype, **dict(q_len=LONG, batch=1, heads=1) | CASES[case], **sizes)
    arguments = problem[0]
    (batch, q_len), k_len = arguments["q"].shape[:2], arguments["k"].shape[1]
    causal, window = arguments.get("causal", True), arguments.get("window") or 2**30
    places = [(row, 0, 0, q_len, k_len) for row in range(batch)]
    if "lengths" in arguments:
        cut = [k_len - length for length in arguments["lengths"].tolist()]
        places = [(row, 0, 0, max(q_len - n, 0), k_len - n) for row, n in enumerate(cut)]
    if "cu_seqlens" in arguments:
        starts = arguments["cu_seqlens"]
        q_starts, k_starts = (x.tolist() for x in (starts if isinstance(starts, tuple) else (starts, starts)))
        pairs = zip(itertools.pairwise(q_starts), itertools.pairwise(k_starts), strict=True)
        places = [(0, a, c, b - a, d - c) for (a, b), (c, d) in pairs]
    sequences = []
    for row, q_start, k_start, queries, keys in places:
        distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
        sees = (distance < window) & (distance >= 0 if causal else distance > -window)
        if "prefix_lengths" in arguments:
            sees |= torch.arange(keys) < arguments["prefix_lengths"][row].item()
        sequences.append(Bounds(row, q_start, k_start, sees))
    return problem, sequences


@pytest.mark.skipif(ON_GPU, reason="only the interpreter can record the tiles that a kernel visits")
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_visited_tiles(case, dtype, device, monkeypatch):
    """Each kernel visits every visible pair once, masks tiles that are partly hidden and visits no fully hidden one."""
    visits, running = defaultdict(list), []

    def start(self, *args):
        outputs = [x for x in self.constants if isinstance(x, str)]
        running.append(" ".join([self.kernel.fn.__name__.removesuffix("_kernel"), *outputs]))
        original_start(self, *args)

    def shape_scores(qk, q_pos, k_pos, head, seq, terms, rule, masked):
        sequence, head_number = (int(x.handle.data.item()) for x in (seq.index, head))
        q_index = q_pos - (seq.k_len - seq.q_len)
        positions = [torch.tensor(x.handle.data.flatten()) for x in (q_index, k_pos)]
        visits[running[-1]].append((sequence, head_number, *positions, bool(masked)))
        return original_scores(qk, q_pos, k_pos, head, seq, terms, rule, masked)

    original_start, original_scores = Launcher.start, forward.shape_scores
    monkeypatch.setattr(Launcher, "start", start)
    for module in (forward, backward, dkdv):
        monkeypatch.setattr(module, "shape_scores", shape_scores)
    problem, sequences = make_case(case, device, dtype=dtype)
    results(kernels, problem, dtype)

    backwards = {"dq both"} if dtype == torch.float16 else {"dq delta", "dq dq"}
    assert set(visits) == {"forward", "dkdv dkdv", *backwards} | ({"dbias"} if "bias" in case else set())
    for kernel, found in visits.items():
        counts = [torch.zeros(problem[0]["q"].shape[2], *x.sees.shape, dtype=torch.int32) for x in sequences]
        for sequence, head, q_index, k_index, masked in found:
            sees = sequences[sequence].sees
            rows = q_index[(q_index >= 0) & (q_index < len(sees))]
            keys = k_index[k_index < sees.shape[1]]
            tile = sees[rows][:, keys]
            where = f"{kernel}: queries from {int(q_index[0])}, keys from {int(k_index[0])} of sequence {sequence}"
            assert tile.any(), f"{where} are fully hidden"
            assert masked or tile.all(), f"{where} are partly hidden, but not masked"
            counts[sequence][head, rows[:, None], keys] += 1
        for count, bounds in zip(counts, sequences, strict=True):
            assert (count[:, bounds.sees] == 1).all(), f"{kernel} skips a visible pair or visits it twice"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN
@pytest.mark.parametrize("dim", [16, 32])  # the interpreter loads these by TMA and through pointers
@pytest.mark.parametrize("case", ["causal", "window_full", "lengths", "packed_pair_window"])
def test_nan_in_tiles_that_a_tile_does_not_see(case, dim, device):
    """NaN in tiles of keys that are hidden from a tile of queries does not change the output or dq of that tile.

    Nor does NaN in tiles of queries change dk and dv of a tile of keys that is hidden from them. Visits to keys before
    the visible ones would go unnoticed, since load_tile() then reads the first visible ones.
    """
    (arguments, dout, dlse), sequences = make_case(case, device, dim=dim)
    clean = results(kernels, (arguments, dout, dlse), torch.float32)
    row, q_start, k_start, sees = max(sequences, key=lambda bounds: bounds.sees.numel())

    def tile_of(position, length, block):
        start = position // block * block
        return slice(start, min(start + block, length))

    def spoil(x, seen, start, block):
        """Put NaN outside the tiles that contain a visible position, for a sequence that begins at `start`."""
        hidden = torch.ones(x.shape[:2], dtype=torch.bool)
        for at in range(0, len(seen), block):
            hidden[row, start + at : start + min(at + block, len(seen))] = not seen[at : at + block].any()
        assert hidden.any() and not hidden.all()
        return x.masked_fill(hidden[..., None, None].to(device), float("nan"))

    def same(names, start, tile):
        tile = slice(start + tile.start, start + tile.stop)
        assert all(torch.equal(found[name][row, tile], clean[name][row, tile]) for name in names)

    count = len(sees)
    tile = tile_of(count // 2, count, BLOCK_Q)
    k, v = (spoil(arguments[name], sees[tile].any(0), k_start, BLOCK_K) for name in ("k", "v"))
    found = results(kernels, (arguments | dict(k=k, v=v), dout, dlse), torch.float32)
    same(("out", "dq"), q_start, tile)

    count = sees.shape[1]
    tile = tile_of(2 * count // 3, count, BLOCK_K)
    q, dout = (spoil(x, sees[:, tile].any(1), q_start, BLOCK_Q) for x in (arguments["q"], dout))
    found = results(kernels, (arguments | dict(q=q), dout, dlse), torch.float32)
    same(("dk", "dv"), k_start, tile)
