"""Tiles on their way from the warps that fill slots of shared memory to those that read them."""

from typing import NamedTuple

from .gluon import gl, gluon, mbarrier, tma_load


class Channel(NamedTuple):
    """Slots in shared memory through which tiles go from a producer to its readers.

    Tile n lies in slot n % slots. Each slot has two barriers. `full`: the producer arrives once, with the last byte of
    a TMA load or in commit(); readers wait. `empty`: each function of warps that reads arrives once, for all of its
    warps, in release(); the producer waits. Phases of a barrier alternate between 0 and 1: tile n ends phase
    n // slots & 1.
    """

    tiles: gl.shared_memory_descriptor  # [slots, rows, D]
    full: gl.shared_memory_descriptor  # barriers [slots, 1]
    empty: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor = 0  # [slots, rows] float32, lse2 or delta, that comes with each tile, if any


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, [COUNT, 1]; each completes a phase after ARRIVALS arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(COUNT):
        mbarrier.init(bars.index(slot), count=ARRIVALS)
    return bars


@gluon.constexpr_function
def shared_layout(shape, dtype):
    """Of tiles in shared memory: the last two dimensions of an allocation."""
    return gl.NVMMASharedLayout.get_default_for([int(x) for x in shape[-2:]], dtype)


@gluon.jit
def new_channel(SLOTS: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, DTYPE: gl.constexpr, READERS: gl.constexpr):
    """A Channel with new memory, whose tiles READERS warpgroups read."""
    tiles = gl.allocate_shared_memory(DTYPE, [SLOTS, ROWS, DIM], shared_layout([ROWS, DIM], DTYPE))
    return Channel(tiles, barriers(SLOTS, 1), barriers(SLOTS, READERS))


@gluon.jit
def slot_and_phase(channel, count):
    """Slot of tile number `count`, and the phase of its barriers that ends with this tile."""
    SLOTS: gl.constexpr = channel.full.shape[0]
    return count % SLOTS, count // SLOTS & 1


@gluon.jit
def acquire(channel, count):
    """The slot for a tile, once it is empty."""
    slot, phase = slot_and_phase(channel, count)
    mbarrier.wait(channel.empty.index(slot), phase ^ 1)  # of the tile before it in the slot; at once if there is none
    return slot


@gluon.jit
def load(channel, slot, full, desc, at, stats=None, first=0, OFFSET: gl.constexpr = 0):
    """Load the tile at coordinates `at`, and its stats from first + OFFSET on, into an empty slot."""
    mbarrier.expect(full, desc.block_type.nbytes + (0 if stats is None else stats.block_type.nbytes))
    tma_load(desc, at, full, channel.tiles.index(slot).reshape(desc.block_shape))
    if stats is not None:
        tma_load(stats, [first + OFFSET], full, channel.stats.index(slot))


@gluon.jit
def fill(channel, count, desc, at):
    """Load the tile at coordinates `at` once its slot is empty."""
    slot = acquire(channel, count)
    load(channel, slot, channel.full.index(slot), desc, at)


@gluon.jit
def commit(channel, count):
    """Let a tile be read that was stored by threads; TMA signals by itself."""
    slot, _ = slot_and_phase(channel, count)
    mbarrier.arrive(channel.full.index(slot))


@gluon.jit
def wait_full(channel, count):
    """The slot of a tile, once it is full."""
    slot, phase = slot_and_phase(channel, count)
    mbarrier.wait(channel.full.index(slot), phase)
    return slot


@gluon.jit
def filled(channel, count):
    """A tile, once its slot is full."""
    return channel.tiles.index(wait_full(channel, count))


@gluon.jit
def release(channel, count):
    """Let the slot of a tile be written again."""
    slot, _ = slot_and_phase(channel, count)
    mbarrier.arrive(channel.empty.index(slot))
