"""Computes logits of the indexer over paged FP8 keys."""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import AddressSpace, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device import wgmma
from cute_kernels.device.operands import load_matrices
from cute_kernels.indexer.score_spec import KEYS, PAGE_STEP, ScoreSpec
from fp8_mla.formats import INDEX_KEY

D = INDEX_KEY.d_qk
WARP = 32
CHUNK = 16  # bytes of a copy
CHUNKS = D // CHUNK  # copies of a key


class Keys(NamedTuple):
    """The keys of a request, as one thread copies them.

    cache   address of the first page
    pages   number of pages
    apart   bytes from page to page
    size    keys of a page
    length  keys that any query of the CTA sees
    """

    cache: Int64
    pages: Int32
    apart: Int64
    size: Int32
    length: Int32


class Queries(NamedTuple):
    """Neighbouring queries of a request that are scored together, and one thread's view of them in shared memory.

    request  number of their request
    first    number of the first query in the request
    count    number of queries
    weights  (queries, 4, heads / 4 + 4): weights of a lane's columns are neighbours; four lanes read different banks
    lengths  number of keys that each query sees
    """

    request: Int32
    first: Int32
    count: Int32
    weights: cute.Pointer
    lengths: cute.Pointer


class Divisors(NamedTuple):
    """Numbers that threads divide by, as fast divisors; a request has `groups` groups of queries."""

    groups: cute.FastDivmodDivisorV2
    s_q: cute.FastDivmodDivisorV2
    page_size: cute.FastDivmodDivisorV2


class Problem(NamedTuple):
    """Arguments of a launch, the same for all threads: see `ScoreKernel.__call__`."""

    mQ: cute.Tensor
    mWeights: cute.Tensor
    mCache: cute.Tensor
    mTable: cute.Tensor
    mSeqlens: cute.Tensor
    mLogits: cute.Tensor
    mLengths: cute.Tensor
    first: Int32
    last: Int32
    unscored: Int32
    divisors: Divisors


class Tiles(NamedTuple):
    """Operands of the products of a tile: wgmma, its fragments of q, and addresses in shared memory."""

    mma: cute.TiledMma
    tQ: cute.Tensor
    key_bytes: Int32
    q_bytes: Int32
    scales: cute.Pointer


class ScoreKernel:
    """q (batch, s_q, heads, 128) e4m3 and the keys of each request -> logits of all queries, and each query's length.

    S (64 keys, heads) = K q^T: keys are rows of wgmma, so a thread has two keys and heads / 4 heads of each, whose sum
    is a chain in registers and two shuffles. A CTA is one warpgroup; three or four share an SM and hide each other's
    waits. All CTAs of the launch have an equal share of the tiles, from one cut to the next. Each scans the lengths for
    it, so a graph may be replayed with other lengths. A CTA multiplies each tile by up to `queries` queries in turn, so
    that keys are read once for all of them: from memory, and from shared memory into 16 registers, so that a query
    reads 8 KB of shared memory (q) instead of 16. While one query is summed up the next is multiplied, in other
    accumulators. All threads copy keys by cp.async into a ring, `stages` - 1 tiles ahead:

    | shared memory    | bytes                  | 64 heads, 1 query | 4 queries |
    |------------------|------------------------|-------------------|-----------|
    | keys             | stages x 8192          | 32768             | 32768     |
    | q                | queries x heads x 128  | 8192              | 32768     |
    | scales           | stages x 256           | 1024              | 1024      |
    | weights, lengths | queries x 4 x (heads + 17) | 324           | 1296      |

    There is one barrier of the CTA a tile. After it the copies of all threads into this tile are there, and all have
    read the tile before, whose stage the next copies take. There is one more where the tiles of other queries begin.

    A tile is 8448 bytes and takes an SM of an H100 some 640 cycles to read. Its copies take 120 issue slots, a query of
    64 heads 128 cycles of wgmma and 92 issue slots.

    Sums are in DeepGEMM's order: a lane adds its heads of even and of odd columns separately, then both, times the
    key's scale, then the four lanes of a key. max(S, 0) is fmaxf, so a NaN product counts as 0. Keys of a page that the
    cache lacks get the scale NaN, so that they come last.
    """

    def __init__(self, spec: ScoreSpec) -> None:
        reasons = spec.can_implement()
        if reasons:
            raise ValueError(f"{spec}: " + "; ".join(reasons))
        self.spec = spec

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
        unscored: Int32,
        stream: cuda.CUstream,
    ):
        """Launches the kernel.

        mQ (batch, s_q, heads, 128) bytes; mWeights (batch, s_q, heads); mCache (num_pages, page_size, 132) bytes,
        planar pages, at least one, whose page size is a multiple of 16; mTable (batch, max_pages); mSeqlens (batch, 1):
        query j sees the first mSeqlens - s_q + 1 + j keys, or (batch, s_q): number of keys that each query sees.
        mLogits (batch x s_q, width); mLengths (batch x s_q,). `ctas` share all tiles. The `first` first and `last` last
        keys that a query sees get +inf. A group of queries that see at most `unscored` keys gets no logits.
        """
        spec = self.spec
        k, tile = OperandMajorMode.K, (KEYS, spec.heads, D)
        tiled_mma = sm90.make_trivial_tiled_mma(
            Float8E4M3FN, Float8E4M3FN, k, k, Float32, (1, 1, 1), tile[:2], warpgroup.OperandSource.RMEM
        )
        q_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, spec.queries)
        s_q = Int32(mQ.shape[1])
        sizes = ((s_q + (spec.queries - 1)) // spec.queries, s_q, Int32(mCache.shape[1]))
        divisors = Divisors(*(cute.fast_divmod_create_divisor_v2(n) for n in sizes))
        problem = Problem(
            mQ, mWeights, mCache, mTable, mSeqlens, mLogits, mLengths, first, last, unscored, divisors
        )  # fmt: skip
        self._kernel(tiled_mma, q_layout, problem, ctas, Int32(mQ.shape[0]) * sizes[0]).launch(
            grid=[ctas, 1, 1], block=[spec.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def _kernel(
        self, tiled_mma: cute.TiledMma, q_layout: cute.ComposedLayout, problem: Problem, ctas: Int32, groups: Int32
    ) -> None:
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = tid % WARP
        smem = SmemAllocator()
        keys = smem.allocate_array(Uint8, spec.stages * KEYS * D, byte_alignment=1024)
        sQ = smem.allocate_tensor(Float8E4M3FN, q_layout.outer, byte_alignment=1024, swizzle=q_layout.inner)
        scales = smem.allocate_array(Float32, spec.stages * KEYS, byte_alignment=16)
        weights = smem.allocate_array(Float32, spec.queries * spec.weights, byte_alignment=16)
        lengths = smem.allocate_array(Int32, spec.queries, byte_alignment=16)
        tiles = Tiles(
            tiled_mma,
            tiled_mma.make_fragment_B(tiled_mma.get_slice(tid).partition_B(sQ)),
            Int32(keys.toint()),
            Int32(sQ.iterator.toint()),
            scales,
        )
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # waits for what earlier kernels write: q, keys, lengths
        if cta == 0:
            for row in cutlass.range(tid, Int32(problem.mLengths.shape[0]), spec.threads, unroll=1):
                request, query = divmod(row, problem.divisors.s_q)
                problem.mLengths[row] = self._length(problem, request, query)
        total = Int32(0)
        for chunk in cutlass.range(0, groups, WARP, unroll=4):
            total += self._count_tiles(problem, chunk + lane, groups)
        total = cute.arch.warp_redux_sync(total, "add")
        share = (total + (ctas - 1)) // ctas
        begin, end = cta * share, cutlass.min((cta + 1) * share, total)
        before = Int32(0)  # tiles of the groups before this chunk of groups
        for chunk in cutlass.range(0, groups, WARP, unroll=1):
            count = self._count_tiles(problem, chunk + lane, groups)
            until = count  # tiles of this lane and of lower lanes
            for step in (1, 2, 4, 8, 16):
                more = cute.arch.shuffle_sync_up(until, step)
                until += cutlass.select_(lane >= step, more, Int32(0))
            start = before + until - count
            first_tile, end_tile = cutlass.max(begin - start, 0), cutlass.min(end - start, count)
            left = Int32(cute.arch.vote_ballot_sync(first_tile < end_tile))
            while left != 0:
                owner = 31 - Int32(cute.arch.clz(left & -left))
                request, group = divmod(chunk + owner, problem.divisors.groups)
                first = group * spec.queries
                count_of_group = cutlass.min(problem.divisors.s_q.divisor - first, spec.queries)
                queries = Queries(request, first, count_of_group, weights, lengths)
                own_first, own_end = cute.arch.shuffle_sync(first_tile, owner), cute.arch.shuffle_sync(end_tile, owner)
                self._score(problem, queries, tiles, own_first, own_end, tid)
                left = left & (left - 1)
            before += cute.arch.shuffle_sync(until, WARP - 1)

    @cute.jit
    def _length(self, problem: Problem, request: Int32, query: Int32) -> Int32:
        """Returns how many keys a query sees."""
        mSeqlens, s_q, width = problem.mSeqlens, problem.divisors.s_q.divisor, Int32(problem.mLogits.shape[1])
        length = cutlass.min(cutlass.max(mSeqlens[request, 0], 0), width) - (s_q - 1) + query  # -2^31 - 1 wraps around
        if mSeqlens.shape[1] == s_q:  # with one query both mean the same
            length = mSeqlens[request, query]
        return cutlass.min(cutlass.max(length, 0), width)

    @cute.jit
    def _longest(self, problem: Problem, request: Int32, first: Int32) -> Int32:
        """Returns how many keys any query of a group sees."""
        longest = Int32(0)
        for i in cutlass.range_constexpr(self.spec.queries):
            query = cutlass.min(first + i, problem.divisors.s_q.divisor - 1)
            longest = cutlass.max(longest, self._length(problem, request, query))
        return longest

    @cute.jit
    def _count_tiles(self, problem: Problem, index: Int32, groups: Int32) -> Int32:
        """Returns the tiles of a group of queries; 0 for a group that does not exist."""
        count = Int32(0)
        if index < groups:
            request, group = divmod(index, problem.divisors.groups)
            longest = self._longest(problem, request, group * self.spec.queries)
            if longest > problem.unscored:
                count = (longest + (KEYS - 1)) // KEYS
        return count

    @cute.jit
    def _score(self, problem: Problem, queries: Queries, tiles: Tiles, first: Int32, end: Int32, tid: Int32):
        """Computes the logits of a group of queries over tiles first, first + 1, ... below end."""
        spec, mCache, mLogits = self.spec, problem.mCache, problem.mLogits
        cute.arch.sync_threads()  # all threads have read the queries before these
        keys = Keys(
            mCache.iterator.toint(), Int32(mCache.shape[0]), Int64(mCache.stride[0]), Int32(mCache.shape[1]),
            self._longest(problem, queries.request, queries.first),
        )  # fmt: skip
        page = self._load_page(problem, queries.request, first, keys.length, tid)
        self._copy_queries(problem.mQ, queries, tiles.q_bytes, tid)
        self._load_weights(problem, queries, tid)
        for ahead in cutlass.range_constexpr(spec.stages - 1):
            if first + ahead < end:
                self._copy_keys(problem, keys, page, first + ahead, Int32(ahead), tiles, tid)
                page = self._load_page(problem, queries.request, first + ahead + 1, keys.length, tid)
            cute.arch.cp_async_commit_group()
        accs = [
            cute.make_rmem_tensor(tiles.mma.partition_shape_C((KEYS, spec.heads)), Float32)
            for _ in range(min(spec.queries, 2))
        ]
        factors = cute.make_rmem_tensor(spec.heads // 4, Float32)  # weights of this lane's heads
        key_scales = cute.make_rmem_tensor(2, Float32)
        sums = cute.make_rmem_tensor((2, spec.queries), Float32)  # sums of this lane's heads
        row_bytes = 4 * Int64(mLogits.stride[0])
        row = queries.request * problem.divisors.s_q.divisor + queries.first
        logits_rows = mLogits.iterator.toint() + Int64(row) * row_bytes
        stage = Int32(0)
        for tile in cutlass.range(first, end, unroll=1):
            cute.arch.cp_async_wait_group(spec.stages - 2)
            if tile == first:
                cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads q in shared memory
            cute.arch.sync_threads()
            ahead_tile = tile + (spec.stages - 1)
            if ahead_tile < end:
                free = cutlass.select_(stage == 0, Int32(spec.stages - 1), stage - 1)
                self._copy_keys(problem, keys, page, ahead_tile, free, tiles, tid)
                page = self._load_page(problem, queries.request, ahead_tile + 1, keys.length, tid)
            cute.arch.cp_async_commit_group()
            operand = self._load_keys(tiles, stage, tid)
            self._multiply(tiles, accs[0], operand, 0)
            for r in cutlass.range_constexpr(2):
                key_scales[r] = (tiles.scales + (KEYS * stage + wgmma.row(tid, r))).load()
            for i in cutlass.range_constexpr(spec.queries):  # sums one query while the next is multiplied
                if const_expr(i + 1 < spec.queries):
                    self._multiply(tiles, accs[(i + 1) % 2], operand, i + 1)
                factors.store(self._weights(queries, i, tid).load())
                if const_expr(i + 1 < spec.queries):
                    warpgroup.wait_group(1)
                else:
                    warpgroup.wait_group(0)
                self._sum(accs[i % 2], factors, key_scales, sums[None, i])
            self._store(sums, queries.lengths, problem, logits_rows, row_bytes, tile * KEYS, tid)
            stage = cutlass.select_(stage == spec.stages - 1, Int32(0), stage + 1)

    @cute.jit
    def _load_keys(self, tiles: Tiles, stage: Int32, tid: Int32) -> cute.Tensor:
        """Loads this thread's 16 registers of a tile's keys, an operand that all queries are multiplied with."""
        operand = tiles.mma.make_fragment_A(tiles.mma.partition_shape_A((KEYS, D)))
        registers = cute.recast_tensor(operand, Int32)
        row = KEYS * stage + PAGE_STEP * (tid // WARP) + tid % PAGE_STEP
        for k in cutlass.range_constexpr(D // 32):
            matrices = load_matrices(_swizzled(tiles.key_bytes, row, 2 * k + tid % WARP // 16), False)
            for i in cutlass.range_constexpr(4):
                registers[4 * k + i] = matrices[i]
        return operand

    @cute.jit
    def _multiply(self, tiles: Tiles, acc: cute.Tensor, operand: cute.Tensor, query: cutlass.Constexpr):
        """Starts the products of a tile and a query."""
        warpgroup.fence()
        wgmma.issue(tiles.mma, acc, operand, tiles.tQ[None, None, None, query], False, [(i, i) for i in range(D // 32)])
        warpgroup.commit_group()

    def _weights(self, queries: Queries, query: int, tid: Int32) -> cute.Tensor:
        """Views the weights of a query for this lane's heads, in shared memory."""
        start = queries.weights + self.spec.weights // 4 * (4 * query + tid % 4)
        return cute.make_tensor(start, cute.make_layout(self.spec.heads // 4))

    @cute.jit
    def _copy_queries(self, mQ: cute.Tensor, queries: Queries, q_bytes: Int32, tid: Int32):
        """Starts the copies of q; they belong to the first group. The last query replaces missing ones."""
        spec = self.spec
        start = mQ.iterator.toint() + Int64(queries.request) * Int64(mQ.stride[0])
        for i in cutlass.range_constexpr(spec.queries * spec.heads * CHUNKS // spec.threads):
            row, chunk = tid // CHUNKS + i * (spec.threads // CHUNKS), tid % CHUNKS
            query = queries.first + cutlass.min(row // spec.heads, queries.count - 1)
            source = start + Int64(query) * Int64(mQ.stride[1]) + Int64(row % spec.heads) * Int64(mQ.stride[2])
            _copy_chunk(_swizzled(q_bytes, row, chunk), source + CHUNK * Int64(chunk))

    @cute.jit
    def _load_weights(self, problem: Problem, queries: Queries, tid: Int32):
        """Copies weights to shared memory, in the order in which lanes use them, and lengths."""
        spec = self.spec
        for i in cutlass.range_constexpr(-(-spec.queries * spec.heads // spec.threads)):
            row = tid + i * spec.threads
            query, head = row // spec.heads, row % spec.heads
            if query < queries.count:
                place = query * spec.weights + head % 8 // 2 * (spec.weights // 4) + head // 8 * 2 + head % 2
                (queries.weights + place).store(problem.mWeights[queries.request, queries.first + query, head])
        if tid < spec.queries:
            length = Int32(0)  # length of missing queries, so that nothing of them is stored
            if tid < queries.count:
                length = self._length(problem, queries.request, queries.first + tid)
            (queries.lengths + tid).store(length)

    @cute.jit
    def _load_page(self, problem: Problem, request: Int32, tile: Int32, length: Int32, tid: Int32) -> Int32:
        """Starts loading the page number of a warp's keys in a tile; past the last key, that key's page number."""
        position = cutlass.min(tile * KEYS + PAGE_STEP * (tid // WARP), length - 1)
        index, _ = divmod(position, problem.divisors.page_size)
        return problem.mTable[request, index]

    @cute.jit
    def _copy_keys(
        self, problem: Problem, keys: Keys, page: Int32, tile: Int32, stage: Int32, tiles: Tiles, tid: Int32
    ):
        """Starts the copies of a tile: each warp's 16 keys are neighbours in one page."""
        warp, lane = cute.arch.make_warp_uniform(tid // WARP), tid % WARP
        exists = page >= 0 and page < keys.pages
        start = keys.cache + Int64(cutlass.select_(exists, page, Int32(0))) * keys.apart
        position = cutlass.min(tile * KEYS + PAGE_STEP * warp, (keys.length - 1) & -PAGE_STEP)
        _, offset = divmod(position, problem.divisors.page_size)
        source = start + Int64(offset * D + CHUNK * lane)
        target = tiles.key_bytes + D * (KEYS * stage + PAGE_STEP * warp)
        for i in cutlass.range_constexpr(PAGE_STEP * CHUNKS // WARP):
            row = i * (WARP // CHUNKS) + lane // CHUNKS
            _copy_chunk(_swizzled(target, row, lane % CHUNKS), source + i * WARP * CHUNK)
        if lane < PAGE_STEP:
            scale = tiles.scales + KEYS * stage + PAGE_STEP * warp + lane
            if exists:
                address = start + Int64(keys.size * D + 4 * (offset + lane))
                cute.arch.inline_ptx(
                    "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;", read_only_args=[Int32(scale.toint()), address]
                )
            else:
                scale.store(Float32.nan)

    @cute.jit
    def _sum(self, acc: cute.Tensor, weights: cute.Tensor, scales: cute.Tensor, sums: cute.Tensor):
        """Computes this lane's sums of two keys: over its heads, times each key's scale."""
        products = wgmma.by_row(acc)
        for r in cutlass.range_constexpr(2):
            parts = [Float32(0.0), Float32(0.0)]
            for i in cutlass.range_constexpr(self.spec.heads // 4):
                parts[i % 2] += cute.arch.fmax(products[r, i], Float32(0.0)) * weights[i]
            sums[r] = (parts[0] + parts[1]) * scales[r]

    @cute.jit
    def _store(
        self, sums: cute.Tensor, lengths: cute.Pointer, problem: Problem, first_row: Int64, row_bytes: Int64,
        begin: Int32, tid: Int32,
    ):  # fmt: skip
        """Adds up the four lanes' sums of two keys and stores them: a lane stores one logit of each two queries."""
        is_odd, is_upper = tid % 2 == 1, tid // 2 % 2 == 1
        position = begin + wgmma.row(tid, 0) + 8 * (tid % 2)
        for pair in cutlass.range_constexpr(-(-self.spec.queries // 2)):
            has_second = const_expr(2 * pair + 1 < self.spec.queries)
            values = []
            for i in cutlass.range_constexpr(2 * pair, 2 * pair + 1 + int(has_second)):
                kept, sent = sums[0, i], sums[1, i]
                if is_odd:
                    kept, sent = sent, kept
                values.append(kept + cute.arch.shuffle_sync_bfly(sent, 1))
            query = Int32(2 * pair)
            kept, sent = values[0], values[0]
            if const_expr(has_second):
                sent = values[1]
                if is_upper:
                    kept, sent = sent, kept
                query += cutlass.select_(is_upper, Int32(1), Int32(0))
            value = kept + cute.arch.shuffle_sync_bfly(sent, 2)
            length = (lengths + query).load()
            if position < length and (const_expr(has_second) or tid % 4 < 2):
                row = first_row + Int64(query) * row_bytes
                target = cute.make_ptr(Float32, row + 4 * Int64(position), AddressSpace.gmem, assumed_align=4)
                if position < problem.first or position >= length - problem.last:
                    value = Float32.inf
                target.store(value)

    def fake_arguments(self) -> tuple:
        """Returns the arguments for compilation: any strides, those of q and of pages multiples of 16 bytes."""
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
        return q, weights, cache, table, seqlens, logits, lengths, *[Int32(1)] * 4, stream


@cute.jit
def _swizzled(start: Int32, row: Int32, chunk: Int32) -> Int32:
    """Returns where a chunk of a row of 128 bytes lies, in the 128-byte swizzle."""
    return start + row * D + ((chunk ^ (row % 8)) * CHUNK)


@cute.jit
def _copy_chunk(target: Int32, source: Int64):
    """Starts a copy of 16 bytes from global to shared memory."""
    cute.arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[target, source])
