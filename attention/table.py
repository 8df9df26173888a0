"""Tile sizes and warps of the portable kernels: one table, and the choices made from shapes and chip.

Nothing is tuned while training: the table is committed, so a run starts at once and repeats itself.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from .gpu import HOPPER, INTERPRETED, chip, processors


class Launch(NamedTuple):
    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False  # whether whole tiles of what a loop walks over come by TMA, of Hopper GPUs and later

    @property
    def program(self):
        """Warps and stages, as a Step of launcher.py has them."""
        return self.num_warps, self.num_stages


# (kernel, bytes per element) -> settings for head dims up to 64, 128 and 256, the larger of q's and v's.
# Where "dkdv" has None, "dk" and "dv" run one after the other: the registers do not hold both sums. Rows for sm_90 were
# tuned on an H200 (benchmarks/LOG.md). The others are the largest that compile without register spills under Triton 3.9
# (tests/test_compile.py) and were not timed.
SM_90 = {
    ("forward", 2): (Launch(64, 64, 4, 3), Launch(64, 64, 4, 3, tma=True), Launch(128, 64, 8, 2, tma=True)),
    ("dq", 2): (Launch(128, 64, 4, 3), Launch(128, 64, 8, 3, tma=True), Launch(128, 32, 8, 3)),
    ("dkdv", 2): (Launch(64, 64, 4, 2), Launch(64, 64, 4, 2, tma=True), None),
    ("dk", 2): (None, None, Launch(32, 128, 8, 3)),
    ("dv", 2): (None, None, Launch(64, 128, 8, 2)),
    ("forward", 4): (Launch(32, 32, 4, 2), Launch(32, 64, 8, 2), Launch(16, 16, 4, 2)),
    ("dq", 4): (Launch(32, 32, 4, 2), Launch(32, 16, 8, 2), Launch(16, 16, 4, 1)),
    ("dkdv", 4): (Launch(32, 32, 8, 2), Launch(32, 16, 4, 1), Launch(16, 16, 4, 1)),
}
# (kernel, bytes per element, head dim) -> settings for few keys per program, and how many: see keys_per_program().
SM_90_SHORT = {
    ("forward", 2, 128): (Launch(64, 32, 4, 3, tma=True), 256),
    ("dq", 2, 64): (Launch(64, 32, 4, 3), 512),
    ("dq", 2, 128): (Launch(64, 64, 4, 2, tma=True), 512),
}
# Any other chip: what fits the 99 KB of shared memory of the smallest of them.
PORTABLE = {
    ("forward", 2): (Launch(64, 64, 4, 2), Launch(128, 32, 8, 2), Launch(64, 32, 8, 1)),
    ("dq", 2): (Launch(64, 32, 4, 3), Launch(64, 32, 4, 2), Launch(32, 32, 4, 1)),
    ("dkdv", 2): (Launch(32, 64, 4, 2), Launch(32, 64, 4, 1), Launch(32, 32, 8, 1)),
    ("forward", 4): (Launch(64, 32, 8, 2), Launch(32, 16, 8, 2), Launch(32, 16, 8, 1)),
    ("dq", 4): (Launch(32, 32, 8, 1), Launch(32, 16, 8, 2), Launch(32, 16, 8, 1)),
    ("dkdv", 4): (Launch(16, 32, 4, 1), Launch(16, 16, 8, 1), Launch(16, 16, 4, 1)),
}
CHIPS = {HOPPER: (SM_90, SM_90_SHORT)}
# Small and unequal, so that a short sequence in the interpreter meets many tiles and a swapped axis shows.
INTERPRETER = Launch(32, 16, 1, 1)
# Bandwidth-bound kernels: rows per program.
STREAMING = Launch(32, 32, 4, 1)


def keys_per_program(q_len, k_len, rule):
    """How far a program walks: the longest sequence or the window; half of it where a mask leaves a triangle."""
    longest = max(q_len, k_len)
    if rule.window > 0:
        longest = min(longest, rule.window)
    return longest // 2 if rule.causal or rule.window > 0 else longest


def settings_dim(dim):
    """The head dim whose settings serve: 64, 128 or 256. Tiles of the Hopper kernels have as many columns."""
    return 64 if dim <= 64 else 128 if dim <= 128 else 256  # compared, since torch.compile may have symbols for it


@lru_cache(4096)
def launches_for(dim, keys, element_size, device):
    """{kernel: Launch} for the larger head dim, keys per program, bytes per element and device."""
    if INTERPRETED:
        launch = INTERPRETER._replace(tma=dim <= 16)  # both ways of loading
        return {"forward": launch, "dq": launch, "dkdv": launch}
    settings, for_few_keys = CHIPS.get(chip(device), (PORTABLE, {}))
    dim = settings_dim(dim)
    chosen = {}
    for (kernel, size), row in settings.items():
        launch, most = for_few_keys.get((kernel, size, dim), (None, -1))
        launch = launch if keys <= most else row[(64, 128, 256).index(dim)]
        if size == element_size and launch is not None:
            chosen[kernel] = launch
    return chosen


def loops_over_group(problem, programs, device):
    """Whether dk/dv loops over the query group in each of `programs` programs (no extra memory) or writes partials.

    Looping is right in short sequences, if there are programs enough to keep every multiprocessor busy to the end:
    under a causal mask some take much longer than others. Measured on an H200, see benchmarks/LOG.md. Not in exact
    float32: one long sum over a group of 8 has up to 2.7 times the error of PyTorch, which sums each head by itself.
    """
    if problem.tile.precision == "ieee":
        return False
    enough = 8 if problem.rule.causal else 2
    return max(problem.q_len, problem.k_len) <= 1024 and programs >= enough * processors(device)


def float32_precision(dtype):
    """Precision of matmuls, as PyTorch is set, by either of its APIs; without effect on 16-bit dtypes."""
    if dtype != torch.float32:
        return "tf32"
    # the older torch.get_float32_matmul_precision() raises where the newer API was used
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
