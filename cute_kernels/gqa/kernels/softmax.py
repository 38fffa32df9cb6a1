"""Scores to probabilities in GQA decoding: soft cap, ALiBi, masks, and the online softmax of a warp."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64, const_expr

from cute_kernels.device import softmax
from cute_kernels.gqa.kernels.arguments import AlibiSlopes, Request, RowBlock
from cute_kernels.gqa.kernels.fragments import Fragments
from cute_kernels.gqa.kernels.smem import QK_FACTOR, row_terms_tensor
from cute_kernels.gqa.spec import KEYS_PER_WARP as KEYS

RESCALE_THRESHOLD = 8.0
"""Growth of scores over row_max, in units of log2, that moves it: P is at most 2^8, and few tiles rescale O."""


class SoftmaxState(NamedTuple):
    """What a thread keeps while it reads a sequence.

    acc_o      O^T, a fragment for each 16 rows of d and 8 query rows
    row_max    of its query rows, in units of log2: P is relative to it
    row_sum    sum of P of its own keys
    factor     what S of a query row is multiplied with
    slope      ALiBi slope of a query row, in units of log2
    positions  of the query rows' tokens, where there are slopes
    """

    acc_o: list
    row_max: cute.Tensor
    row_sum: cute.Tensor
    factor: cute.Tensor
    slope: cute.Tensor
    positions: cute.Tensor


class TileKeys(NamedTuple):
    """A warp's keys of a tile.

    begin   the first of the 16
    keys    the two that this thread has, rows g and g + 8 of S
    valid   bit i: row i of S has a page that exists
    length  of the sequence
    """

    begin: Int32
    keys: tuple
    valid: Int32
    length: Int32


class OnlineSoftmax(Fragments):
    """Device code for a consumer warp."""

    def state(self) -> SoftmaxState:
        """Registers of one thread, not yet filled."""
        acc_o = self.accumulators()
        row_max, row_sum, factor = (cute.make_rmem_tensor(self.thread_rows, Float32) for _ in range(3))
        lines = self.thread_rows if self.spec.alibi else 1
        slope, positions = cute.make_rmem_tensor(lines, Float32), cute.make_rmem_tensor(lines, Int32)
        return SoftmaxState(acc_o, row_max, row_sum, factor, slope, positions)

    @cute.jit
    def start(
        self,
        state: SoftmaxState,
        row_terms: cute.Pointer,
        alibi: AlibiSlopes,
        request: Request,
        rows: RowBlock,
        length: Int32,
        lane: Int32,
    ):
        """Empties the state for a sequence; gets the factors of its scores and its ALiBi lines."""
        spec = self.spec
        b, kv_head, block, ratio = rows
        for m in cutlass.range_constexpr(spec.d // 16):
            for n in cutlass.range_constexpr(self.n_tiles):
                state.acc_o[m][n].fill(0.0)
        state.row_max.fill(-Float32.inf)
        state.row_sum.fill(0.0)
        sTerms = row_terms_tensor(spec, row_terms)
        scale = request.softmax_scale * softmax.LOG2_E
        if const_expr(spec.softcap):
            scale = request.softmax_scale * (2.0 * softmax.LOG2_E) * cute.arch.rcp_approx(request.softcap)
        for i in cutlass.range_constexpr(self.thread_rows):
            n = self.query_row(i, lane)
            state.factor[i] = sTerms[n, QK_FACTOR] * scale
            if const_expr(spec.alibi):
                row = cutlass.min(block * spec.columns + n, ratio.divisor * request.s_q - 1)
                token, r = divmod(row, ratio)
                head = Int64(b) * alibi.batch_stride + Int64(kv_head * ratio.divisor + r)
                pointer = cute.make_ptr(Float32, alibi.address + 4 * head, AddressSpace.gmem, assumed_align=4)
                state.slope[i] = cute.make_tensor(pointer, cute.make_layout(1))[0] * softmax.LOG2_E
                state.positions[i] = length - request.s_q + token

    @cute.jit
    def scale_scores(self, state: SoftmaxState, acc_s, keys: tuple, softcap: Float32) -> cute.Tensor:
        """S as (key, query row) in units of log2, soft cap and ALiBi applied."""
        s = cute.make_rmem_tensor((2, self.thread_rows), Float32)
        for i in cutlass.range_constexpr(self.thread_rows):
            for k in cutlass.range_constexpr(2):
                x = acc_s[i // 2][2 * k + i % 2] * state.factor[i]
                if const_expr(self.spec.softcap):
                    # c tanh(y) = c - 2 c / (1 + e^(2 y)), in units of log2
                    cap = softcap * softmax.LOG2_E
                    x = cap - 2.0 * cap * cute.arch.rcp_approx(1.0 + cute.math.exp2(x, fastmath=True))
                if const_expr(self.spec.alibi):
                    # the distance first: slope x key and slope x position lose 2^-8 each at 100,000 tokens
                    x += state.slope[i] * Float32(keys[k] - state.positions[i])
                s[k, i] = x
        return s

    @cute.jit
    def needs_mask(self, tile: TileKeys, request: Request):
        """Whether some query does not see some key of the warp."""
        seen_by_all = tile.length - request.causal * (request.s_q - 1)
        begin = tile.begin
        return begin + KEYS > seen_by_all or begin < tile.length - request.window or (tile.valid & 0xFFFF) != 0xFFFF

    @cute.jit
    def mask(
        self,
        s: cute.Tensor,
        v_scale: cute.Tensor,
        tile: TileKeys,
        lowest: Int32,
        request: Request,
        rows: RowBlock,
        lane: Int32,
    ) -> Int32:
        """Puts -inf where a query row does not see a key, and 0 into scales of keys that do not exist.

        `lowest` is the first key that any query sees. Returns bit 2 i + k: the thread's query row i sees its key k.
        """
        sees = Int32(0)
        for k in cutlass.range_constexpr(2):
            key = tile.keys[k]
            exists = key < tile.length and key >= lowest and ((tile.valid >> (lane // 4 + 8 * k)) & 1) == 1
            for i in cutlass.range_constexpr(self.thread_rows):
                row = rows.block * self.spec.columns + self.query_row(i, lane)
                position = tile.length - request.s_q + row // rows.ratio
                end = cutlass.select_(request.causal == 1, cutlass.min(position + 1, tile.length), tile.length)
                visible = exists and key < end and key > position - request.window
                s[k, i] = cutlass.select_(visible, s[k, i], -Float32.inf)
                if const_expr(self.has_nan):
                    sees |= cutlass.select_(visible, Int32(1 << 2 * i + k), Int32(0))
            for group in cutlass.range_constexpr(self.v_groups):  # may be NaN where no token is
                v_scale[k, group] = cutlass.select_(exists, v_scale[k, group], Float32(0.0))
        return sees

    @cute.jit
    def exponentiate(self, state: SoftmaxState, s: cute.Tensor):
        """Turns S into P relative to row_max, and adds it to row_sum; rescales O where row_max moves."""
        spec = self.spec
        grown = False
        for i in cutlass.range_constexpr(self.thread_rows):
            grown = grown or cute.arch.fmax(s[0, i], s[1, i]) > state.row_max[i] + RESCALE_THRESHOLD
        if cute.arch.vote_any_sync(grown):
            alpha = cute.make_rmem_tensor(self.thread_rows, Float32)
            for i in cutlass.range_constexpr(self.thread_rows):
                peak = cute.arch.fmax(s[0, i], s[1, i])
                for step in cutlass.range_constexpr(3):
                    peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 4 << step))
                peak = cute.arch.fmax(peak, state.row_max[i])
                alpha[i] = softmax.rescaling(state.row_max[i], peak)
                state.row_max[i] = peak
                state.row_sum[i] *= alpha[i]
            for m in cutlass.range_constexpr(spec.d // 16):
                for n in cutlass.range_constexpr(self.n_tiles):
                    for e in cutlass.range_constexpr(4):
                        state.acc_o[m][n][e] *= alpha[2 * n + e % 2]
        for i in cutlass.range_constexpr(self.thread_rows):
            shift = softmax.finite(state.row_max[i])
            for k in cutlass.range_constexpr(2):
                s[k, i] = cute.math.exp2(s[k, i] - shift, fastmath=True)
            state.row_sum[i] += s[0, i] + s[1, i]
