"""The portable kernels: what each is started with, and the order in which they run.

hopper/launch.py does the same for Hopper's own.
"""

from functools import partial

import torch

from ..features import FEATURES, GRADIENTS
from ..gpu import processors
from ..launcher import Launcher, loop_descriptors
from ..problem import describe, empty, gradients, output
from ..score import LOG2E
from ..table import STREAMING, loops_over_group
from ..tiles import aligned, pair_view, view
from .dbias import Spread, dbias_kernel
from .distance import by_reach, distance_kernel, distances_of, of_diagonals
from .dkdv import dkdv_kernel, group_sum_kernel
from .dq import dq_kernel
from .forward import forward_kernel

# Their gradients follow from delta or come from a kernel of their own: dq_kernel and dkdv_kernel sum all others.
SUMMED_ELSEWHERE = {"bias", "sink", *(feature.name for feature in FEATURES if feature.distance_gradient)}
DBIAS_WAVES = 8  # programs per multiprocessor that share the gradient of a small bias


def forward(call):
    """Launch the forward of a Call; returns out [B, Tq, H, Dv] and, both float32 and in base 2, lse2 [B, H, Tq] and,
    with return_max_logit, max_logit2 [H].
    """
    q, k, v = map(aligned, call.split())
    problem = describe(q, k, v, call)
    batch, q_len, heads, dim = q.shape
    value_dim = problem.tile.value_dim
    out = output(problem, q, None if value_dim == dim else (batch, q_len, heads, value_dim))
    lse2 = output(problem, q, (batch, heads, q_len), fill=float("-inf"), dtype=torch.float32)
    max_logit2 = q.new_full((heads,), float("-inf"), dtype=torch.float32) if call.return_max_logit else None
    view = problem.view
    if out.numel() > 0:
        with torch.cuda.device_of(q):
            problem.cached(forward_launcher).start(
                view("q", q), view("k", k), view("v", v), *loop_descriptors(problem, "forward", k, v), view("out", out),
                view("lse2", lse2), max_logit2, call.sink, problem.q_len, problem.k_len, problem.ragged, problem.terms,
            )  # fmt: skip
    return (out, lse2, max_logit2)[: 2 + call.return_max_logit]


def forward_launcher(problem):
    tile = problem.tile_for(launch := problem.launches["forward"])
    return Launcher(forward_kernel, problem.programs(tile), launch, (problem.rule, tile))


def backward(call, out, lse2, dout, dlse, wanted):
    """Launch the backward; returns {name: gradient} of GRADIENTS, filled where `wanted`, {name: bool}, is true.

    dlse [B, H, Tq] float32 is the gradient of the natural-log LSE, or None. If q holds keys and values too, its
    gradient is that of them all, and those of k and v are None.
    """
    q, k, v, dout = map(aligned, (*call.split(), dout))
    problem = describe(q, k, v, call, out, lse2, dout, dlse)
    view = problem.view
    new = partial(output, problem)
    (dq, dk, dv), found = gradients(q, k, v, call.kv_heads > 0, new, new)
    bias, gate, sink = call.bias if wanted["bias"] else None, call.decay, call.sink
    if q.numel() == 0 or k.numel() == 0:
        for x in (dq, dk, dv):
            x.zero_()
        given = zip(GRADIENTS[3:], call.learned[3:], strict=True)
        found |= {name: torch.zeros_like(x) for name, x in given if x is not None}
        if sink is not None and dlse is not None:  # a row without keys has the sink
            found["sink"] = sink_gradient(sink, lse2, -dlse)
        return found
    delta = output(problem, lse2)
    inputs = [view(name, x) for name, x in dict(q=q, k=k, v=v, dout=dout, lse2=lse2, delta=delta).items()]
    # A gate's gradient is the difference of two sums of dS: as a query and as a key. It is added up over all later keys
    # (cumsum in autograd), and so are its rounding errors. Inputs of 16 bits have larger errors of their own.
    sum_type = torch.float64 if q.element_size() > 2 else torch.float32
    summed = {name for name in GRADIENTS if wanted[name]} - SUMMED_ELSEWHERE
    q_gate, k_gate = (None if gate is None else empty(gate, dtype=sum_type).zero_() for _ in range(2))

    with torch.cuda.device_of(q):
        launch_dq(problem, inputs, out, view("dlse", dlse), sink, bias, dq, q_gate, bool(summed - {"k", "v"}))
        if summed - (set() if call.kv_heads > 0 else {"q"}):
            launch_dkdv(problem, inputs, dk, dv, k_gate)
        if bias is not None:
            found["bias"] = launch_dbias(problem, inputs, bias)
        found |= launch_distances(problem, inputs, call, wanted)

    if wanted["decay"]:
        found["decay"] = (q_gate + k_gate).to(gate.dtype)
    if wanted["sink"]:
        found["sink"] = sink_gradient(sink, lse2, delta)
    return found


def sink_gradient(sink, lse2, delta):
    """Of sink [H], from lse2 and delta [B, H, Tq]: its weight has no value, so dS = -weight * delta."""
    weight = torch.exp2(sink.double()[:, None] * LOG2E.value - lse2)
    return -torch.where(lse2 == float("-inf"), 0.0, weight * delta).sum((0, 2)).to(sink.dtype)


def launch_dq(problem, inputs, out, dlse, sink, bias, dq, q_gate, with_dq):
    """Fill delta [B, H, Tq], which is among the inputs, and if with_dq dq [B, Tq, H, D] and the query half of dgate.

    bias: of which the gradient is asked, or None.
    """
    # What rounding leaves in sums of dS over rows shows in float32, and where a bias over whole rows learns them alone.
    walks = dq.element_size() > 2 or (bias is not None and bias.shape[-1] < problem.k_len)
    _, k, v, *_ = inputs
    args = (
        *inputs, *loop_descriptors(problem, "dq", k.ptr, v.ptr), None if walks else problem.view("out", out), dlse,
        sink, problem.view("dq", dq), problem.view("q_gate", q_gate),
        problem.q_len, problem.k_len, problem.ragged, problem.terms,
    )  # fmt: skip
    for outputs in ("delta",) if not with_dq else ("delta", "dq") if walks else ("both",):
        problem.cached(dq_launcher, outputs, walks).start(*args)


def dq_launcher(problem, outputs, walks):
    """outputs: of dq_kernel; walks: whether its `out` is None, for which another kernel is compiled."""
    tile = problem.tile_for(launch := problem.launches["dq"])
    return Launcher(dq_kernel, problem.programs(tile), launch, (problem.rule, tile, outputs))


def launch_dkdv(problem, inputs, dk, dv, k_gate):
    """Fill dk and dv [B, Tk, Hkv, D or Dv], and the key half of dgate [B, H, Tk].

    Grouped queries: either each program loops over the group, or all write float32 partials [B, Tk, H, D + Dv], which
    are added afterwards.
    """
    (batch, k_len, kv_heads, _), heads = dk.shape, problem.tile.heads
    kernels = ("dkdv",) if "dkdv" in problem.launches else [x for x in ("dk", "dv") if x in problem.launches]
    partials = False
    if heads != kv_heads:
        programs = problem.cached(dkdv_launcher, kernels[0], kv_heads).programs
        partials = not loops_over_group(problem, programs, problem.device)
    dk_sum, dv_sum = dk, dv
    if partials:
        kv_heads = heads
        dk_sum, dv_sum = (output(problem, x, (batch, k_len, heads, x.shape[-1]), dtype=torch.float32) for x in (dk, dv))
    args = (
        problem.view(("dk", partials), dk_sum), problem.view(("dv", partials), dv_sum),
        problem.view("k_gate", k_gate), problem.q_len, problem.k_len, problem.ragged, problem.terms,
    )  # fmt: skip
    q, _, _, dout, *_ = inputs
    for outputs in kernels:
        tiles = loop_descriptors(problem, outputs, q.ptr, dout.ptr)
        problem.cached(dkdv_launcher, outputs, kv_heads).start(*inputs, *tiles, *args)
    if partials:
        launch_group_sum(problem, dk_sum, dk)
        launch_group_sum(problem, dv_sum, dv)


def dkdv_launcher(problem, outputs, heads):
    """outputs: of dkdv_kernel; heads: over which programs are spread."""
    tile = problem.tile_for(launch := problem.launches[outputs], heads=heads)
    members = problem.tile.heads // heads
    return Launcher(dkdv_kernel, problem.programs(tile, "k"), launch, (problem.rule, tile, members, outputs))


def launch_group_sum(problem, parts, total):
    """Fill total [B, Tk, Hkv, D] with the sums over groups of parts [B, Tk, H, D] float32."""
    problem.cached(group_sum_launcher, total.shape).start(view(parts), view(total), total.shape[1])


def group_sum_launcher(problem, shape):
    batch, k_len, kv_heads, dim = shape
    tile = problem.tile_for(STREAMING, dim=dim, heads=kv_heads)
    return Launcher(group_sum_kernel, -(-k_len // tile.block_k) * kv_heads * batch, STREAMING, (tile,))


def launch_dbias(problem, inputs, bias):
    """The gradient of bias, in its own broadcast shape."""
    rows, bias_heads, q_len, k_len = bias.shape
    # Packed sequences share an element only if it is broadcast over both axes: then each has its own, added below.
    shared = problem.ragged.q_starts is not None and q_len == 1 and k_len == 1
    rows = problem.sequences if shared else rows
    launcher = problem.cached(dbias_launcher, rows, *bias.shape[1:])
    parts = launcher.constants[-1].parts
    dbias = bias.new_zeros(rows * parts, bias_heads, q_len, k_len, dtype=torch.float32)
    launcher.start(*inputs, pair_view(dbias), problem.q_len, problem.k_len, problem.ragged, problem.terms)
    if parts > 1:
        dbias = dbias.unflatten(0, (rows, parts)).sum(1)
    return (dbias.sum(0, keepdim=True) if shared else dbias).to(bias.dtype)


def dbias_launcher(problem, rows, bias_heads, q_len, k_len):
    """rows: of dbias, without parts; the rest is the shape of the bias."""
    batches, heads = max(1, problem.batch // rows), problem.tile.heads // bias_heads
    spread = Spread(batches, heads, queries=q_len == 1, keys=k_len == 1, parts=1)
    tile = problem.tile_for(launch := problem.launches["dq"], heads=bias_heads)
    down, across = problem.tiles_per_head(problem.q_len, tile.block_q), -(-problem.k_len // tile.block_k)
    if spread.queries:  # one axis holds the tiles of all packed sequences
        down, across = 1, problem.tiles_per_head(problem.k_len, tile.block_k)
    if spread.keys:
        across = 1
    programs = down * across * bias_heads * rows
    steps = spread.batches * spread.heads * (-(-problem.q_len // tile.block_q) if spread.queries else 1)
    parts = max(1, min(steps, DBIAS_WAVES * processors(problem.device) // programs))
    return Launcher(dbias_kernel, programs * parts, launch, (problem.rule, tile, spread._replace(parts=parts)))


def launch_distances(problem, inputs, call, wanted):
    """{name: gradient} of the features whose gradient is wanted and follows from sums of dS by distance."""
    features = [feature for feature in FEATURES if feature.distance_gradient and wanted[feature.name]]
    if not features:
        return {}
    launcher = problem.cached(distance_launcher)
    tile, first, diagonals, parts = launcher.constants[1:]
    shape = parts, problem.tile.heads, diagonals, 3, tile.block_q
    sums = torch.empty(shape, dtype=torch.float32, device=problem.device)
    order = (None, None) if problem.ragged.q_starts is None else by_reach(problem.ragged)
    launcher.start(
        *inputs, sums, *order, problem.q_len, problem.k_len, problem.sequences, problem.ragged, problem.terms
    )
    sides = of_diagonals(sums.sum(0), first)
    return {x.name: x.distance_gradient(sides, getattr(call, x.name)) for x in features}


def distance_launcher(problem):
    """The smaller side of the tiles of dq_kernel makes square ones."""
    launch = problem.launches["dq"]
    block = min(launch.block_q, launch.block_k)
    tile = problem.tile_for(launch._replace(block_q=block, block_k=block))
    first, diagonals = distances_of(problem, block)
    programs = diagonals * tile.heads
    parts = max(1, min(problem.sequences, DBIAS_WAVES * processors(problem.device) // programs))
    return Launcher(distance_kernel, programs * parts, launch, (problem.rule, tile, first, diagonals, parts))
