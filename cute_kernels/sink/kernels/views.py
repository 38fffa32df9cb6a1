"""Sequences as TMA and the statistics see them: a batch of one length, or packed sequences of any lengths.

TMA clips at the edge of a tensor, but not at the end of a sequence that others follow. So kernels see a packed tensor
(tokens, heads, d) as (rows, d, heads, (turns, ends)), where rows and ends have the stride of a token. A sequence of n
rows that ends at token e has row i at (EDGE - n + i, d, head, (EDGE, e)). Rows past the end have coordinates of EDGE
and more, which TMA fills with zeros or does not store. The stride of `turns` is 2^34 elements minus that of a token.
So EDGE rows and EDGE turns together are EDGE x 2^35 bytes = 2^65, a multiple of 2^64, and the address wraps around to
token e - n + i. The view begins where the tensor does. A view that began EDGE tokens earlier and had no turns would
give the same addresses. But where TMA fills with zeros, it reads at the beginning of the view, so memory has to exist
there. The last coordinates of all modes together are those of the last row, so a descriptor spans exactly the tensor.

A batch of one length is the plain view (rows, d, heads, batch). Both views have one rank and one kind of coordinates.

Statistics and float32 sums of dq have no view. Row i of sequence b has position
((first row of b + 192 b) rounded down to 64) + i. A tile of 128 rows starts at a multiple of 128 in its sequence, so it
meets no other sequence. There are (total rows + 192 x batch) positions, rounded up to 64.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from cute_kernels.sink.backward_spec import PADDING

DTYPES = {"bfloat16": BFloat16, "float16": Float16}
EDGE = 1 << 30  # rows of a packed view: where TMA clips
TURN = 1 << 34  # elements of 16 bits; EDGE of them are 2^65 bytes


class Tma(NamedTuple):
    """A TMA copy, and the tensor of coordinates that goes with it."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Packed(NamedTuple):
    """cu_seqlens of queries and of keys, and the list of work tiles; all are None unless sequences are packed."""

    cu_q: Any
    cu_k: Any
    work_list: Any


class Span(NamedTuple):
    """A sequence in a packed tensor: its first row, and its number of rows."""

    start: Int32
    length: Int32


class Origin(NamedTuple):
    """Where a sequence begins in its view: coordinate of its row 0, and the outer coordinate."""

    row: Int32
    outer: Any


def fake_packed(packed: bool) -> Packed:
    """Makes the arguments of the compiler for packed sequences."""
    if not packed:
        return Packed(None, None, None)
    ends = cute.sym_int()
    cu_q, cu_k = (make_fake_tensor(Int32, (ends,), (1,), assumed_align=4) for _ in range(2))
    return Packed(cu_q, cu_k, make_fake_tensor(Int32, (cute.sym_int(), 2), (2, 1), assumed_align=8))


def fake_rows(dtype, packed: bool, sizes: tuple, d: int | None):
    """Makes (batch, s, heads[, d]) or (tokens, heads[, d]) of any strides, but 1 for d; `sizes` are those before d."""
    inner = () if d is None else (1,)
    shape = (*sizes[1:], d) if packed else (*sizes, d)
    shape = tuple(size for size in shape if size is not None)
    align = 4 if d is None else 16
    lead = tuple(cute.sym_int64(divisibility=align * 8 // dtype.width) for _ in range(len(shape) - len(inner)))
    return make_fake_tensor(dtype, shape, (*lead, *inner), assumed_align=align)


def fake_stats(h_q):
    """Makes (2, h_q, positions) float32, contiguous: log2-sum-exp2 with the sink, and delta; see prepare.py."""
    positions = cute.sym_int(divisibility=64)
    return make_fake_compact_tensor(Float32, (2, h_q, positions), stride_order=(2, 1, 0), assumed_align=128)


def rows_view(t: cute.Tensor, packed: bool):
    """Returns the tensor as (rows, d, heads, outer); see the module's docstring."""
    if const_expr(not packed):
        return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))
    (rows, *outer), (row, turn, end) = packed_modes(t.shape[0], t.stride[0])
    layout = cute.make_layout(
        (rows, t.shape[2], t.shape[1], tuple(outer)), stride=(row, 1, t.stride[1], (cute.assume(turn, divby=8), end))
    )
    return cute.make_tensor(t.iterator, layout)


def packed_modes(tokens, row):
    """Returns sizes and strides of (rows, turns, ends) of a packed view; a token has a stride of `row` elements."""
    return (EDGE, EDGE + 1, tokens + 1), (row, TURN - row, row)


def tma(op, t: cute.Tensor, packed: bool, layout, box: tuple) -> Tma:
    """Makes a TMA copy between boxes of the tensor's view and one stage of a shared memory layout."""
    return Tma(*cute.nvgpu.cpasync.make_tiled_tma_atom(op, rows_view(t, packed), cute.select(layout, mode=[0, 1]), box))


def partition(tma: Tma, staged: cute.Tensor, boxes: cute.Tensor):
    """Returns boxes in shared memory and in global memory, as the copy takes them."""
    return cute.nvgpu.cpasync.tma_partition(
        tma.atom, 0, cute.make_layout(1), cute.group_modes(staged, 0, 2), cute.group_modes(boxes, 0, 2)
    )


@cute.jit
def span(cu_seqlens: cute.Tensor, batch: Int32, tokens: Int32) -> Span:
    """Returns a packed sequence, clamped to `tokens` whatever its borders are.

    The host checks borders, but not those that a CUDA graph finds at its replay: they may be any int32.
    """
    begin = cutlass.min(cutlass.max(cu_seqlens[batch], 0), tokens)
    end = cutlass.min(cutlass.max(cu_seqlens[batch + 1], 0), tokens)
    return Span(begin, cutlass.max(end - begin, 0))


@cute.jit
def block_at(cu_seqlens: cute.Tensor, tokens: Int32, index: Int32, rows: cutlass.Constexpr):
    """Returns the sequence that has block `index` of the positions in the statistics, and the block's number there.

    A sequence's blocks of `rows`, 64 or 128, begin at its row 0, and no two blocks have the same position // rows. A
    block may lie past the last row of its sequence. If borders decrease, the number may be any, also a negative one.
    """
    low, high = Int32(0), cu_seqlens.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if position(True, span(cu_seqlens, middle, tokens).start, middle, Int32(0)) // rows <= index:
            low = middle
        else:
            high = middle
    return low, index - position(True, span(cu_seqlens, low, tokens).start, low, Int32(0)) // rows


def head_rows(t: cute.Tensor, packed: bool, start: Int32, batch: Int32, head: Int32) -> cute.Tensor:
    """Returns the rows of a head of a sequence: (s, d), or (s) of a tensor without d."""
    first = (None, head) if const_expr(packed) else (batch, None, head)
    rest = (None,) * (cute.rank(t) - len(first))
    rows = t[first + rest]
    return cute.domain_offset((start, *(0 for _ in rest)), rows) if const_expr(packed) else rows


def origin(packed: bool, length: Int32, start: Int32, batch: Int32) -> Origin:
    """Returns where a sequence begins in its view."""
    if const_expr(packed):
        return Origin(EDGE - length, (EDGE, start + length))
    return Origin(Int32(0), batch)


def position(packed: bool, start: Int32, batch: Int32, length: Int32) -> Int32:
    """Returns the position of row 0 of a sequence in the statistics, a multiple of 64.

    The next sequence begins at least 129 positions after the last row, so whole tiles of 128 never meet it.
    """
    first = start if const_expr(packed) else batch * length
    return (first + PADDING * batch) & -64
