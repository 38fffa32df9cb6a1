"""The ring of a CTA's stages. Numbers are those of `device.ring.ring_slot`; the form is another.

`ring_slot_pow2` changes the machine code, even in one role alone (sparse, unsplit, both exchanges), and so does a phase
that is computed before the first wait. So each wait computes its own, by signed division.
"""

from cutlass import Int32

from cute_kernels.mla.crossover.kernels.tile import STAGES


def stage_of(tile: Int32) -> Int32:
    """The stage of the tile-th key tile, counted from 0 since the kernel started."""
    return tile % STAGES


def full_phase(tile: Int32) -> Int32:
    """The phase in which a barrier that a producer completes says so for this key tile."""
    return tile // STAGES % 2


def empty_phase(tile: Int32) -> Int32:
    """The phase in which `empty` says that the tile before in the stage is read; a fresh barrier passes at once."""
    return (tile // STAGES + 1) % 2
