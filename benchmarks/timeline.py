"""When each warp of the Hopper kernels computes, loads, multiplies and waits: docs/attention.md, section 13.

    python benchmarks/timeline.py     prints two steps of each kernel: benchmarks/results/timeline.csv

The kernels know nothing of it. Before they are compiled, the names of attention/hopper/gluon.py by which warps start
something or wait are exchanged for functions that also mark the time. Time is the address: at cycle t of its clock, a
warp stores at byte t of its log the code of what it begins. So a mark needs no counter, and waits for nothing.
"""

from itertools import cycle, pairwise
from types import ModuleType

import torch
from harness import command_line, table

from attention import attention
from attention.hopper import gluon as gluon_names
from attention.hopper.gluon import gl, gluon

COMPUTE, WAIT, COPY, MULTIPLY, FINISH = map(gl.constexpr, range(1, 6))  # FINISH + n: wait for all products but n
EVENTS = "", "computes", "waits", "copies", "multiplies", "waits", "waits", "waits"
AFTER = {("forward", "(1)"): " softmax", ("backward", "(1)"): " P", ("backward", "(2)"): " dS"}  # is computed
LOGS = 16  # for all warps of a program
SPAN = gl.constexpr(2**22)  # cycles until a log begins anew: 2 ms
ADDRESS = gl.constexpr(0)  # of the logs
mma, mma_wait, meet = gluon_names.warpgroup_mma, gluon_names.warpgroup_mma_wait, gluon_names.partition_barrier
load, add, barrier_wait = gluon_names.tma_load, gluon_names.tma_add, gluon_names.mbarrier.wait


@gluon.constexpr_function
def assembly(logs, span, code):
    return f"""{{
        .reg .b32 at, warp; .reg .b64 address; .reg .pred first;
        mov.u32 $0, %ctaid.x;
        setp.eq.u32 first, $0, 0;
        mov.u64 address, %clock64;
        cvt.u32.u64 at, address;
        and.b32 at, at, {span - 1};
        mov.u32 warp, %tid.x;
        shr.u32 warp, warp, 5;
        mad.lo.u32 at, warp, {span}, at;
        cvt.u64.u32 address, at;
        add.u64 address, address, {logs};
        mov.b32 at, {code};
        @first st.global.u8 [address], at; }}"""


@gluon.jit
def mark(CODE: gl.constexpr):
    """Log what this warp begins, in the first program. In assembly, which holds registers only for a moment."""
    ASSEMBLY: gl.constexpr = assembly(ADDRESS, SPAN, CODE)
    gl.inline_asm_elementwise(ASSEMBLY, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def warpgroup_mma(a, b, acc, use_acc: gl.constexpr = True, is_async: gl.constexpr = True):
    mark(MULTIPLY)
    acc = mma(a, b, acc, use_acc=use_acc, is_async=is_async)
    mark(COMPUTE)
    return acc


@gluon.jit
def warpgroup_mma_wait(N: gl.constexpr, deps):
    mark(FINISH + N)
    done = mma_wait(N, deps=deps)
    mark(COMPUTE)
    return done


@gluon.jit
def partition_barrier():
    mark(WAIT)
    meet()
    mark(COMPUTE)


@gluon.jit
def wait(barrier, phase):
    mark(WAIT)
    barrier_wait(barrier, phase)
    mark(COMPUTE)


@gluon.jit
def tma_load(desc, at, barrier, tile):
    mark(COPY)
    load(desc, at, barrier, tile)


@gluon.jit
def tma_add(desc, at, tile):
    mark(COPY)
    add(desc, at, tile)


def switch_on(address):
    """Have the Hopper kernels, whose modules must not have been imported yet, log to this address."""
    global ADDRESS
    ADDRESS = gl.constexpr(address)
    mbarrier = ModuleType("mbarrier")
    vars(mbarrier).update(vars(gluon_names.mbarrier), __name__="marked", wait=wait)
    gluon_names.mbarrier = mbarrier
    for function in (warpgroup_mma, warpgroup_mma_wait, partition_barrier, tma_load, tma_add):
        setattr(gluon_names, function.__name__, function)


def boxes(kernel, log, order, first, last):
    """[(kernel, lane, first cycle, cycles, what)] from product `first` of warp 0, at cycle 0, to product `last`.

    order: numbers of the products of a step. A product begins when it is issued, or when the one before it ends, and
    ends when its threads have waited for it. A mark takes some cycles, so computing of less than 120 is left out.
    """
    at = log.any(0).nonzero().flatten()
    log = log.roll(-int(at[at.diff(prepend=at[-1:] - SPAN.value).argmax()]), 1)  # a ring begins after the longest gap
    begin, end = (log[0] == MULTIPLY.value).nonzero().flatten()[[first, last]].tolist()

    def box(lane, start, stop, what):
        start, stop = max(start, begin), min(stop, end)
        return [(kernel, lane, start - begin, stop - start, what)] if start < stop else []

    others = iter(("loader", "adder"))
    for warp in (0, 4, *range(8, LOGS)):  # the first of each warpgroup that multiplies, and all others
        if log[warp].any():
            number = warp // 4 + 1
            lane = f"warpgroup {number}" if warp < 8 else next(others)
            at = log[warp].nonzero().flatten()
            names, issued, done, after = cycle(order), [], 0, ""
            for (start, code), (stop, _) in pairwise(zip(at.tolist(), log[warp, at].tolist(), strict=True)):
                if code != COMPUTE.value:
                    yield from box(lane, start, stop, EVENTS[code])
                elif stop - start > 120:
                    yield from box(lane, start, stop, EVENTS[code] + after)
                    after = ""
                if code == MULTIPLY.value:
                    issued.append((next(names), start))
                while 0 <= code - FINISH.value < len(issued):
                    name, start = issued.pop(0)
                    yield from box(f"products of {number}", max(start, done), stop, f"multiplies {name}")
                    done, after = stop, AFTER.get((kernel, name), "")


def rows():
    log = torch.zeros(LOGS, SPAN.value, dtype=torch.int8, device="cuda")
    switch_on(log.data_ptr())
    q, k, v, dout = torch.randn(4, 1, 4096, 16, 128, dtype=torch.bfloat16, device="cuda").unbind()
    out = attention(q.requires_grad_(), k, v, impl="hopper")
    # two steps in the middle of the first tile; the first block of the forward has no product (2)
    for kernel, way, *window in (
        ("forward", lambda: attention(q, k, v, impl="hopper"), ("(2)", "(1)"), 31, 35),
        ("backward", lambda: torch.autograd.grad(out, q, dout), ("(1)", "(2)", "(3)", "(5)", "(4)"), 80, 90),
    ):
        log.zero_()
        way()
        yield from boxes(kernel, log.cpu(), *window)


def main():
    command_line(__doc__).parse_args()
    table(["kernel", "lane", "cycle", "cycles", "what"], rows())


if __name__ == "__main__":
    main()
