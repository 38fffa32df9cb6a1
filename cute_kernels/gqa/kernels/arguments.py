"""What the roles of one GQA decode launch share, by name. All fields are values that the whole launch agrees on."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


class TmaCopies(NamedTuple):
    """The TMA copies of K and V: an atom, and the cache as (rows, columns, heads, outer) for each."""

    k_atom: cute.CopyAtom
    k: cute.Tensor
    v_atom: cute.CopyAtom
    v: cute.Tensor


class Tensors(NamedTuple):
    """Tensors of the call that are read or written without TMA.

    q        (batch, s_q, h_q, d)
    table    (batch, pages of a sequence) int32, or None without pages
    lengths  (batch,) int32
    sink     (h_q,) float32
    out      as q
    lse      (batch, s_q, h_q) float32
    """

    q: cute.Tensor
    table: cute.Tensor | None
    lengths: cute.Tensor
    sink: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor


class ScaleSource(NamedTuple):
    """Scales of K or of V in global memory: address, and strides in elements, 0 along what shares a scale."""

    address: Int64
    outer: Int64
    head: Int64
    row: Int64
    group: Int64


class AlibiSlopes(NamedTuple):
    """Slopes in global memory: address, and the stride from one sequence to the next in elements."""

    address: Int64
    batch_stride: Int64


class Request(NamedTuple):
    """What the call asks for beside its tensors.

    capacity  tokens that a sequence can have
    window    keys that a query sees, itself included; NO_WINDOW for all
    causal    1: a query sees no later token of its own sequence; 0: all
    """

    softmax_scale: Float32
    softcap: Float32
    capacity: Int32
    window: Int32
    s_q: Int32
    causal: Int32


class PageFacts(NamedTuple):
    """Tokens of a page, and pages of the cache."""

    size: Int32
    count: Int32


class GridFacts(NamedTuple):
    """How the work list is cut: into `ranges`, or each sequence into `splits` where that is not 0; all work tiles."""

    ranges: Int32
    splits: Int32
    work_tiles: Int32


class ScratchMemory(NamedTuple):
    """Addresses of the partials and of the counters of finished ones."""

    partials: Int64
    counters: Int64


class Divisors(NamedTuple):
    """Fast divisors of the launch: a division by what only the device knows takes 100 cycles.

    head_blocks  heads of the cache times blocks of query rows
    blocks       blocks of query rows of a head of the cache
    ratio        query heads of a head of the cache
    ranges       of the work list
    splits       of a sequence, at least 1
    """

    head_blocks: Any
    blocks: Any
    ratio: Any
    ranges: Any
    splits: Any


class RowBlock(NamedTuple):
    """Whose rows a CTA decodes: a sequence, a head of the cache, a block of its query rows (tokens x heads)."""

    batch_idx: Int32
    kv_head: Int32
    block: Int32
    ratio: Any


class KeyRange(NamedTuple):
    """Tiles `start` to `stop` of a sequence of `length` keys."""

    start: Int32
    stop: Int32
    length: Int32
