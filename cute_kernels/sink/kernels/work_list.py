"""Makes the list of work tiles of packed sequences: blocks of queries or of keys, those with most work first.

The launch also fills the rows of a padded tensor past its last sequence, which no later kernel writes.

One CTA sorts by counting, in 1024 bins of equal width. The work of a block is the number of tokens of the other side
that it meets. Within a bin blocks have the order in which threads arrive; this changes only which CTA computes what.

Roles (512 threads): a warp takes a sequence, and its lanes take the blocks. The sort has three steps, with
__syncthreads between them: count the blocks of each bin; the first warp turns counts into first entries, 32 bins a
lane; every block takes an entry. The other FILLERS CTAs fill padding rows in turn. Without such rows they end.

Borders may be any int32 when a CUDA graph is replayed. Sequences are clamped to the last token. If they overlap, so
that they add up to more tokens than there are, the list is empty. Otherwise it has room for all of their blocks.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.sink.kernels import masks, views
from cute_kernels.sink.spec import SinkWorkListSpec

THREADS, BINS = 512, 1024
FILLERS = 64  # CTAs that fill; each stores 512 words at a time
ZERO, MINUS_INF = 0, -(1 << 23)  # bits of float32 values; two 16-bit zeros have the bits of ZERO too
WARPS, PER_LANE = THREADS // 32, BINS // 32
MANY = 1 << 30  # tokens, more than any call has


class Tokens(NamedTuple):
    """Number of tokens of a sequence on the side that the list is for, and on the other side."""

    listed: Int32
    other: Int32


class Padding(NamedTuple):
    """Contiguous tensors whose rows past the last sequence are filled: addresses, 0 for none, and words of a row."""

    queries: Int64  # the output or the gradient of q, filled with 0
    lses: Int64  # filled with -inf
    keys: Int64  # the gradient of k, filled with 0
    values: Int64  # the gradient of v, filled with 0
    query_words: Int32
    heads: Int32  # words of a row of lses
    key_words: Int32


class SinkWorkListKernel:
    """The kernel that the module's docstring describes."""

    def __init__(self, spec: SinkWorkListSpec):
        self.spec = spec

    def fake_arguments(self) -> tuple:
        """Returns shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        ends = cute.sym_int()
        cu_q, cu_k = (make_fake_tensor(Int32, (ends,), (1,), assumed_align=4) for _ in range(2))
        work = make_fake_tensor(Int32, (cute.sym_int(), 2), (2, 1), assumed_align=8)
        padding = (*[Int64(0)] * 4, *[Int32(1)] * 3)
        return (cu_q, cu_k, work, *[Int32(1)] * 5, *padding, make_fake_stream(use_tvm_ffi_env_stream=True))

    @cute.jit
    def __call__(
        self,
        mCuQ: cute.Tensor,
        mCuK: cute.Tensor,
        mWork: cute.Tensor,
        rows: Int32,
        window: Int32,
        causal: Int32,
        listed: Int32,
        other: Int32,
        queries: Int64,
        lses: Int64,
        keys: Int64,
        values: Int64,
        query_words: Int32,
        heads: Int32,
        key_words: Int32,
        stream: cuda.CUstream,
    ):
        """Launches 1 + FILLERS CTAs.

        mCuQ, mCuK  (batch + 1,) int32
        mWork    (entries + 1, 2) int32; entries is at least listed / rows + batch
        rows     tokens of a block
        window   keys that a query sees at most, 2^30 where there is no window
        causal   1 or 0
        listed   tokens of all sequences on the side that the list is for
        other    tokens of all sequences on the other side
        queries ... key_words  as in `Padding`
        """
        padding = Padding(queries, lses, keys, values, query_words, heads, key_words)
        reach = Int32(0) if causal != 0 else Int32(masks.UNLIMITED)
        self.kernel(mCuQ, mCuK, mWork, rows, window, reach, listed, other, padding).launch(
            grid=[1 + FILLERS, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mCuQ: cute.Tensor,
        mCuK: cute.Tensor,
        mWork: cute.Tensor,
        rows: Int32,
        window: Int32,
        reach: Int32,
        listed: Int32,
        other: Int32,
        padding: Padding,
    ):
        cta, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()  # one for all: each allocator begins at the first byte
        bins = smem.allocate_array(Int32, BINS, byte_alignment=16)
        sTokens = smem.allocate_tensor(Int32, cute.make_layout(WARPS))
        if cta == 0:
            self.sort(mCuQ, mCuK, mWork, rows, window, reach, listed, other, bins, sTokens)
        else:
            tokens_q, tokens_k = (other, listed) if const_expr(self.spec.keys) else (listed, other)
            self.fill(padding.queries, padding.query_words, ZERO, mCuQ, tokens_q, cta - 1)
            self.fill(padding.lses, padding.heads, MINUS_INF, mCuQ, tokens_q, cta - 1)
            self.fill(padding.keys, padding.key_words, ZERO, mCuK, tokens_k, cta - 1)
            self.fill(padding.values, padding.key_words, ZERO, mCuK, tokens_k, cta - 1)

    @cute.jit
    def fill(
        self, rows: Int64, words: Int32, value: cutlass.Constexpr, cu_seqlens: cute.Tensor, tokens: Int32, filler: Int32
    ):
        """Stores `value` in all words of every FILLERS-th row past the last sequence."""
        tidx, _, _ = cute.arch.thread_idx()
        if rows != 0:
            end = cutlass.min(cutlass.max(cu_seqlens[cu_seqlens.shape[0] - 1], 0), tokens)
            for row in cutlass.range(end + filler, tokens, FILLERS, unroll=1):
                for i in cutlass.range(tidx, words, THREADS, unroll=1):
                    address = rows + (Int64(row) * words + i) * 4
                    word = cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=4)
                    cute.arch.store(word, Int32(value))

    @cute.jit
    def sort(
        self,
        mCuQ: cute.Tensor,
        mCuK: cute.Tensor,
        mWork: cute.Tensor,
        rows: Int32,
        window: Int32,
        reach: Int32,
        listed: Int32,
        other: Int32,
        bins: cute.Pointer,
        sTokens: cute.Tensor,
    ):
        """Sorts the blocks and writes the list; `bins` and `sTokens` are shared memory."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp_idx = tidx % 32, tidx // 32
        sBins = cute.make_tensor(bins, cute.make_layout(BINS))
        for i in cutlass.range(tidx, BINS, THREADS, unroll=1):
            sBins[i] = Int32(0)
        cute.arch.sync_threads()
        shift = cutlass.max(22 - Int32(cute.arch.clz(other)), 0)  # other >> shift is below 1024
        sequences, tokens = Int32(mCuQ.shape[0] - 1), Int32(0)

        for b in cutlass.range(warp_idx, sequences, WARPS, unroll=1):
            sequence = self.tokens(mCuQ, mCuK, b, listed, other)
            tokens = cutlass.min(tokens + sequence.listed, MANY)
            blocks = (sequence.listed + rows - 1) // rows
            for block in cutlass.range(lane, blocks, 32, unroll=1):
                bin_index = self.bin_of(sequence, block, rows, window, reach, shift)
                cute.arch.atomic_add(bins + bin_index, Int32(1), sem="relaxed", scope="cta")
        if lane == 0:
            sTokens[warp_idx] = tokens
        cute.arch.sync_threads()
        all_tokens = Int64(0)
        for w in cutlass.range_constexpr(WARPS):
            all_tokens += Int64(sTokens[w])
        if all_tokens > Int64(listed):
            sequences = Int32(0)

        if warp_idx == 0:
            total = Int32(0)
            for i in cutlass.range(PER_LANE, unroll=1):
                total += sBins[lane * PER_LANE + i]
            entries = total
            for step in cutlass.range_constexpr(5):
                lower = cute.arch.shuffle_sync_up(entries, 1 << step, mask_and_clamp=0)
                if lane >= 1 << step:
                    entries += lower
            if lane == 31:
                mWork[0, 0] = cutlass.select_(sequences > 0, entries, Int32(0))
                mWork[0, 1] = Int32(0)
            first = entries - total
            for i in cutlass.range(PER_LANE, unroll=1):
                count = sBins[lane * PER_LANE + i]
                sBins[lane * PER_LANE + i] = first
                first += count
        cute.arch.sync_threads()

        for b in cutlass.range(warp_idx, sequences, WARPS, unroll=1):
            again = self.tokens(mCuQ, mCuK, b, listed, other)
            count_b = (again.listed + rows - 1) // rows
            for block in cutlass.range(lane, count_b, 32, unroll=1):
                bin_index = self.bin_of(again, block, rows, window, reach, shift)
                entry = cute.arch.atomic_add(bins + bin_index, Int32(1), sem="relaxed", scope="cta") + 1
                if entry < mWork.shape[0]:
                    mWork[entry, 0] = b
                    mWork[entry, 1] = block

    @cute.jit
    def tokens(self, mCuQ: cute.Tensor, mCuK: cute.Tensor, b: Int32, listed: Int32, other: Int32):
        """Returns the tokens of sequence `b`."""
        cu_listed, cu_other = mCuQ, mCuK
        if const_expr(self.spec.keys):
            cu_listed, cu_other = mCuK, mCuQ
        _, mine = views.span(cu_listed, b, listed)
        _, others = views.span(cu_other, b, other)
        return Tokens(mine, others)

    @cute.jit
    def bin_of(self, tokens: Tokens, block: Int32, rows: Int32, window: Int32, reach: Int32, shift: Int32) -> Int32:
        """Returns the bin of a block; bin 0 has the most work."""
        mine, other = tokens
        first = block * rows
        last = cutlass.min(first + rows, mine) - 1
        if const_expr(self.spec.keys):
            offset = mine - other  # query i stands at key i + offset
            begin = cutlass.max(first - offset - reach, 0)
            end = cutlass.min(last - offset + window, other)
        else:
            offset = other - mine
            begin = cutlass.max(first + offset - window + 1, 0)
            end = cutlass.min(last + offset + 1 + reach, other)
        work = cutlass.max(end - begin, 0) >> shift
        return BINS - 1 - cutlass.min(work, BINS - 1)
