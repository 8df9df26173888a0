"""What the Hopper kernels share: barriers, masks, and functions of the portable kernels compiled as Gluon."""

from .. import score, tiles
from . import ragged
from .gluon import gl, gluon, mbarrier

end_softmax = gluon.jit(score.end_softmax.fn)
bounds = gluon.jit(ragged.bounds.fn)
listed = gluon.jit(ragged.listed.fn)
meeting_range = gluon.jit(tiles.meeting_range.fn)
query_tile = gluon.jit(tiles.query_tile.fn)
tanh = gluon.jit(score.tanh.fn)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers [COUNT, 1] that complete a phase after so many arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(COUNT):
        mbarrier.init(bars.index(slot), count=ARRIVALS)
    return bars


@gluon.jit
def ring(step, SLOTS: gl.constexpr):
    """Slot of a step, and the phase in which its full barrier ends; the empty one ends in the other."""
    return step % SLOTS, step // SLOTS & 1


@gluon.jit
def keep_columns(x, begin, end, other):
    """A matmul's result [rows, columns] where begin <= column < end, else `other`; both int32 [rows], or None.

    A thread holds columns 8 n + 2 t + (0, 1) of a row, where t is its place in the group of four that shares the row.
    With 2 t on the side of the rows, all is compared with constants; else there were not registers enough.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    parts = x.reshape([ROWS, COLUMNS // 8, 4, 2])
    of_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout))  # [rows, t]
    of_column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, parts.type.layout))  # [n, 2]
    eights = gl.arange(0, COLUMNS // 8, gl.SliceLayout(1, of_column)) * 8
    column = (eights[:, None] + gl.arange(0, 2, gl.SliceLayout(0, of_column))[None, :])[None, :, None, :]
    thread = gl.arange(0, 4, gl.SliceLayout(0, of_row))[None, :] * 2
    if end is not None:
        end = gl.convert_layout(end, gl.SliceLayout(1, of_row), assert_trivial=True)
        parts = gl.where(column < (end[:, None] - thread)[:, None, :, None], parts, other)
    if begin is not None:
        begin = gl.convert_layout(begin, gl.SliceLayout(1, of_row), assert_trivial=True)
        parts = gl.where(column >= (begin[:, None] - thread)[:, None, :, None], parts, other)
    return gl.convert_layout(parts.reshape([ROWS, COLUMNS]), x.type.layout, assert_trivial=True)
