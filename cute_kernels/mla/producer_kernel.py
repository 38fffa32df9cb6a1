"""The producer warpgroup of the decode kernel: finds keys, gathers their rows and lays them out for wgmma."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int32, Int64, Uint8, const_expr
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import cluster, token_cache
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.spec import ROLES, TOKENS_PER_TILE, WIDE, MlaDecodeSpec

NOPE, ROPE = 512, 64
GROUP = 128  # columns of a quantization tile
GROUPS = NOPE // GROUP
STAGES = 2
PARTS = 2  # of a stage, 32 keys each, that are given back one by one
THREADS = 128
WARP = 32
ROWS = token_cache.ROWS_PER_PASS
COLUMNS = 64  # of a block: 128 bytes, which the swizzle permutes
BLOCK = TOKENS_PER_TILE * COLUMNS  # elements of it
BLOCKS = NOPE // COLUMNS
BAR_PRODUCER = 4

# What a CTA of a cluster hands to the other one of every tile, in bytes: each thread's pieces of 32 rows, or the rows
# as wgmma reads them. Scales are brought by those who apply them, in both CTAs.
HALF = TOKENS_PER_TILE // 2
CODES_BYTES = HALF // ROWS * THREADS * 16 * token_cache.PIECES
VALUES_BYTES = HALF * 2 * (NOPE + ROPE)


class KeyProducer:
    """Fills the stages of :class:`cute_kernels.mla.kernel.MlaDecodeKernel`; device code for 128 threads.

    Without a cluster a CTA gathers all rows of a tile, else those from 32 x its rank on, and gets the others:

    exchange  rows of the other CTA come                                      then
    codes     by st.async from its registers, to where they will be stored,   they are read and widened like own ones
              a thread's pieces to its counterpart
    values    by bulk copies of its stage, when that half is done, and        nothing: all counts on the full barrier
              the rope part by st.async from its registers

    A stage may be written to when the consumers of both CTAs have left it: each says so to the other.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.sparse = spec.sparse
        self.exchange = spec.exchange
        self.depth = 2  # passes of 16 rows in flight
        self.crosses = spec.cluster > 1
        self.codes = True  # are stored as they are, and scales applied by those who multiply
        self.tracer = Tracer(spec.trace, len(ROLES))
        self.threads = THREADS
        self.by_parts = False  # each turn over `depth` passes fills a part
        self.distance = ROWS  # from a pass of a warpgroup to its next
        self.passes = TOKENS_PER_TILE // self.distance // spec.cluster  # of a warpgroup over own rows of a tile

    @cute.jit
    def fill(
        self,
        smem,
        mKV: cute.Tensor,
        zero_row: Int64,
        entries: cute.Tensor,
        begin: Int32,
        limit: Int32,
        done: Int32,
        count: Int32,
        page_divisor,
        rank: Int32,
        tidx: Int32,
    ):
        """Fills `count` stages with the keys at positions `begin` and on; those at `limit` and beyond are masked.

        `done` stages have been filled before.

        The rows of the next `depth` passes are always in flight: as a pass is stored, its registers receive the pass
        `depth` further. Entries of the index or block table come a tile at a time, one a lane, a tile before that.
        """
        place = self.place(tidx % THREADS)
        row, segment, quarter, _, _, _ = place
        first_row = HALF * rank + ROWS * (tidx // THREADS)  # of this warpgroup's rows of a tile
        position = begin + first_row + row
        last = limit - 1
        full, empty = smem.full.data_ptr(), smem.empty.data_ptr()
        # of the passes that are to be loaded while a tile is stored, lane 4 p + r: row r of the warp's four in pass p
        lane, warp_idx = tidx % 32, tidx % THREADS // 32
        entry_position = begin + first_row + 4 * warp_idx + lane % 4
        p_of_lane = lane // 4 % self.passes
        early = self.read_entry(entries, entry_position + self.distance * p_of_lane, last, page_divisor)
        entry_position += self.ahead(p_of_lane)
        entry = self.read_entry(entries, entry_position, last, page_divisor)

        raw = cute.make_rmem_tensor((16, token_cache.PIECES, self.depth), Uint8)
        scale = cute.make_rmem_tensor((1, self.depth), Float32)
        valid = cute.make_rmem_tensor(self.depth, Int32)
        for d in cutlass.range_constexpr(self.depth):
            found = cute.arch.shuffle_sync(early, 4 * d + row % 4)
            valid[d], address = self.locate(mKV, zero_row, found, position + self.distance * d, last, page_divisor)
            token_cache.gather(address, segment, raw[None, None, d])
            if const_expr(not self.codes):
                token_cache.load_scale(address, quarter, scale[None, d])

        for t in cutlass.range(done, done + count, unroll=1):
            stage, use = t % STAGES, t // STAGES
            self.tracer.stamp(smem.trace.ptr, 0, 2 * t, 0, tidx == 0)
            of_stage = empty + PARTS * stage
            cute.arch.mbarrier_wait(of_stage + (0 if self.by_parts else PARTS - 1), (use + 1) % 2)
            self.tracer.stamp(smem.trace.ptr, 0, 2 * t, 1, tidx == 0)
            self.tracer.stamp(smem.trace.ptr, 0, 2 * t + 1, 0, tidx == 0)
            if const_expr(self.exchange != "none"):
                self.open_stage(smem, stage, use, rank, tidx)
            if const_expr(self.exchange == "codes"):
                for d in cutlass.range_constexpr(self.depth):
                    self.send_codes(smem, raw[None, None, d], stage, d, rank, tidx)
            entry_position += TOKENS_PER_TILE
            if const_expr(not self.crosses):
                entry_next = self.read_entry(entries, entry_position, last, page_divisor)
            # not unrolled: ptxas would hoist loads and spill
            for turn in cutlass.range(self.passes // self.depth, unroll=1):
                if const_expr(self.by_parts):
                    cute.arch.mbarrier_wait(of_stage + turn, (use + 1) % 2)
                for d in cutlass.range_constexpr(self.depth):
                    p = turn * self.depth + d
                    at = first_row + self.distance * p
                    powers = None
                    if const_expr(not self.codes):
                        powers = self.split_scales(smem, place, scale[0, d], valid[d], stage, at)
                    following = None
                    if const_expr(self.exchange != "codes"):  # there the registers receive the other CTA's rows first
                        valid[d], following = self.find(mKV, zero_row, entry, p, row, position, last, page_divisor)
                        if const_expr(not self.codes):
                            token_cache.load_scale(following, quarter, scale[None, d])
                    even, odd, rope = self.targets(smem, place, stage, at)
                    if const_expr(self.exchange == "values"):
                        self.send_rope(smem, raw[None, None, d], rope, stage, rank)
                    token_cache.store_and_gather(raw[None, None, d], powers, even, odd, rope, following, segment)
                    if const_expr(not self.crosses):
                        cute.arch.sync_warp()  # or ptxas mixes the passes, and all loads start behind both
            if const_expr(self.exchange == "codes"):
                cute.arch.mbarrier_wait(smem.codes_full.data_ptr() + stage, use % 2)
                for d in cutlass.range_constexpr(self.depth):
                    self.take_codes(smem, place, raw[None, None, d], stage, d, rank, tidx)
                    valid[d], later = self.find(mKV, zero_row, entry, Int32(d), row, position, last, page_divisor)
                    token_cache.gather(later, segment, raw[None, None, d])
            if const_expr(self.crosses):
                entry = self.read_entry(entries, entry_position, last, page_divisor)
            else:
                entry = entry_next
            position += TOKENS_PER_TILE
            # no fence: it would wait for the loads that are on the way. Those who multiply have one
            if const_expr(self.exchange == "values"):
                self.send_values(smem, stage, rank, tidx)
            self.tracer.stamp(smem.trace.ptr, 0, 2 * t + 1, 1, tidx == 0)
            if const_expr(self.exchange == "values"):
                if tidx == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, VALUES_BYTES)
                else:
                    cute.arch.mbarrier_arrive(full + stage)
            else:
                cute.arch.mbarrier_arrive(full + stage)

    @cute.jit
    def find(
        self,
        mKV: cute.Tensor,
        zero_row: Int64,
        entry: Int32,
        p: Int32,
        row: Int32,
        position: Int32,
        last: Int32,
        page_divisor,
    ):
        """Of the row that a thread loads when pass p of a tile is stored, what `locate` says."""
        found = cute.arch.shuffle_sync(entry, 4 * p + row % 4)
        return self.locate(mKV, zero_row, found, position + self.ahead(p), last, page_divisor)

    def ahead(self, p):
        """Positions from the first of a tile to the pass that is loaded when pass p is stored, `depth` passes on."""
        if self.passes == self.depth:
            return TOKENS_PER_TILE + self.distance * p
        return self.distance * (p + self.depth)

    # ---- a row

    def place(self, tidx: Int32):
        """What a thread has of a pass.

        (row of 16, first of the 16 columns in a quantization tile, number of the scale; where its even and odd chunks
        and its chunk of the rope part go, in elements from the pass's first row on). r % 8 is the same in every pass.
        """
        lane, warp_idx = tidx % 32, tidx // 32
        quarter, odd_row, phase = lane % 4, lane // 4 % 2, lane // 8
        row, half = 4 * warp_idx + 2 * (phase // 2) + odd_row, (phase + odd_row) % 2
        x = row % 8
        start = half * BLOCK + row * COLUMNS
        even, odd = (start + ((2 * quarter + i) ^ x) * 8 for i in range(2))
        return row, 64 * half + 16 * quarter, quarter, even, odd, row * COLUMNS + ((4 * half + quarter) ^ x) * 8

    @cute.jit
    def targets(self, smem, place: tuple, stage: Int32, at: Int32):
        """Where a thread's row of the pass that begins at row `at` goes: even and odd chunks (8, GROUPS), rope (8)."""
        _, _, _, even, odd, rope = place
        nope, chunks = smem.nope.data_ptr(), cute.make_layout((8, GROUPS), stride=(1, 2 * BLOCK))
        start = stage * (TOKENS_PER_TILE * NOPE) + at * COLUMNS
        sEven = cute.make_tensor(nope + cute.assume(start + even, divby=8), chunks)
        sOdd = cute.make_tensor(nope + cute.assume(start + odd, divby=8), chunks)
        start = stage * (TOKENS_PER_TILE * ROPE) + at * COLUMNS
        sRope = cute.make_tensor(smem.rope.data_ptr() + cute.assume(start + rope, divby=8), cute.make_layout(8))
        return sEven, sOdd, sRope

    @cute.jit
    def store_mask(self, smem, token: Int32, stage: Int32, valid: Int32):
        """0 or -inf, added to the scores of a key."""
        sMask = cute.make_tensor(smem.mask.data_ptr(), cute.make_layout((TOKENS_PER_TILE, STAGES)))
        sMask[token, stage] = Float32(0.0) if valid != 0 else -Float32.inf

    @cute.jit
    def split_scales(self, smem, place: tuple, scale: Float32, valid: Int32, stage: Int32, at: Int32):
        """Stores f and quotients of a row's scales, and its mask; returns the four powers of two as bf16."""
        row, segment, quarter, _, _, _ = place
        first_lane = cute.arch.lane_idx() & 28
        power, f = token_cache.split_scale(scale)
        before = cute.arch.shuffle_sync(f, first_lane | ((quarter + 3) % 4))  # f of the quantization tile before
        if segment < 64:
            token = at + row
            if quarter == 0:
                before = Float32(1.0)  # the chain starts with the rope part, which has no scale
                self.store_mask(smem, token, stage, valid)
            sFactor = cute.make_tensor(smem.factor.data_ptr(), cute.make_layout((TOKENS_PER_TILE, GROUPS, 2, STAGES)))
            sFactor[token, quarter, 0, stage] = before * cute.arch.rcp_approx(f)
            sFactor[token, quarter, 1, stage] = f
        powers = cute.make_rmem_tensor(GROUPS, BFloat16)
        for j in cutlass.range_constexpr(GROUPS):
            of_group = cute.arch.shuffle_sync(power, first_lane | j)
            powers[j] = of_group.bitcast(Float32).to(BFloat16)
        return powers

    # ---- what the CTAs of a cluster hand to each other

    @cute.jit
    def open_stage(self, smem, stage: Int32, use: Int32, rank: Int32, tidx: Int32):
        """Tells the other CTA that this one's stage is free, and waits until the same is true there.

        Relaxed: it publishes no data. That the other CTA has used the tile before in this stage also says that copies
        from here have ended.
        """
        peer_free = smem.peer_free.data_ptr() + stage
        if tidx == 0:
            if const_expr(self.exchange == "codes"):
                cute.arch.mbarrier_arrive_and_expect_tx(smem.codes_full.data_ptr() + stage, CODES_BYTES)
            cute.arch.mbarrier_arrive(peer_free, 1 - rank, scope=MemScopeKind.CLUSTER, relaxed=True)
        cute.arch.mbarrier_wait(peer_free, use % 2)

    def landing(self, smem, stage: Int32, at: Int32, block: int) -> cute.Pointer:
        """Where a stage has room for what comes of the pass that begins at row `at`: its own rows in a block, 2 KB."""
        start = stage * (TOKENS_PER_TILE * NOPE) + block * BLOCK + at * COLUMNS
        return smem.nope.data_ptr() + cute.assume(start, divby=1024)

    @cute.jit
    def send_codes(self, smem, raw: cute.Tensor, stage: Int32, d: int, rank: Int32, tidx: Int32):
        """Sends this thread's pieces of a row."""
        at = HALF * rank + ROWS * d
        barrier = cluster.remote_address(smem.codes_full.data_ptr() + stage, 1 - rank)
        words = cute.recast_tensor(raw, Int32)
        to_piece = cluster.remote_address(self.landing(smem, stage, at, 0), 1 - rank) + tidx * 16
        for piece in cutlass.range_constexpr(token_cache.PIECES):
            four = tuple(words[i, piece] for i in range(4))
            cluster.send_words(to_piece + piece * (2 * BLOCK), four, barrier)

    @cute.jit
    def take_codes(self, smem, place: tuple, raw: cute.Tensor, stage: Int32, d: int, rank: Int32, tidx: Int32):
        """Stores a row that the other CTA has sent, by way of `raw`."""
        at = HALF * (1 - rank) + ROWS * d
        for piece in cutlass.range_constexpr(token_cache.PIECES):
            start = cute.recast_ptr(self.landing(smem, stage, at, piece), dtype=Uint8)
            own = cute.make_tensor(start + cute.assume(tidx * 16, divby=16), cute.make_layout(16))
            cute.autovec_copy(own, raw[None, piece])
        # all have read what lies where the rows go
        cute.arch.barrier(barrier_id=BAR_PRODUCER, number_of_threads=THREADS)
        even, odd, rope = self.targets(smem, place, stage, at)
        token_cache.store_and_gather(raw, None, even, odd, rope, None, Int32(0))

    @cute.jit
    def send_rope(self, smem, raw: cute.Tensor, rope: cute.Tensor, stage: Int32, rank: Int32):
        """Sends this thread's chunk of the rope part: from registers, for P takes its place before a copy would end."""
        words = cute.recast_tensor(raw, Int32)
        four = tuple(words[i, 4] for i in range(4))
        barrier = cluster.remote_address(smem.full.data_ptr() + stage, 1 - rank)
        cluster.send_words(cluster.remote_address(rope.iterator, 1 - rank), four, barrier)

    @cute.jit
    def send_values(self, smem, stage: Int32, rank: Int32, tidx: Int32):
        """Copies the own rows of a stage to the other CTA."""
        at = HALF * rank
        # copies count on the barrier that they name, which is to be the receiver's
        there = cluster.remote_address(smem.full.data_ptr() + stage, 1 - rank)
        barrier = cute.make_ptr(Int64, there, AddressSpace.smem, assumed_align=8)
        cute.arch.barrier(barrier_id=BAR_PRODUCER, number_of_threads=THREADS)  # all of it is written
        if tidx < WARP:
            cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by bulk copies
            if tidx < BLOCKS:
                copy = cute.make_copy_atom(cpasync.CopyBulkS2SOp(), Float16)
                start = stage * (TOKENS_PER_TILE * NOPE) + tidx * BLOCK + at * COLUMNS
                block = smem.nope.data_ptr() + cute.assume(start, divby=HALF * COLUMNS)
                rows = cute.make_tensor(block, cute.make_layout(HALF * COLUMNS))
                cute.copy(copy, rows, rows, mbar_ptr=barrier, cta_rank=1 - rank)

    # ---- which row

    @cute.jit
    def read_entry(self, entries: cute.Tensor, position: Int32, last: Int32, page_divisor):
        """The index (sparse) or page number (dense) behind a position; beyond the last one, that of the last one."""
        position = cutlass.min(position, last)
        if const_expr(not self.sparse):
            position = position // page_divisor
        return entries[position]

    @cute.jit
    def locate(self, mKV: cute.Tensor, zero_row: Int64, entry: Int32, position: Int32, last: Int32, page_divisor):
        """(1, the address of the key's row), or (0, that of a row of zeros) where the position is masked."""
        bound = mKV.shape[0]
        if const_expr(self.sparse):
            bound *= mKV.shape[1]
        inside = cutlass.min(
            cutlass.max(entry, 0), bound - 1
        )  # one comparison less, and so a predicate, than two bounds
        valid = inside == entry and position <= last
        if const_expr(self.sparse):
            page, offset = divmod(inside, page_divisor)
        else:
            page, offset = inside, position % page_divisor
        row = token_cache.row_pointer(mKV, zero_row, valid, page, offset)
        return (Int32(1) if valid else Int32(0)), row
