"""Where the threads of the backward kernel hold the elements of its matmuls."""

from .gluon import gl, gluon


@gluon.constexpr_function
def staged(plan):
    """Whether P and dS reach their matmuls through shared memory: a warp holds too few of their columns."""
    return plan.block_k < plan.warps * 16


@gluon.constexpr_function
def mma_layout(warps, rows, columns):
    """Of a matmul's result: 16 rows a warp, in groups of four warps; groups that this leaves over share the columns."""
    down = min(warps, rows // 16)
    across = warps // down
    return gl.NVMMADistributedLayout([3, 0], [down, across], [16, columns // across, 16])


@gluon.constexpr_function
def scores_layout(plan):
    """Of [keys, queries]."""
    return mma_layout(plan.warps, plan.block_k, plan.block_q)


@gluon.constexpr_function
def operand_layout(plan, dim):
    """Of P^T and dS^T, the left operands of dV and dK [keys, dim]."""
    return gl.DotOperandLayout(0, mma_layout(plan.warps, plan.block_k, dim), 2)


@gluon.jit
def accumulator(ROWS: gl.constexpr, COLUMNS: gl.constexpr, PLAN: gl.constexpr):
    """A float32 accumulator of a matmul."""
    return gl.full([ROWS, COLUMNS], 0.0, gl.float32, mma_layout(PLAN.warps, ROWS, COLUMNS))
