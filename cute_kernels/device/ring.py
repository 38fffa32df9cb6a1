"""Places in shared memory that tiles take in turns, and the phases of their mbarriers."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint32


class RingSlot(NamedTuple):
    """Where a tile is: the stage, and the parity of the phase in which the stage's barriers complete for it."""

    index: Int32
    phase: Int32


def ring_slot(tile: Int32, stages: int) -> RingSlot:
    """The slot of the tile-th tile, counted from 0 since the kernel started, in a ring of `stages`.

    A consumer waits for `phase` of the barrier that says full; a producer for `phase ^ 1` of the one that says empty,
    which a fresh barrier passes at once. Unsigned: dividing a signed number takes twice the instructions, at the top of
    each loop.
    """
    use = Uint32(tile) // stages
    return RingSlot(Int32(Uint32(tile) - use * stages), Int32(use % 2))


def ring_slot_pow2(tile: Int32, stages: int) -> RingSlot:
    """As `ring_slot` for a power of two of stages: two instructions, of numbers with a sign too."""
    return RingSlot(tile & (stages - 1), (tile >> (stages.bit_length() - 1)) & 1)


def ring_slot_signed(tile: Int32, stages: int) -> RingSlot:
    """As `ring_slot` by signed division: for rings that sink attention advances once a work tile, measured with it."""
    return RingSlot(tile % stages, tile // stages % 2)


def use_phase(use: Int32) -> Int32:
    """The phase of the use-th use of a place, counted from 0; a producer waits for that of use + 1."""
    return use % 2


def advance(phase: Int32, stage: Int32, stages: int) -> tuple[Int32, Int32]:
    """(phase, stage) of the next tile, without a division: for loops that carry both along."""
    phase = phase ^ cutlass.select_(stage + 1 == stages, Int32(1), Int32(0))
    return phase, cutlass.select_(stage + 1 == stages, Int32(0), stage + 1)
