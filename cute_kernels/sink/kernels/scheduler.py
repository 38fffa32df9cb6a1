"""Scheduler: which work tile a CTA takes next, and how its load warp passes it on to the other roles.

A work tile is a block of query rows (or of keys) of one head. CTA c starts with work tile c. It takes further ones from
a counter, long ones first, so a CTA that got long ones takes fewer. In a batch of one length, divisions turn the number
of a work tile into its block. Packed sequences have a list in global memory: row 0 is (number of entries, 0), further
rows are (sequence, block), those with most work first (work_list.py).

The word after the counter counts the CTAs that have finished. The last CTA sets both to 0 for the next launch.

In shared memory a work tile is a record of 8 words. A record whose first word is -1 ends the kernel.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int32, Int64, const_expr

from cute_kernels.device.pipeline import Pipeline, Slot
from cute_kernels.sink.kernels import views
from cute_kernels.sink.kernels.masks import Visibility, visibility

RECORD = 8  # words of a work tile in shared memory
WORK_STAGES = 2  # work tiles that the load warp may be ahead


class WorkTile(NamedTuple):
    """Rows of a head from `first` on, in sequence `batch`: queries if the kernel is query-stationary, else keys.

    The sequence has s_q queries and s_k keys. If packed, they start at tokens start_q and start_k.
    """

    first: Int32
    head: Int32
    batch: Int32
    s_q: Int32
    s_k: Int32
    start_q: Int32
    start_k: Any = None


class Divisors(NamedTuple):
    """Divisors of the numbers of work tiles."""

    section_tiles: Any  # work tiles of a section
    section: Any  # pairs of a sequence and a head in a section
    heads: Any


class QuerySchedule(NamedTuple):
    """The work tiles of a query-stationary kernel."""

    max_q: Int32  # queries of a sequence; if packed, of all sequences
    max_k: Int32
    blocks: Int32  # blocks of queries of a sequence, unless packed
    work_tiles: Int32  # number of work tiles, unless packed
    counters: Int64  # address
    divisors: Divisors
    ratio: Any  # divisor: query heads of a KV head


class KeySchedule(NamedTuple):
    """The work tiles of the key-stationary kernel."""

    max_q: Int32  # queries of a sequence; if packed, of all sequences
    max_k: Int32
    ratio: Int32  # query heads of a KV head
    work_tiles: Int32  # number of work tiles, unless packed
    counters: Int64  # address
    divisors: Divisors


@cute.jit
def query_work(
    spec, mQ: cute.Tensor, mK: cute.Tensor, window: Int32, causal: Int32, section: Int32, counters: Int64
) -> tuple[QuerySchedule, Visibility]:
    """Makes the schedule of a query-stationary kernel from the arguments of its launch."""
    heads = mQ.shape[1 if const_expr(spec.packed) else 2]
    ratio = heads // mK.shape[1 if const_expr(spec.packed) else 2]
    if const_expr(spec.grouped):
        heads, section = heads // ratio, section // ratio
    blocks, work_tiles, pairs = Int32(1), Int32(0), Int32(1)
    max_q, max_k = (Int32(t.shape[0 if const_expr(spec.packed) else 1]) for t in (mQ, mK))
    if const_expr(not spec.packed):
        blocks = cute.ceil_div(max_q, spec.rows)
        pairs = section
        work_tiles = blocks * heads * mQ.shape[0]
    visible = visibility(window, causal)
    *divisors, ratio = (cute.fast_divmod_create_divisor_v2(Int32(n)) for n in (pairs * blocks, pairs, heads, ratio))
    return QuerySchedule(max_q, max_k, blocks, work_tiles, counters, Divisors(*divisors), ratio), visible


class Block(NamedTuple):
    """Which block a work tile is: the sequence, the number of the block in it, and the head."""

    batch: Int32
    number: Int32
    head: Int32


class WorkRecord:
    """A work tile in shared memory. Each use of a field reads it: registers are short while accumulators are alive."""

    def __init__(self, smem, slot: Slot) -> None:
        self.words, self.slot = smem.work.get_tensor(cute.make_layout((RECORD, WORK_STAGES))), slot

    def __getattr__(self, name: str) -> Int32:
        if name not in WorkTile._fields:
            raise AttributeError(name)
        return self.words[WorkTile._fields.index(name), self.slot.index]

    def write(self, fields: tuple) -> None:
        """Writes the first fields of the record, as many as are given."""
        for i, value in enumerate(fields):
            self.words[i, self.slot.index] = value


def await_record(smem, edge: Pipeline, count: Int32) -> WorkRecord:
    """Waits until the load warp has written the record of the count-th work tile; returns the record."""
    slot = edge.slot(count)
    edge.wait(smem, slot)
    return WorkRecord(smem, slot)


def read(record: WorkRecord) -> WorkTile:
    """Reads all fields but start_k into registers."""
    return WorkTile(*(record.words[i, record.slot.index] for i in range(6)))


@cute.jit
def block_at(number: Int32, packed: cutlass.Constexpr, work_list, divisors: Divisors, blocks: Int32) -> Block:
    """Returns the block of a work tile: by the list if packed, otherwise by dividing its number."""
    if const_expr(packed):
        entry, head = divmod(number, divisors.heads)
        batch, block = work_list[entry + 1, 0], work_list[entry + 1, 1]
        return Block(batch, block, head)
    section, rest = divmod(number, divisors.section_tiles)
    rank, pair = divmod(rest, divisors.section)
    batch, head = divmod(section * divisors.section.divisor + pair, divisors.heads)
    return Block(batch, rank, head)


@cute.jit
def work_tile(
    block: Block, index: Int32, size: int, packed: cutlass.Constexpr, tensors: views.Packed, schedule
) -> WorkTile:
    """Returns the work tile of rows (or keys) from index x size on, in the sequence and head of a block."""
    start_q, start_k, s_q, s_k = Int32(0), Int32(0), schedule.max_q, schedule.max_k
    if const_expr(packed):
        start_q, s_q = views.span(tensors.cu_q, block.batch, schedule.max_q)
        start_k, s_k = views.span(tensors.cu_k, block.batch, schedule.max_k)
    return WorkTile(index * size, block.head, block.batch, s_q, s_k, start_q, start_k)


@cute.jit
def publish(smem, edge: Pipeline, count: Int32, fields: tuple, lane: Int32):
    """Writes the record of the count-th work tile once its stage is free; called by one warp."""
    slot = edge.slot(count)
    edge.acquire(smem, count)
    if lane == 0:
        WorkRecord(smem, slot).write(fields)
    edge.arrive(smem, slot)


@cute.jit
def publish_end(
    smem, edge: Pipeline, count: Int32, retires: cutlass.Constexpr, counters: Int64, ctas: Int32, lane: Int32
):
    """Writes the record that ends the kernel; if it `retires`, the CTA also counts as finished."""
    slot = edge.slot(count)
    edge.acquire(smem, count)
    if lane == 0:
        WorkRecord(smem, slot).write((Int32(-1),))
        if const_expr(retires):
            retire(counters, ctas)
    edge.arrive(smem, slot)


@cute.jit
def claim(counters: Int64, lane: Int32) -> Int32:
    """Returns the next number of the counter in lane 0; called by one warp.

    The caller shuffles it to the other lanes when it needs it: that waits for the counter, some 700 cycles.
    """
    got = Int32(0)
    if lane == 0:
        got = cute.arch.atomic_add(counter(counters, 0), Int32(1), sem="relaxed", scope="gpu")
    return got


@cute.jit
def retire(counters: Int64, ctas: Int32):
    """Counts this CTA as finished; the last one sets both counters to 0. Called by one thread."""
    done = cute.arch.atomic_add(counter(counters, 1), Int32(1), sem="acq_rel", scope="gpu")
    if done == ctas - 1:
        cute.arch.store(counter(counters, 0), Int32(0))
        cute.arch.store(counter(counters, 1), Int32(0))


def counter(counters: Int64, i: int) -> cute.Pointer:
    """Returns the address of word i of the counters."""
    return cute.make_ptr(Int32, counters + 4 * i, AddressSpace.gmem, assumed_align=4)
