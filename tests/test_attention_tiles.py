"""Kernels read no tile that is fully hidden, mask those that are partly hidden, and stay inside of their row."""

import itertools
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from problems import ON_GPU, check, identical, integers, kernels, make_problem, reference, results

from attention import attention, table
from attention.portable import distance
from attention.score import Rule
from attention.tiles import Tile, query_tile

# Multiples of all tile sizes: those of the GPU tables, or those of the interpreter.
BLOCK_Q, BLOCK_K = (128, 128) if ON_GPU else (table.INTERPRETER.block_q, table.INTERPRETER.block_k)
LONG = 3 * BLOCK_Q + 7
close = partial(torch.testing.assert_close, rtol=1e-2 if ON_GPU else 1e-4, atol=1e-2 if ON_GPU else 1e-5)

CASES = {
    "causal": {},
    "more_queries": dict(k_len=LONG // 2),
    "window": dict(window=BLOCK_Q + 2 * BLOCK_K),
    "window_of_one": dict(window=1),
    "window_full": dict(window=BLOCK_K // 2 + 3, causal=False, k_len=LONG + 9),
    "window_more_keys": dict(window=BLOCK_K, k_len=2 * LONG),
    "lengths": dict(lengths=[LONG - BLOCK_K - 5, 0], batch=2),
    "lengths_window_full": dict(lengths=[LONG - 5, 3], batch=2, window=BLOCK_Q + 2 * BLOCK_K, causal=False),
    "prefix": dict(prefix_lengths=[BLOCK_K + 5, 2 * BLOCK_K], batch=2, k_len=LONG + 9),
    "prefix_bias": dict(prefix_lengths=[LONG, BLOCK_K], lengths=[LONG - BLOCK_K - 5, 9], batch=2, bias=(LONG, LONG)),
    "packed": dict(packed=[0, LONG - BLOCK_Q - 3, LONG - BLOCK_Q - 3, LONG - 3]),
    "packed_pair_window": dict(
        packed=([0, LONG - BLOCK_Q, LONG], [0, LONG, LONG + BLOCK_K + 1]), k_len=LONG + 2 * BLOCK_K, window=BLOCK_Q
    ),
    "grouped": dict(heads=2, kv_heads=1, k_len=8 * BLOCK_K, window=BLOCK_K + 3),
    "bias": dict(bias=(LONG, LONG), window=BLOCK_K + 3),
}


def make_case(case, device, **sizes):
    """A problem and its largest sequence: row, places of its first query and key, and [queries, keys] which it sees."""
    problem = make_problem(device, torch.float32, **dict(q_len=LONG, batch=1, heads=1) | CASES[case], **sizes)
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
        sequences.append((row, q_start, k_start, sees))
    return problem, max(sequences, key=lambda sequence: sequence[-1].numel())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN
@pytest.mark.parametrize("dim", [16, 32])  # the interpreter loads these by TMA and through pointers
@pytest.mark.parametrize("case", CASES)
def test_nan_in_tiles_that_a_tile_does_not_see(case, dim, device):
    """NaN in tiles of keys that are hidden from a tile of queries does not change the output or dq of that tile.

    Nor does NaN in tiles of queries change dk and dv of a tile of keys that is hidden from them. Visits to keys before
    the visible ones would go unnoticed, since load_tile() then reads the first visible ones.
    """
    (arguments, dout, dlse), (row, q_start, k_start, sees) = make_case(case, device, dim=dim)
    clean = results(kernels, (arguments, dout, dlse), torch.float32)

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
        identical(*([x[name][row, tile] for name in names] for x in (found, clean)))

    count = len(sees)
    tile = tile_of(count // 2, count, BLOCK_Q)
    k, v = (spoil(arguments[name], sees[tile].any(0), k_start, BLOCK_K) for name in ("k", "v"))
    found = results(kernels, (arguments | dict(k=k, v=v), dout, dlse), torch.float32)
    same(("out", "dq"), q_start, tile)

    count = sees.shape[1]
    tile = tile_of(count - 1 - len(sees) // 3, count, BLOCK_K)
    q, dout = (spoil(x, sees[:, tile].any(1), q_start, BLOCK_Q) for x in (arguments["q"], dout))
    found = results(kernels, (arguments | dict(q=q), dout, dlse), torch.float32)
    same(("dk", "dv"), k_start, tile)


@pytest.mark.parametrize("options", [{}, dict(window=BLOCK_Q + 5), dict(window=BLOCK_Q, causal=False)], ids=str)
def test_masks_at_any_offset(options, device):
    """Which tiles need no mask depends on where queries begin among the keys: here at each position of a tile."""
    for more in range(BLOCK_K):
        problem = make_problem(device, torch.float32, batch=1, heads=1, q_len=50, k_len=50 + more, **options)
        ours, expected = (results(call, problem, torch.float32) for call in (kernels, reference))
        close(ours, expected)


@triton.jit
def tiles_kernel(out, count, n_tiles, k_len, RULE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """out = number of the tile of each program, heads and sequences counted through."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.minimum(number, count - 1)
    tile, head, index = query_tile(number, count, n_tiles, k_len, RULE, TILE)
    tl.store(out + number, (index * TILE.heads + head) * n_tiles + tile)


SIZES = [(n + more, n + more, dim) for dim, n in ((64, 2**24), (64, 2**25), (128, 2**23), (128, 2**24), (256, 2**23))
         for more in (0, 1)] + [(2**24, 1, 8), (70, 2**29, 256)]  # fmt: skip


@pytest.mark.parametrize(
    "q_len, k_len, dim, heads, group",
    [(*sizes, *heads) for sizes in SIZES for heads in ((1, 1), (6, 2))] + [(70, 70, 64, 1200, 2)],
)
def test_every_query_tile_is_visited(q_len, k_len, dim, heads, group, device):
    """Once, also where the number of elements of keys and values passes 2^31 or 2^32, and in sets of heads."""
    n_tiles = -(-q_len // 64)
    count = n_tiles * heads
    out = torch.full((count,), -1, dtype=torch.int32, device=device)
    rule, tile = Rule(True, 0, 0.0, False, False), Tile(64, 64, dim, dim, heads, group, "ieee")
    block = 2**10 if ON_GPU else 2**20
    tiles_kernel[(-(-count // block),)](out, count, n_tiles, k_len, rule, tile, block)
    assert torch.equal(out.sort().values, torch.arange(count, dtype=torch.int32, device=device))


@pytest.mark.parametrize("causal", [True, False])
def test_diagonals_visit_the_sequences_that_reach_them(causal, device, monkeypatch):
    """In all as many as there are tokens and sequences, not as their product; both of a pair count."""
    starts = [0, 100, *range(101, 131), 300, *[300] * 60]
    others = [0, 40, *range(45, 75), *[75] * 60, 300]
    options = dict(relative=(2, 40), q_len=300, causal=causal, batch=1)
    draws = [partial(make_problem, device, torch.float32, packed=x, **options) for x in (starts, (starts, others))]
    for draw in draws:
        visited, sequence = [], distance.sequence
        if not ON_GPU:  # in the interpreter
            monkeypatch.setattr(distance, "sequence", lambda *args: visited.append(args[0]) or sequence(*args))  # noqa: B023
        results(kernels, draw(), torch.float32)
        monkeypatch.undo()
        heads, tokens, sequences = 2, 600, len(starts) - 1
        assert len(visited) <= heads * (2 * tokens // table.INTERPRETER.block_k + 4 * sequences)
        check(draw, torch.float32)


@pytest.mark.parametrize("more", [0, 1, 1000, 2**31 - 71])
def test_starts_past_the_end_of_the_row(more, device):
    """They are cut off, on the device: of queries, of keys, of both; nothing outside of the row is read or written."""
    arguments, dout, dlse = make_problem(device, torch.float32, packed=[0, 30, 70], bias=(2, 70, 70))
    inside, past = integers(0, 30, 70, 70), integers(0, 30, 70 + more, 70 + more)
    for starts in ((past, past), (past, inside), (inside, past)):
        ours, expected = (
            results(call, (arguments | dict(cu_seqlens=x, max_seqlen=None), dout, dlse), torch.float32)
            for call, x in ((kernels, starts), (reference, (inside, inside)))
        )
        close(ours, expected)
        out = attention(**arguments | dict(cu_seqlens=starts, max_seqlen=None), impl="reference")
        torch.testing.assert_close(out, expected["out"])


def test_starts_that_decrease_stay_in_the_row(device):
    """Which is against the rules, and may give anything, but touches no other memory."""
    for starts in (integers(50, 0, 70, 0, 70), integers(-5, 70, -70, 2**31 - 1), integers(64, 64, 70)):
        arguments, dout, dlse = make_problem(device, torch.float32, packed=starts.tolist(), longest=False)
        results(kernels, (arguments, dout, dlse), torch.float32)
