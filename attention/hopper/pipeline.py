"""How tiles get from the loading warp of the forward to its consumers."""

from typing import NamedTuple

from ..score import Terms, ahead, alibi_slope2, behind, dropout_key
from ..tiles import Ragged, Sequence, meeting_range, query_tile
from .channel import Channel, acquire, commit, fill, filled, release, wait_full
from .decay import nearest_gate
from .gluon import aggregate, gl, gluon, mbarrier
from .ragged import bounds, corner, extents, listed

PER_CONSUMER = gl.constexpr(64)  # queries of a consumer: what one warpgroup multiplies at a time
MAILBOX = gl.constexpr(2)  # tiles on their way from the loader to the consumers
WORDS = gl.constexpr(3)  # about each: see send()


class Pipeline(NamedTuple):
    """How the work of a program is spread: a constexpr argument."""

    consumers: int
    stages: int  # blocks of keys, and of values, in shared memory
    q_stages: int = 1  # tiles of queries of each consumer in shared memory; with two, the next one loads early
    ping_pong: bool = False  # whether consumers issue their products in turn, so that softmax and products alternate
    out_in_q_memory: bool = False  # whether the output takes the queries' memory, then of one slot; else it has its own
    negate_scores: bool = False  # because the scale is negative
    ragged: bool = False  # whether sequences have lengths of their own, and tiles come from a list


@aggregate
class ForwardProgram:
    """What all warps of a program know: tensors, shared memory, sizes and static choices."""

    q: gl.tensor  # like k, v and out: TMA descriptors
    k: gl.tensor
    v: gl.tensor
    out: gl.tensor
    lse2: gl.tensor  # [B, H, Tq]
    max_logit2: gl.tensor  # [H], or None
    sink: gl.tensor  # [H], or None
    terms: Terms  # of the call
    q_tiles: Channel  # from the loader to consumers, which take its tiles in turn
    k_tiles: Channel  # from the loader to all consumers, like v_tiles and mail
    v_tiles: Channel
    mail: Channel  # which tiles are to come
    out_tiles: gl.shared_memory_descriptor  # one of each consumer
    may_issue: gl.shared_memory_descriptor  # barriers [consumers, 1], see take_turn(); 0 without ping_pong
    q_len: gl.tensor  # queries and keys of a batch row
    k_len: gl.tensor
    batches: gl.tensor
    tile_list: gl.tensor  # as hopper_forward_kernel() gets it
    ragged: Ragged
    RULE: gl.constexpr
    TILE: gl.constexpr
    PIPE: gl.constexpr


@aggregate
class Queries:
    """PER_CONSUMER queries of a tile, which are one consumer's, and what their scores depend on."""

    number: gl.tensor  # of their tile in q_tiles
    tile: gl.shared_memory_descriptor  # [queries, D]
    seq: Sequence
    head: gl.tensor
    flat_head: gl.tensor  # counted over all batch rows
    start: gl.tensor  # the first in its sequence; below 0 if there are fewer
    first_pos: gl.tensor  # the key at which that stands
    alibi_slope2: gl.tensor
    philox_key: gl.tensor
    gates: gl.tensor  # pointer to the sequence's first, if there are any
    pivot: gl.tensor  # the gate that is subtracted from the others
    INDEX: gl.constexpr  # of the consumer


@gluon.jit
def blocks(start, rows, seq, program):
    """Blocks of keys that `rows` queries from `start` on meet: (begin, full_begin, full_end, end), at least one."""
    RULE: gl.constexpr = program.RULE
    BLOCK: gl.constexpr = program.TILE.block_k
    first = start + seq.k_len - seq.q_len  # query i stands at key i + k_len - q_len
    last = gl.minimum(first + rows, seq.k_len) - 1
    first -= gl.minimum(start, 0)  # there is no query before 0
    span = meeting_range(first, last, behind(RULE), ahead(RULE), seq.k_len, BLOCK, BLOCK)
    begin = span.lo // BLOCK
    end = gl.maximum(gl.cdiv(span.hi, BLOCK), begin + 1)
    return begin, span.full_lo // BLOCK, span.full_hi // BLOCK, end


@gluon.jit
def own_blocks(q_start, seq, tile_end, program):
    """blocks() of a consumer, of those of its tile; where it has no queries the last one, so that there is one."""
    begin, full_begin, full_end, end = blocks(q_start, PER_CONSUMER, seq, program)
    end = gl.minimum(end, tile_end)
    begin = gl.where((q_start >= 0) & (q_start < seq.q_len), gl.minimum(begin, end - 1), end - 1)
    full_end = gl.maximum(gl.minimum(full_end, end - 1), begin)
    if program.RULE.window > 0:
        full_begin = gl.maximum(gl.minimum(full_begin, full_end), begin)
    else:
        full_begin = begin
    return begin, full_begin, full_end, end


@gluon.jit
def in_or_past(q_start, q_len):
    """A consumer's first query; q_len if its rows lie before query 0, because TMA cannot store there."""
    return gl.where(q_start < 0, q_len, q_start)


@gluon.jit
def send(mail, visit, words):
    """Tell the consumers about a tile: its first query, its head, or -1 if there are no more, and its sequence."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = acquire(mail, visit)
    for word in gl.static_range(WORDS):
        mail.tiles.index(WORDS * slot + word).store(gl.full([1], words[word], gl.int32, layout))
    commit(mail, visit)


@gluon.jit
def receive(mail, visit):
    """The words that the loader sent about the next tile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = wait_full(mail, visit)
    words = ()
    for word in gl.static_range(WORDS):
        words += (gl.max(mail.tiles.index(WORDS * slot + word).load(layout), 0),)
    release(mail, visit)
    return words


@gluon.jit
def sequence_at(index, program):
    """The Sequence of a number."""
    if program.PIPE.ragged:
        return bounds(index, program.q_len, program.k_len, program.ragged, program.RULE)
    else:
        return Sequence(index, index, 0, program.q_len, 0, program.k_len)


@gluon.jit
def tiles_of(program):
    """How many tiles of queries there are, of all heads and sequences."""
    if program.PIPE.ragged:
        n_tiles = gl.load(program.tile_list + 1)
    else:
        n_tiles = gl.cdiv(program.q_len, program.TILE.block_q) * program.batches
    return n_tiles * program.TILE.heads


@gluon.jit
def tile_at(number, program):
    """Number of a tile -> (its first query, head, Sequence), in the order in which they should start."""
    TILE: gl.constexpr = program.TILE
    if program.PIPE.ragged:  # all heads of a tile, then the next one: the keys of neighbours are in the cache
        tile, index, _ = listed(program.tile_list, number // TILE.heads)
        head = number % TILE.heads
    else:
        n_tiles = gl.cdiv(program.q_len, TILE.block_q)
        tile, head, index = query_tile(number, tiles_of(program), n_tiles, program.k_len, program.RULE, TILE)
    seq = sequence_at(index, program)
    q_start = tile * TILE.block_q
    # The tile that is not full comes first, where a causal mask leaves the fewest keys. But tiles as large as a
    # block of keys stay aligned with the blocks: with a window each would otherwise need one more.
    if TILE.block_q != TILE.block_k:
        spare = gl.cdiv(seq.q_len, TILE.block_q) * TILE.block_q - seq.q_len
        q_start -= spare // PER_CONSUMER * PER_CONSUMER
    return q_start, head, seq


@gluon.jit
def loader(program):
    """Choose tiles, and load what the consumers will need in the order in which they will."""
    TILE: gl.constexpr = program.TILE
    PIPE: gl.constexpr = program.PIPE
    CONSUMERS: gl.constexpr = PIPE.consumers
    count = 0  # of blocks
    visit = 0  # of tiles
    number = gl.program_id(0)
    total = tiles_of(program)
    while number < total:
        q_start, head, seq = tile_at(number, program)
        send(program.mail, visit, (q_start, head, seq.index))
        queries, keys = extents(seq, program.q_len, program.k_len)
        for index in gl.static_range(CONSUMERS):
            at = corner(queries, in_or_past(q_start + index * PER_CONSUMER, seq.q_len), head, PIPE.ragged)
            fill(program.q_tiles, visit * CONSUMERS + index, program.q, at)
        kv_head = head // TILE.group
        begin, _, _, end = blocks(q_start, TILE.block_q, seq, program)
        start = (end - 1) * TILE.block_k
        fill(program.k_tiles, count, program.k, corner(keys, start, kv_head, PIPE.ragged))
        for _ in range(end - 1 - begin):
            fill(program.k_tiles, count + 1, program.k, corner(keys, start - TILE.block_k, kv_head, PIPE.ragged))
            fill(program.v_tiles, count, program.v, corner(keys, start, kv_head, PIPE.ragged))
            count += 1
            start -= TILE.block_k
        fill(program.v_tiles, count, program.v, corner(keys, start, kv_head, PIPE.ragged))
        count += 1
        visit += 1
        # whoever is free takes the next
        number = gl.atomic_add(program.tile_list, 1, sem="relaxed") + gl.num_programs(0)
    if not PIPE.ragged:  # the last to find none left sets the count back, for the next launch
        gl.store(program.tile_list, 0, number == total + gl.num_programs(0) - 1)
    send(program.mail, visit, (0, -1, 0))


@gluon.jit
def own_queries(tile_start, head, index, visit, program, INDEX: gl.constexpr):
    """The Queries of a consumer in a tile, once they are loaded; index: of the sequence."""
    terms = program.terms
    seq = sequence_at(index, program)
    start = tile_start + INDEX * PER_CONSUMER
    first_pos = start + seq.k_len - seq.q_len
    flat_head = seq.batch * program.TILE.heads + head
    slope2 = alibi_slope2(terms, head, seq)
    philox_key = dropout_key(seq.index, head, terms.seed, program.RULE)
    gates, pivot = 0, 0
    if program.RULE.decay:
        gates = terms.gate + (flat_head.to(gl.int64) * program.k_len + seq.k_start)
        pivot = nearest_gate(gates, first_pos, seq.k_len)
    number = visit * program.PIPE.consumers + INDEX
    tile = filled(program.q_tiles, number)
    return Queries(number, tile, seq, head, flat_head, start, first_pos, slope2, philox_key, gates, pivot, INDEX)


@gluon.jit
def take_turn(program, count, INDEX: gl.constexpr):
    """Wait until the consumer before has issued its products of this block: each block ends a phase of may_issue."""
    if program.PIPE.ping_pong:
        mbarrier.wait(program.may_issue.index(INDEX), count & 1)


@gluon.jit
def pass_turn(program, INDEX: gl.constexpr):
    """Let the next consumer issue its own."""
    if program.PIPE.ping_pong:
        mbarrier.arrive(program.may_issue.index((INDEX + 1) % program.PIPE.consumers))


@gluon.jit
def skip(program, count, steps, INDEX: gl.constexpr):
    """Release blocks that other consumers of the tile meet and this one does not."""
    for _ in range(steps):
        take_turn(program, count, INDEX)
        pass_turn(program, INDEX)
        filled(program.k_tiles, count)
        release(program.k_tiles, count)
        filled(program.v_tiles, count)
        release(program.v_tiles, count)
        count += 1
    return count
