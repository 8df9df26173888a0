"""What the scores of the Hopper kernels share: masks, dropout, and a user's rule.

They call Triton functions of ../score.py and ../tiles.py as they are: Gluon compiles what its kernels call.
"""

from triton.errors import TritonError
from triton.runtime.jit import MockTensor

from ..gpu import asked_once
from ..score import TERMS, philox
from ..score_mod import function_of
from .gluon import gl, gluon


@gluon.jit
def modify(scores, q_pos, k_pos, head, seq, terms, RULE: gl.constexpr):
    """As score.modify(); positions are [rows, 1] and [1, columns], or the reverse.

    The derivative is to be ignored where a key is hidden.
    """
    q_pos = gl.maximum(gl.minimum(q_pos, seq.k_len - 1), seq.k_len - seq.q_len)
    k_pos = gl.maximum(gl.minimum(k_pos, seq.k_len - 1), 0)
    new, slope = RULE.score_mod(scores, q_pos, k_pos, head, seq.index, *terms[TERMS:])
    new = gl.where(scores == scores, new, new)  # which may be a number: now it has the shape of scores
    return new.to(gl.float32), slope


@gluon.jit
def score_mod_kernel(args, SCORE_MOD: gl.constexpr):
    """SCORE_MOD of one tile. It is compiled only, to see whether that is possible."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    scores = gl.full([64, 64], 0.0, gl.float32, layout)
    SCORE_MOD(scores, rows, columns, gl.program_id(0), gl.program_id(1), *args)


@asked_once
def compiles(label, kinds):
    """Whether a score_mod compiles as Gluon, where tl.full() and tl.arange() lack a layout.

    kinds: of each of the score_args, the dtype of a tensor or the type of a number.
    """
    args = tuple(kind(2.5) if kind in (int, float) else MockTensor(kind) for kind in kinds)
    try:
        score_mod_kernel.warmup(args, function_of(label), grid=(1,))
    except (TritonError, RuntimeError):  # the portable kernels will say what is wrong, if it is wrong for them too
        return False
    return True


@gluon.jit
def split_columns(x):
    """A matmul's result [rows, columns] -> (parts [rows, n, t, e], 8 n + e, 2 t [1, t]); their sum is the column.

    A thread holds columns 8 n + 2 t + e of a row: t is its place in the group of four that shares the row, e is 0 or 1.
    Of these it knows 8 n + e when it is compiled, and 2 t only when it runs. So instead of column < end, callers test

        8 n + e < end - 2 t

    The left side is an immediate of the instruction. The right side is one register for all columns of a row, where
    column < end would need one for each column: more than there are.
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
    lead = (expand_rows(first, thread) + thread).to(DTYPE)
    return join_columns(lead[:, None, :, None] + column.to(DTYPE), x)


@gluon.jit
def add_ramp(x, slope, first):
    """A matmul's result x [rows, columns] -> (sum, lead): sum + slope * lead = x + slope * (first + column).

    lead, float32 [rows, t], is the same for all columns of a row that a thread holds, which leaves constants for the
    columns: one multiply-add an element.
    """
    parts, column, thread = split_columns(x)
    lead = (expand_rows(first, thread) + thread).to(gl.float32)
    return join_columns(gl.fma(column.to(gl.float32), slope, parts), x), lead


@gluon.jit
def row_max(x, factor, lead):
    """The largest x * factor + lead of each row; lead [rows, t] as of add_ramp(), or None."""
    if lead is None:
        return gl.max(x, 1) * factor
    else:
        parts, _, _ = split_columns(x)
        largest = gl.max(gl.max(gl.max(parts, 3), 1) * factor + lead, 1)
        return gl.convert_layout(largest, gl.SliceLayout(1, x.type.layout), assert_trivial=True)


@gluon.jit
def minus_rows(x, factor, rows, lead):
    """x * factor + lead - rows [rows]; lead [rows, t] as of add_ramp()."""
    parts, _, thread = split_columns(x)
    return join_columns(parts * factor - (expand_rows(rows, thread) - lead)[:, None, :, None], x)


@gluon.constexpr_function
def axis(layout, dim):
    """Of one dimension of four."""
    for other in (3, 2, 1, 0):
        layout = layout if other == dim else gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def split_fours(x, row, column):
    """The even columns x of a matmul's result -> positions of rows i and of columns j, the first of each four.

    A thread holds fours: rows i and i + 8, columns j and j + 8 of blocks of 16. Positions are uint32 [rows / 16, 8, 1,
    1] and [1, 1, columns / 16, 4]; row and column, multiples of 16, are those of the first.
    """
    ROWS: gl.constexpr = x.shape[0] // 16
    COLUMNS: gl.constexpr = x.shape[1] // 8
    parts = x.reshape([ROWS, 2, 8, COLUMNS, 2, 4]).permute((0, 2, 3, 5, 1, 4))
    of_four: gl.constexpr = gl.SliceLayout(4, gl.SliceLayout(5, parts.type.layout))
    rows = row + gl.arange(0, ROWS, axis(of_four, 0))[:, None, None, None] * 16
    rows += gl.arange(0, 8, axis(of_four, 1))[None, :, None, None]
    columns = column + gl.arange(0, COLUMNS, axis(of_four, 2))[None, None, :, None] * 16
    columns += gl.arange(0, 4, axis(of_four, 3))[None, None, None, :] * 2
    return rows.to(gl.uint32), columns.to(gl.uint32)


@gluon.jit
def join_fours(first, right, below, last, x):
    """What belongs to (i, j), (i, j + 8), (i + 8, j) and (i + 8, j + 8) of split_fours(x), laid out as x is."""
    joined = gl.join(gl.join(first, right), gl.join(below, last)).permute((0, 5, 1, 2, 4, 3))
    return gl.convert_layout(joined.reshape(x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def dropped(word, probability):
    """Four random bytes in a uint32 -> bit 7 of each is set if it is less than 256 times the probability."""
    bound = gl.cast(probability * 256, gl.uint32) * 0x01010101
    rest = (word | 0x80808080) - (bound & 0x7F7F7F7F)  # bit 7 is set if the other bits are not less
    return (~word & bound) | (~(word ^ bound) & ~rest)


@gluon.jit
def drop_pairs(pairs, row, column, philox_key, probability):
    """Zero packed weights [queries, keys / 2] as score.drop() does; row, column: of the first query and key."""
    queries, keys = split_fours(pairs, row, column)
    low, high = philox(queries, keys, philox_key)
    low, high = dropped(low, probability), dropped(high, probability)
    # each mask: its lower half is bit 7 of a byte of low, its upper half of high; for odd queries the reverse
    FILL: gl.constexpr = "prmt.b32 $0, $1, $2, $3;"
    choice = 0xCC88 ^ (queries & 1) * 0x4444
    masks = ()
    for byte in gl.static_range(4):
        args = [low, high, choice + byte * 0x1111]
        masks += (gl.inline_asm_elementwise(FILL, "=r,r,r,r", args, dtype=gl.int32, is_pure=True, pack=1),)
    return pairs & ~join_fours(masks[0], masks[2], masks[1], masks[3], pairs)


@gluon.jit
def negate(weights, flags):
    """Weights [keys, queries of one parity], negative where dropped() set their bit in flags."""
    bits = join_fours(flags << 24, flags << 16, flags << 8, flags, weights) & 0x80000000
    return (weights.to(gl.uint32, bitcast=True) ^ bits).to(gl.float32, bitcast=True)


@gluon.jit
def negate_dropped(weights, row, column, philox_key, probability):
    """Weights [keys, queries], negative where score.drop() drops; row, column: of the first key and query.

    Of the two threads that hold keys j and j + 1, each calls philox() for half of the queries.
    """
    even, odd = gl.split(weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]))
    keys, queries = split_fours(even, row, column)
    own = keys & 1  # threads of odd keys draw for odd queries: the low word for their key, the high for the other one
    low, high = philox(queries + own, keys - own, philox_key)
    low, high = dropped(low, probability), dropped(high, probability)
    SWAP: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 4, 31, -1;"
    other = gl.inline_asm_elementwise(SWAP, "=r,r", [high], dtype=gl.uint32, is_pure=False, pack=1)
    even = negate(even, gl.where(own == 0, low, other))
    odd = negate(odd, gl.where(own == 0, other, low))
    return gl.convert_layout(gl.join(even, odd).reshape(weights.shape), weights.type.layout, assert_trivial=True)


@gluon.jit
def positive_part(x, DTYPE: gl.constexpr):
    """x as 16 bits, 0 where it is negative: one instruction for two numbers."""
    if DTYPE == gl.bfloat16:
        CONVERT: gl.constexpr = "cvt.rn.relu.bf16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(CONVERT, "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        CONVERT: gl.constexpr = "cvt.rn.relu.f16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(CONVERT, "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2)
