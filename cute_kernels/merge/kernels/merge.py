"""Merges attention states of disjoint key sets: a softmax over their log-sum-exps, then a weighted sum."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Boolean, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.merge.spec import BLOCK_SCALE_VALUES, VECTOR_BYTES, MergeSpec

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
LARGEST = (2 - 2.0**-23) * 2.0**127  # the largest finite float32
DTYPES = {"float32": Float32, "bfloat16": BFloat16, "float16": Float16}


class Strided(NamedTuple):
    """A row's part of each state: the address in the first state, and bytes from one state to the next."""

    address: Int64
    stride: Int64


class MergeRow(NamedTuple):
    """A row to merge.

    outs   this thread's first vector of each state
    lses   the row's log-sum-exp in each state, with `headers` also the word after it
    scales the row's fp16 block scales in each state, or None. If the first one is below 0, its magnitude is the scale
           of all values of its state; the others need not be written then
    sink   sink of the row's head, or None
    out    address of the result
    lse    address of the merged log-sum-exp, or None
    """

    outs: Strided
    lses: Strided
    scales: Any
    sink: Any
    out: Int64
    lse: Any


class MergeKernel:
    """outs (n, b, s, h, d), lses (n, b, s, h) -> out (b, s, h, d), lse (b, s, h), in one launch.

    A CTA merges `rows_per_cta` rows. A row has `groups` x `lanes` neighbouring threads: lane c holds the 16-byte
    vectors c, c + lanes, ... of the row, group g adds up the states g, g + groups, ... Two steps, for rounds of states:

    1. Each warp of a row makes weights of its log-sum-exps, sink and normalization included: an empty state gets 0.
       Lane i has the weights of states i, i + 32, ..., and hands them to others by shuffles: no warp waits for another.
    2. All threads add weight x state in float32, `unroll` states at a time: `loads` of 16 bytes are in flight in each
       thread. A load whose weight is 0 is not issued, so that nothing of an empty state is read. If `eager`, loads are
       issued before the log-sum-exps have arrived, and values of an empty state count as zeros.

    At the end the groups' sums meet in shared memory and are added in the order of the groups. The specification fixes
    the order of all additions: the same bits every time.

    | shared memory | bytes                                                   | 64 states of 512 float32 |
    |---------------|---------------------------------------------------------|--------------------------|
    | sums          | 4 x (threads of groups 1, 2, ...) x vectors x vector    | 6144                     |

    Barriers: two if there are several groups; for one warp if a row has no more threads than that, else for the CTA.
    """

    def __init__(self, spec: MergeSpec) -> None:
        reasons = spec.can_implement()
        if reasons:
            raise ValueError(f"{spec}: " + "; ".join(reasons))
        self.spec = spec
        self.in_dtype = DTYPES[spec.in_dtype]
        self.out_dtype = DTYPES[spec.out_dtype]
        self.empty_lse = Float32.inf if spec.inf_if_empty else -Float32.inf

    @cute.jit
    def __call__(
        self,
        mOuts: cute.Tensor,
        mLses: cute.Tensor,
        mSink: cute.Tensor | None,
        mOut: cute.Tensor,
        mLse: cute.Tensor | None,
        stream: cuda.CUstream,
    ):
        """Launches the kernel.

        Every row of mOuts and mOut starts at a multiple of 16 bytes and has stride 1. mSink and mLse are None exactly
        if the spec says so. States with block scales are for `merge_row`: the kernel that writes them merges them.
        """
        if const_expr(mOuts.element_type is not self.in_dtype or mOut.element_type is not self.out_dtype):
            raise TypeError(f"{self.spec} was given states {mOuts.element_type} and a result {mOut.element_type}")
        if const_expr((mSink is not None) != self.spec.has_sink or (mLse is not None) != self.spec.has_lse):
            raise TypeError(f"{self.spec} was given a sink {mSink} and a log-sum-exp {mLse}")
        batch, s, heads = (Int32(mOut.shape[i]) for i in range(3))
        rows = batch * s * heads
        divisors = (cute.fast_divmod_create_divisor_v2(heads), cute.fast_divmod_create_divisor_v2(s))
        self._kernel(mOuts, mLses, mSink, mOut, mLse, rows, divisors).launch(
            grid=[cute.ceil_div(rows, self.spec.rows_per_cta), 1, 1],
            block=[self.spec.threads, 1, 1],
            stream=stream,
            # Without it ptxas saves registers for more CTAs (40 instead of 72) and keeps 3 of the 8 loads in flight.
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def _kernel(
        self,
        mOuts: cute.Tensor,
        mLses: cute.Tensor,
        mSink,  # None without a sink
        mOut: cute.Tensor,
        mLse,  # None if it is not wanted
        rows: Int32,
        divisors: tuple,
    ) -> None:
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row_in_cta = tid // const_expr(spec.lanes * spec.groups)
        row_index = cta * spec.rows_per_cta + row_in_cta
        head_divisor, seq_divisor = divisors
        # threads past the last row repeat it and store nothing: they must reach the barriers
        batch_seq, head = divmod(cutlass.min(row_index, rows - 1), head_divisor)
        batch, seq = divmod(batch_seq, seq_divisor)
        smem = SmemAllocator()
        sums = None
        if const_expr(spec.groups > 1):
            sums = smem.allocate_array(Float32, math.prod(spec.sum_shape) * spec.rows_per_cta, byte_alignment=16)
        row = self.find_row(mOuts, mLses, mSink, mOut, mLse, (batch, seq, head), tid)
        self.merge_row(row, sums, Int32(mLses.shape[0]), row_index < rows, tid, row_in_cta)

    def find_row(
        self, mOuts: cute.Tensor, mLses: cute.Tensor, mSink, mOut: cute.Tensor, mLse, place: tuple, tid: Int32
    ) -> MergeRow:
        """Returns the row of states at `place` (batch, seq, head)."""
        outs = Strided(row_address(mOuts, 0, *place) + Int64(tid % self.spec.lanes) * VECTOR_BYTES, state_bytes(mOuts))
        lses = Strided(row_address(mLses, 0, *place), state_bytes(mLses))
        sink = mSink[place[2]] if self.spec.has_sink else None
        return MergeRow(
            outs,
            lses,
            None,
            sink,
            row_address(mOut, *place),
            row_address(mLse, *place) if self.spec.has_lse else None,
        )

    @cute.jit
    def merge_row(self, row: MergeRow, sums, num_states: Int32, valid, tid: Int32, row_in_cta: Int32):
        """Merges a row of `num_states` states (1 or more) with `lanes` x `groups` threads; the whole CTA takes part.

        `sums` is shared memory for the groups' sums (None with one group). Threads of a row that is not `valid` repeat
        an existing row and store nothing.
        """
        spec = self.spec
        (outs_row, outs_stride), lses_source, scales_source, sink, out_row, lse_row = row
        group = tid // spec.lanes % spec.groups
        lane = tid % spec.lanes
        weight_lane = tid % spec.weight_lanes

        acc = cute.make_rmem_tensor((spec.vector, spec.vectors), Float32)
        acc.fill(0.0)
        raw = cute.make_rmem_tensor((4, spec.vectors, spec.unroll), Int32)
        weights = cute.make_rmem_tensor((spec.weights,), Float32)  # for the states of a chunk that this lane weighs
        first_scales = cute.make_rmem_tensor((spec.weights,), Float32)  # for the same states
        first_scales.fill(-1.0)
        shift, scale, special = Float32(0.0), Float32(0.0), Int32(0)
        for first in cutlass.range(0, num_states, spec.round, unroll=1):
            address = outs_row + Int64(first + group) * outs_stride
            if const_expr(spec.eager):
                exists = [first + group + u * spec.groups < num_states for u in range(spec.unroll)]
                self._load_states(raw, exists, address, outs_stride, lane)
            if first % spec.chunk == 0:
                if const_expr(spec.block_scales):
                    self._load_floats(first_scales, *scales_source, first, num_states, weight_lane)
                self._load_lses(weights, *lses_source, first, num_states, weight_lane)
                if first == 0:
                    stores = tid % const_expr(spec.lanes * spec.groups) == 0 and valid
                    shift, scale = self._begin(weights, lses_source, num_states, sink, lse_row, stores, weight_lane)
                special = self._weigh(weights, first_scales, shift, scale, num_states - first - weight_lane)
            start = tid % 32 - weight_lane + first % spec.weight_lanes + group  # the lane that weighs the first state
            if const_expr(not spec.eager):
                factors = list(self._spread(weights, start))
                self._load_states(raw, [factor[0] != 0.0 for factor in factors], address, outs_stride, lane)
                self._accumulate(acc, raw, factors)
            elif special == 0:
                self._accumulate(acc, raw, self._spread(weights, start))
            else:
                self._accumulate_special(acc, raw, weights, first_scales, scales_source, start, first + group, lane)

        # ---- the groups' sums, in the order of the groups
        if const_expr(spec.groups > 1):
            row_sums = sums + row_in_cta * const_expr(math.prod(spec.sum_shape))
            sSum = cute.make_tensor(row_sums, cute.make_ordered_layout(spec.sum_shape, order=(0, 1, 2, 3)))
            self._sync()  # the sums of the row before have been read
            if group > 0:
                cute.autovec_copy(acc, sSum[None, lane, None, group - 1])
            self._sync()
            other = cute.make_rmem_tensor((spec.vector, spec.vectors), Float32)
            for g in cutlass.range_constexpr(spec.groups - 1):
                cute.autovec_copy(sSum[None, lane, None, g], other)
                acc.store(acc.load() + other.load())

        if valid and group == 0:
            self._store(acc, out_row, lane)

    @cute.jit
    def _begin(self, lses: cute.Tensor, source: Strided, num_states: Int32, sink, lse_row, stores, weight_lane: Int32):
        """Returns shift and scale that make weights of a row's log-sum-exps: exp(lse - shift) x scale.

        The thread that `stores` stores the merged log-sum-exp. `lses` are this lane's of the first chunk.
        """
        peak, total = self._softmax_statistics(lses, source, num_states, weight_lane)
        if const_expr(self.spec.has_lse):
            if stores:
                lse = peak + cute.math.log2(total, fastmath=True) * LN_2
                target = cute.make_ptr(Float32, lse_row, AddressSpace.gmem, assumed_align=4)
                target.store(cutlass.select_(total == 0.0, self.empty_lse, lse))
        shift, denominator = peak, total
        if const_expr(self.spec.has_sink):
            # Relative to the sink if it is largest: the denominator is then 1 or more, and less than 2^126, above which
            # rcp_approx flushes to 0. Only a sink of +inf makes it infinite, and the weights 0.
            shift = cute.arch.fmax(peak, cute.arch.fmin(sink, LARGEST))
            denominator = total * cute.math.exp2((peak - shift) * LOG2_E, fastmath=True)
            denominator += cute.math.exp2((sink - shift) * LOG2_E, fastmath=True)
        # no state: all weights are exp2(-inf), and 0 x (1 / 0) would be NaN
        return shift, cutlass.select_(total == 0.0, Float32(0.0), cute.arch.rcp_approx(denominator))

    @cute.jit
    def _softmax_statistics(self, lses: cute.Tensor, source: Strided, num_states: Int32, weight_lane: Int32):
        """Returns the maximum of a row, 0 without a state, and the sum of exp(lse - maximum), to each of its threads.

        `lses` are this lane's of the first chunk.
        """
        spec = self.spec
        peak, total = self._include(-Float32.inf, Float32(0.0), lses)
        for first in cutlass.range(spec.chunk, num_states, spec.chunk, unroll=1):
            more = cute.make_rmem_tensor((spec.weights,), Float32)
            self._load_lses(more, *source, first, num_states, weight_lane)
            peak, total = self._include(peak, total, more)
        row_peak = cute.arch.warp_reduction(peak, cute.arch.fmax, threads_in_group=spec.weight_lanes)
        shift = cutlass.select_(row_peak == -Float32.inf, Float32(0.0), row_peak)
        total *= cute.math.exp2((peak - shift) * LOG2_E, fastmath=True)
        return shift, cute.arch.warp_reduction_sum(total, threads_in_group=spec.weight_lanes)

    @cute.jit
    def _include(self, peak: Float32, total: Float32, lses: cute.Tensor):
        """Returns the maximum, and the sum of exponentials relative to it, after more log-sum-exps."""
        new_peak = peak
        for i in cutlass.range_constexpr(self.spec.weights):
            new_peak = cute.arch.fmax(new_peak, lses[i])
        new_shift = cutlass.select_(new_peak == -Float32.inf, Float32(0.0), new_peak)
        total *= cute.math.exp2((peak - new_shift) * LOG2_E, fastmath=True)
        for i in cutlass.range_constexpr(self.spec.weights):
            total += cute.math.exp2((lses[i] - new_shift) * LOG2_E, fastmath=True)
        return new_peak, total

    @cute.jit
    def _load_floats(
        self, floats: cute.Tensor, row: Int64, stride: Int64, first: Int32, num_states: Int32, weight_lane: Int32
    ):
        """Loads a number of each of this lane's states in the chunk that starts at `first`; -inf past the last one."""
        for i in cutlass.range_constexpr(self.spec.weights):
            state = first + weight_lane + i * self.spec.weight_lanes
            floats[i] = _load_or_minus_inf(row + Int64(state) * stride, state < num_states)

    @cute.jit
    def _load_lses(
        self, lses: cute.Tensor, row: Int64, stride: Int64, first: Int32, num_states: Int32, weight_lane: Int32
    ):
        """Loads log-sum-exps like `_load_floats`, but -inf for +inf, with which FlashMLA marks that there is no key.

        States with block scales are the kernel's own, which never have +inf. With `headers` a log-sum-exp is NaN if the
        word after it differs from the first state's: another call wrote it.
        """
        self._load_floats(lses, row, stride, first, num_states, weight_lane)
        for i in cutlass.range_constexpr(self.spec.weights):
            if const_expr(not self.spec.block_scales):
                lses[i] = cutlass.select_(lses[i] == Float32.inf, -Float32.inf, lses[i])
            if const_expr(self.spec.headers):
                state = first + weight_lane + i * self.spec.weight_lanes
                exists = state < num_states
                word = _load_or_minus_inf(row + Int64(state) * stride + 4, exists).bitcast(Int32)
                same = word == _load_or_minus_inf(row + 4, exists).bitcast(Int32)
                lses[i] = cutlass.select_(same, lses[i], Float32(math.nan))

    @cute.jit
    def _weigh(
        self, weights: cute.Tensor, first_scales: cute.Tensor, shift: Float32, scale: Float32, left: Int32
    ) -> Int32:
        """Replaces log-sum-exps by weights, times the block scale of a state that has one for all values.

        There are `left` states from this lane's first one on. Returns 1 in all lanes if one of the states is empty or
        has block scales that differ.
        """
        special = False
        for i in cutlass.range_constexpr(self.spec.weights):
            # `approx` keeps results below 2^-126, which `fastmath` flushes: a large sink leaves all weights that small
            weight = cute.math.exp2((weights[i] - shift) * LOG2_E, approx=True) * scale
            if const_expr(self.spec.block_scales):
                weight *= cutlass.select_(first_scales[i] < 0.0, -first_scales[i], Float32(1.0))
            # Exactly 0 even if another state's NaN made the scale NaN: this state may not exist, or not be readable.
            weights[i] = cutlass.select_(weights[i] == -Float32.inf, Float32(0.0), weight)
            special = special or (i * self.spec.weight_lanes < left and (weights[i] == 0.0 or first_scales[i] > 0.0))
        return Int32(1) if cute.arch.vote_any_sync(special) else Int32(0)

    def _from_weight_lane(self, numbers: cute.Tensor, u: int, start: Int32) -> Float32:
        """Returns the number of a thread's state u of a round, from the lane that weighs it."""
        place = u * self.spec.groups
        return cute.arch.shuffle_sync(numbers[place // self.spec.weight_lanes], start + place % self.spec.weight_lanes)

    def _spread(self, weights: cute.Tensor, start: Int32) -> Iterator[list[Float32]]:
        """Yields the weight of each state that a thread adds in a round, for each of its vectors."""
        for u in range(self.spec.unroll):
            yield [self._from_weight_lane(weights, u, start)] * self.spec.vectors

    def _load_states(self, raw: cute.Tensor, wanted: list, address: Int64, stride: Int64, lane: Int32) -> None:
        """Loads this lane's vectors of a round's states, zeros if not `wanted`; `address` is in the first state."""
        spec = self.spec
        for u, v in itertools.product(range(spec.unroll), range(spec.vectors)):
            source = address + Int64(u * spec.groups) * stride + v * spec.lanes * VECTOR_BYTES
            words = _load16_or_zero(source, self._and_in_row(wanted[u], lane, v))
            for w in range(4):
                raw[w, v, u] = words[w]

    def _accumulate(self, acc: cute.Tensor, raw: cute.Tensor, factors: Iterable[list[Float32]]) -> None:
        """Adds the values of the states of a round, each vector times its factor."""
        for u, state_factors in enumerate(factors):
            for v, factor in enumerate(state_factors):
                values = cute.recast_tensor(raw[None, v, u], self.in_dtype).load().to(Float32)
                for i in range(self.spec.vector):
                    acc[i, v] = acc[i, v] + factor * values[i]

    @cute.jit
    def _accumulate_special(
        self,
        acc: cute.Tensor,
        raw: cute.Tensor,
        weights: cute.Tensor,
        first_scales: cute.Tensor,
        source: Strided,
        start: Int32,
        state: Int32,
        lane: Int32,
    ):
        """Does what `_accumulate` does if empty states may hold anything, and block scales of a state differ.

        They differ if one scale for all values of a state would leave the range of float16.
        """
        spec = self.spec
        row, stride = source
        factors = cute.make_rmem_tensor((spec.vectors, spec.unroll), Float32)
        for u in cutlass.range_constexpr(spec.unroll):
            weight = self._from_weight_lane(weights, u, start)
            differ = self._from_weight_lane(first_scales, u, start) > 0.0
            for v in cutlass.range_constexpr(spec.vectors):
                block = (lane + v * spec.lanes) // (BLOCK_SCALE_VALUES // spec.vector)
                place = row + Int64(state + u * spec.groups) * stride + Int64(block) * const_expr(Float32.width // 8)
                scale = _load_or_minus_inf(place, differ and weight != 0.0)  # an empty state has no scale
                factors[v, u] = cutlass.select_(differ and weight != 0.0, weight * scale, weight)
                for w in cutlass.range_constexpr(4):
                    raw[w, v, u] = cutlass.select_(weight == 0.0, Int32(0), raw[w, v, u])
        self._accumulate(acc, raw, [[factors[v, u] for v in range(spec.vectors)] for u in range(spec.unroll)])

    @cute.jit
    def _store(self, acc: cute.Tensor, out_row: Int64, lane: Int32):
        """Stores this lane's vectors, rounded to the result's type."""
        spec = self.spec
        size = const_expr(spec.vector * self.out_dtype.width // 8)
        rounded = cute.make_rmem_tensor((spec.vector, spec.vectors), self.out_dtype)
        rounded.store(acc.load().to(self.out_dtype))
        for v in cutlass.range_constexpr(spec.vectors):
            if self._and_in_row(Boolean(True), lane, v):
                address = out_row + Int64(lane + v * spec.lanes) * size
                pointer = cute.make_ptr(self.out_dtype, address, AddressSpace.gmem, assumed_align=min(size, 16))
                cute.autovec_copy(rounded[None, v], cute.make_tensor(pointer, cute.make_layout(spec.vector)))

    def _and_in_row(self, condition: Any, lane: Int32, v: int) -> Any:
        """Returns `condition`, and this lane's v-th vector is in the row: the last one of an uneven row may not be."""
        count = self.spec.d // self.spec.vector
        return condition if (v + 1) * self.spec.lanes <= count else condition & (lane < count - v * self.spec.lanes)

    @cute.jit
    def _sync(self):
        """Waits for all threads that work on this thread's row."""
        if const_expr(self.spec.lanes * self.spec.groups <= 32):
            cute.arch.sync_warp()
        else:
            cute.arch.sync_threads()

    def fake_arguments(self) -> tuple:
        """Returns the arguments for compilation: any strides of the leading dimensions, in steps of 16 bytes."""
        spec = self.spec
        shape = tuple(cute.sym_int() for _ in range(3))
        states = cute.sym_int()

        def strides(count: int, divisibility: int = 1) -> tuple:
            return tuple(cute.sym_int64(divisibility=divisibility) for _ in range(count))

        def values(dtype, shape: tuple):
            leading = strides(len(shape), VECTOR_BYTES * 8 // dtype.width)
            return make_fake_tensor(dtype, (*shape, spec.d), (*leading, 1), assumed_align=16)

        def floats(shape: tuple):
            return make_fake_tensor(Float32, shape, strides(len(shape)), assumed_align=4)

        return (
            values(self.in_dtype, (states, *shape)),
            floats((states, *shape)),
            floats(shape[2:]) if spec.has_sink else None,
            values(self.out_dtype, shape),
            floats(shape) if spec.has_lse else None,
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )


@cute.jit
def row_address(mX: cute.Tensor, *coordinates) -> Int64:
    """Returns the byte address of a row, by 64-bit products: a tensor may have more than 2^31 elements."""
    offset = Int64(0)
    for i in cutlass.range_constexpr(len(coordinates)):
        offset += Int64(coordinates[i]) * Int64(mX.stride[i])
    return mX.iterator.toint() + offset * const_expr(mX.element_type.width // 8)


def state_bytes(mX: cute.Tensor) -> Int64:
    """Returns the bytes from a row of a state to that row of the next state."""
    return Int64(mX.stride[0]) * (mX.element_type.width // 8)


def _load16_or_zero(address: Int64, wanted) -> tuple:
    """Loads four words from global memory, or returns zeros without reading.

    It is inline PTX because a condition around a load becomes a branch, and a branch between two loads keeps them from
    being in flight together. Results are written last: an output may share its register with an input.
    """
    return cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b32 x, y, z, w;"
        " setp.ne.b32 p, {$r1}, 0; mov.b32 x, 0; mov.b32 y, 0; mov.b32 z, 0; mov.b32 w, 0;"
        " @p ld.global.v4.b32 {x, y, z, w}, [{$r0}];"
        " mov.b32 {$w0}, x; mov.b32 {$w1}, y; mov.b32 {$w2}, z; mov.b32 {$w3}, w; }",
        write_only_types=[Int32] * 4,
        read_only_args=[address, Int32(wanted)],
    )


def _load_or_minus_inf(address: Int64, wanted) -> Float32:
    """Loads a float32 from global memory, or returns -inf without reading."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .f32 x; setp.ne.b32 p, {$r1}, 0; mov.f32 x, 0fFF800000;"
        " @p ld.global.f32 x, [{$r0}]; mov.f32 {$w0}, x; }",
        write_only_types=[Float32],
        read_only_args=[address, Int32(wanted)],
    )
