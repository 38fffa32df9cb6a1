"""Logits of the indexer over paged FP8 keys."""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import AddressSpace, Float8E4M3FN, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device import wgmma
from cute_kernels.indexer.score_spec import KEYS, PAGE_STEP, ScoreSpec
from fp8_mla.formats import INDEX_KEY

D = INDEX_KEY.d_qk
CHUNK = 16  # bytes of a copy
CHUNKS = D // CHUNK  # of a key
BLOCKS = KEYS // PAGE_STEP  # of a tile, each within a page


class Keys(NamedTuple):
    """The keys of a row, as one thread copies them.

    cache   address of the first page
    pages   that there are
    apart   bytes from page to page
    size    keys of a page
    length  keys that the row sees
    """

    cache: Int64
    pages: Int32
    apart: Int64
    size: Int32
    length: Int32


class ScoreKernel:
    """q (rows, heads, 128) e4m3 over the keys of each row -> logits (rows, width), lengths (rows,), in one launch.

    S (64 keys, heads) = K q^T: keys are rows of wgmma, so a thread has two keys and heads / 4 heads of each, whose sum
    is a chain in registers and two shuffles. A CTA is one warpgroup; four share an SM and hide what others wait for.
    All threads copy keys by cp.async into a ring, `stages` - 1 tiles ahead:

    | shared memory | bytes             | 64 heads, 4 stages |
    |---------------|-------------------|--------------------|
    | keys          | stages x 8192     | 32768              |
    | q             | heads x 128       | 8192               |
    | scales        | stages x 256      | 1024               |

    Barriers: one of the CTA a tile. After it the copies of all threads into this tile are there, and all have read the
    tile before, whose place the next copies take.

    A tile is 8448 bytes and takes an SM of an H100 some 640 cycles to read; four wgmma of 64 heads take 128, and the
    two instructions of each product 120 issue slots.

    Sums are in DeepGEMM's order: a lane adds its heads of even and of odd columns apart, then both, times the key's
    scale, then the four lanes of a key. max(S, 0) is fmaxf, so a NaN product counts as 0. The keys of a page that the
    cache lacks get the scale NaN, so that they come last.
    """

    def __init__(self, spec: ScoreSpec) -> None:
        reasons = spec.can_implement()
        if reasons:
            raise ValueError(f"{spec}: " + "; ".join(reasons))
        self.spec = spec
        self.pairs = spec.heads // 8  # pairs of neighbouring heads of a thread

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mWeights: cute.Tensor,
        mCache: cute.Tensor,
        mTable: cute.Tensor,
        mSeqlens: cute.Tensor,
        mLogits: cute.Tensor,
        mLengths: cute.Tensor,
        ctas: Int32,
        first: Int32,
        last: Int32,
        stream: cuda.CUstream,
    ):
        """Launches the kernel.

        mQ (batch, s_q, heads, 128) bytes; mWeights (batch, s_q, heads); mCache (num_pages, page_size, 132) bytes,
        planar pages, at least one, whose page size is a multiple of 16; mTable (batch, max_pages); mSeqlens (batch, 1):
        query j sees the first mSeqlens - s_q + 1 + j keys, or (batch, s_q): what each sees. mLogits
        (batch x s_q, width); mLengths (batch x s_q,). `ctas` share the keys of a row. Its `first` first keys and
        `last` last ones get +inf.
        """
        spec = self.spec
        k, tile = OperandMajorMode.K, (KEYS, spec.heads, D)
        tiled_mma = sm90.make_trivial_tiled_mma(Float8E4M3FN, Float8E4M3FN, k, k, Float32, (1, 1, 1), tile[:2])
        layouts = (
            sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, spec.stages),
            sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, 1),
        )
        batch, s_q = Int32(mQ.shape[0]), Int32(mQ.shape[1])
        divisors = tuple(cute.fast_divmod_create_divisor_v2(n) for n in (s_q, Int32(mCache.shape[1])))
        tensors = (mQ, mWeights, mCache, mTable, mSeqlens, mLogits, mLengths)
        self._kernel(tiled_mma, layouts, tensors, ctas, (first, last), divisors).launch(
            grid=[ctas, batch * s_q, 1], block=[spec.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def _kernel(
        self, tiled_mma: cute.TiledMma, layouts: tuple, tensors: tuple, ctas: Int32, forced: tuple, divisors: tuple
    ) -> None:
        spec = self.spec
        mQ, mWeights, mCache, mTable, mSeqlens, mLogits, mLengths = tensors
        tid, _, _ = cute.arch.thread_idx()
        cta, row, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        sKeys = smem.allocate_tensor(Float8E4M3FN, layouts[0].outer, byte_alignment=1024, swizzle=layouts[0].inner)
        sQ = smem.allocate_tensor(Float8E4M3FN, layouts[1].outer, byte_alignment=1024, swizzle=layouts[1].inner)
        scales = smem.allocate_array(Float32, spec.stages * KEYS, byte_alignment=16)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # what kernels before this one write: q, keys, lengths
        by_s_q, by_page_size = divisors
        batch, query = divmod(row, by_s_q)
        s_q, width = Int32(mQ.shape[1]), Int32(mLogits.shape[1])
        length = cutlass.min(cutlass.max(mSeqlens[batch, 0], 0), width) - (s_q - 1) + query  # -2^31 does not wrap
        if mSeqlens.shape[1] == s_q:  # with one query both mean the same
            length = mSeqlens[batch, query]
        length = cutlass.min(cutlass.max(length, 0), width)
        if cta == 0 and tid == 0:
            mLengths[row] = length
        tiles = (length + (KEYS - 1)) // KEYS
        share = (tiles + (ctas - 1)) // ctas
        first, end = cta * share, cutlass.min((cta + 1) * share, tiles)
        if first < end:
            keys = Keys(
                mCache.iterator.toint(), Int32(mCache.shape[0]), Int64(mCache.stride[0]), Int32(mCache.shape[1]), length
            )
            key_bytes, q_bytes = Int32(sKeys.iterator.toint()), Int32(sQ.iterator.toint())
            self._copy_query(mQ, (batch, query), q_bytes, tid)
            weights = cute.make_rmem_tensor((2, self.pairs), Float32)
            for j in cutlass.range_constexpr(self.pairs):
                for c in cutlass.range_constexpr(2):
                    weights[c, j] = mWeights[batch, query, 8 * j + 2 * (tid % 4) + c]
            pages = cute.make_rmem_tensor((BLOCKS,), Int32)
            self._load_pages(mTable, batch, first, keys.length, by_page_size, pages)
            for ahead in cutlass.range_constexpr(spec.stages - 1):
                if first + ahead < end:
                    self._copy_keys(keys, pages, first + ahead, Int32(ahead), by_page_size, key_bytes, scales, tid)
                    self._load_pages(mTable, batch, first + ahead + 1, keys.length, by_page_size, pages)
                cute.arch.cp_async_commit_group()
            slice_ = tiled_mma.get_slice(tid)
            tKeys = tiled_mma.make_fragment_A(slice_.partition_A(sKeys))
            tQ = tiled_mma.make_fragment_B(slice_.partition_B(sQ))
            acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((KEYS, spec.heads)), Float32)
            logits_row = mLogits.iterator.toint() + 4 * Int64(row) * Int64(mLogits.stride[0])
            stage = Int32(0)
            for tile in cutlass.range(first, end, unroll=1):
                cute.arch.cp_async_wait_group(spec.stages - 2)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_threads()
                ahead_tile = tile + (spec.stages - 1)
                if ahead_tile < end:
                    free = cutlass.select_(stage == 0, Int32(spec.stages - 1), stage - 1)
                    self._copy_keys(keys, pages, ahead_tile, free, by_page_size, key_bytes, scales, tid)
                    self._load_pages(mTable, batch, ahead_tile + 1, keys.length, by_page_size, pages)
                cute.arch.cp_async_commit_group()
                warpgroup.fence()
                blocks = [(i, i) for i in range(D // 32)]
                wgmma.issue(tiled_mma, acc, tKeys[None, None, None, stage], tQ[None, None, None, 0], False, blocks)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                self._store(acc, weights, scales + KEYS * stage, logits_row, tile * KEYS, length, forced, tid)
                stage = cutlass.select_(stage == spec.stages - 1, Int32(0), stage + 1)

    @cute.jit
    def _copy_query(self, mQ: cute.Tensor, place: tuple, q_bytes: Int32, tid: Int32):
        """Starts the copies of q; they belong to the first group."""
        batch, query = place
        row = mQ.iterator.toint() + Int64(batch) * Int64(mQ.stride[0]) + Int64(query) * Int64(mQ.stride[1])
        for i in cutlass.range_constexpr(self.spec.heads * CHUNKS // self.spec.threads):
            head, chunk = tid // CHUNKS + i * (self.spec.threads // CHUNKS), tid % CHUNKS
            source = row + Int64(head) * Int64(mQ.stride[2]) + CHUNK * Int64(chunk)
            _copy_chunk(_swizzled(q_bytes, head, chunk), source)

    @cute.jit
    def _load_pages(
        self, mTable: cute.Tensor, batch: Int32, tile: Int32, length: Int32, by_page_size, pages: cute.Tensor
    ):
        """Starts the loads of the page numbers of a tile; past the row's last key they are those of that key."""
        for block in cutlass.range_constexpr(BLOCKS):
            index, _ = divmod(cutlass.min(tile * KEYS + PAGE_STEP * block, length - 1), by_page_size)
            pages[block] = mTable[batch, index]

    @cute.jit
    def _copy_keys(
        self,
        keys: Keys,
        pages: cute.Tensor,
        tile: Int32,
        stage: Int32,
        by_page_size,
        key_bytes: Int32,
        scales: cute.Pointer,
        tid: Int32,
    ):
        """Starts the copies of a tile: of each 16 keys one chunk a thread; and of a scale, by half of the threads."""
        start = key_bytes + KEYS * D * stage
        for block in cutlass.range_constexpr(BLOCKS):
            exists = pages[block] >= 0 and pages[block] < keys.pages
            page = keys.cache + Int64(cutlass.select_(exists, pages[block], Int32(0))) * keys.apart
            position = cutlass.min(tile * KEYS + PAGE_STEP * block, (keys.length - 1) // PAGE_STEP * PAGE_STEP)
            _, offset = divmod(position, by_page_size)
            key, chunk = PAGE_STEP * block + tid // CHUNKS, tid % CHUNKS
            source = page + Int64((offset + tid // CHUNKS) * D + CHUNK * chunk)
            _copy_chunk(_swizzled(start, key, chunk), source)
            if tid // PAGE_STEP == block:
                scale = scales + KEYS * stage + tid
                if exists:
                    address = page + Int64(keys.size) * D + 4 * Int64(offset + tid % PAGE_STEP)
                    cute.arch.inline_ptx(
                        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;", read_only_args=[Int32(scale.toint()), address]
                    )
                else:
                    scale.store(Float32.nan)

    @cute.jit
    def _store(
        self,
        acc: cute.Tensor,
        weights: cute.Tensor,
        scales: cute.Pointer,
        logits_row: Int64,
        begin: Int32,
        length: Int32,
        forced: tuple,
        tid: Int32,
    ):
        """Logits of the two keys that four lanes share; the first two of them store one each."""
        products = wgmma.by_row(acc)
        values = []
        for r in cutlass.range_constexpr(2):
            sums = [Float32(0.0), Float32(0.0)]
            for j in cutlass.range_constexpr(self.pairs):
                for c in cutlass.range_constexpr(2):
                    sums[c] += cute.arch.fmax(products[r, 2 * j + c], Float32(0.0)) * weights[c, j]
            value = (sums[0] + sums[1]) * (scales + wgmma.row(tid, r)).load()
            value += cute.arch.shuffle_sync_bfly(value, 1)
            value += cute.arch.shuffle_sync_bfly(value, 2)
            values.append(value)
        position = begin + wgmma.row(tid, 0) + 8 * (tid % 4)
        if tid % 4 < 2 and position < length:
            target = cute.make_ptr(Float32, logits_row + 4 * Int64(position), AddressSpace.gmem, assumed_align=4)
            first, last = forced
            value = cutlass.select_(tid % 4 == 0, values[0], values[1])
            if position < first or position >= length - last:
                value = Float32.inf
            target.store(value)

    def fake_arguments(self) -> tuple:
        """What `__call__` is compiled from: any strides, those of q and of pages multiples of 16 bytes."""
        batch, s_q, rows, width = (cute.sym_int() for _ in range(4))
        heads = self.spec.heads
        q_strides = (*(cute.sym_int64(divisibility=16) for _ in range(3)), 1)
        q = make_fake_tensor(Uint8, (batch, s_q, heads, D), q_strides, assumed_align=16)
        weights_strides = (cute.sym_int64(), cute.sym_int64(), 1)
        weights = make_fake_tensor(Float32, (batch, s_q, heads), weights_strides, assumed_align=4)
        shape = (cute.sym_int(), cute.sym_int(), INDEX_KEY.token_bytes)
        strides = (cute.sym_int64(divisibility=16), cute.sym_int64(), 1)
        cache = make_fake_tensor(Uint8, shape, strides, assumed_align=16)
        table = make_fake_tensor(Int32, (batch, cute.sym_int()), (cute.sym_int64(), 1), assumed_align=4)
        free = (cute.sym_int64(), cute.sym_int64())
        seqlens = make_fake_tensor(Int32, (batch, cute.sym_int()), free, assumed_align=4)
        logits = make_fake_tensor(Float32, (rows, width), (cute.sym_int64(), 1), assumed_align=4)
        lengths = make_fake_tensor(Int32, (rows,), (1,), assumed_align=4)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return q, weights, cache, table, seqlens, logits, lengths, *[Int32(1)] * 3, stream


@cute.jit
def _swizzled(start: Int32, row: Int32, chunk: Int32) -> Int32:
    """Where a chunk of a row of 128 bytes lies, in the 128-byte swizzle."""
    return start + row * D + ((chunk ^ (row % 8)) * CHUNK)


@cute.jit
def _copy_chunk(target: Int32, source: Int64):
    """Starts a copy of 16 bytes from global to shared memory."""
    cute.arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[target, source])
