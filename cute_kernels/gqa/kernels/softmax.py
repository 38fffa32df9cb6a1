"""Softmax of a consumer warp: turns S into P, and updates row_max, row_sum and O."""

import functools

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64, const_expr

from cute_kernels.device import softmax
from cute_kernels.gqa.kernels.arguments import QueryBlock, Scoring, Sizes
from cute_kernels.gqa.kernels.fragments import Fragments, ScoreTerms, SoftmaxState, TileKeys
from cute_kernels.gqa.kernels.smem import S_SCALE, column_constants
from cute_kernels.gqa.kernels.softcap import capped
from cute_kernels.gqa.spec import KEYS_PER_TEAM as KEYS
from cute_kernels.gqa.spec import GqaDecodeSpec

RESCALE_THRESHOLD = 8.0  # log2 of the growth of the largest score that moves row_max
P_EXPONENT = 7.0  # P of the largest score is 2^7: float16 holds 2^-31 of that, and P stays below 2^15


class Softmax(Fragments):
    """Device code for one consumer warp."""

    def __init__(self, spec: GqaDecodeSpec):
        super().__init__(spec)
        # bfloat16 holds P of any size, times a scale of any size
        self.p_exponent = P_EXPONENT if spec.v_operand == "float16" else 0.0
        self.has_nan = self.may_be_nan or self.v_groups > 0  # whether values, or scales of tokens, may be NaN

    @cute.jit
    def start(
        self,
        state: SoftmaxState,
        terms: ScoreTerms,
        constants: cute.Pointer,
        scoring: Scoring,
        query: QueryBlock,
        length: Int32,
        lane: Int32,
    ):
        """Clears the state; loads the factors of each column's scores, and its ALiBi line."""
        spec = self.spec
        b, kv_head, block, ratio, s_q = query
        for m in cutlass.range_constexpr(self.d // 16):
            for n in cutlass.range_constexpr(self.n_tiles):
                state.acc_o[m][n].fill(0.0)
        state.row_max.fill(-Float32.inf)
        state.row_sum.fill(0.0)
        state.zeros.fill(0.0)
        sConstants = column_constants(spec, constants)
        scale = scoring.softmax_scale * softmax.LOG2_E
        if const_expr(spec.softcap):
            scale = scoring.softmax_scale * (2.0 * softmax.LOG2_E) * cute.arch.rcp_approx(scoring.softcap)
        for i in cutlass.range_constexpr(self.thread_columns):
            n = self.column(i, lane)
            terms.factor[i] = sConstants[n, S_SCALE] * scale
            if const_expr(spec.alibi):
                row = cutlass.min(block * spec.columns + n, ratio.divisor * s_q - 1)
                token, r = divmod(row, ratio)
                head = Int64(b) * scoring.alibi_batch + Int64(kv_head * ratio.divisor + r)
                pointer = cute.make_ptr(Float32, scoring.alibi + 4 * head, AddressSpace.gmem, assumed_align=4)
                terms.slope[i] = cute.make_tensor(pointer, cute.make_layout(1))[0] * softmax.LOG2_E
                terms.position[i] = length - s_q + token

    @cute.jit
    def existing_keys(self, page_exists: cute.Pointer, first_key: Int32, lane: Int32) -> Int32:
        """Returns bit i: row i of S has a page that exists, bit 16 + i: for a second block, or the same one.

        page_exists: a bit for each TMA copy of the tile. first_key: position of row 0 in the tile.
        """
        spec, bits = self.spec, Int32(-1)
        if const_expr(spec.paged):
            key = first_key + self.key_row(lane % 16)
            if const_expr(spec.key_blocks == 2):
                key += lane // 16 * (spec.teams * KEYS)
            word = cute.make_tensor(page_exists, cute.make_layout(spec.page_words))[key // spec.box_rows // 32]
            bits = cute.arch.vote_ballot_sync(((word >> (key // spec.box_rows % 32)) & 1) == 1)
        return bits

    @cute.jit
    def scaled_scores(self, acc_s: list, terms: ScoreTerms, keys: TileKeys, softcap: Float32) -> cute.Tensor:
        """Returns scores in units of log2, softcap and ALiBi included: (key, column) of this thread."""
        s = cute.make_rmem_tensor((2, self.thread_columns), Float32)
        exp2 = functools.partial(cute.math.exp2, fastmath=True)
        for i in cutlass.range_constexpr(self.thread_columns):
            for k in cutlass.range_constexpr(2):
                x = acc_s[i // 2][2 * k + i % 2] * terms.factor[i]
                if const_expr(self.spec.softcap):
                    x = capped(x, softcap * softmax.LOG2_E, exp2, cute.arch.rcp_approx, cutlass.select_)
                if const_expr(self.spec.alibi):
                    # the distance first: slope x key and slope x position lose 2^-8 each at 100,000 tokens
                    x += terms.slope[i] * Float32(keys.own[k] - terms.position[i])
                s[k, i] = x
        return s

    @cute.jit
    def mask(
        self,
        s: cute.Tensor,
        v_scale: cute.Tensor,
        keys: TileKeys,
        lowest: Int32,
        query: QueryBlock,
        sizes: Sizes,
        lane: Int32,
    ):
        """Sets scores of keys that a query does not see to -inf, and scales that none sees to 0: they may be NaN.

        lowest: the first key that any query sees.
        Returns s, v_scale and bits: bit 2 i + k, the i-th column of this thread sees its key k; 0 if nothing can be
        NaN.
        """
        length, s_q, g = keys.length, query.s_q, lane // 4
        sees = Int32(0)
        for k in cutlass.range_constexpr(2):
            key = keys.own[k]
            exists = key < length and key >= lowest and ((keys.exists >> (g + 8 * k)) & 1) == 1
            for i in cutlass.range_constexpr(self.thread_columns):
                position = length - s_q + (query.block * self.spec.columns + self.column(i, lane)) // query.ratio
                end = cutlass.select_(sizes.causal == 1, cutlass.min(position + 1, length), length)
                visible = exists and key < end and key > position - sizes.window
                s[k, i] = cutlass.select_(visible, s[k, i], -Float32.inf)
                if const_expr(self.has_nan):
                    sees |= cutlass.select_(visible, Int32(1 << 2 * i + k), Int32(0))
            for group in cutlass.range_constexpr(self.v_groups):
                v_scale[k, group] = cutlass.select_(exists, v_scale[k, group], Float32(0.0))
        return s, v_scale, sees

    @cute.jit
    def raise_max(self, state: SoftmaxState, scores: list):
        """If the largest score grows by RESCALE_THRESHOLD, moves row_max, and row_sum and O with it.

        So few tiles need shuffles and a rescaling of O. row_max is set `p_exponent` below the largest score, and P may
        grow by 2^8 before row_max moves.
        """
        acc_o, row_max, row_sum, zeros = state
        exceeds = False
        for i in cutlass.range_constexpr(self.thread_columns):
            exceeds = exceeds or self.largest(scores, i) > row_max[i] + (self.p_exponent + RESCALE_THRESHOLD)
        if cute.arch.vote_any_sync(exceeds):
            alpha = cute.make_rmem_tensor(self.thread_columns, Float32)
            for i in cutlass.range_constexpr(self.thread_columns):
                new_max = self.largest(scores, i)
                for step in cutlass.range_constexpr(3):
                    new_max = cute.arch.fmax(new_max, cute.arch.shuffle_sync_bfly(new_max, 4 << step))
                new_max = cute.arch.fmax(new_max - self.p_exponent, row_max[i])
                alpha[i] = softmax.rescaling(row_max[i], new_max)
                row_max[i] = new_max
                row_sum[i] *= alpha[i]
                if const_expr(self.spec.rotated):
                    zeros[i] *= alpha[i]
            for m in cutlass.range_constexpr(self.d // 16):
                for n in cutlass.range_constexpr(self.n_tiles):
                    for e in cutlass.range_constexpr(4):
                        acc_o[m][n][e] *= alpha[2 * n + e % 2]

    @cute.jit
    def exponentiate(self, state: SoftmaxState, scores: list):
        """Turns S into P, relative to row_max, and adds it to row_sum."""
        for i in cutlass.range_constexpr(self.thread_columns):
            shift = softmax.finite(state.row_max[i])
            for s in scores:
                for k in cutlass.range_constexpr(2):
                    s[k, i] = cute.math.exp2(s[k, i] - shift, fastmath=True)
                state.row_sum[i] += s[0, i] + s[1, i]

    def largest(self, scores: list, i: int):
        """Returns the largest score that this thread has in its i-th column."""
        return functools.reduce(cute.arch.fmax, [s[k, i] for s in scores for k in range(2)])
