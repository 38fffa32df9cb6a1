"""A consumer warp of GQA decoding: QK, softmax and PV of 16 keys of every tile, and the results of the CTA."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.gqa.kernels.arguments import (
    AlibiSlopes,
    KeyRange,
    Request,
    RowBlock,
    ScaleSource,
    ScratchMemory,
    Tensors,
)
from cute_kernels.gqa.kernels.barriers import NamedBarrier
from cute_kernels.gqa.kernels.epilogue import Epilogue, Results
from cute_kernels.gqa.kernels.fragments import Fragments
from cute_kernels.gqa.kernels.nonfinite import NonFinite
from cute_kernels.gqa.kernels.pv import ValueMma
from cute_kernels.gqa.kernels.qk import ScoreMma
from cute_kernels.gqa.kernels.query import QueryLoader
from cute_kernels.gqa.kernels.scheduler import Scheduler, WorkList
from cute_kernels.gqa.kernels.smem import ROW_TERMS, SharedMemory
from cute_kernels.gqa.kernels.softmax import OnlineSoftmax, SoftmaxState, TileKeys
from cute_kernels.gqa.spec import KEYS_PER_WARP as KEYS
from cute_kernels.gqa.spec import GqaDecodeSpec


class ConsumerWarp(Fragments):
    """Device code for one of the warps that multiply."""

    def __init__(self, spec: GqaDecodeSpec):
        super().__init__(spec)
        self.threads = 32 * spec.warps
        self.scheduler = Scheduler(spec)
        self.query = QueryLoader(spec)
        self.qk = ScoreMma(spec)
        self.softmax = OnlineSoftmax(spec)
        self.pv = ValueMma(spec)
        self.nonfinite = NonFinite(spec)
        self.epilogue = Epilogue(spec)

    @cute.jit
    def run(
        self,
        tensors: Tensors,
        k_scale: ScaleSource,
        v_scale: ScaleSource,
        alibi: AlibiSlopes,
        request: Request,
        work: WorkList,
        ratio,
        scratch: ScratchMemory,
        smem: SharedMemory,
        warp_idx: Int32,
        lane: Int32,
    ):
        """Decodes all work tiles of this CTA: results of sequences that it reads alone, partials of others."""
        spec = self.spec
        tidx = warp_idx * 32 + lane
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        survey = self.scheduler.survey(work, lane)
        state = self.softmax.state()
        stage, phase, turn = Int32(0), Int32(0), Int32(0)
        for number in cutlass.range(cta, work.grid.work_tiles, ctas, unroll=1):
            kv_head, block, head_block, range_idx = self.scheduler.work_tile(number, work)
            b, offset, left, line = self.scheduler.range_start(work, survey, range_idx)
            if const_expr(spec.cluster > 1):
                keys, origin, _ = self.scheduler.extent(work, b)
                own_rows = RowBlock(b, kv_head, block, ratio)
                own_range = KeyRange(origin + offset, origin + offset + left, keys)
                stage, phase = self.attend_range(
                    tensors, k_scale, v_scale, alibi, request, own_rows, own_range, state, smem, smem.row_terms, stage,
                    phase, warp_idx, lane,
                )  # fmt: skip
                own_results = Results(tensors.out, tensors.lse, smem.row_terms, own_rows, request.s_q)
                self.epilogue.meet(state, smem, warp_idx, lane)
                self.epilogue.merge_cluster(smem, own_results, tidx)
                left = Int32(0)
            while left > 0:
                length, first, count = self.scheduler.extent(work, b)
                stop = cutlass.min(offset + left, count)
                left -= stop - offset
                # two sets of row terms in turns: slow warps may still read those of the sequence before
                row_terms = smem.row_terms + turn * (ROW_TERMS * spec.columns)
                turn ^= 1
                rows = RowBlock(b, kv_head, block, ratio)
                key_range = KeyRange(first + offset, first + stop, length)
                stage, phase = self.attend_range(
                    tensors, k_scale, v_scale, alibi, request, rows, key_range, state, smem, row_terms, stage, phase,
                    warp_idx, lane,
                )  # fmt: skip
                results = Results(tensors.out, tensors.lse, row_terms, rows, request.s_q)
                self.epilogue.meet(state, smem, warp_idx, lane)
                whole = offset == 0 and stop == count
                if whole:
                    self.epilogue.store(smem, results, tidx)
                else:
                    opens = cutlass.select_(offset == 0, Int32(1), Int32(0))
                    self.epilogue.store_partial(smem, scratch.partials, 2 * number + opens, results, tidx)
                    head_blocks = work.head_blocks.divisor
                    first_range, sharing = self.scheduler.sharers(work, survey, b, line, count)
                    counter = scratch.counters + 4 * (Int64(b) * head_blocks + head_block)
                    last = self.epilogue.count(counter, sharing, smem.arrived, tidx)
                    if last:
                        first_slot = 2 * (first_range * head_blocks + head_block)
                        self.epilogue.merge(smem, scratch.partials, first_slot, 2 * head_blocks, sharing, results, tidx)
                line += count
                offset = Int32(0)
                b += 1

    @cute.jit
    def attend_range(
        self,
        tensors: Tensors,
        k_scale: ScaleSource,
        v_scale: ScaleSource,
        alibi: AlibiSlopes,
        request: Request,
        rows: RowBlock,
        key_range: KeyRange,
        state: SoftmaxState,
        smem: SharedMemory,
        row_terms: cute.Pointer,
        stage: Int32,
        phase: Int32,
        warp_idx: Int32,
        lane: Int32,
    ):
        """Attends to this warp's keys of a range of tiles of one sequence; returns stage and phase after it."""
        spec = self.spec
        self.query.load(tensors, smem.q, row_terms, k_scale, v_scale, rows, request.s_q, warp_idx, lane)
        cute.arch.barrier(barrier_id=int(NamedBarrier.CONSUMERS), number_of_threads=self.threads)
        self.softmax.start(state, row_terms, alibi, request, rows, key_range.length, lane)
        if key_range.length > 0:
            for tile in cutlass.range(key_range.start, key_range.stop, unroll=1):
                cute.arch.mbarrier_wait(smem.full + stage, phase)
                self.attend(tile, key_range.length, request, rows, state, smem, stage, warp_idx, lane)
                phase ^= cutlass.select_(stage + 1 == spec.stages, Int32(1), Int32(0))
                stage = cutlass.select_(stage + 1 == spec.stages, Int32(0), stage + 1)
        return stage, phase

    @cute.jit
    def attend(
        self,
        tile: Int32,
        length: Int32,
        request: Request,
        rows: RowBlock,
        state: SoftmaxState,
        smem: SharedMemory,
        stage: Int32,
        w: Int32,
        lane: Int32,
    ):
        """Adds the warp's 16 keys of a tile to O, row_max and row_sum, and gives the stage back.

        V is in registers, as bytes, before the softmax: its way from shared memory is then hidden, and the load warp
        gets the stage back earlier.
        """
        spec = self.spec
        address = Int32(smem.tiles.toint()) + stage * (2 * spec.tile_bytes)
        scales = smem.scales + stage * spec.scale_values
        valid = self.valid_keys(smem.valid + stage * spec.valid_words, w, lane)
        g = lane // 4
        k_scale, v_scale = self.scales_of_keys(scales, w, g)
        acc_s = self.qk.scores(k_scale, smem.q, address, w, lane)
        raw = self.pv.load(address + spec.tile_bytes, w, lane)
        cute.arch.mbarrier_arrive(smem.empty + stage)

        begin = tile * spec.keys_per_tile + w * KEYS
        keys = TileKeys(begin, (begin + self.key_row(g), begin + self.key_row(g + 8)), valid, length)
        s = self.softmax.scale_scores(state, acc_s, keys.keys, request.softcap)
        if self.softmax.needs_mask(keys, request):
            lowest = length - request.s_q - request.window + 1
            sees = self.softmax.mask(s, v_scale, keys, lowest, request, rows, lane)
            if const_expr(not self.is_int8):
                self.pv.mask(raw, begin, length, lowest, valid, lane)
            if const_expr(self.has_nan):
                if request.s_q > 1:
                    if self.nonfinite.any(raw, v_scale):
                        self.nonfinite.spread(state.acc_o, raw, v_scale, sees)
        self.softmax.exponentiate(state, s)
        self.pv.multiply(state.acc_o, s, v_scale, raw)

    @cute.jit
    def scales_of_keys(self, scales: cute.Pointer, w: Int32, g: Int32):
        """Scales of K and of V of this thread's two keys: (key, group) each."""
        spec = self.spec
        k_scale = cute.make_rmem_tensor((2, max(self.k_groups, 1)), Float32)
        v_scale = cute.make_rmem_tensor((2, max(self.v_groups, 1)), Float32)
        sScale = cute.make_tensor(scales, cute.make_layout((spec.keys_per_tile, self.k_groups + self.v_groups + 1)))
        for k in cutlass.range_constexpr(2):
            key = w * KEYS + self.key_row(g + 8 * k)
            for group in cutlass.range_constexpr(self.k_groups):
                k_scale[k, group] = sScale[key, group]
            for group in cutlass.range_constexpr(self.v_groups):
                v_scale[k, group] = sScale[key, self.k_groups + group]
        return k_scale, v_scale

    @cute.jit
    def valid_keys(self, valid: cute.Pointer, w: Int32, lane: Int32) -> Int32:
        """Bit i: row i of S has a page that exists; `valid` has a bit for each copied box of the tile."""
        bits = Int32(-1)
        if const_expr(self.spec.paged):
            box = (w * KEYS + self.key_row(lane % 16)) // self.spec.box_rows
            word = cute.make_tensor(valid, cute.make_layout(self.spec.valid_words))[box // 32]
            bits = cute.arch.vote_ballot_sync(((word >> (box % 32)) & 1) == 1)
        return bits
