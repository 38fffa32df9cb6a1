"""A consumer warp of the decode kernel: QK, softmax and PV of its keys of every tile, then the epilogue."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.device.pipeline import Slot
from cute_kernels.gqa.kernels.arguments import Call, KeyRange, QueryBlock, Scratch, Sizes
from cute_kernels.gqa.kernels.epilogue import Epilogue
from cute_kernels.gqa.kernels.fragments import KeptKeys, ScoreTerms, SoftmaxState, Thread, TileKeys
from cute_kernels.gqa.kernels.load_q import LoadQ
from cute_kernels.gqa.kernels.merge import Merge, SharedSequence
from cute_kernels.gqa.kernels.pipelines import pipelines
from cute_kernels.gqa.kernels.qk import QK
from cute_kernels.gqa.kernels.scheduler import Scheduler, WorkList, WorkTile
from cute_kernels.gqa.kernels.smem import CONSTANTS_BUFFERS, NUM_CONSTANTS, Q_BUFFERS, SmemViews
from cute_kernels.gqa.kernels.softmax import Softmax
from cute_kernels.gqa.kernels.spread_nan import SpreadNan
from cute_kernels.gqa.spec import KEYS_PER_TEAM as KEYS
from cute_kernels.gqa.spec import GqaDecodeSpec


class ConsumerWarp:
    """Device code for the warps that multiply in :class:`cute_kernels.gqa.kernels.decode.GqaDecodeKernel`."""

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec
        self.scheduler = Scheduler(spec)
        self.q = LoadQ(spec)
        self.qk = QK(spec)
        self.softmax = Softmax(spec)
        self.pv = SpreadNan(spec)
        self.epilogue = Epilogue(spec)
        self.merge = Merge(spec)
        self.kv, self.warp_o = pipelines(spec)

    @cute.jit
    def run(self, call: Call, work_list: WorkList, scratch: Scratch, smem: SmemViews, warp_idx: Int32, lane: Int32):
        """Computes attention over all work tiles of this CTA: results, partials and their merge."""
        spec = self.spec
        tidx = warp_idx * 32 + lane
        team, part = warp_idx, Int32(0)
        if const_expr(spec.d_split > 1):
            team, part = warp_idx // spec.d_split, warp_idx % spec.d_split
        thread = Thread(warp_idx, lane, tidx, team, part)
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        survey = self.scheduler.survey(work_list, lane)
        state, terms = self._registers()
        rows = self.q.registers()
        slot, sequences = Slot(Int32(0), Int32(0)), Int32(0)  # the next stage; sequences so far
        for index in cutlass.range(cta, work_list.work.num_work_tiles, ctas, unroll=1):
            work_tile = self.scheduler.work_tile(work_list, index)
            b, offset, left, line = self.scheduler.assignment(work_list, survey, work_tile.range)
            self.q.fetch(rows, call, query_block(b, work_tile, work_list), thread)
            self.q.store(rows, *self.buffers(smem, sequences), thread)
            self.epilogue.sync()
            if const_expr(spec.cluster > 1):
                slot = self.decode_with_cluster(
                    call, work_list, work_tile, state, terms, smem, slot, b, offset, left, thread
                )
                left = Int32(0)
            given = self.scheduler.given(work_list, b)
            while left > 0:
                length, first, tiles, start = self.scheduler.extent_of(work_list, given)
                stop = cutlass.min(offset + left, tiles)
                left -= stop - offset
                query = query_block(b, work_tile, work_list)
                key_range = KeyRange(first + offset, first + stop, length, start)
                q, constants = self.buffers(smem, sequences)
                self.softmax.start(state, terms, constants, call.scoring, query, length, lane)
                if left > 0:
                    given = self.scheduler.given(work_list, b + 1)
                    self.q.fetch(rows, call, query_block(b + 1, work_tile, work_list), thread)
                slot = self.attend_range(call, state, terms, smem, q, slot, query, key_range, thread)
                if left > 0:
                    self.q.store(rows, *self.buffers(smem, sequences + 1), thread)
                self.warp_o.acquire(smem, sequences)
                self.epilogue.gather_warps(state, smem, thread)
                whole = offset == 0 and stop == tiles
                if whole:
                    self.epilogue.store(smem, call.tensors, constants, query, tidx)
                else:
                    is_first = cutlass.select_(offset == 0, Int32(1), Int32(0))
                    self.merge.store_partial(smem, scratch.partials, 2 * index + is_first, query, tidx)
                    first_range, sharers = self.scheduler.sharers(work_list, b, line, tiles, survey.total)
                    head_blocks = work_list.divisors.head_blocks.divisor
                    counter = scratch.counters + 4 * (Int64(b) * head_blocks + work_tile.head_block)
                    last = self.merge.count(counter, sharers, smem.arrived, tidx)
                    if last:
                        first_slot = 2 * (first_range * head_blocks + work_tile.head_block)
                        shared = SharedSequence(scratch.partials, first_slot, 2 * head_blocks, sharers)
                        self.merge.merge(smem, shared, call.tensors, constants, query, tidx)
                self.warp_o.release(smem, sequences)
                sequences += 1
                line += tiles
                offset = Int32(0)
                b += 1

    @cute.jit
    def decode_with_cluster(
        self,
        call: Call,
        work_list: WorkList,
        work_tile: WorkTile,
        state: SoftmaxState,
        terms: ScoreTerms,
        smem: SmemViews,
        slot: Slot,
        b: Int32,
        offset: Int32,
        tiles: Int32,
        thread: Thread,
    ) -> Slot:
        """Decodes this CTA's tiles of its cluster's one sequence, and merges; returns the slot after them."""
        length, first, _, start = self.scheduler.extent(work_list, b)
        query = query_block(b, work_tile, work_list)
        key_range = KeyRange(first + offset, first + offset + tiles, length, start)
        self.softmax.start(state, terms, smem.constants, call.scoring, query, length, thread.lane)
        slot = self.attend_range(call, state, terms, smem, smem.q, slot, query, key_range, thread)
        self.epilogue.gather_warps(state, smem, thread)
        self.merge.merge_cluster(smem, call.tensors, smem.constants, query, thread.tidx)
        return slot

    def _registers(self) -> tuple[SoftmaxState, ScoreTerms]:
        """Makes the registers that a warp keeps through all work tiles."""
        acc_o = self.pv.accumulators()
        columns = self.pv.thread_columns
        row_max, row_sum, factor = (cute.make_rmem_tensor(columns, Float32) for _ in range(3))
        slope = cute.make_rmem_tensor(columns if self.spec.alibi else 1, Float32)
        position = cute.make_rmem_tensor(columns if self.spec.alibi else 1, Int32)
        zeros = cute.make_rmem_tensor(columns if self.spec.rotated else 1, Float32)
        return SoftmaxState(acc_o, row_max, row_sum, zeros), ScoreTerms(factor, slope, position)

    def buffers(self, smem: SmemViews, sequence: Int32) -> tuple[cute.Pointer, cute.Pointer]:
        """Returns the buffers of Q and of the constants for this CTA's sequence-th sequence."""
        spec = self.spec
        size = const_expr(spec.q_values)
        q = smem.q + cute.assume(sequence % Q_BUFFERS * size, divby=size)
        return q, smem.constants + sequence % CONSTANTS_BUFFERS * (NUM_CONSTANTS * spec.columns)

    @cute.jit
    def attend_range(
        self,
        call: Call,
        state: SoftmaxState,
        terms: ScoreTerms,
        smem: SmemViews,
        q: cute.Pointer,
        slot: Slot,
        query: QueryBlock,
        key_range: KeyRange,
        thread: Thread,
    ) -> Slot:
        """Attends to this warp's keys in all tiles of a range; returns the slot after them."""
        tiles = smem.tiles
        kept = self._no_keys()
        if key_range.length > 0:
            for tile in cutlass.range(key_range.start, key_range.stop, unroll=1):
                self.kv.wait(smem, slot)
                address = Int32(tiles.toint()) + slot.index * self.spec.stage_bytes
                self.attend(call, state, terms, smem, q, slot, address, query, tile, key_range, thread, kept)
                slot = self.kv.following(slot)
        if const_expr(self.spec.pv_is_late):
            self.add_values(state, kept)
        return slot

    def _no_keys(self) -> list[KeptKeys]:
        """Makes registers for PV's keys of the tile before; until there is one, keys that add nothing."""
        kept = [self.pv.key_registers() for _ in range(self.spec.key_blocks if self.spec.pv_is_late else 0)]
        for keys in kept:
            keys.s.fill(-Float32.inf)
            keys.v_scale.fill(0.0)
            keys.raw.fill(0)
        return kept

    @cute.jit
    def add_values(self, state: SoftmaxState, keys: list):
        """Makes P of the warp's keys of a tile, and adds P V."""
        self.softmax.exponentiate(state, [some.s for some in keys])
        for some in keys:
            self.pv.accumulate(state.acc_o, state.zeros, *some)

    @cute.jit
    def attend(
        self,
        call: Call,
        state: SoftmaxState,
        terms: ScoreTerms,
        smem: SmemViews,
        q: cute.Pointer,
        slot: Slot,
        address: Int32,
        query: QueryBlock,
        tile: Int32,
        key_range: KeyRange,
        thread: Thread,
        kept: list,
    ):
        """Adds the warp's keys of a tile to its state, and releases the stage.

        If `GqaDecodeSpec.pv_is_late`, it adds the values of the tile before, and `kept` takes those of this tile.

        V is loaded into registers, in the cache's form, before the softmax. So its load from shared memory overlaps
        with QK, and the load warp gets the stage back earlier.
        """
        spec, sizes, length = self.spec, call.sizes, key_range.length
        scales = smem.scales + slot.index * spec.scale_values
        page_exists, blocks = smem.page_exists + slot.index * spec.page_words, range(spec.key_blocks)
        first_key = [(spec.teams * block + thread.team) * KEYS for block in blocks]  # first keys in the tile
        exists = self.softmax.existing_keys(page_exists, first_key[0], thread.lane)
        token_scales = [self._token_scales(scales, key, thread) for key in first_key]
        acc_s = self.qk.scores([k_scale for k_scale, _ in token_scales], q, address, thread)
        if const_expr(spec.pv_is_late):
            self.add_values(state, kept)
        parts = smem.s_parts
        if const_expr(spec.d_split > 1):
            # tiles take turns: this one's number is slot.index + stages x phase, but for a multiple of 2 x stages
            turn = (slot.index + spec.stages * slot.phase) % 2
            parts += cute.assume(turn * (spec.s_part_values // 2), divby=spec.s_part_values // 2)
            self.qk.store_part(acc_s[0], parts, thread)
        v_address = address + spec.tile("k").size
        raw = [self.pv.load_v(self.pv.block_address("v", v_address, block), thread) for block in blocks]
        # without it the arrival may precede queued loads of V, and TMA overwrites the stage with the next key tile
        cute.arch.fence_proxy("async.shared", space="cta")
        self.kv.release(smem, slot)
        if const_expr(spec.d_split > 1):
            self.qk.sum_of_parts(acc_s[0], parts, thread)

        g, keys, seen = thread.lane // 4, [], []
        for i in cutlass.range_constexpr(spec.key_blocks):
            begin = tile * spec.keys_per_tile + first_key[i]
            own = (begin + self.qk.key_row(g), begin + self.qk.key_row(g + 8))
            keys.append(TileKeys(begin, own, exists >> 16 * i, length))
            s = self.softmax.scaled_scores(acc_s[i], terms, keys[i], call.scoring.softcap)
            seen.append(KeptKeys(s, token_scales[i][1], raw[i]))
        seen = self.masked(seen, state, keys, query, key_range, sizes, thread)
        self.softmax.raise_max(state, [some.s for some in seen])
        if const_expr(spec.pv_is_late):
            for i in cutlass.range_constexpr(spec.key_blocks):
                for to, of in zip(kept[i], seen[i], strict=True):
                    to.store(of.load())
        else:
            self.add_values(state, seen)

    @cute.jit
    def masked(
        self,
        seen: list,
        state: SoftmaxState,
        keys: list,
        query: QueryBlock,
        key_range: KeyRange,
        sizes: Sizes,
        thread: Thread,
    ) -> list:
        """Returns the warp's keys of a tile, with scores masked for queries that do not see them."""
        spec, length = self.spec, key_range.length
        seen_by_all = length - sizes.causal * (query.s_q - 1)
        begins = length - sizes.window  # the first key that all queries see
        if const_expr(spec.starts):
            begins = cutlass.max(begins, key_range.first_key)
        exist = (keys[0].exists & 0xFFFF) == 0xFFFF if const_expr(len(keys) == 1) else keys[0].exists == -1
        if keys[-1].first + KEYS > seen_by_all or keys[0].first < begins or not exist:
            lowest = length - query.s_q - sizes.window + 1  # the first key that any query sees
            if const_expr(spec.starts):
                lowest = cutlass.max(lowest, key_range.first_key)
            for i in cutlass.range_constexpr(len(keys)):
                s, v_scale, raw = seen[i]
                s, v_scale, sees = self.softmax.mask(s, v_scale, keys[i], lowest, query, sizes, thread.lane)
                if const_expr(self.pv.may_be_nan):
                    self.pv.mask_v(raw, keys[i], lowest, thread.lane)
                if const_expr(self.softmax.has_nan):
                    if query.s_q > 1:
                        if self.pv.any_nan(raw, v_scale):
                            self.pv.spread(state.acc_o, raw, v_scale, sees)
        return seen

    @cute.jit
    def _token_scales(self, scales: cute.Pointer, first_key: Int32, thread: Thread):
        """Loads scales of tokens and groups of a stage, for K and for V: (key, group) of this thread.

        first_key: position in the tile of the first of the 16 keys.
        """
        spec, g = self.spec, thread.lane // 4
        k_groups, v_groups = const_expr(self.qk.k_groups), const_expr(self.qk.v_groups)
        k_all = const_expr(spec.scale_groups(spec.k_scales))
        k_first, v_first = Int32(0), Int32(k_all)
        if const_expr(k_all > k_groups):
            k_first = k_groups * thread.part
        if const_expr(spec.scale_groups(spec.v_scales) > v_groups):
            v_first = k_all + v_groups * thread.part
        k_scale = cute.make_rmem_tensor((2, max(k_groups, 1)), Float32)
        v_scale = cute.make_rmem_tensor((2, max(v_groups, 1)), Float32)
        sScale = cute.make_tensor(scales, cute.make_layout((spec.keys_per_tile, spec.key_scales + 1)))
        for k in cutlass.range_constexpr(2):
            key = first_key + self.qk.key_row(g + 8 * k)
            for group in cutlass.range_constexpr(k_groups):
                k_scale[k, group] = sScale[key, k_first + group]
            for group in cutlass.range_constexpr(v_groups):
                v_scale[k, group] = sScale[key, v_first + group]
        return k_scale, v_scale


def query_block(b: Int32, work_tile: WorkTile, work_list: WorkList) -> QueryBlock:
    """Returns the query rows of a work tile in sequence b."""
    return QueryBlock(b, work_tile.kv_head, work_tile.block, work_list.divisors.ratio, work_list.sizes.s_q)
