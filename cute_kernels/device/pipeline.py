"""Pipelines: edges between the roles of a kernel, whose stages in shared memory tiles take in turn.

A pipeline has two mbarriers a stage, `NAME_full` and `NAME_empty`:

    producer    acquire, then fill the stage, then arrive
    consumer    wait, then read the stage, then release

Some edges need only one of the two. Tiles are counted from 0 since the kernel started, and tile t has stage t % stages.
All methods take a tile number or its `Slot`; a role that carries the `Slot` of its next tile divides nothing.

All threads of a role arrive, not one per warp: that costs nothing measurable, and racecheck can follow it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass._mlir.dialects.nvvm import MemScopeKind


class Slot(NamedTuple):
    """The place of a tile: the stage, and the parity of the phase in which the stage's barriers complete for it."""

    index: Int32
    phase: Int32


class MBarrier(NamedTuple):
    """An mbarrier, one for each stage.

    name      name of the field in shared memory: a pointer, a number, or a range with stages
    arrivals  number of arrivals that complete a phase; an arrival that announces bytes counts as one
    stages    number of stages
    bytes     bytes that TMA, or the other CTA of a cluster, brings in a phase; 0: none
    says      what is true when a phase completes
    """

    name: str
    arrivals: int
    stages: int
    bytes: int
    says: str


@dataclass(frozen=True)
class Pipeline:
    """An edge: `producers` arrivals fill a stage, and `consumers` arrivals free it. With 0 there is no such barrier.

    name       prefix of its fields in shared memory, NAME_full and NAME_empty
    bytes      bytes that copies bring to a stage beside the arrivals
    full       what is true when a stage is full
    empty      what is true when a stage is free
    """

    name: str
    stages: int = 1
    producers: int = 0
    consumers: int = 0
    bytes: int = 0
    full: str = ""
    empty: str = ""

    def barriers(self) -> list[MBarrier]:
        """Returns the barriers of the edge."""
        both = (
            MBarrier(f"{self.name}_full", self.producers, self.stages, self.bytes, self.full),
            MBarrier(f"{self.name}_empty", self.consumers, self.stages, 0, self.empty),
        )
        return [barrier for barrier in both if barrier.arrivals]

    # ---- where a tile is

    def slot(self, tile: Int32 | Slot) -> Slot:
        """Returns the slot of a tile."""
        return tile if isinstance(tile, Slot) else self.slot_of(tile)

    def slot_of(self, tile: Int32) -> Slot:
        """Returns the slot of a tile's number. The division is unsigned: a signed one takes twice the instructions."""
        use = Uint32(tile) // self.stages
        return Slot(Int32(Uint32(tile) - use * self.stages), Int32(use % 2))

    def index(self, tile: Int32 | Slot) -> Int32:
        """Returns the stage of a tile."""
        return self.slot(tile).index

    def following(self, slot: Slot) -> Slot:
        """Returns the slot of the next tile, without a division, for loops that carry it along."""
        wraps = slot.index + 1 == self.stages
        phase = slot.phase ^ cutlass.select_(wraps, Int32(1), Int32(0))
        return Slot(cutlass.select_(wraps, Int32(0), slot.index + 1), phase)

    # ---- the producer

    def acquire(self, smem: Any, tile: Int32 | Slot) -> None:
        """Waits until the stage of a tile is free, its earlier tile having been read. A fresh stage is free at once."""
        index, phase = self.slot(tile)
        # on a fresh barrier, a wait for the phase before the first one returns at once
        cute.arch.mbarrier_wait(self.empty_barrier(smem, index), phase ^ 1)

    def arrive(self, smem: Any, tile: Int32 | Slot, peer: Any = None) -> None:
        """Arrives: this thread has filled its part of the stage, in the CTA of rank `peer` if given."""
        _arrive(self.full_barrier(smem, self.index(tile)), peer)

    def arrive_copies(self, smem: Any, tile: Int32 | Slot) -> None:
        """Makes this thread's cp.async copies arrive when they end; each thread counts as one arrival."""
        cute.arch.cp_async_mbarrier_arrive_noinc(self.full_barrier(smem, self.index(tile)))

    def arrive_and_expect(self, smem: Any, tile: Int32 | Slot) -> None:
        """Arrives, and announces the bytes that copies bring. Called by one thread."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.full_barrier(smem, self.index(tile)), self.bytes)

    def expect(self, smem: Any, tile: Int32 | Slot) -> None:
        """Announces the bytes that copies bring, without an arrival. Called by one thread."""
        cute.arch.mbarrier_expect_tx(self.full_barrier(smem, self.index(tile)), self.bytes)

    # ---- the consumer

    def wait(self, smem: Any, tile: Int32 | Slot) -> None:
        """Waits until a tile has arrived."""
        index, phase = self.slot(tile)
        cute.arch.mbarrier_wait(self.full_barrier(smem, index), phase)

    def release(self, smem: Any, tile: Int32 | Slot, peer: Any = None) -> None:
        """Arrives: this thread has read the tile. The arrival goes to the CTA of rank `peer` if given."""
        _arrive(self.empty_barrier(smem, self.index(tile)), peer)

    # ---- shared memory

    def full_barrier(self, smem: Any, index: Any) -> cute.Pointer:
        """Returns the barrier of a full stage, which TMA copies take."""
        return field_pointer(smem, f"{self.name}_full") + index

    def empty_barrier(self, smem: Any, index: Any) -> cute.Pointer:
        """Returns the barrier of a free stage."""
        return field_pointer(smem, f"{self.name}_empty") + index


class Pow2Pipeline(Pipeline):
    """A pipeline of a power of two of stages: it masks and shifts the numbers of tiles."""

    def slot_of(self, tile: Int32) -> Slot:
        """Returns the slot of a tile's number."""
        return Slot(tile & (self.stages - 1), (tile >> (self.stages.bit_length() - 1)) & 1)


class SignedPipeline(Pipeline):
    """A pipeline that divides the numbers of tiles as signed ones."""

    def slot_of(self, tile: Int32) -> Slot:
        """Returns the slot of a tile's number."""
        return Slot(tile % self.stages, tile // self.stages % 2)

    def acquire(self, smem: Any, tile: Int32 | Slot) -> None:
        """Waits until the stage of a tile is free; given a number, for the phase of the stage's next use."""
        barrier = self.empty_barrier(smem, self.index(tile))
        phase = tile.phase ^ 1 if isinstance(tile, Slot) else (tile // self.stages + 1) % 2
        cute.arch.mbarrier_wait(barrier, phase)


Pipelines = Sequence[Pipeline]


def initialize(smem: Any, pipelines: Pipelines) -> None:
    """Initializes all barriers; called by one thread, which fences and synchronizes afterwards."""
    for barrier in _barriers(pipelines):
        for stage in range(barrier.stages):
            cute.arch.mbarrier_init(field_pointer(smem, barrier.name) + stage, barrier.arrivals)


def table(pipelines: Pipelines) -> str:
    """Lines for a docstring: name[stages], arrivals, bytes, and what the barrier says."""
    rows = []
    for barrier in _barriers(pipelines):
        name = f"{barrier.name}[{barrier.stages}]" if barrier.stages > 1 else barrier.name
        transaction = f"+ {barrier.bytes:,} bytes" if barrier.bytes else ""
        rows.append(f"  {name:<16}{barrier.arrivals:>5} {transaction:<15} {barrier.says}".rstrip())
    return "\n".join(rows)


def _barriers(pipelines: Pipelines) -> Iterator[MBarrier]:
    return (barrier for pipeline in pipelines for barrier in pipeline.barriers())


def field_pointer(smem: Any, name: str) -> cute.Pointer:
    """Returns the first word of a field, which is a pointer, a number or a range with stages."""
    field = getattr(smem, name)
    if isinstance(field, cute.Pointer):
        return field
    return field.data_ptr() if hasattr(field, "data_ptr") else field.ptr


def _arrive(barrier: cute.Pointer, peer: Any) -> None:
    if peer is None:
        cute.arch.mbarrier_arrive(barrier)
    else:  # relaxed: the arrival publishes no data of this thread
        cute.arch.mbarrier_arrive(barrier, peer, scope=MemScopeKind.CLUSTER, relaxed=True)
