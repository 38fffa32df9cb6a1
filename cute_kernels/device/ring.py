"""Rings: stages in shared memory that tiles take in turns, and the phases of their mbarriers.

Only sink attention has rings; other kernels have the edges of `pipeline.py`. With edges its forward took 1.006 (d 64)
and 1.019 (d 128) of the time, because ptxas orders the softmax otherwise (journal).
"""

from cutlass import Int32

from cute_kernels.device.pipeline import Slot


def ring_slot_pow2(tile: Int32, stages: int) -> Slot:
    """Returns the slot of the tile-th tile, counted from 0 since the kernel started, in a ring of 2^n stages.

    A consumer waits for `phase` on the "full" barrier; a producer waits for `phase ^ 1` on the "empty" barrier, which a
    fresh barrier passes at once.
    """
    return Slot(tile & (stages - 1), (tile >> (stages.bit_length() - 1)) & 1)


def ring_slot_signed(tile: Int32, stages: int) -> Slot:
    """Returns the slot of a tile in a ring of any size, by signed division: rings of work tiles are timed so."""
    return Slot(tile % stages, tile // stages % 2)


def use_phase(use: Int32) -> Int32:
    """Returns the phase of the use-th use of a stage, counted from 0; a producer waits for the phase of use + 1."""
    return use % 2
