"""What the kernels of sink attention share: views for TMA, the list of items, and the record of one in shared memory.

Views. TMA clips at the edge of a tensor, not at the end of a sequence that others follow. A packed tensor
(tokens, heads, d) is therefore seen as (rows, d, heads, (turns, ends)), where rows and ends have the stride of a token:
row i of a sequence of n rows that ends at token e is at (EDGE - n + i, d, head, (EDGE, e)). Rows behind the end have
coordinates of EDGE and more, which TMA fills with zeros or does not store. The stride of `turns` is 2^34 elements less
that of a token, so EDGE of each together are EDGE x 2^35 bytes = 2^65, a multiple of 2^64: addresses come round to
token e - n + i. The view begins where the tensor does. A view that began EDGE tokens before it, and had no turns, would
give the same addresses; but TMA reads at the beginning of a view where it fills with zeros, and there must be memory.
The last coordinates of all modes are together those of the last row, so a descriptor is of no more than the tensor. A
batch of one length is the plain view (rows, d, heads, batch). Kernels see one rank and one kind of coordinates.

Items. An item is a block of rows (or of keys) of one head. CTA c starts with item c, and takes further ones from a
counter in the order of the list, which has long items first; so a CTA that got long ones takes fewer. Batches of one
length need no list: item numbers are divided. Packed sequences have a list in global memory, row 0 (number of
entries, 0), then (sequence, block), sorted by length (work_list.py).

The counter is followed by the number of CTAs that have finished; the last one sets both back to 0 for the next launch.
"""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from cute_kernels.sink.backward_spec import PADDING

DTYPES = {"bfloat16": BFloat16, "float16": Float16}
RECORD = 8  # words of an item in shared memory
SLOTS = 2  # items that the producer may be ahead
UNLIMITED = 1 << 30  # what a causal limit moves by where there is none
EDGE = 1 << 30  # rows of a packed view: where TMA clips
TURN = 1 << 34  # elements of 16 bits; EDGE of them are 2^65 bytes


def fake_packed(packed: bool) -> tuple:
    """(cu_seqlens_q, cu_seqlens_k, list of work) where sequences are packed, else three times None."""
    if not packed:
        return None, None, None
    ends = cute.sym_int()
    cu_q, cu_k = (make_fake_tensor(Int32, (ends,), (1,), assumed_align=4) for _ in range(2))
    return cu_q, cu_k, make_fake_tensor(Int32, (cute.sym_int(), 2), (2, 1), assumed_align=8)


def fake_rows(dtype, packed: bool, sizes: tuple, d: int | None):
    """(batch, s, heads[, d]) or (tokens, heads[, d]) with any strides but that of d; `sizes` has the leading ones."""
    inner = () if d is None else (1,)
    shape = (*sizes[1:], d) if packed else (*sizes, d)
    shape = tuple(size for size in shape if size is not None)
    align = 4 if d is None else 16
    lead = tuple(cute.sym_int64(divisibility=align * 8 // dtype.width) for _ in range(len(shape) - len(inner)))
    return make_fake_tensor(dtype, shape, (*lead, *inner), assumed_align=align)


def rows_view(t: cute.Tensor, packed: bool):
    """The tensor as (rows, d, heads, outer); see the module's docstring."""
    if const_expr(not packed):
        return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))
    (rows, *outer), (row, turn, end) = sequences(t.shape[0], t.stride[0])
    layout = cute.make_layout(
        (rows, t.shape[2], t.shape[1], tuple(outer)), stride=(row, 1, t.stride[1], (cute.assume(turn, divby=8), end))
    )
    return cute.make_tensor(t.iterator, layout)


def sequences(tokens, row):
    """Sizes and strides of (rows, turns, ends) of a packed view; `row` is the stride of a token, in elements."""
    return (EDGE, EDGE + 1, tokens + 1), (row, TURN - row, row)


@cute.jit
def span(mCu: cute.Tensor, batch: Int32, tokens: Int32):
    """(first row, number of rows) of a packed sequence, within `tokens` whatever the borders are.

    The host looks at borders, but not at those that a CUDA graph finds when it is replayed: they may be any int32.
    """
    begin = cutlass.min(cutlass.max(mCu[batch], 0), tokens)
    end = cutlass.min(cutlass.max(mCu[batch + 1], 0), tokens)
    return begin, cutlass.max(end - begin, 0)


def place(packed: bool, length: Int32, start: Int32, batch: Int32):
    """(coordinate of row 0 of a sequence, outer coordinate) in its view."""
    if const_expr(packed):
        return EDGE - length, (EDGE, start + length)
    return Int32(0), batch


@cute.jit
def item_of(item: Int32, packed: cutlass.Constexpr, mWork, divisors: tuple, blocks: Int32):
    """(sequence, block from the last one or as listed, head) of an item."""
    section_items, section, heads = divisors
    if const_expr(packed):
        entry, head = divmod(item, heads)
        batch, block = mWork[entry + 1, 0], mWork[entry + 1, 1]
        return batch, block, head
    number, rest = divmod(item, section_items)
    rank, pair = divmod(rest, section)
    batch, head = divmod(number * section.divisor + pair, heads)
    return batch, rank, head


@cute.jit
def take(counters: Int64, lane: Int32) -> Int32:
    """The next number of the counter, in lane 0; called by one whole warp.

    Where it is needed, shuffle_sync brings it to the others: that waits for the counter, some 700 clocks.
    """
    got = Int32(0)
    if lane == 0:
        got = cute.arch.atomic_add(counter(counters, 0), Int32(1), sem="relaxed", scope="gpu")
    return got


@cute.jit
def finish(counters: Int64, ctas: Int32):
    """Called by one thread of a CTA that takes no more items."""
    done = cute.arch.atomic_add(counter(counters, 1), Int32(1), sem="acq_rel", scope="gpu")
    if done == ctas - 1:
        cute.arch.store(counter(counters, 0), Int32(0))
        cute.arch.store(counter(counters, 1), Int32(0))


def counter(counters: Int64, i: int) -> cute.Pointer:
    """Word i of the counters."""
    return cute.make_ptr(Int32, counters + 4 * i, AddressSpace.gmem, assumed_align=4)


def stage_of(use: Int32, stages: int):
    """(stage, parity of its barriers' phase) of the use-th tile since the kernel started; stages are a power of two."""
    return use & (stages - 1), (use >> (stages.bit_length() - 1)) & 1


def fake_stats(h_q):
    """(2, h_q, positions) float32, contiguous: log2-sum-exp2 with the sink, and delta; see prepare.py."""
    positions = cute.sym_int(divisibility=64)
    return make_fake_compact_tensor(Float32, (2, h_q, positions), stride_order=(2, 1, 0), assumed_align=128)


def position(packed: bool, start: Int32, batch: Int32, length: Int32) -> Int32:
    """Where row 0 of a sequence stands in the statistics, a multiple of 64.

    The next sequence begins at least 65 positions behind the last row, so whole tiles of 64 never meet it.
    """
    first = start if const_expr(packed) else batch * length
    return (first + PADDING * batch) & -64
