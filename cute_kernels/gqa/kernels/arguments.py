"""Arguments of the decode kernel's roles, by name: those of the launch, and values that a role derives from them."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


class Tensors(NamedTuple):
    """Tensors of the call, except the cache, which TMA reads."""

    mQ: cute.Tensor
    mTable: Any  # a tensor, or None without pages
    mLengths: cute.Tensor
    mStarts: Any  # a tensor, or None if sequences begin with their first token
    mSink: cute.Tensor
    mOut: cute.Tensor
    mLse: cute.Tensor


class Tma(NamedTuple):
    """The TMA copy of K or of V, and the tensor of coordinates that goes with it."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Scales(NamedTuple):
    """Scales of K or of V in global memory: their address, and strides in elements."""

    address: Int64
    outer: Int64
    head: Int64
    row: Int64
    group: Int64


class Scoring(NamedTuple):
    """Terms that turn q k into a score: address and batch stride of ALiBi slopes, the softmax scale, the softcap."""

    alibi: Int64
    alibi_batch: Int64
    softmax_scale: Float32
    softcap: Float32


class Sizes(NamedTuple):
    """Sizes and masks of the call.

    capacity  tokens that a sequence can have
    window    keys that a query sees; below 2^30
    causal    1 or 0
    """

    capacity: Int32
    window: Int32
    s_q: Int32
    causal: Int32


class Call(NamedTuple):
    """Arguments of the call, except the cache and the scratch memory."""

    tensors: Tensors
    k_scales: Scales
    v_scales: Scales
    scoring: Scoring
    sizes: Sizes


class Work(NamedTuple):
    """How the work is cut: the line of all tiles into `ranges`, or each sequence into `splits` if that is not 0."""

    ranges: Int32
    splits: Int32
    num_work_tiles: Int32


class Scratch(NamedTuple):
    """Addresses of the partials, and of the counters of finished partials."""

    partials: Int64
    counters: Int64


class Divisors(NamedTuple):
    """Divisors with precomputed reciprocals.

    head_blocks  KV heads x blocks of query rows
    blocks       blocks of query rows of a KV head
    ratio        query heads of a KV head
    """

    head_blocks: Any
    blocks: Any
    ratio: Any
    ranges: Any
    splits: Any


class PageTable(NamedTuple):
    """The block table, and the divisors and bounds of page numbers. `shift` is log2 of the page size."""

    mTable: Any  # a tensor, or None without pages
    shift: Int32
    page_size: Int32
    num_pages: Int32


class KeyRange(NamedTuple):
    """Key tiles `start` to `stop` of a sequence of `length` keys, the first of which is `first_key`."""

    start: Int32
    stop: Int32
    length: Int32
    first_key: Int32


class QueryBlock(NamedTuple):
    """The query rows of a CTA: rows columns * block ... of s_q x ratio (tokens x heads) of one KV head."""

    sequence: Int32
    kv_head: Int32
    block: Int32
    ratio: Any  # as a divisor
    s_q: Int32
