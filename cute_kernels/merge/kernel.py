"""Merge attention states of disjoint key sets: a softmax over their log-sum-exps, then a weighted sum."""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.merge.spec import VECTOR_BYTES, MergeSpec

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
DTYPES = {"float32": Float32, "bfloat16": BFloat16, "float16": Float16}


class MergeKernel:
    """outs (n, b, s, h, d), lses (n, b, s, h) -> out (b, s, h, d), lse (b, s, h), in one launch.

    A CTA merges `rows_per_cta` rows. A row has `groups` x `lanes` neighbouring threads: lane c holds the 16-byte
    vectors c, c + lanes, ... of the row, group g adds up the states g, g + groups, ... Two steps, for chunks of states:

    1. The first `weight_lanes` threads of a row turn its log-sum-exps into weights in shared memory, sink and
       normalization included: an empty state gets 0.
    2. All threads add weight x state in float32, `unroll` states at a time: `loads` of 16 bytes are in flight in each
       thread. A load whose weight is 0 is not issued, so that nothing of an empty state is read.

    At the end the groups' sums meet in shared memory and are added in the order of the groups. The order of all
    additions is fixed by the specification: the same bits every time.

    | shared memory | bytes                                                   | 64 states of 512 float32 |
    |---------------|---------------------------------------------------------|--------------------------|
    | weights       | 4 x rows_per_cta x chunk                                | 512                      |
    | sums          | 4 x (threads of groups 1, 2, ...) x vectors x vector    | 6144                     |

    Barriers: one after each step of a chunk, one before the groups meet; of a warp where a row has no more threads than
    that, otherwise of the CTA.
    """

    def __init__(self, spec: MergeSpec) -> None:
        reasons = spec.can_implement()
        if reasons:
            raise ValueError(f"{spec}: " + "; ".join(reasons))
        self.spec = spec
        self.in_dtype = DTYPES[spec.in_dtype]
        self.out_dtype = DTYPES[spec.out_dtype]

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
        self.launch(mOuts, mLses, mSink, mOut, mLse, stream)

    @cute.jit
    def launch(
        self,
        mOuts: cute.Tensor,
        mLses: cute.Tensor,
        mSink: cute.Tensor | None,
        mOut: cute.Tensor,
        mLse: cute.Tensor | None,
        stream: cuda.CUstream,
    ):
        """Launches the kernel; a kernel that writes the states calls this from its own host function.

        Every row of mOuts and mOut starts at a multiple of 16 bytes and has stride 1. mSink and mLse are None exactly
        where the specification says so. States with units are for `merge_row`: what merges them has launched them.
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
        mLse,  # None where it is not wanted
        rows: Int32,
        divisors: tuple,
    ) -> None:
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row_in_cta = tid // const_expr(spec.lanes * spec.groups)
        row = cta * spec.rows_per_cta + row_in_cta
        # the threads beyond the last row repeat it and store nothing: they must reach the barriers
        batch_seq, head = divmod(cutlass.min(row, rows - 1), divisors[0])
        batch, seq = divmod(batch_seq, divisors[1])
        smem = SmemAllocator()
        weights = smem.allocate_array(Float32, spec.weight_floats * spec.rows_per_cta, byte_alignment=16)
        sums = None
        if const_expr(spec.groups > 1):
            sums = smem.allocate_array(Float32, math.prod(spec.sum_shape) * spec.rows_per_cta, byte_alignment=16)
        place = (batch, seq, head)
        states = (Int32(0), Int32(mLses.shape[0]))
        self.merge_row(mOuts, mLses, None, mSink, mOut, mLse, weights, sums, states, place, row < rows, tid, row_in_cta)

    @cute.jit
    def merge_row(
        self,
        mOuts: cute.Tensor,
        mLses: cute.Tensor,
        mUnits,
        mSink,
        mOut: cute.Tensor,
        mLse,
        weights: cute.Pointer,
        sums,
        states: tuple,
        place: tuple,
        valid,
        tid: Int32,
        row_in_cta: Int32,
    ):
        """Merges the row at `place` (batch, seq, head) with `lanes` x `groups` threads; the whole CTA takes part.

        `states` is (the first, how many).
        `weights` is shared memory for weight_floats float32 a row, `sums` for the groups' sums (None with one group).
        `mUnits` (n, b, s, h, d / 64) is None where states have no units. A first unit below 0 is, without its sign,
        that of all values of its state; the others need not be written then.
        Threads of a row that is not `valid` do the same for a row that exists and store nothing.
        """
        spec = self.spec
        batch, seq, head = place
        threads_per_row = const_expr(spec.lanes * spec.groups)
        group = tid // spec.lanes % spec.groups
        lane = tid % spec.lanes
        of_weights = cute.make_layout((spec.units_of_row, spec.chunk))
        sWeight = cute.make_tensor(weights + row_in_cta * spec.weight_floats, of_weights)
        acc = cute.make_rmem_tensor((spec.vector, spec.vectors), Float32)
        acc.fill(0.0)
        first_state, num_states = states
        lse_row = _row_address(mLses, first_state, batch, seq, head)
        lse_stride = Int64(mLses.stride[0]) * const_expr(Float32.width // 8)
        units_row, units_stride = Int64(0), Int64(0)
        if const_expr(spec.units):
            units_row = _row_address(mUnits, first_state, batch, seq, head)
            units_stride = Int64(mUnits.stride[0]) * const_expr(Float32.width // 8)

        sink = -Float32.inf
        if const_expr(spec.has_sink):
            sink = mSink[head]  # in flight together with the log-sum-exps

        # ---- the row's maximum and sum of exponentials, in its weight threads
        weight_lane = tid % threads_per_row
        weighs = weight_lane < spec.weight_lanes
        shift, scale = Float32(0.0), Float32(0.0)
        firsts = cute.make_rmem_tensor((spec.chunk // spec.weight_lanes,), Float32)
        firsts.fill(-1.0)
        if weighs:
            if const_expr(spec.units):  # in flight together with the log-sum-exps
                self._load_firsts(firsts, units_row, units_stride, Int32(0), num_states, weight_lane)
            shift, total = self._softmax_statistics(lse_row, lse_stride, num_states, weight_lane)
            denominator = total
            if const_expr(spec.has_sink):
                # Relative to the states' maximum. A sink far above it (or +inf) makes this infinite and the weights 0.
                denominator += cute.math.exp2((sink - shift) * LOG2_E, fastmath=True)
            # no state: all weights are exp2(-inf), and 0 x (1 / 0) would be NaN
            scale = cutlass.select_(total == 0.0, Float32(0.0), cute.arch.rcp_approx(denominator))
            if const_expr(spec.has_lse):
                if weight_lane == 0 and valid:
                    lse = shift + cute.math.log2(total, fastmath=True) * LN_2
                    mLse[batch, seq, head] = cutlass.select_(total == 0.0, -Float32.inf, lse)

        # ---- weights, then the weighted sum, a chunk of states at a time
        outs_row = _row_address(mOuts, first_state, batch, seq, head) + Int64(lane) * VECTOR_BYTES
        outs_stride = Int64(mOuts.stride[0]) * const_expr(self.in_dtype.width // 8)
        for first in cutlass.range(0, num_states, spec.chunk, unroll=1):
            if weighs:
                lses = self._load_lses(lse_row, lse_stride, first, num_states, weight_lane)
                for i in cutlass.range_constexpr(spec.chunk // spec.weight_lanes):
                    weight = cute.math.exp2((lses[i] - shift) * LOG2_E, fastmath=True) * scale
                    # Exactly 0 even where another state's NaN made the scale NaN: there may be no such state to read.
                    lses[i] = cutlass.select_(lses[i] == -Float32.inf, Float32(0.0), weight)  # from here on
                    for b in cutlass.range_constexpr(spec.units_of_row):
                        # an empty state has no unit either
                        sWeight[b, weight_lane + i * spec.weight_lanes] = cutlass.select_(
                            lses[i] == 0.0, lses[i], -firsts[i] * lses[i]
                        )
                if const_expr(spec.units):
                    self._weigh_apart(sWeight, lses, firsts, units_row, units_stride, first, weight_lane)
                    self._load_firsts(firsts, units_row, units_stride, first + spec.chunk, num_states, weight_lane)
            self._sync()
            stop = cutlass.min(num_states - first, spec.chunk)
            for state in cutlass.range(0, stop, spec.unroll * spec.groups, unroll=1):
                address = outs_row + Int64(first + state + group) * outs_stride
                self._accumulate(acc, sWeight, state + group, address, outs_stride, lane)
            self._sync()

        # ---- the groups' sums, in the order of the groups
        if const_expr(spec.groups > 1):
            of_row = sums + row_in_cta * const_expr(math.prod(spec.sum_shape))
            sSum = cute.make_tensor(of_row, cute.make_ordered_layout(spec.sum_shape, order=(0, 1, 2, 3)))
            if group > 0:
                cute.autovec_copy(acc, sSum[None, lane, None, group - 1])
            self._sync()
            other = cute.make_rmem_tensor((spec.vector, spec.vectors), Float32)
            for g in cutlass.range_constexpr(spec.groups - 1):
                cute.autovec_copy(sSum[None, lane, None, g], other)
                acc.store(acc.load() + other.load())

        if valid and group == 0:
            self._store(acc, _row_address(mOut, batch, seq, head), lane)

    @cute.jit
    def _softmax_statistics(self, lse_row: Int64, lse_stride: Int64, num_states: Int32, weight_lane: Int32):
        """(maximum, or 0 without a state; sum of exp(lse - maximum)) of a row, in each of its weight threads."""
        spec = self.spec
        peak, total = -Float32.inf, Float32(0.0)
        for first in cutlass.range(0, num_states, spec.chunk, unroll=1):
            lses = self._load_lses(lse_row, lse_stride, first, num_states, weight_lane)
            new_peak = peak
            for i in cutlass.range_constexpr(spec.chunk // spec.weight_lanes):
                new_peak = cute.arch.fmax(new_peak, lses[i])
            new_shift = cutlass.select_(new_peak == -Float32.inf, Float32(0.0), new_peak)
            total *= cute.math.exp2((peak - new_shift) * LOG2_E, fastmath=True)
            for i in cutlass.range_constexpr(spec.chunk // spec.weight_lanes):
                total += cute.math.exp2((lses[i] - new_shift) * LOG2_E, fastmath=True)
            peak = new_peak
        row_peak = cute.arch.warp_reduction(peak, cute.arch.fmax, threads_in_group=spec.weight_lanes)
        shift = cutlass.select_(row_peak == -Float32.inf, Float32(0.0), row_peak)
        total *= cute.math.exp2((peak - shift) * LOG2_E, fastmath=True)
        return shift, cute.arch.warp_reduction_sum(total, threads_in_group=spec.weight_lanes)

    @cute.jit
    def _load_lses(self, lse_row: Int64, lse_stride: Int64, first: Int32, num_states: Int32, weight_lane: Int32):
        """This thread's log-sum-exps of the chunk that starts at state `first`; -inf beyond the last state."""
        spec = self.spec
        lses = cute.make_rmem_tensor((spec.chunk // spec.weight_lanes,), Float32)
        for i in cutlass.range_constexpr(spec.chunk // spec.weight_lanes):
            state = first + weight_lane + i * spec.weight_lanes
            address = lse_row + Int64(state) * lse_stride
            lses[i] = _load_or_minus_inf(address, state < num_states)
        return lses

    @cute.jit
    def _accumulate(
        self, acc: cute.Tensor, weights: cute.Tensor, state: Int32, address: Int64, stride: Int64, lane: Int32
    ):
        """Adds weight x values of the states `state`, `state` + groups, ...; `address` is this lane's in the first."""
        spec = self.spec
        raw = cute.make_rmem_tensor((4, spec.vectors, spec.unroll), Int32)
        weight = cute.make_rmem_tensor((spec.vectors, spec.unroll), Float32)
        for u in cutlass.range_constexpr(spec.unroll):
            for v in cutlass.range_constexpr(spec.vectors):
                # states beyond the last one are in the chunk as well, with weight 0
                block = (lane + v * spec.lanes) // (spec.d // spec.vector // spec.units_of_row)
                weight[v, u] = weights[block if const_expr(spec.units) else 0, state + u * spec.groups]
                wanted = weight[v, u] != 0.0 and self._in_row(lane, v)
                at = address + Int64(u * spec.groups) * stride + v * spec.lanes * VECTOR_BYTES
                words = _load16_or_zero(at, wanted)
                for w in cutlass.range_constexpr(4):
                    raw[w, v, u] = words[w]
        for u in cutlass.range_constexpr(spec.unroll):
            for v in cutlass.range_constexpr(spec.vectors):
                values = cute.recast_tensor(raw[None, v, u], self.in_dtype).load().to(Float32)
                for i in cutlass.range_constexpr(spec.vector):
                    acc[i, v] += weight[v, u] * values[i]

    @cute.jit
    def _load_firsts(
        self, firsts: cute.Tensor, row: Int64, stride: Int64, first: Int32, num_states: Int32, weight_lane: Int32
    ):
        """The first unit of each of a thread's states of the chunk that starts at state `first`; -1 beyond the last.

        One below 0 stands for all units of its state.
        """
        spec = self.spec
        for i in cutlass.range_constexpr(spec.chunk // spec.weight_lanes):
            state = first + weight_lane + i * spec.weight_lanes
            loaded = _load_or_minus_inf(row + Int64(state) * stride, state < num_states)
            firsts[i] = cute.arch.fmax(loaded, Float32(-1.0))

    @cute.jit
    def _weigh_apart(
        self,
        sWeight: cute.Tensor,
        weights: cute.Tensor,
        firsts: cute.Tensor,
        row: Int64,
        stride: Int64,
        first: Int32,
        weight_lane: Int32,
    ):
        """Weights times each unit, where those of a state differ: scales that float16 does not reach, so rare."""
        spec = self.spec
        for i in cutlass.range_constexpr(spec.chunk // spec.weight_lanes):
            state = weight_lane + i * spec.weight_lanes
            if weights[i] != 0.0 and firsts[i] > 0.0:
                four = cute.make_rmem_tensor(4, Float32)
                words = cute.recast_tensor(four, Int32)
                for j in cutlass.range_constexpr(spec.units_of_row // 4):
                    loaded = _load16_or_zero(row + Int64(first + state) * stride + j * VECTOR_BYTES, True)
                    for w in cutlass.range_constexpr(4):
                        words[w] = loaded[w]
                    for w in cutlass.range_constexpr(4):
                        sWeight[4 * j + w, state] = four[w] * weights[i]

    @cute.jit
    def _store(self, acc: cute.Tensor, out_row: Int64, lane: Int32):
        """This lane's vectors, rounded to the result's type."""
        spec = self.spec
        size = const_expr(spec.vector * self.out_dtype.width // 8)
        rounded = cute.make_rmem_tensor((spec.vector, spec.vectors), self.out_dtype)
        rounded.store(acc.load().to(self.out_dtype))
        for v in cutlass.range_constexpr(spec.vectors):
            if self._in_row(lane, v):
                address = out_row + Int64(lane + v * spec.lanes) * size
                pointer = cute.make_ptr(self.out_dtype, address, AddressSpace.gmem, assumed_align=min(size, 16))
                cute.autovec_copy(rounded[None, v], cute.make_tensor(pointer, cute.make_layout(spec.vector)))

    def _in_row(self, lane: Int32, v: int):
        """Whether this lane's v-th vector is in the row: a Python bool, except for the last vector of an uneven row."""
        spec = self.spec
        count = spec.d // spec.vector
        if (v + 1) * spec.lanes <= count:
            return True
        return lane < count - v * spec.lanes

    @cute.jit
    def _sync(self):
        """Waits for all threads that work on this thread's row."""
        if const_expr(self.spec.lanes * self.spec.groups <= 32):
            cute.arch.sync_warp()
        else:
            cute.arch.sync_threads()

    def fake_arguments(self) -> tuple:
        """What `__call__` is compiled from: any strides of the leading dimensions, in steps of 16 bytes."""
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
def _row_address(mX: cute.Tensor, *coordinates) -> Int64:
    """Byte address of a row. The products are 64-bit: a tensor may have more than 2^31 elements."""
    offset = Int64(0)
    for i in cutlass.range_constexpr(len(coordinates)):
        offset += Int64(coordinates[i]) * Int64(mX.stride[i])
    return mX.iterator.toint() + offset * const_expr(mX.element_type.width // 8)


def _load16_or_zero(address: Int64, wanted) -> tuple:
    """Four words from global memory, or zeros without reading.

    Inline PTX because a condition around a load becomes a branch, and a branch between two loads keeps them from being
    in flight together. Results are written last: an output may share its register with an input.
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
    """A float32 from global memory, or -inf without reading."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .f32 x; setp.ne.b32 p, {$r1}, 0; mov.f32 x, 0fFF800000;"
        " @p ld.global.f32 x, [{$r0}]; mov.f32 {$w0}, x; }",
        write_only_types=[Float32],
        read_only_args=[address, Int32(wanted)],
    )
