"""Dropout, residual and norm in one kernel each way: x + dropout(y), and its LayerNorm or RMSNorm.

A program has as many warps as rows, one for each row. The masks are drawn again in the backward, and nothing but the
sum itself is kept for it.

Letters: N rows (tokens), C width.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from attention.reference import drop_probability
from attention.score import keeps, philox
from kernels.shared import processors

WIDEST = 1024  # C; of wider rows a warp has too few registers
ROWS = 4  # of a program at a time
PROGRAMS = 4  # of the backward, per multiprocessor
STAGES = 2  # of its loads
LANES = tl.constexpr(32)
GROUP = tl.constexpr(4)  # neighbours that share 64 random bits


def add_norm(x, y, norm, dropout, seed):
    """(x + dropout(y), its norm), both with gradients.

    Args:
        x: [..., C] on a GPU, C at most WIDEST. y: [..., C], as x. norm: nn.LayerNorm or nn.RMSNorm over C.
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
def row_sum(values):
    """[PARTS, ROWS, LANES, GROUP] -> [1, ROWS, 1, 1]; each sum stays in a warp."""
    return tl.sum(tl.sum(tl.sum(values, 0, keep_dims=True), 3, keep_dims=True), 2, keep_dims=True)


@triton.jit
def places(first, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Rows [1, ROWS, 1, 1], groups of columns [PARTS, 1, LANES, 1] and columns [PARTS, 1, LANES, GROUP] of a tile."""
    row = first + tl.arange(0, ROWS)[None, :, None, None]
    group = tl.arange(0, PARTS)[:, None, None, None] * LANES + tl.arange(0, LANES)[None, None, :, None]
    return row, group, group * GROUP + tl.arange(0, GROUP)[None, None, None, :]


@triton.jit
def drop(values, row, group, seed, dropout):
    """Zero each value with probability `dropout` and scale the others up; seed: uint64."""
    start = tl.cast(seed >> 32, tl.uint32)
    low, high = philox(tl.cast(row, tl.uint32) + start, tl.cast(group, tl.uint32), tl.cast(seed, tl.uint32))
    number = tl.arange(0, GROUP)[None, None, None, :]
    bits = tl.where(number < 2, low, high) << tl.cast(16 * (number & 1), tl.uint32)
    return tl.where(keeps(bits, dropout), values * (1 / (1 - dropout)), 0.0)


@triton.jit
def normalise(x, inside, eps, C: tl.constexpr, CENTERED: tl.constexpr):
    """(x - mean) / deviation and 1 / deviation of each row; without CENTERED the mean counts as 0, as in RMSNorm."""
    if CENTERED:
        x = tl.where(inside, x - row_sum(x) / C, 0.0)
    scale = tl.rsqrt(row_sum(x * x) / C + eps)
    return x * scale, scale


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["seed"])
def add_norm_kernel(
    x, y, weight, bias, seed, total, out, rows, dropout, eps, C: tl.constexpr, CENTERED: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """total = x + dropout(y); out = norm(total) * weight + bias, of ROWS rows. weight and bias may be None."""
    row, group, column = places(tl.program_id(0) * ROWS, ROWS, PARTS)
    inside = column < C
    real = inside & (row < rows)
    place = tl.cast(row, tl.int64) * C + column
    branch = tl.load(y + place, real, 0.0).to(tl.float32)
    stream = tl.load(x + place, real, 0.0).to(tl.float32)
    branch = drop(branch, row, group, tl.load(seed).to(tl.uint64, bitcast=True), dropout)
    sums = (stream + branch).to(total.dtype.element_ty)
    tl.store(total + place, sums, real)
    normal, _ = normalise(sums.to(tl.float32), inside, eps, C, CENTERED)
    if weight is not None:
        normal *= tl.load(weight + column, inside, 0.0).to(tl.float32)
    if bias is not None:
        normal += tl.load(bias + column, inside, 0.0).to(tl.float32)
    tl.store(out + place, normal.to(out.dtype.element_ty), real)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["seed"])
def add_norm_backward_kernel(
    total, weight, seed, dtotal, dout, dx, dy, dweight, dbias, rows, dropout, eps, C: tl.constexpr,
    CENTERED: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx and dy of all rows; this program's part of the sums that dweight and dbias are, in a row of [programs, C].

    With n = norm(total), g = dout * weight: dx = dtotal + (g - mean(g) - n mean(g n)) / deviation.
    dtotal may be None, and so may weight, dweight and dbias.
    """
    value = tl.load(seed).to(tl.uint64, bitcast=True)
    _, _, column = places(0, ROWS, PARTS)
    inside = column < C
    gain = tl.full([PARTS, 1, LANES, GROUP], 1.0, tl.float32)
    if weight is not None:
        gain = tl.load(weight + column, inside, 0.0).to(tl.float32)
    weight_sum = tl.zeros([PARTS, ROWS, LANES, GROUP], tl.float32)
    bias_sum = tl.zeros([PARTS, ROWS, LANES, GROUP], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row, group, _ = places(first, ROWS, PARTS)
        real = inside & (row < rows)
        place = tl.cast(row, tl.int64) * C + column
        normal, scale = normalise(tl.load(total + place, real, 0.0).to(tl.float32), inside, eps, C, CENTERED)
        gradient = tl.load(dout + place, real, 0.0).to(tl.float32)
        weight_sum += gradient * normal
        bias_sum += gradient
        gradient *= gain
        slope = gradient - normal * (row_sum(gradient * normal) / C)
        if CENTERED:
            slope -= row_sum(gradient) / C
        slope *= scale
        if dtotal is not None:
            slope += tl.load(dtotal + place, real, 0.0).to(tl.float32)
        tl.store(dx + place, slope.to(dx.dtype.element_ty), real)
        tl.store(dy + place, drop(slope, row, group, value, dropout).to(dy.dtype.element_ty), real)
    mine = tl.program_id(0) * C + column
    if dweight is not None:
        tl.store(dweight + mine, tl.sum(weight_sum, 1, keep_dims=True), inside)
    if dbias is not None:
        tl.store(dbias + mine, tl.sum(bias_sum, 1, keep_dims=True), inside)


def parts(width):
    """Parts of LANES * GROUP columns, a power of 2."""
    return triton.next_power_of_2(triton.cdiv(width, LANES.value * GROUP.value))


def forward(
    x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, seed: Tensor, dropout: float, eps: float,
    centered: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As add_norm(); centered: LayerNorm, else RMSNorm. dtype: of the norm."""
    x, y, width = x.contiguous(), y.contiguous(), x.shape[-1]
    total, out = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    rows = x.numel() // width
    if rows:
        with torch.cuda.device_of(x):
            add_norm_kernel[(triton.cdiv(rows, ROWS),)](
                x, y, weight, bias, seed, total, out, rows, drop_probability(dropout), eps, width, centered, ROWS,
                parts(width), num_warps=ROWS, enable_fp_fusion=True,
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
    programs = PROGRAMS * processors(total.device)
    sums = total.new_empty((weight is not None) + has_bias, programs, width, dtype=torch.float32)
    with torch.cuda.device_of(total):
        add_norm_backward_kernel[(programs,)](
            total, weight, seed, None if dtotal is None else dtotal.contiguous(), dout.contiguous(), dx, dy,
            None if weight is None else sums[0], sums[1] if has_bias else None, total.numel() // width,
            drop_probability(dropout), eps, width, centered, ROWS, parts(width), STAGES, num_warps=ROWS,
            enable_fp_fusion=True,
        )  # fmt: skip
    return dx, dy, sums


_gradients = torch.library.custom_op("gpt::add_norm_backward", find_gradients, mutates_args=())


@_gradients.register_fake
def _(total, weight, seed, dtotal, dout, has_bias, dropout, eps, centered, dtype):
    shape = (weight is not None) + has_bias, PROGRAMS * processors(total.device), total.shape[-1]
    return total.new_empty(total.shape), total.new_empty(total.shape, dtype=dtype), total.new_empty(
        shape, dtype=torch.float32
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
    backward = staticmethod(partial(_backward, find_gradients))
