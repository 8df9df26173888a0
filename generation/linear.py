"""A linear layer for a few rows, with the operations around it, in one kernel:

    y = activation(norm(x) W^T + b) + residual, then (1 + a) y + b embedded if the next block has an embedding skip

When a network generates text, a token's time is the time to read the weights and to start the kernels. One kernel per
linear layer starts fewer of them: no others normalise, apply the activation or add the residual.

Letters: B rows, K input width, N output width.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import nn
from triton.language.extra.cuda import gdc_launch_dependents

from attention.gpu import shared_memory
from attention.launcher import wait_for_inputs
from attention.score import tanh
from attention.tiles import INTERPRETED
from generation.launch import launch
from kernels.activation import activate_tile

RESERVED = 8 * 2**10  # bytes of shared memory for everything but the stages


class Tiles(NamedTuple):
    """What a program computes and how: `outputs` of `rows`, from `inputs` at a time."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def choose_tiles(rows, inputs, outputs):
    """Tiles for 16-bit elements, the fastest of those tried on an H200 (benchmarks/LOG.md)."""
    head, wide = outputs >= 2**14, outputs >= 2048
    if rows == 1:
        return Tiles(1, 4, 1024, 4, 1) if head else Tiles(1, 1, 512, 1, 3 if inputs >= 2048 else 1)
    width = min(64, max(8, triton.next_power_of_2(rows)))
    if head:
        return Tiles(64, 128, 64, 8, 4) if width == 64 else Tiles(width, 64, 128, 4, 4)
    if width == 64:
        return Tiles(32, 64 if wide else 16, 256, 4, 4)
    if width == 8:
        return Tiles(8, 32, 256, 2, 3) if wide else Tiles(8, 16, 512 if inputs >= 2048 else 256, 2, 3)
    return Tiles(width, 32 if wide else 16, 256, 4, 3)


def linear(
    x, layer, *, norm=None, activation=None, gate=None, residual=None, embedded=None, skip=None, softcap=None,
    dtype=None,
):  # fmt: skip
    """activation(norm(x) W^T + b) + residual for few rows: each program computes the norm of all its rows anew.

    Args:
        x: [B, K] on a GPU, float16 or bfloat16; float32 in Triton's interpreter only, because the long sums of this
            kernel are less exact than PyTorch's. layer: nn.Linear from K to N, in the dtype of x.
        norm: nn.LayerNorm or nn.RMSNorm over K, or None. residual: [B, N], or None.
        activation: a name in ACTIVATIONS, or "swiglu" = silu(norm(x) gate^T) * (norm(x) W^T), which has a second
            nn.Linear, `gate`; None without one.
        embedded, skip: [B, N] and [2], a and b: the result is (1 + a) y + b embedded, or with skip=None y.
        softcap: positive float, for y = softcap * tanh(y / softcap); None for no cap. dtype: of the result; None is
            that of x.

    Returns:
        [B, N], from sums in float32.
    """
    parameters = [getattr(module, name, None) for module in (layer, gate, norm) for name in ("weight", "bias")]
    others = *parameters, residual, None if skip is None else embedded, skip
    x, *others = [None if t is None else t.contiguous() for t in (x, *others)]
    rows, inputs, outputs = len(x), x.shape[1], layer.weight.shape[0]
    y = x.new_empty(rows, outputs, dtype=dtype or x.dtype)
    tiles = choose_tiles(rows, inputs, outputs)
    depth = min(tiles.inputs, max(16, triton.next_power_of_2(inputs)))
    columns = tiles.rows + tiles.outputs * (1 if gate is None else 2)
    room = (shared_memory(x.device) - RESERVED) // (2 * columns)  # inputs in all stages
    while depth > 64 and 2 * depth > room:  # one stage alone would go to registers, and spill
        depth //= 2
    stages = max(1, min(tiles.stages, room // depth))
    eps = 0.0
    if norm is not None:
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
    grid = triton.cdiv(outputs, tiles.outputs), triton.cdiv(rows, tiles.rows)
    launch(
        linear_kernel, grid, x, *others, y, rows, outputs, eps, softcap or 0.0, inputs, norm is not None,
        isinstance(norm, nn.LayerNorm), activation, softcap is not None, tiles.rows, tiles.outputs, depth, stages,
        num_warps=tiles.warps,
    )  # fmt: skip
    return y


@triton.jit
def product(w, x, acc, ROWS: tl.constexpr):
    """acc + w x^T of tiles [outputs, inputs] and [rows, inputs]; with one row, the sum over inputs comes later."""
    if ROWS == 1:
        return acc + w.to(tl.float32) * x.to(tl.float32)
    elif INTERPRETED:  # NumPy has no bfloat16
        return tl.dot(w.to(tl.float32), tl.trans(x.to(tl.float32)), acc)
    else:
        return tl.dot(w, tl.trans(x), acc)


# skip is a slice: without this, the kernel would be compiled for each alignment
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["skip"])
def linear_kernel(
    x, weight, bias, gate, gate_bias, gain, shift, residual, embedded, skip, y, rows, outputs, eps, softcap,
    K: tl.constexpr, NORMAL: tl.constexpr, CENTERED: tl.constexpr, ACTIVATION: tl.constexpr, CAPPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK outputs of ROWS rows; it takes DEPTH inputs at a time.

    NORMAL: with a norm, which is LayerNorm if CENTERED and else RMSNorm; gain and shift are None without its weight and
    bias. The variance is E[x^2] - E[x]^2 in float32, which is exact enough unless the mean is a hundred times the
    deviation.
    """
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, DEPTH)
    real_row, real_output = row < rows, output < outputs
    x += row[:, None] * K + lane[None, :]
    at = output.to(tl.int64)[:, None] * K + lane[None, :]
    wait_for_inputs(OVERLAP)
    mean = tl.zeros([ROWS], tl.float32)
    scale = tl.full([ROWS], 1.0, tl.float32)
    if NORMAL:
        squares = tl.zeros([ROWS], tl.float32)
        for start in tl.range(0, K, DEPTH, num_stages=STAGES):
            tile = tl.load(x + start, real_row[:, None] & (start + lane < K)[None, :], 0.0).to(tl.float32)
            mean += tl.sum(tile, 1) / K
            squares += tl.sum(tile * tile, 1) / K
        if not CENTERED:
            mean = tl.zeros([ROWS], tl.float32)
        scale = tl.rsqrt(tl.maximum(squares - mean * mean, 0.0) + eps)
    acc = tl.zeros([BLOCK, DEPTH if ROWS == 1 else ROWS], tl.float32)
    gates = acc
    for start in tl.range(0, K, DEPTH, num_stages=STAGES):
        inside = start + lane < K
        tile = tl.load(x + start, real_row[:, None] & inside[None, :], 0.0)
        if NORMAL:
            normal = (tile.to(tl.float32) - mean[:, None]) * scale[:, None]
            if gain is not None:
                normal *= tl.load(gain + start + lane, inside, 0.0).to(tl.float32)[None, :]
            if shift is not None:
                normal += tl.load(shift + start + lane, inside, 0.0).to(tl.float32)[None, :]
            tile = normal.to(tile.dtype)
        w = tl.load(weight + at + start, real_output[:, None] & inside[None, :], 0.0)
        acc = product(w, tile, acc, ROWS)
        if gate is not None:
            w = tl.load(gate + at + start, real_output[:, None] & inside[None, :], 0.0)
            gates = product(w, tile, gates, ROWS)
    if ROWS == 1:
        acc = tl.sum(acc, 1)[:, None]
        gates = tl.sum(gates, 1)[:, None]
    if OVERLAP and ROWS > 1:  # one row has thousands of programs, and those of the next kernel would take their place
        gdc_launch_dependents()
    if bias is not None:
        acc += tl.load(bias + output, real_output, 0.0).to(tl.float32)[:, None]
    if ACTIVATION == "swiglu":
        if gate_bias is not None:
            gates += tl.load(gate_bias + output, real_output, 0.0).to(tl.float32)[:, None]
        acc *= gates * tl.sigmoid(gates)
    elif ACTIVATION is not None:
        acc = activate_tile(acc, ACTIVATION)
    if CAPPED:
        acc = softcap * tanh(acc / softcap)
    place = row.to(tl.int64)[None, :] * outputs + output[:, None]
    real = real_row[None, :] & real_output[:, None]
    if residual is not None:
        acc += tl.load(residual + place, real, 0.0).to(tl.float32)
    if skip is not None:
        a, b = tl.load(skip).to(tl.float32), tl.load(skip + 1).to(tl.float32)
        acc = (1.0 + a) * acc + b * tl.load(embedded + place, real, 0.0).to(tl.float32)
    tl.store(y + place, acc.to(y.dtype.element_ty), real)
