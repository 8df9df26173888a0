"""Dropout, residual and norm in one kernel each way: x + dropout(y), and its LayerNorm or RMSNorm.

A program is one warp, which takes one row after the other. The backward draws the mask again, so nothing is kept for it
but the sum.

Letters: N rows (tokens), C width.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from attention.reference import drop_probability
from attention.score import keeps, philox
from kernels.shared import processors

PROGRAMS = 32, 16  # per multiprocessor, forward and backward
STAGES = 1, 2  # rows that a program loads ahead, forward and backward
GROUP = tl.constexpr(4)  # neighbours that share 64 random bits


def fused_add_norm(x, y, norm, dropout, seed):
    """(x + dropout(y), its norm), both with gradients.

    Args:
        x: [..., C] on a GPU, C at most WIDEST of kernels/add_norm.py. y: as x. norm: nn.LayerNorm or nn.RMSNorm over C.
        dropout: probability below 1, rounded to a multiple of 1 / 65,536.
        seed: [1] int64. The mask is a function of it, of the row and of the column.

    Returns:
        The sum in the dtype of x, and its norm in autocast's dtype, without autocast in that of x.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
    run = _add_norm if torch.compiler.is_compiling() else EagerAddNorm.apply
    weights = norm.weight, getattr(norm, "bias", None)
    return run(x, y, *weights, seed, dropout, eps, isinstance(norm, nn.LayerNorm), dtype)


@triton.jit
def columns(GROUPS: tl.constexpr):
    """Numbers of the groups [GROUPS, 1] and of the columns [GROUPS, GROUP] of a row."""
    group = tl.arange(0, GROUPS)[:, None]
    return group, group * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def load(pointer, row, column, C: tl.constexpr):
    """A row in float32, with 0 from column C on."""
    return tl.load(pointer + tl.cast(row, tl.int64) * C + column, column < C, 0.0).to(tl.float32)


@triton.jit
def store(pointer, values, row, column, C: tl.constexpr):
    tl.store(pointer + tl.cast(row, tl.int64) * C + column, values.to(pointer.dtype.element_ty), column < C)


@triton.jit
def drop(values, row, group, seed, dropout):
    """Zero each value with probability `dropout` and scale the others up; seed: uint64."""
    start = tl.cast(seed >> 32, tl.uint32)
    low, high = philox(tl.cast(row, tl.uint32) + start, tl.cast(group, tl.uint32), tl.cast(seed, tl.uint32))
    number = tl.arange(0, GROUP)[None, :]
    bits = tl.where(number < 2, low, high) << tl.cast(16 * (number & 1), tl.uint32)
    return tl.where(keeps(bits, dropout), values * (1 / (1 - dropout)), 0.0)


@triton.jit
def mean(values, C: tl.constexpr):
    return tl.sum(tl.sum(values, 1), 0) * (1 / C)


@triton.jit
def normalise(x, column, eps, C: tl.constexpr, CENTERED: tl.constexpr):
    """(x - mean) / deviation, and 1 / deviation; without CENTERED the mean counts as 0, as in RMSNorm."""
    if CENTERED:
        x = tl.where(column < C, x - mean(x, C), 0.0)
    scale = tl.rsqrt(mean(x * x, C) + eps)
    return x * scale, scale


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["seed"])
def add_norm_kernel(
    x, y, weight, bias, seed, total, out, rows, dropout, eps, C: tl.constexpr, CENTERED: tl.constexpr,
    GROUPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """total = x + dropout(y); out = norm(total) * weight + bias. weight and bias may be None."""
    value = tl.load(seed).to(tl.uint64, bitcast=True)
    group, column = columns(GROUPS)
    gain = None if weight is None else load(weight, 0, column, C)
    shift = None if bias is None else load(bias, 0, column, C)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        branch = drop(load(y, row, column, C), row, group, value, dropout)
        sums = (load(x, row, column, C) + branch).to(total.dtype.element_ty)
        store(total, sums, row, column, C)
        normal, _ = normalise(sums.to(tl.float32), column, eps, C, CENTERED)
        if gain is not None:
            normal *= gain
        if shift is not None:
            normal += shift
        store(out, normal, row, column, C)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["seed"])
def add_norm_backward_kernel(
    total, weight, seed, dtotal, dout, dx, dy, dweight, dbias, rows, dropout, eps, C: tl.constexpr,
    CENTERED: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx and dy of all rows; this program's part of the sums that dweight and dbias are, in a row of [programs, C].

    With n = norm(total), g = dout * weight: dx = dtotal + (g - mean(g) - n mean(g n)) / deviation.
    dtotal may be None, and so may weight, dweight and dbias.
    """
    value = tl.load(seed).to(tl.uint64, bitcast=True)
    group, column = columns(GROUPS)
    gain = None if weight is None else load(weight, 0, column, C)
    weight_sum = tl.zeros([GROUPS, GROUP], tl.float32)
    bias_sum = tl.zeros([GROUPS, GROUP], tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        normal, scale = normalise(load(total, row, column, C), column, eps, C, CENTERED)
        gradient = load(dout, row, column, C)
        weight_sum += gradient * normal
        bias_sum += gradient
        if gain is not None:
            gradient *= gain
        slope = gradient - normal * mean(gradient * normal, C)
        if CENTERED:
            slope -= mean(gradient, C)
        slope *= scale
        if dtotal is not None:
            slope += load(dtotal, row, column, C)
        store(dx, slope, row, column, C)
        store(dy, drop(slope, row, group, value, dropout), row, column, C)
    if dweight is not None:
        store(dweight, weight_sum, tl.program_id(0), column, C)
    if dbias is not None:
        store(dbias, bias_sum, tl.program_id(0), column, C)


def groups(width):
    """Groups of neighbours in a row, a power of 2 and no fewer than the lanes of a warp."""
    return max(32, triton.next_power_of_2(triton.cdiv(width, GROUP.value)))


def forward(
    x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, seed: Tensor, dropout: float, eps: float,
    centered: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As fused_add_norm(); centered: LayerNorm, else RMSNorm. dtype: of the norm."""
    x, y, width = x.contiguous(), y.contiguous(), x.shape[-1]
    total, out = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    rows = x.numel() // width
    if rows:
        with torch.cuda.device_of(x):
            add_norm_kernel[(min(rows, PROGRAMS[0] * processors(x.device)),)](
                x, y, weight, bias, seed, total, out, rows, drop_probability(dropout), eps, width, centered,
                groups(width), STAGES[0], num_warps=1, enable_fp_fusion=True,
            )  # fmt: skip
    return total, out


_add_norm = torch.library.custom_op("gpt::add_norm", forward, mutates_args=())


@_add_norm.register_fake
def _(x, y, weight, bias, seed, dropout, eps, centered, dtype):
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=dtype)


def find_gradients(
    total: Tensor, weight: Tensor | None, seed: Tensor, dtotal: Tensor | None, dout: Tensor, has_bias: bool,
    dropout: float, eps: float, centered: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dy in a dtype, and float32 [number of weight and bias, programs, C], whose sums are dweight and dbias."""
    width = total.shape[-1]
    dx, dy = torch.empty_like(total), torch.empty_like(total, dtype=dtype)
    programs = PROGRAMS[1] * processors(total.device)
    sums = total.new_empty((weight is not None) + has_bias, programs, width, dtype=torch.float32)
    with torch.cuda.device_of(total):
        add_norm_backward_kernel[(programs,)](
            total, weight, seed, None if dtotal is None else dtotal.contiguous(), dout.contiguous(), dx, dy,
            None if weight is None else sums[0], sums[1] if has_bias else None, total.numel() // width,
            drop_probability(dropout), eps, width, centered, groups(width), STAGES[1], num_warps=1,
            enable_fp_fusion=True,
        )  # fmt: skip
    return dx, dy, sums


_gradients = torch.library.custom_op("gpt::add_norm_backward", find_gradients, mutates_args=())


@_gradients.register_fake
def _(total, weight, seed, dtotal, dout, has_bias, dropout, eps, centered, dtype):
    shape = (weight is not None) + has_bias, PROGRAMS[1] * processors(total.device), total.shape[-1]
    return (
        total.new_empty(total.shape),
        total.new_empty(total.shape, dtype=dtype),
        total.new_empty(shape, dtype=torch.float32),
    )


def _save(ctx, inputs, output):
    _, y, weight, bias, seed, *ctx.options, _ = inputs
    ctx.save_for_backward(output[0], weight, seed)
    ctx.y_dtype, ctx.bias_dtype = y.dtype, None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)  # nothing reads the stream after the last norm: do not fill zeros for it


def _backward(find_gradients, ctx, dtotal, dout):
    total, weight, seed = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(total)
    has_bias = ctx.bias_dtype is not None
    dx, dy, sums = find_gradients(total, weight, seed, dtotal, dout, has_bias, *ctx.options, ctx.y_dtype)
    dweight = None if weight is None else sums[0].sum(0).to(weight.dtype)
    dbias = sums[1].sum(0).to(ctx.bias_dtype) if has_bias else None
    return dx, dy, dweight, dbias, *(None,) * 5


_add_norm.register_autograd(partial(_backward, _gradients), setup_context=_save)


class EagerAddNorm(torch.autograd.Function):
    """The op for eager mode: the first call of a torch.library.custom_op imports torch._dynamo, which takes seconds."""

    forward, setup_context = staticmethod(forward), staticmethod(_save)
    backward = staticmethod(once_differentiable(partial(_backward, find_gradients)))
