"""Channels: slots of shared memory that some warps fill in turn and others empty, with barriers that say which may."""

from typing import NamedTuple

from .gluon import fence_async_shared, gl, gluon, mbarrier, tma_load


class Channel(NamedTuple):
    """The user of step n takes slot n % slots. A full barrier says that its tile may be read, an empty one written."""

    tiles: gl.shared_memory_descriptor  # [slots, rows, D]
    full: gl.shared_memory_descriptor  # barriers [slots, 1]
    empty: gl.shared_memory_descriptor


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers [COUNT, 1], each of which completes a phase after ARRIVALS arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(COUNT):
        mbarrier.init(bars.index(slot), count=ARRIVALS)
    return bars


@gluon.jit
def make_channel(
    SLOTS: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, DTYPE: gl.constexpr, READERS: gl.constexpr
):
    """An empty Channel."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], DTYPE)
    tiles = gl.allocate_shared_memory(DTYPE, [SLOTS, ROWS, DIM], layout)
    return Channel(tiles, barriers(SLOTS, 1), barriers(SLOTS, READERS))


@gluon.jit
def slot_and_phase(step, SLOTS: gl.constexpr):
    """Slot of a step, and the phase in which its full barrier completes; the empty one completes in the other."""
    return step % SLOTS, step // SLOTS & 1


@gluon.jit
def emptied(channel, step):
    """The slot of a step, once it may be written."""
    slot, phase = slot_and_phase(step, channel.full.shape[0])
    mbarrier.wait(channel.empty.index(slot), phase ^ 1)
    return slot


@gluon.jit
def fill(channel, step, desc, at):
    """Load the tile at coordinates `at` by TMA, once its slot is empty."""
    slot = emptied(channel, step)
    mbarrier.expect(channel.full.index(slot), desc.block_type.nbytes)
    tile = channel.tiles.index(slot).reshape(desc.block_shape)
    tma_load(desc, at, channel.full.index(slot), tile)


@gluon.jit
def put(channel, step, tile):
    """Store a tile from registers, once its slot is empty."""
    slot = emptied(channel, step)
    channel.tiles.index(slot).store(tile)
    fence_async_shared()
    mbarrier.arrive(channel.full.index(slot))


@gluon.jit
def filled(channel, step):
    """The tile of a step, once it may be read."""
    slot, phase = slot_and_phase(step, channel.full.shape[0])
    mbarrier.wait(channel.full.index(slot), phase)
    return channel.tiles.index(slot)


@gluon.jit
def release(channel, step):
    """Let the slot of a step be written again."""
    slot, _ = slot_and_phase(step, channel.full.shape[0])
    mbarrier.arrive(channel.empty.index(slot))
