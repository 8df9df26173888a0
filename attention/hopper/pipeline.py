"""How tiles get from the loading warp of the forward to its consumers."""

from typing import NamedTuple

from ..score import Terms, ahead, behind
from ..tiles import Sequence
from .channel import Channel, acquire, barriers, commit, fill, filled, release, shared_layout, wait_full
from .decay import Decay
from .gluon import gl, gluon, mbarrier
from .ragged import Extent, corner
from .scores import Dropout, alibi_slope2, bounds, dropout_key, listed, meeting_range, query_tile

PER_CONSUMER = gl.constexpr(64)  # queries of a consumer: what one warpgroup multiplies at a time
MAILBOX = gl.constexpr(2)  # tiles on their way from the loader to the consumers


class Pipeline(NamedTuple):
    """How the work of a program is spread: a constexpr argument."""

    consumers: int
    stages: int  # blocks of keys, and of values, in shared memory
    q_stages: int = 1  # tiles of queries of each consumer in shared memory; with two, the next one loads early
    ping_pong: bool = False  # whether consumers issue their products in turn, so that softmax and products alternate
    out_in_q_memory: bool = False  # whether the output takes the queries' memory, then of one slot; else it has its own
    negate_scores: bool = False  # because the scale is negative
    ragged: bool = False  # whether sequences have lengths of their own, and tiles come from a list


class ForwardMemory(NamedTuple):
    """Shared memory of a program."""

    q: Channel  # from the loader to consumers, like k, v and mail; consumers take its tiles in turn
    k: Channel
    v: Channel
    out: gl.shared_memory_descriptor
    may_issue: gl.shared_memory_descriptor  # barriers [consumers, 1], see take_turn(); 0 without ping_pong
    mail: Channel  # which tiles are to come, a few words of each


class Sizes(NamedTuple):
    """What the tiles of a launch have in common, or those of a sequence."""

    q_len: gl.tensor
    k_len: gl.tensor
    scale: gl.tensor
    dropout: gl.tensor  # probability
    alibi_slope2: gl.tensor = 0.0  # of ALiBi and the head of a tile, in base 2


class TileTerms(NamedTuple):
    """What the scores of a tile depend on besides its Sizes."""

    dropout: Dropout
    decay: Decay  # if there are gates
    terms: Terms  # of the call
    flat_head: gl.tensor  # head, counted over all rows of the batch


@gluon.jit
def blocks(start, rows, sizes, RULE: gl.constexpr, TILE: gl.constexpr):
    """Blocks of keys that `rows` queries from `start` on meet: (begin, full_begin, full_end, end), at least one."""
    first = start + sizes.k_len - sizes.q_len  # query i stands at key i + k_len - q_len
    last = gl.minimum(first + rows, sizes.k_len) - 1
    first -= gl.minimum(start, 0)  # there is no query before 0
    span = meeting_range(first, last, behind(RULE), ahead(RULE), sizes.k_len, TILE.block_k, TILE.block_k)
    begin = span.lo // TILE.block_k
    end = gl.maximum(gl.cdiv(span.hi, TILE.block_k), begin + 1)
    return begin, span.full_lo // TILE.block_k, span.full_hi // TILE.block_k, end


@gluon.jit
def in_or_past(q_start, q_len):
    """A consumer's first query; q_len if its rows lie before query 0, because TMA cannot store there."""
    return gl.where(q_start < 0, q_len, q_start)


@gluon.jit
def channel(SLOTS: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, DTYPE: gl.constexpr, READERS: gl.constexpr):
    """An empty Channel."""
    tiles = gl.allocate_shared_memory(DTYPE, [SLOTS, ROWS, DIM], shared_layout([ROWS, DIM], DTYPE))
    return Channel(tiles, barriers(SLOTS, 1), barriers(SLOTS, READERS))


@gluon.constexpr_function
def words(rule, pipe):
    """How many words a message has: see pack_message()."""
    return 2 + 3 * pipe.ragged + rule.dropout + rule.alibi + rule.decay


@gluon.jit
def pack_message(q_start, head, seq, terms, RULE: gl.constexpr, TILE: gl.constexpr, PIPE: gl.constexpr):
    """The message about a tile: its first query, and its head of all sequences, or -1 when there are no more tiles.

    If sequences are ragged also where its own begins in its row, and how many queries and keys that has; with dropout
    also its Philox key; with ALiBi also its slope; with gates also where its keys begin in their row.
    """
    message = q_start, seq.batch * TILE.heads + head
    if PIPE.ragged:
        message += seq.q_start, seq.q_len, seq.k_len
    if RULE.dropout:
        message += (gl.cast(dropout_key(seq.index, head, terms.seed, RULE), gl.int32),)
    if RULE.alibi:
        message += (alibi_slope2(terms, head, seq).to(gl.int32, bitcast=True),)
    if RULE.decay:
        message += (seq.k_start,)
    return message


@gluon.jit
def unpack_message(message, sizes, RULE: gl.constexpr, PIPE: gl.constexpr):
    """What pack_message() packed -> (first query and key of the sequence in its row, its Sizes, its Dropout)."""
    NEXT: gl.constexpr = 2 + 3 * PIPE.ragged
    first = 0
    q_len, k_len = sizes.q_len, sizes.k_len
    if PIPE.ragged:
        first, q_len, k_len = message[2], message[3], message[4]
    philox_key = 0
    if RULE.dropout:
        philox_key = message[NEXT].to(gl.uint32, bitcast=True)
    slope = 0.0
    if RULE.alibi:
        slope = message[NEXT + RULE.dropout].to(gl.float32, bitcast=True)
    first_key = 0
    if RULE.decay:
        first_key = message[NEXT + RULE.dropout + RULE.alibi]
    own = Sizes(q_len, k_len, sizes.scale, sizes.dropout, slope)
    return first, first_key, own, Dropout(philox_key, sizes.dropout)


@gluon.jit
def send(mail, visit, message):
    """Tell the consumers about a tile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    WORDS: gl.constexpr = mail.tiles.shape[0] // MAILBOX
    slot = acquire(mail, visit)
    for word in gl.static_range(WORDS):
        mail.tiles.index(WORDS * slot + word).store(gl.full([1], message[word], gl.int32, layout))
    commit(mail, visit)


@gluon.jit
def read(mail, number):
    """A word of the messages."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(mail.tiles.index(number).load(layout), 0)


@gluon.jit
def receive(mail, visit):
    """The next message of the loader."""
    WORDS: gl.constexpr = mail.tiles.shape[0] // MAILBOX
    first = WORDS * wait_full(mail, visit)
    message = read(mail, first), read(mail, first + 1)
    for word in gl.static_range(2, WORDS):
        message += (read(mail, first + word),)
    release(mail, visit)
    return message


@gluon.jit
def tile_at(
    number, total, n_tiles, tile_list, ragged, sizes, RULE: gl.constexpr, TILE: gl.constexpr, PIPE: gl.constexpr
):
    """Number of `total` tiles -> (tile, head, Sequence), in the order in which they should start."""
    if PIPE.ragged:  # all heads of a tile, then the next one: the keys of neighbours are in the cache
        tile, index, _ = listed(tile_list, number // TILE.heads)
        return tile, number % TILE.heads, bounds(index, sizes.q_len, sizes.k_len, ragged, RULE)
    else:
        tile, head, batch = query_tile(number, total, n_tiles, sizes.k_len, RULE, TILE)
        return tile, head, Sequence(batch, batch, 0, sizes.q_len, 0, sizes.k_len)


@gluon.jit
def loader(
    shared, q, k, v, terms, sizes, n_tiles, flat_heads, tile_list, ragged,
    RULE: gl.constexpr, TILE: gl.constexpr, PIPE: gl.constexpr,
):  # fmt: skip
    """Choose tiles, and load what the consumers will need in the order in which they will."""
    CONSUMERS: gl.constexpr = PIPE.consumers
    count = 0  # of blocks
    visit = 0  # of tiles
    number = gl.program_id(0)
    total = n_tiles * flat_heads
    if PIPE.ragged:
        total = gl.load(tile_list + 1) * TILE.heads
    while number < total:
        tile, head, seq = tile_at(number, total, n_tiles, tile_list, ragged, sizes, RULE, TILE, PIPE)
        q_start = tile * TILE.block_q
        # The tile that is not full comes first, where a causal mask leaves the fewest keys. But tiles as large as a
        # block of keys stay aligned with the blocks: with a window each would otherwise need one more.
        if TILE.block_q != TILE.block_k:
            spare = gl.cdiv(seq.q_len, TILE.block_q) * TILE.block_q - seq.q_len
            q_start -= spare // PER_CONSUMER * PER_CONSUMER
        send(shared.mail, visit, pack_message(q_start, head, seq, terms, RULE, TILE, PIPE))
        queries = Extent(seq.batch, seq.batch * sizes.q_len + seq.q_start + seq.q_len, seq.q_len)
        for index in gl.static_range(CONSUMERS):
            at = corner(queries, in_or_past(q_start + index * PER_CONSUMER, seq.q_len), head, PIPE.ragged)
            fill(shared.q, visit * CONSUMERS + index, q, at)
        keys = Extent(seq.batch, seq.batch * sizes.k_len + seq.k_start + seq.k_len, seq.k_len)
        kv_head = head // TILE.group
        own = Sizes(seq.q_len, seq.k_len, sizes.scale, sizes.dropout)
        begin, _, _, end = blocks(q_start, TILE.block_q, own, RULE, TILE)
        start = (end - 1) * TILE.block_k
        fill(shared.k, count, k, corner(keys, start, kv_head, PIPE.ragged))
        for _ in range(end - 1 - begin):
            fill(shared.k, count + 1, k, corner(keys, start - TILE.block_k, kv_head, PIPE.ragged))
            fill(shared.v, count, v, corner(keys, start, kv_head, PIPE.ragged))
            count += 1
            start -= TILE.block_k
        fill(shared.v, count, v, corner(keys, start, kv_head, PIPE.ragged))
        count += 1
        visit += 1
        number = gl.atomic_add(tile_list, 1, sem="relaxed") + gl.num_programs(0)  # whoever is free takes the next
    if not PIPE.ragged:  # the last to find none left sets the count back, for the next launch
        gl.store(tile_list, 0, number == total + gl.num_programs(0) - 1)
    send(shared.mail, visit, (0, -1, 0, 0, 0, 0, 0, 0))


@gluon.jit
def take_turn(may_issue, count, INDEX: gl.constexpr, PIPE: gl.constexpr):
    """Wait until the consumer before has issued its products of this block: each block ends a phase of may_issue."""
    if PIPE.ping_pong:
        mbarrier.wait(may_issue.index(INDEX), count & 1)


@gluon.jit
def pass_turn(may_issue, INDEX: gl.constexpr, PIPE: gl.constexpr):
    """Let the next consumer issue its own."""
    if PIPE.ping_pong:
        mbarrier.arrive(may_issue.index((INDEX + 1) % PIPE.consumers))


@gluon.jit
def skip(shared, count, steps, INDEX: gl.constexpr, PIPE: gl.constexpr):
    """Release blocks that other consumers of the tile meet and this one does not."""
    for _ in range(steps):
        take_turn(shared.may_issue, count, INDEX, PIPE)
        pass_turn(shared.may_issue, INDEX, PIPE)
        filled(shared.k, count)
        release(shared.k, count)
        filled(shared.v, count)
        release(shared.v, count)
        count += 1
    return count
