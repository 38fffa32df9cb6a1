"""Arguments of a decode launch: fake ones for compilation, those of the roles, and tensors over scratch memory."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.merge.spec import BLOCK_SCALE_VALUES
from cute_kernels.mla.kernels.tile import NOPE


def fake_strided(dtype, shape: tuple, align: int) -> Any:
    """Makes a fake tensor of any strides whose last dimension is contiguous; rows are aligned to `align` bytes."""
    strides = [cute.sym_int64(divisibility=align // (dtype.width // 8)) for _ in shape[:-1]]
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=align)


def fake_keys(sparse: bool, sizes: tuple) -> tuple:
    """Makes fake indices or block table, and lengths, of a call with (batch, s_q, h_q) `sizes`."""
    batch, s_q, _ = sizes
    if sparse:
        index = fake_strided(cutlass.Int32, (batch, s_q, cute.sym_int()), 4)
        length = make_fake_tensor(cutlass.Int32, (batch, s_q), (cute.sym_int64(), cute.sym_int64()), assumed_align=4)
    else:
        index = fake_strided(cutlass.Int32, (batch, cute.sym_int()), 4)
        length = make_fake_tensor(cutlass.Int32, (batch,), (cute.sym_int64(),), assumed_align=4)
    return index, length


def fake_results(sizes: tuple) -> tuple:
    """Makes fake sinks, out and log-sum-exp of a call with (batch, s_q, h_q) `sizes`."""
    sink = make_fake_tensor(Float32, sizes[2:], (1,), assumed_align=4)
    out = fake_strided(BFloat16, (*sizes, NOPE), 16)
    lse = make_fake_tensor(Float32, sizes, tuple(cute.sym_int64() for _ in range(3)), assumed_align=4)
    return sink, out, lse


class Partials(NamedTuple):
    """Partial results of all heads in scratch memory, by (split, request, query, head); all None without a merge.

    out     float16, 512 values of a row
    lse     float32
    scales  float32, a power of two for each 64 values
    """

    out: Any = None
    lse: Any = None
    scales: Any = None


class Source(NamedTuple):
    """A cache, and where a key's rows lie in a page: a `PageLayout` of fp8_mla.formats.

    mKV  (pages, tokens of a page, bytes): only the first two sizes, the first stride and the address count
    """

    mKV: cute.Tensor
    page_size: cute.FastDivmodDivisorV2
    data_stride: Int32
    scale_offset: Int32
    scale_stride: Int32


class Caches(NamedTuple):
    """Arguments of the load role: one source or two, and the TMA loads of the first source's pages, or ()."""

    sources: tuple
    pages: tuple


class Sizes(NamedTuple):
    """Numbers of a launch. num_splits of a balanced schedule: the number of places of partials. causal: 0 or 1."""

    num_splits: Int32
    work_tiles: Int32
    decode_ctas: Int32
    causal: Int32


class Results(NamedTuple):
    """The sinks, which join the softmax last, and the targets: bf16 O and float32 log-sum-exp, or partials."""

    mSink: cute.Tensor
    mOut: cute.Tensor
    mLse: cute.Tensor
    partials: Partials


def uniform_partials(scratch: Int64, num_splits: Int32, batch, s_q, h_q) -> Partials:
    """Makes the partials of num_splits equal parts of each query."""
    per_query, per_request = Int64(h_q), Int64(h_q) * s_q  # 64 bits: a partial may exceed 2^31 values
    strides = (per_request * batch, per_request, per_query, Int64(1))
    return _partials(scratch, (num_splits, batch, s_q, h_q), strides)


def balanced_partials(scratch: Int64, shares: Int32, batch, s_q, h_q) -> tuple[Int32, Partials]:
    """Makes (places, partials) of a balanced schedule: the place is the sum of a share's and a query's number."""
    per_place, places = Int64(h_q), shares + batch * s_q
    return places, _partials(scratch, (places, batch, s_q, h_q), (per_place, Int64(0), Int64(0), Int64(1)))


def _partials(scratch: Int64, shape: tuple, strides: tuple) -> Partials:
    """Makes tensors of rows with these strides: all values, then all block scales, then all log-sum-exps."""
    value_strides, scale_strides = (
        tuple(cute.assume(stride * n, divby=n) for stride in strides) for n in (NOPE, NOPE // BLOCK_SCALE_VALUES)
    )
    rows = strides[0] * shape[0]
    values = cute.make_ptr(Float16, scratch, AddressSpace.gmem, assumed_align=16)
    out = cute.make_tensor(values, cute.make_layout((*shape, NOPE), stride=(*value_strides, 1)))
    end = scratch + rows * (2 * NOPE)
    first_scale = cute.make_ptr(Float32, end, AddressSpace.gmem, assumed_align=16)
    layout = cute.make_layout((*shape, NOPE // BLOCK_SCALE_VALUES), stride=(*scale_strides, 1))
    scales = cute.make_tensor(first_scale, layout)
    end += rows * (4 * (NOPE // BLOCK_SCALE_VALUES))
    first_lse = cute.make_ptr(Float32, end, AddressSpace.gmem, assumed_align=16)
    return Partials(out, cute.make_tensor(first_lse, cute.make_layout(shape, stride=strides)), scales)
