"""What the Hopper kernels share: masks, and functions of the portable kernels compiled as Gluon."""

from typing import NamedTuple

from .. import score, tiles
from . import ragged
from .gluon import gl, gluon


class Dropout(NamedTuple):
    """Of one head of a sequence."""

    key: gl.tensor  # of score.dropout_key()
    probability: gl.tensor


end_softmax = gluon.jit(score.end_softmax.fn)
bounds = gluon.jit(ragged.bounds.fn)
dropout_key = gluon.jit(score.dropout_key.fn)
keeps = gluon.jit(score.keeps.fn)
listed = gluon.jit(ragged.listed.fn)
meeting_range = gluon.jit(tiles.meeting_range.fn)
philox = gluon.jit(score.philox.fn)
query_tile = gluon.jit(tiles.query_tile.fn)
alibi_slope2 = gluon.jit(score.alibi_slope2.fn)
relative_bias = gluon.jit(score.relative_bias.fn)
cap_scores = gluon.jit(score.cap_scores.fn)


@gluon.jit
def split_columns(x):
    """A matmul's result [rows, columns] -> (parts [rows, n, t, 2], 8 n + (0, 1), 2 t [1, t]); their sum is the column.

    A thread holds columns 8 n + 2 t + (0, 1) of a row, where t is its place in the group of four that shares the row.
    With 2 t on the side of the rows, the rest are constants; else there were not registers enough.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    parts = x.reshape([ROWS, COLUMNS // 8, 4, 2])
    of_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout))  # [rows, t]
    of_column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, parts.type.layout))  # [n, 2]
    eights = gl.arange(0, COLUMNS // 8, gl.SliceLayout(1, of_column)) * 8
    column = (eights[:, None] + gl.arange(0, 2, gl.SliceLayout(0, of_column))[None, :])[None, :, None, :]
    return parts, column, gl.arange(0, 4, gl.SliceLayout(0, of_row))[None, :] * 2


@gluon.jit
def expand_rows(rows, thread):
    """[rows] -> [rows, 1], in the layout of [rows, t]."""
    return gl.convert_layout(rows, gl.SliceLayout(1, thread.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def join_columns(parts, x):
    """The parts of split_columns(x) as x was."""
    return gl.convert_layout(parts.reshape(x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def keep_columns(x, begin, end, other):
    """A matmul's result [rows, columns] where begin <= column < end, else `other`; both int32 [rows], or None."""
    parts, column, thread = split_columns(x)
    if end is not None:
        parts = gl.where(column < (expand_rows(end, thread) - thread)[:, None, :, None], parts, other)
    if begin is not None:
        parts = gl.where(column >= (expand_rows(begin, thread) - thread)[:, None, :, None], parts, other)
    return join_columns(parts, x)


@gluon.jit
def ramp(x, first, DTYPE: gl.constexpr):
    """first + column as DTYPE, for a matmul's result [rows, columns]; first int32 [rows]."""
    _, column, thread = split_columns(x)
    found = (expand_rows(first, thread) + thread).to(DTYPE)[:, None, :, None] + column.to(DTYPE)
    return join_columns(found, x)


@gluon.constexpr_function
def axis(layout, dim):
    """Of one dimension of four."""
    for other in (3, 2, 1, 0):
        layout = layout if other == dim else gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def kept(x, row, column, dropout, QUERIES: gl.constexpr):
    """Which weights in a matmul's result x [rows, columns] dropout keeps, as score.drop() decides.

    row, column: of the first, multiples of 16; QUERIES: whether rows are queries (0), or columns (1). A thread holds
    the rows i and i + 8 and the columns j and j + 8 of blocks of 16: of one philox() all four weights.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    parts = x.reshape([ROWS // 16, 2, 8, COLUMNS // 16, 2, 8]).permute((0, 2, 3, 5, 1, 4))
    of_four: gl.constexpr = gl.SliceLayout(4, gl.SliceLayout(5, parts.type.layout))
    rows = row + gl.arange(0, ROWS // 16, axis(of_four, 0))[:, None, None, None] * 16
    rows += gl.arange(0, 8, axis(of_four, 1))[None, :, None, None]
    columns = column + gl.arange(0, COLUMNS // 16, axis(of_four, 2))[None, None, :, None] * 16
    columns += gl.arange(0, 8, axis(of_four, 3))[None, None, None, :]
    rows, columns = rows.to(gl.uint32), columns.to(gl.uint32)
    if QUERIES == 0:
        low, high = philox(rows, columns, dropout.key)
        bits = gl.join(gl.join(low << 16, low), gl.join(high << 16, high))
    else:
        low, high = philox(columns, rows, dropout.key)
        bits = gl.join(gl.join(low << 16, high << 16), gl.join(low, high))
    keep = keeps(bits, dropout.probability).permute((0, 4, 1, 2, 5, 3)).reshape([ROWS, COLUMNS])
    return gl.convert_layout(keep, x.type.layout, assert_trivial=True)
