"""The portable kernels: what each is started with, and the order in which they run.

hopper/launch.py does the same for Hopper's own. The functions named ..._steps() list Steps for start() of launcher.py.
"""

from functools import partial

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..features import FEATURES, GRADIENTS
from ..gpu import processors
from ..launcher import Step, start
from ..problem import apart, at_16_bytes, gradients, output, outputs, place, ragged_of
from ..score import LOG2E, split_decay, terms_of
from ..table import STREAMING, loops_over_group
from ..tiles import fits as fits  # for problem.py
from ..tiles import padded, pair_view, rows_view, view
from .dbias import Spread, dbias_kernel
from .distance import by_reach, distance_kernel, distances_of, of_diagonals
from .dkdv import dkdv_kernel, group_sum_kernel
from .dq import dq_kernel
from .forward import forward_kernel

# Their gradients follow from delta or come from a kernel of their own: dq_kernel and dkdv_kernel sum all others.
SUMMED_ELSEWHERE = {"bias", "sink", *(feature.name for feature in FEATURES if feature.distance_gradient)}
SHORT = 128  # keys, of which one is a share that float32's errors do not show
DBIAS_WAVES = 8  # programs per multiprocessor that share the gradient of a small bias


def forward(call, problem=None):
    """Launch the forward of a Call; returns out [B, Tq, H, Dv] and, both float32 and in base 2, lse2 [B, H, Tq] and,
    with return_max_logit, max_logit2 [H]. problem: that of problem_of(), from who knows it.
    """
    call, problem = place(call, problem)
    call = split_decay(call)
    made = outputs(problem, call, partial(output, problem))
    if made[0].numel() > 0:
        start(problem, forward_steps, call, made)
    return made[: 2 + call.return_max_logit]


def forward_steps(problem, call, tensors):
    out, lse2, max_logit2 = tensors
    tile = problem.tile_for(launch := problem.launches["forward"])
    q, k, v = call.split()
    args = (
        *map(view, (q, k, v)), *loop_descriptors(problem, "forward", k, v), view(out), rows_view(lse2), max_logit2,
        call.sink, *bounds_and_terms(problem, call),
    )  # fmt: skip
    return [Step(forward_kernel, problem.programs(tile), args, (problem.rule, tile), *launch.program)]


def backward(call, out, lse2, dout, dlse, wanted, problem=None):
    """Launch the backward; returns {name: gradient} of GRADIENTS, filled where `wanted`, {name: bool}, is true.

    dlse [B, H, Tq] float32 is the gradient of the natural-log LSE, or None. If q holds keys and values too, its
    gradient is that of them all, and those of k and v are None.
    """
    call, problem = place(call, problem)
    dout, out, lse2, dlse = problem.placed(dout), *map(at_16_bytes, (out, lse2, dlse))
    new = partial(output, problem)
    grads = gradients(call, new, new)
    bias, gate, sink = call.bias if wanted["bias"] else None, call.decay, call.sink
    if 0 in (problem.batch, problem.q_len, problem.k_len, problem.tile.heads):
        for x in grads.values():
            x.zero_()
        given = zip(GRADIENTS[3:], call.learned[3:], strict=True)
        grads |= {name: torch.zeros_like(x) for name, x in given if x is not None}
        if sink is not None and dlse is not None:  # a row without keys has the sink
            grads["sink"] = sink_gradient(sink, lse2, -dlse).sum((0, 2)).to(sink.dtype)
        return grads
    # A query that sees one key has dP = delta but for rounding, which float32's small errors do not cover. Such queries
    # are a share that shows if keys are hidden or sequences are short. With a sink, dP and delta are close, too.
    few = problem.rule.hides or problem.is_ragged or problem.k_len <= SHORT
    walks = dout.element_size() > 2 and (few or sink is not None)
    delta = torch.zeros_like(lse2) if walks else output(problem, lse2)
    inputs = dout, lse2, delta
    # A gate's gradient is the difference of two sums of dS: as a query and as a key. It is added up over all later keys
    # (cumsum in autograd), and so are its rounding errors. Inputs of 16 bits have larger errors of their own.
    sum_type = torch.float64 if dout.element_size() > 2 else torch.float32
    summed = {name for name in GRADIENTS if wanted[name]} - SUMMED_ELSEWHERE
    of_keys = bias is not None and bias.shape[2] == 1 < bias.shape[3]  # a bias that is broadcast over queries
    shape = *lse2.shape[:2], problem.k_len
    q_gate = None if gate is None else lse2.new_zeros(shape, dtype=sum_type)
    k_gate = lse2.new_zeros(shape, dtype=sum_type) if of_keys or gate is not None else None
    split = split_decay(call)
    dqkv = grads.values()

    start(problem, dq_steps, split, (*inputs, out, dlse, q_gate, *dqkv), walks, bool(summed - {"k", "v"}))
    if of_keys or summed - (set() if call.kv_heads > 0 else {"q"}):
        sums = partial_sums(problem, call.q, new)
        start(problem, dkdv_steps, split, (*inputs, k_gate, *sums, *dqkv))
    if bias is not None and bias.shape[-1] == 1:
        grads["bias"] = row_bias_gradient(bias, sink, lse2, delta, dlse)
    elif of_keys:
        grads["bias"] = -k_gate[:, :, None].sum_to_size(bias.shape).to(bias.dtype)
    elif bias is not None:
        grads["bias"] = bias_gradient(problem, split, inputs, bias)
    grads |= distance_gradients(problem, call, inputs, wanted)
    if wanted["decay"]:
        grads["decay"] = (q_gate + k_gate).to(gate.dtype)
    if wanted["sink"]:
        grads["sink"] = sink_gradient(sink, lse2, delta).sum((0, 2)).to(sink.dtype)
    return grads


def views(call, dout, lse2, delta):
    """The arguments with which all kernels of the backward begin."""
    return *map(view, (*call.split(), dout)), rows_view(lse2), rows_view(delta)


def bounds_and_terms(problem, call):
    """The arguments with which they end."""
    return problem.q_len, problem.k_len, ragged_of(call), terms_of(call)


def loop_descriptors(problem, kernel, *tensors):
    """TMA descriptors of the two tensors over which a kernel walks; None and None if it loads by pointers."""
    launch = problem.launches[kernel]
    if not launch.tma or any(0 in x.shape + x.stride() for x in tensors):  # empty, or expanded
        return None, None
    rows = launch.block_k if kernel in ("forward", "dq") else launch.block_q
    return [TensorDescriptor(x, x.shape, x.stride(), [1, rows, 1, padded(x.shape[-1])]) for x in tensors]


def sink_gradient(sink, lse2, delta):
    """dS [B, H, Tq] of sink [H], from lse2 and delta: its weight has no value, so dS = -weight * delta."""
    weight = torch.exp2(sink.double()[:, None] * LOG2E.value - lse2)
    return -torch.where(lse2 == float("-inf"), 0.0, weight * delta)


def row_bias_gradient(bias, sink, lse2, delta, dlse):
    """The gradient of a bias that is broadcast over keys: sums of dS over rows, which but for the sink add up to dlse.

    So without both it is 0, and no sum of dS is: what these add up is rounding.
    """
    rows = torch.zeros_like(lse2) if dlse is None else dlse.masked_fill(lse2 == float("-inf"), 0.0)
    if sink is not None:
        rows = rows - sink_gradient(sink, lse2, delta)
    return rows[..., None].sum_to_size(bias.shape).to(bias.dtype)


def dq_steps(problem, call, tensors, walks, with_dq):
    """Fill delta [B, H, Tq], and with_dq dq [B, Tq, H, D] and the query half of dgate. walks: to find delta."""
    dout, lse2, delta, out, dlse, q_gate, *dqkv = tensors
    (_, k, v), (dq, _, _) = call.split(), apart(call, dqkv)
    tile = problem.tile_for(launch := problem.launches["dq"])
    inputs = *views(call, dout, lse2, delta), *loop_descriptors(problem, "dq", k, v)
    out, dq = None if walks else view(out), view(dq)
    pairs = [(out, dq if with_dq else None)]
    if with_dq and dout.element_size() > 2:
        pairs = [(out, None), (None, dq)]
    steps = []
    for part_out, part_dq in pairs:
        args = (
            *inputs, part_out, rows_view(dlse), call.sink, part_dq, rows_view(q_gate), *bounds_and_terms(problem, call),
        )  # fmt: skip
        steps.append(Step(dq_kernel, problem.programs(tile), args, (problem.rule, tile), *launch.program))
    return steps


def partial_sums(problem, like, new):
    """For dk and dv float32 [B, Tk, H, D or Dv], each head's alone; or None and None.

    Grouped queries: either each program of dk/dv loops over the group, or all write these, to be added afterwards.
    """
    tile = problem.tile
    if tile.group > 1:
        launch = problem.launches.get("dkdv") or problem.launches["dk"]
        programs = problem.programs(problem.tile_for(launch, heads=tile.heads // tile.group), "k")
        if not loops_over_group(problem, programs, problem.device):
            shape = problem.batch, problem.k_len, tile.heads
            return [new(like, (*shape, width), dtype=torch.float32) for width in (tile.dim, tile.value_dim)]
    return None, None


def dkdv_steps(problem, call, tensors):
    """Fill dk and dv [B, Tk, Hkv, D or Dv], and the key half of dgate [B, H, Tk]."""
    dout, lse2, delta, k_gate, dk_sum, dv_sum, *dqkv = tensors
    (q, _, _), (_, dk, dv) = call.split(), apart(call, dqkv)
    loops = dk_sum is None
    sums = (dk, dv) if loops else (dk_sum, dv_sum)
    heads, steps = sums[0].shape[2], []
    for part in [name for name in ("dkdv", "dk", "dv") if name in problem.launches]:
        tile = problem.tile_for(launch := problem.launches[part], heads=heads)
        args = (
            *views(call, dout, lse2, delta), *loop_descriptors(problem, part, q, dout), *map(view, sums),
            rows_view(k_gate), *bounds_and_terms(problem, call),
        )  # fmt: skip
        constants = problem.rule, tile, problem.tile.heads // heads, part
        steps.append(Step(dkdv_kernel, problem.programs(tile, "k"), args, constants, *launch.program))
    if not loops:
        steps += [group_sum(problem, *pair) for pair in zip(sums, (dk, dv), strict=True)]
    return steps


def group_sum(problem, parts, total):
    """Fill total [B, Tk, Hkv, D] with the sums over groups of parts [B, Tk, H, D] float32."""
    batch, k_len, kv_heads, dim = total.shape
    tile = problem.tile_for(STREAMING, dim=dim, heads=kv_heads)
    programs = -(-k_len // tile.block_k) * kv_heads * batch
    return Step(group_sum_kernel, programs, (view(parts), view(total), k_len), (tile,))


def bias_gradient(problem, call, inputs, bias):
    """The gradient of bias, in its own broadcast shape."""
    tile, spread, programs = spread_bias(problem, *bias.shape[:2])
    dbias = bias.new_zeros(bias.shape[0] * spread.parts, *bias.shape[1:], dtype=torch.float32)
    start(problem, dbias_steps, call, (*inputs, dbias), tile, spread, programs)
    if spread.parts > 1:
        dbias = dbias.unflatten(0, (-1, spread.parts)).sum(1)
    return dbias.to(bias.dtype)


def dbias_steps(problem, call, tensors, tile, spread, programs):
    *inputs, dbias = tensors
    args = *views(call, *inputs), pair_view(dbias), *bounds_and_terms(problem, call)
    return [Step(dbias_kernel, programs, args, (problem.rule, tile, spread), *problem.launches["dq"].program)]


def spread_bias(problem, rows, heads):
    """Tile, Spread and number of programs of dbias_kernel, for a bias [rows, heads, Tq, Tk]."""
    tile = problem.tile_for(problem.launches["dq"], heads=heads)
    down, across = problem.tiles_per_head(problem.q_len, tile.block_q), -(-problem.k_len // tile.block_k)
    programs, members = down * across * heads * rows, (problem.batch // rows, problem.tile.heads // heads)
    parts = parts_for(problem, programs, members[0] * members[1])
    return tile, Spread(*members, parts), programs * parts


def parts_for(problem, programs, most):
    """How many programs share a sum, so that every multiprocessor has DBIAS_WAVES in all."""
    return max(1, min(most, DBIAS_WAVES * processors(problem.device) // programs))


def distance_gradients(problem, call, inputs, wanted):
    """{name: gradient} of the features whose gradient is wanted and follows from sums of dS by distance."""
    features = [feature for feature in FEATURES if feature.distance_gradient and wanted[feature.name]]
    if not features:
        return {}
    # the smaller side of the tiles of dq_kernel makes square ones
    launch = problem.launches["dq"]
    block = min(launch.block_q, launch.block_k)
    tile = problem.tile_for(launch._replace(block_q=block, block_k=block))
    first, diagonals = distances_of(problem, block)
    programs = diagonals * tile.heads
    parts = parts_for(problem, programs, problem.sequences)
    shape = parts, tile.heads, diagonals, 3, block
    sums = torch.empty(shape, dtype=torch.float32, device=problem.device)
    order = by_reach(ragged_of(call)) if problem.is_packed else (None, None)
    constants = tile, first, diagonals, parts
    start(problem, distance_steps, call, (*inputs, sums, *order), programs * parts, constants)
    sides = of_diagonals(sums.sum(0), first)
    return {x.name: x.distance_gradient(sides, getattr(call, x.name)) for x in features}


def distance_steps(problem, call, tensors, programs, constants):
    *inputs, sums, reaches, order = tensors
    args = *views(call, *inputs), sums, reaches, order, problem.sequences, *bounds_and_terms(problem, call)
    return [Step(distance_kernel, programs, args, (problem.rule, *constants), *problem.launches["dq"].program)]
