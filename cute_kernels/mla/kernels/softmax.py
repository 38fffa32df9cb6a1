"""The softmax of the MLA decode kernel: makes P of S. With 32 and 64 heads its warpgroup also loads key tiles."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int32, const_expr

from cute_kernels.device import registers, softmax
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.kernels.arguments import Caches
from cute_kernels.mla.kernels.load import KeyLoader
from cute_kernels.mla.kernels.pipelines import pipelines
from cute_kernels.mla.kernels.scaled_units import ScaledValueUnits
from cute_kernels.mla.kernels.scheduler import Scheduler, WorkTable
from cute_kernels.mla.kernels.smem import (
    BFLOAT16,
    P_EXPONENT,
    RESCALE_O,
    RESCALE_THRESHOLD,
    WARPS,
    s_offset,
)
from cute_kernels.mla.kernels.value_units import ValueUnits
from cute_kernels.mla.spec import EVENTS, ROLES, TOKENS_PER_TILE, MlaDecodeSpec

NO_ROW_MAX = -3.0e38  # before the first key: every score is far above it, and -inf below


class Addresses(NamedTuple):
    """Shared memory addresses at which a thread reads S and stores P: of its first key in a stage."""

    s: Int32
    p: Int32


class SoftmaxWarpgroup:
    """Device code for 128 threads: P^T = exp2(S^T - row_max) of all tiles, and everything that PV needs with it.

    A thread has a head and 32, 16, 8 or 4 keys of a tile; lanes of a head are neighbours, so no warp waits for another.

    S times the unit of its head is the score, in units of log2. Lazy rescaling: row_max is set P_EXPONENT below the
    largest score. It moves only when a score exceeds the largest by RESCALE_THRESHOLD, because O moves with it.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.spec = spec
        self.heads = spec.heads
        self.keys = spec.heads // 2  # keys of a thread
        self.lanes = TOKENS_PER_TILE // self.keys  # lanes of a head
        self.loads = not spec.few_heads
        self.units = ValueUnits(spec) if spec.float_scales else ScaledValueUnits(spec)
        self.loader = KeyLoader(spec)
        self.scheduler = Scheduler(spec)
        self.edges = pipelines(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def run(self, smem, table: WorkTable, caches: Caches, mSink: cute.Tensor, tid: Int32):
        """Computes the softmax of all work tiles of this CTA.

        If this warpgroup loads, it does so `rope_stages` tiles ahead, after P of the current tile is stored: the stage
        is free then, or becomes free while P is multiplied. If PV issues TMA, tiles are announced before S is there,
        and PV issues the loads some 2,000 clocks earlier. This warpgroup then loads the other tiles: those with masked
        keys or of several pages, and the first ones.
        """
        if const_expr(self.loads):
            cursor = self.loader.start(table, tid)
            for _ in cutlass.range(self.spec.rope_stages, unroll=1):
                cursor = self.loader.step(smem, table, caches, cursor, tid)
        done = Int32(0)
        sSink = smem.sink.get_tensor(cute.make_layout(self.heads))
        first_work, end_work, step = table.share.first, table.share.end, table.share.step
        for index in cutlass.range(first_work, end_work, step, unroll=1):
            work = self.scheduler.locate(index, table)
            length = self.scheduler.length(work, table.mLength)
            _, _, tiles, is_whole = self.scheduler.keys(index, work, length, table)
            # opaque: the address would be kept in registers that are not available
            head = work.head_block * self.heads + self.head(registers.opaque(tid) if self.spec.balanced else tid)
            if tid % 32 < 32 // self.lanes:  # in shared memory to save a register; the writer reads it
                sink = mSink[cutlass.min(head, mSink.shape[0] - 1)] * softmax.LOG2_E
                if const_expr(self.spec.balanced):  # a partial has no sink
                    sink = Float32(cutlass.select_(is_whole != 0, sink, -Float32.inf))
                sSink[head - work.head_block * self.heads] = sink
            self.units.reset(smem, tid)
            row_max, row_sum = Float32(NO_ROW_MAX), Float32(0.0)
            addresses = self.addresses(smem, tid)
            for tile in cutlass.range(done, done + tiles, unroll=1):
                if const_expr(self.spec.pv_issues_tma):
                    newest = tile + self.spec.stages - 1  # newest of the tiles that have a stage
                    was_announced = Int32(1) if cursor.loaded > newest else Int32(0)
                    if was_announced == 0:
                        cursor = self.loader.step(smem, table, caches, cursor, tid)
                    self.await_stages(smem, tile)
                    if was_announced != 0:  # P of tile - 2 is multiplied, so nobody reads the mask that this replaces
                        self.loader.clear_mask(smem, newest, tid)
                    cursor = self.loader.announce(smem, table, cursor, tile, tid)
                else:
                    self.await_stages(smem, tile)
                row_max, row_sum = self.softmax_tile(smem, row_max, row_sum, addresses, tile, tid)
                if tile == done + tiles - 1:
                    self.finish(smem, row_max, row_sum, self.edges.p.index(tile), tid)
                    self.units.finish(smem, self.edges.p.index(tile), tid)
                cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores of P, which wgmma reads
                self.edges.p.arrive(smem, tile)
                self.stamp(smem, tile, 1, tid)
                if const_expr(self.loads and not self.spec.pv_issues_tma):
                    cursor = self.loader.step(smem, table, caches, cursor, tid)
            done += tiles

    def head(self, tid: Int32):
        """Returns the head of a thread: neighbouring lanes have neighbouring heads and the same keys."""
        return tid // 32 * (32 // self.lanes) + tid % (32 // self.lanes)

    def addresses(self, smem, tid: Int32) -> Addresses:
        """Returns addresses in the first stages. For both, 16 bytes further flips one address bit: see `s_offset`."""
        head, first = self.head(tid), self.keys * (tid % 32 // (32 // self.lanes))
        chunk = (first // 8) ^ (head % 8)
        s, p = smem.s.data_ptr() + s_offset(head, first // 2), smem.p.data_ptr() + head * TOKENS_PER_TILE
        # kept in registers: ptxas would compute them again from the thread number after each wait for S
        return Addresses(
            registers.opaque(Int32(s.toint())), registers.opaque(Int32((p + chunk * 8 + first % 8).toint()))
        )

    @cute.jit
    def await_stages(self, smem, tile: Int32):
        """Waits, before S, for everything else that a tile needs: each wait takes some 100 clocks."""
        self.edges.keys.wait(smem, tile)
        self.edges.p.acquire(smem, tile)

    @cute.jit
    def softmax_tile(self, smem, row_max: Float32, row_sum: Float32, addresses: Addresses, tile: Int32, tid: Int32):
        """Makes P^T of a tile and what PV needs with it; returns the new row_max and this thread's part of row_sum."""
        stage, p_stage = self.edges.keys.index(tile), self.edges.p.index(tile)
        lane, part, head = tid % 32, tid % 32 // (32 // self.lanes), self.head(tid)
        sMask = smem.mask.get_tensor(cute.make_layout(2 * self.spec.mask_stages))
        s_stage = self.edges.s.index(tile)
        pointer = smem.s.data_ptr() + cute.assume(s_stage * (TOKENS_PER_TILE * self.heads), divby=TOKENS_PER_TILE)
        sS = cute.make_tensor(pointer, cute.make_layout(TOKENS_PER_TILE * self.heads))
        first = self.keys * part
        all_keys = Int32(-1 if self.keys == 32 else (1 << self.keys) - 1)
        sFlags = smem.flags.get_tensor(cute.make_layout((WARPS, 2)))
        mask = (sMask[2 * (tile % self.spec.mask_stages) + first // 32] >> (first % 32)) & all_keys
        flags = self.units.weigh(smem, stage, p_stage, tid)  # before S is there
        if lane == 0:  # in shared memory to save a register
            sFlags[tid // 32, p_stage] = flags
        cute.arch.sync_warp()
        self.edges.s.wait(smem, tile)
        self.stamp(smem, tile, 0, tid)
        if cute.arch.vote_any_sync(mask != all_keys):
            for k in cutlass.range(self.keys, unroll=1):
                if (mask >> k) & 1 == 0:
                    sS[s_offset(head, (first + k) // 2) + k % 2] = -Float32.inf
        unit = smem.unit.get_tensor(cute.make_layout(self.heads * self.spec.qk_warpgroups))[s_stage * self.heads + head]
        rescaling = Float32(1.0)
        addresses = Addresses(
            addresses.s + s_stage * (4 * TOKENS_PER_TILE * self.heads),
            addresses.p + p_stage * (2 * TOKENS_PER_TILE * self.heads),
        )
        largest, tile_sum = self.exp_tile(row_max, unit, addresses, None)
        flags = sFlags[tid // 32, p_stage] | self.late_flags(smem, stage, tid)
        moves = largest > row_max + (P_EXPONENT + RESCALE_THRESHOLD)
        if cute.arch.vote_any_sync(moves or flags & BFLOAT16 != 0):
            # in the first tile of a work tile, and hardly later
            if largest > row_max + (P_EXPONENT + RESCALE_THRESHOLD):
                rescaling = cute.math.exp2(row_max - (largest - P_EXPONENT), fastmath=True)
                row_max = largest - P_EXPONENT
            _, tile_sum = self.exp_tile(row_max, unit, addresses, flags)
        self.edges.s.release(smem, tile)
        row_sum = row_sum * rescaling + tile_sum

        sRescaling = smem.rescaling.get_tensor(cute.make_layout((self.heads, 2)))
        if part == 0:
            sRescaling[head, p_stage] = rescaling
        if cute.arch.vote_any_sync(rescaling != 1.0):
            flags |= RESCALE_O
        if lane == 0:
            sFlags[tid // 32, p_stage] = flags
        return row_max, row_sum

    @cute.jit
    def late_flags(self, smem, stage: Int32, tid: Int32) -> Int32:
        """Returns the flags that are known only with S, the same in all warps: of rope parts that are values too.

        QK sets BFLOAT16 if float16 does not hold them, and NEEDS_SCALES.
        """
        flags = Int32(0)
        if const_expr(self.spec.rope_is_value):
            words = cute.make_rmem_tensor(WARPS, Int32)
            pointer = smem.rope_flags.data_ptr() + cute.assume(WARPS * stage, divby=WARPS)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(WARPS)), words)
            flags = words[0] | words[1] | words[2] | words[3]
        return flags

    @cute.jit
    def exp_tile(self, row_max: Float32, unit: Float32, addresses: Addresses, flags: Int32 | None):
        """Stores P^T of this thread; returns (largest score of its head, sum of its own P).

        The rare second call, with flags, may store bfloat16. It keeps its loop rolled: the hot path then jumps over
        fewer instructions.
        """
        thread_max, thread_sum = cute.make_rmem_tensor(1, Float32), cute.make_rmem_tensor(1, Float32)
        thread_max.fill(-Float32.inf)
        thread_sum.fill(0.0)
        at_once = min(8, self.keys)
        if const_expr(flags is None):
            following = self.load_s(addresses, 0)
            for i in cutlass.range_constexpr(self.keys // at_once):
                s = following
                if const_expr(i + 1 < self.keys // at_once):
                    following = self.load_s(addresses, i + 1)  # before P is stored: ptxas assumes that they may alias
                self.exp_and_store_p(row_max, unit, addresses, s, i, thread_max, thread_sum, None)
        else:
            for i in cutlass.range(self.keys // at_once, unroll=1):
                s = self.load_s(addresses, i)
                self.exp_and_store_p(row_max, unit, addresses, s, i, thread_max, thread_sum, flags)
        largest = thread_max[0]
        for step in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 32 // self.lanes << step))
        return largest * unit, thread_sum[0]

    @cute.jit
    def load_s(self, addresses: Addresses, i) -> cute.Tensor:
        """Returns S of a thread's i-th keys, eight or fewer."""
        pairs = min(8, self.keys) // 2
        s = cute.make_rmem_tensor((2, pairs), Float32)
        for j in cutlass.range_constexpr(pairs):
            pair = cute.make_ptr(Float32, addresses.s ^ 16 * (pairs * i + j), AddressSpace.smem, assumed_align=8)
            cute.autovec_copy(cute.make_tensor(pair, cute.make_layout(2)), s[None, j])
        return s

    @cute.jit
    def exp_and_store_p(
        self, row_max: Float32, unit: Float32, addresses: Addresses, s: cute.Tensor, i, thread_max, thread_sum,
        flags: Any,
    ):  # fmt: skip
        """Exponentiates up to 8 scores, stores P and updates this thread's max and sum. Without flags P is float16."""
        at_once = min(8, self.keys)
        p = cute.make_rmem_tensor(at_once, Float16)
        for j in cutlass.range_constexpr(at_once // 2):
            for k in cutlass.range_constexpr(2):
                thread_max[0] = cute.arch.fmax(thread_max[0], s[k, j])
                s[k, j] = cute.math.exp2(s[k, j] * unit - row_max, fastmath=True)
                thread_sum[0] += s[k, j]
        p.store(s.load().to(Float16).reshape(p.shape))
        if const_expr(flags is not None):
            if flags & BFLOAT16 != 0:
                rounded = cute.recast_tensor(p, BFloat16)
                rounded.store(s.load().to(BFloat16).reshape(p.shape))
        chunk = cute.make_ptr(Float16, addresses.p ^ 16 * i, AddressSpace.smem, assumed_align=2 * at_once)
        cute.autovec_copy(p, cute.make_tensor(chunk, cute.make_layout(at_once)))

    @cute.jit
    def finish(self, smem, row_max: Float32, row_sum: Float32, p_stage: Int32, tid: Int32):
        """Stores each head's log-sum-exp, and 1 / row_sum: 0 without keys; a final result includes the sink."""
        for step in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            row_sum += cute.arch.shuffle_sync_bfly(row_sum, 32 // self.lanes << step)
        sInverseSum = smem.inverse_sum.get_tensor(cute.make_layout((self.heads, 2)))
        sLse = smem.lse.get_tensor(cute.make_layout((self.heads, 2)))
        sSink = smem.sink.get_tensor(cute.make_layout(self.heads))
        if tid % 32 < 32 // self.lanes:
            denominator, head = row_sum, self.head(tid)
            if const_expr(self.spec.balanced or not self.spec.split):
                denominator += cute.math.exp2(sSink[head] - row_max, fastmath=True)
            sInverseSum[head, p_stage] = Float32(cutlass.select_(row_sum == 0.0, Float32(0.0), 1.0 / denominator))
            sLse[head, p_stage] = softmax.log_sum_exp(row_max, row_sum)

    @cute.jit
    def stamp(self, smem, tile: Int32, edge: cutlass.Constexpr, tid: Int32):
        """Stores a timestamp of a key tile."""
        self.tracer.stamp(smem.trace.ptr, 0, len(EVENTS[0]) * tile + 2, edge, tid == 0)
