"""Append to an INT8 cache: quantize new keys and values and store each token in its slot."""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float16, Float32, Int8, Int32, Int64, const_expr
from cutlass.cute.nvgpu import CopyG2ROp
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.gqa.append_spec import GIVEN, GROUPS, PER_TOKEN, PER_TOKEN_HEAD, VALUES, WARP, KvAppendSpec
from cute_kernels.gqa.codes import element

LARGEST = {"bfloat16": 3.3895313892515355e38, "float16": 65504.0}  # 0x7F7F, 0x7BFF
MIN_SCALE = {"float16": 2.0**-14, "float32": 2.0**-126}
CODE_MAX = 127.0
TOKENS_TOGETHER = 16  # paged_vllm: of one head, in neighbouring teams, so that their bytes meet in a sector
FAR = 2.0**64  # division by a scale above it, or below its inverse, takes another power of two


class RowStrides(NamedTuple):
    """Of new keys or values, in elements."""

    token: Int64
    head: Int64


class CacheStrides(NamedTuple):
    """Of a cache, in bytes: sequence or page, token, head, and from one piece of a row to the next (of V packed: d)."""

    outer: Int64
    row: Int64
    head: Int64
    piece: Int64


class ScaleStrides(NamedTuple):
    """Of scales, in elements; 0 along what shares a scale."""

    outer: Int64
    row: Int64
    head: Int64
    group: Int64


class Pointers(NamedTuple):
    """New keys and values, caches, scales."""

    k: cute.Pointer
    v: cute.Pointer
    k_cache: cute.Pointer
    v_cache: cute.Pointer
    k_scale: cute.Pointer
    v_scale: cute.Pointer


class Strides(NamedTuple):
    """Of the same."""

    k: RowStrides
    v: RowStrides
    k_cache: CacheStrides
    v_cache: CacheStrides
    k_scale: ScaleStrides
    v_scale: ScaleStrides


class Operand(NamedTuple):
    """Keys or values: where new ones are, where codes and scales go, and how values share a scale."""

    is_v: bool
    scale_kind: str
    rows: cute.Pointer
    row_strides: RowStrides
    cache: cute.Pointer
    cache_strides: CacheStrides
    scale: cute.Pointer
    scale_strides: ScaleStrides


class Place(NamedTuple):
    """Where a piece is stored: page and token of it, the task's first head, the piece; and whether it is."""

    page: Int32
    offset: Int32
    first_head: Int32
    piece: Int32
    stored: object


@cute.jit
def _times(index: Int32, stride: Int64) -> Int64:
    """64 bits of the product, where index >= 0: zero extension halves what sign extension takes."""
    return (Int64(index) & 0xFFFFFFFF) * stride


class KvAppendKernel:
    """k, v (tokens, h_kv, d) -> codes and scales in the slots of slot_mapping (tokens,), one launch.

    A team of lanes has a task, K and V of a head of a token, or of a token with all its heads where they share a scale.
    A lane has pieces of 16 values, lane, lane + team, ... of the task:

    | part        | per lane and piece                        | a warp's instruction, d 128, a head a team  |
    |-------------|-------------------------------------------|---------------------------------------------|
    | k, v        | 2 loads of 16 B each, all issued first    | 4 heads, half of each sector: L1 joins them |
    | codes       | 1 store of 16 B each                      | 4 rows of 128 B                             |
    | V, x-packed | 16 stores of a byte, page_size apart      | 8 times 4 bytes, if the slots follow        |
    | scales      | 1 store by the first lane that shares it  | 4 scales                                    |

    No shared memory, no barriers: absmax is a packed maximum over a lane's values, then shuffles among the lanes that
    share a scale. Threads past the last task or piece repeat the last one, and store nothing. Where a token does not
    fit into the registers of a warp (held 0), a second pass reads it from L1 or L2.

    The codes are those of an IEEE division x / scale, rounded half to even; it takes three instructions a value
    (`_divide`). With d 128, a head a team and computed scales, a value takes 13 instructions: at the speed of the
    memory, 5.2 values per clock and SM, half of the issue slots.
    """

    def __init__(self, spec: KvAppendSpec) -> None:
        reasons = spec.can_implement()
        if reasons:
            raise ValueError(f"{spec}: " + "; ".join(reasons))
        self.spec = spec
        self.dtype = element(spec.dtype)
        self.scale_dtype = element(spec.scale_dtype)
        self.lanes = spec.d // VALUES  # of a head
        self.threads = spec.warps * WARP
        self.teams = self.threads // spec.team

    @cute.jit
    def __call__(
        self,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mKCache: cute.Tensor,
        mVCache: cute.Tensor,
        mKScale: cute.Tensor,
        mVScale: cute.Tensor,
        mSlots: cute.Tensor,
        heads_first: Int32,
        stream: cuda.CUstream,
    ):
        """Launches the kernel.

        Caches are as their layout has them; heads_first says whether axis 1 or 2 is the heads (not looked at in
        paged_vllm). A given scale comes as (h_kv,) or (1,).
        """
        spec = self.spec
        tokens, h_kv = Int32(mK.shape[0]), Int32(mK.shape[1])
        outer = Int32(mKCache.shape[0])
        if const_expr(spec.x_packed):
            rows = Int32(mKCache.shape[3])
            k_strides = CacheStrides(*self._wide(mKCache, (0, 3, 1, 2)))
            v_strides = CacheStrides(*self._wide(mVCache, (0, 3, 1, 2)))
        else:
            rows = cutlass.select_(heads_first != 0, Int32(mKCache.shape[2]), Int32(mKCache.shape[1]))
            k_outer, k_row, k_head = self._places(mKCache, heads_first)
            v_outer, v_row, v_head = self._places(mVCache, heads_first)
            k_strides = CacheStrides(k_outer, k_row, k_head, Int64(VALUES))
            v_strides = CacheStrides(v_outer, v_row, v_head, Int64(VALUES))
        strides = Strides(
            RowStrides(Int64(mK.stride[0]), Int64(mK.stride[1])),
            RowStrides(Int64(mV.stride[0]), Int64(mV.stride[1])),
            k_strides,
            v_strides,
            self._scale_strides(mKScale, spec.k_scale, heads_first),
            self._scale_strides(mVScale, spec.v_scale, heads_first),
        )
        tasks = tokens
        if const_expr(not spec.by_token):
            tasks = tokens * h_kv
            if const_expr(spec.x_packed):
                tasks = cute.ceil_div(tokens, TOKENS_TOGETHER) * TOKENS_TOGETHER * h_kv
        divisors = (cute.fast_divmod_create_divisor_v2(h_kv), cute.fast_divmod_create_divisor_v2(rows))
        pointers = Pointers(*(tensor.iterator for tensor in (mK, mV, mKCache, mVCache, mKScale, mVScale)))
        num_slots = Int64(outer) * Int64(rows)
        self._kernel(pointers, strides, mSlots, tokens, h_kv, tasks, num_slots, divisors).launch(
            grid=[cute.ceil_div(tasks, self.teams), 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    def _sharing(self, kind: str) -> int:
        """Neighbouring lanes that share a scale."""
        whole = {PER_TOKEN: self.spec.team, PER_TOKEN_HEAD: self.lanes}
        return whole[kind] if kind in whole else GROUPS[kind] // VALUES

    @cute.jit
    def _wide(self, mX: cute.Tensor, axes: tuple):
        return tuple(Int64(mX.stride[axis]) for axis in axes)

    @cute.jit
    def _places(self, mX: cute.Tensor, heads_first: Int32):
        """Strides of (outer, row, head)."""
        one, two = Int64(mX.stride[1]), Int64(mX.stride[2])
        swap = heads_first != 0
        return Int64(mX.stride[0]), cutlass.select_(swap, two, one), cutlass.select_(swap, one, two)

    @cute.jit
    def _scale_strides(self, mScale: cute.Tensor, kind: str, heads_first: Int32) -> ScaleStrides:
        none = Int64(0)
        strides = (none, none, none, none)
        if const_expr(kind == GIVEN):
            # one scale for all heads: (1,)
            head_stride = cutlass.select_(Int32(mScale.shape[0]) == 1, none, Int64(mScale.stride[0]))
            strides = (none, none, head_stride, none)
        elif const_expr(kind == PER_TOKEN):
            strides = (Int64(mScale.stride[0]), Int64(mScale.stride[1]), none, none)
        elif const_expr(self.spec.x_packed and kind == PER_TOKEN_HEAD):
            strides = (*self._wide(mScale, (0, 2, 1)), none)
        elif const_expr(self.spec.x_packed):
            strides = self._wide(mScale, (0, 3, 1, 2))
        elif const_expr(kind == PER_TOKEN_HEAD):
            strides = (*self._places(mScale, heads_first), none)
        else:
            strides = (*self._places(mScale, heads_first), Int64(mScale.stride[3]))
        return ScaleStrides(*strides)

    @cute.kernel
    def _kernel(
        self,
        pointers: Pointers,
        strides: Strides,
        mSlots: cute.Tensor,
        tokens: Int32,
        h_kv: Int32,
        tasks: Int32,
        num_slots: Int64,
        divisors: tuple,
    ) -> None:
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        head_divisor, row_divisor = divisors
        k, v = self._operands(pointers, strides)
        task = cta * self.teams + tid // spec.team
        lane = tid % spec.team
        valid = task < tasks
        task = cutlass.min(task, tasks - 1)
        token, first_head = task, Int32(0)
        if const_expr(not spec.by_token and spec.x_packed):
            block, first_head = divmod(task // TOKENS_TOGETHER, head_divisor)
            token = block * TOKENS_TOGETHER + task % TOKENS_TOGETHER
            valid = valid and token < tokens
            token = cutlass.min(token, tokens - 1)
        elif const_expr(not spec.by_token):
            token, first_head = divmod(task, head_divisor)
        slot = mSlots[token]
        pieces = self.lanes
        if const_expr(spec.by_token):
            pieces = h_kv * self.lanes

        if const_expr(spec.held > 0):
            rK = cute.make_rmem_tensor((VALUES, spec.held), self.dtype)
            rV = cute.make_rmem_tensor((VALUES, spec.held), self.dtype)
            for i in cutlass.range_constexpr(spec.held):
                piece = lane + spec.team * i
                if const_expr(spec.by_token):
                    piece = cutlass.min(piece, pieces - 1)
                self._load(k, token, first_head, piece, rK[None, i])
                self._load(v, token, first_head, piece, rV[None, i])
            k_absmax, v_absmax = Float32(0.0), Float32(0.0)
            if const_expr(spec.k_scale == PER_TOKEN):
                for i in cutlass.range_constexpr(spec.held):
                    k_absmax = cute.arch.fmax(k_absmax, self._absmax(rK[None, i]))
            if const_expr(spec.v_scale == PER_TOKEN):
                for i in cutlass.range_constexpr(spec.held):
                    v_absmax = cute.arch.fmax(v_absmax, self._absmax(rV[None, i]))
            k_absmax, v_absmax = self._over_team(k_absmax, v_absmax)
            page, offset, stored = self._place(slot, num_slots, row_divisor, valid)
            for i in cutlass.range_constexpr(spec.held):
                piece = lane + spec.team * i
                exists = stored
                if const_expr(spec.by_token):
                    exists = stored and piece < pieces
                place = Place(page, offset, first_head, piece, exists)
                self._append(k, rK[None, i], k_absmax, place)
                self._append(v, rV[None, i], v_absmax, place)
        else:
            turns = cute.ceil_div(pieces, spec.team)
            rK = cute.make_rmem_tensor((VALUES,), self.dtype)
            rV = cute.make_rmem_tensor((VALUES,), self.dtype)
            k_absmax, v_absmax = Float32(0.0), Float32(0.0)
            for i in cutlass.range(turns, unroll=2):
                piece = cutlass.min(lane + spec.team * i, pieces - 1)
                if const_expr(spec.k_scale == PER_TOKEN):
                    self._load(k, token, first_head, piece, rK)
                    k_absmax = cute.arch.fmax(k_absmax, self._absmax(rK))
                if const_expr(spec.v_scale == PER_TOKEN):
                    self._load(v, token, first_head, piece, rV)
                    v_absmax = cute.arch.fmax(v_absmax, self._absmax(rV))
            k_absmax, v_absmax = self._over_team(k_absmax, v_absmax)
            page, offset, stored = self._place(slot, num_slots, row_divisor, valid)
            for i in cutlass.range(turns, unroll=1):
                piece = lane + spec.team * i
                self._load(k, token, first_head, cutlass.min(piece, pieces - 1), rK)
                self._load(v, token, first_head, cutlass.min(piece, pieces - 1), rV)
                place = Place(page, offset, first_head, piece, stored and piece < pieces)
                self._append(k, rK, k_absmax, place)
                self._append(v, rV, v_absmax, place)

    def _operands(self, pointers: Pointers, strides: Strides) -> tuple[Operand, Operand]:
        """Keys, and values."""
        k = (pointers.k, strides.k, pointers.k_cache, strides.k_cache, pointers.k_scale, strides.k_scale)
        v = (pointers.v, strides.v, pointers.v_cache, strides.v_cache, pointers.v_scale, strides.v_scale)
        return Operand(False, self.spec.k_scale, *k), Operand(True, self.spec.v_scale, *v)

    @cute.jit
    def _load(self, operand: Operand, token: Int32, first_head: Int32, piece: Int32, rX: cute.Tensor):
        """Starts the loads of a piece. The products are 64-bit: k and v may have more than 2^31 elements."""
        head, part = self._split(first_head, piece)
        strides = operand.row_strides
        row = _times(token, strides.token) + _times(head, strides.head) + Int64(VALUES * part)
        atom = cute.make_copy_atom(CopyG2ROp(), self.dtype, num_bits_per_copy=128)
        for half in cutlass.range_constexpr(2):
            address = operand.rows.toint() + 2 * (row + 8 * half)
            source = cute.make_ptr(self.dtype, address, AddressSpace.gmem, assumed_align=16)
            target = cute.make_tensor(rX.iterator + 8 * half, cute.make_layout(8))
            cute.copy(atom, cute.make_tensor(source, cute.make_layout(8)), target)

    @cute.jit
    def _split(self, first_head: Int32, piece: Int32):
        """The head of a piece, and which piece of it. Shifts: dividing a signed number takes five instructions."""
        head, part = first_head, piece
        if const_expr(self.spec.by_token):
            head, part = piece >> (self.lanes.bit_length() - 1), piece & (self.lanes - 1)
        return head, part

    @cute.jit
    def _place(self, slot: Int64, num_slots: Int64, rows: cute.FastDivmodDivisorV2, valid):
        """Page and offset of a slot, and whether there is such a slot."""
        exists = valid and slot >= 0 and slot < num_slots
        page, offset = divmod(cutlass.select_(exists, Int32(slot), Int32(0)), rows)
        return page, offset, exists

    @cute.jit
    def _absmax(self, rX: cute.Tensor) -> Float32:
        """The largest magnitude of a piece, NaN left out."""
        kind = const_expr("bf16x2" if self.spec.dtype == "bfloat16" else "f16x2")
        words = cute.recast_tensor(rX, Int32)
        packed = cute.arch.inline_ptx(
            "abs." + kind + " {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[words[0]]
        )
        for i in cutlass.range_constexpr(1, VALUES // 2):
            packed = cute.arch.inline_ptx(
                "{\n.reg .b32 t;\nabs." + kind + " t, {$r0};\nmax." + kind + " {$w0}, t, {$r1};\n}",
                write_only_types=[Int32],
                read_only_args=[words[i], packed],
            )
        pair = cute.make_rmem_tensor((2,), self.dtype)
        cute.recast_tensor(pair, Int32)[0] = packed
        both = pair.load().to(Float32)
        return cute.arch.fmax(cute.arch.fmax(both[0], both[1]), 0.0)  # 0 where all are NaN

    @cute.jit
    def _over_team(self, k_absmax: Float32, v_absmax: Float32):
        """The maxima of all lanes of a team, where a token has one scale."""
        if const_expr(self.spec.k_scale == PER_TOKEN):
            k_absmax = cute.arch.warp_reduction(k_absmax, cute.arch.fmax, threads_in_group=self.spec.team)
        if const_expr(self.spec.v_scale == PER_TOKEN):
            v_absmax = cute.arch.warp_reduction(v_absmax, cute.arch.fmax, threads_in_group=self.spec.team)
        return k_absmax, v_absmax

    @cute.jit
    def _append(self, operand: Operand, rX: cute.Tensor, absmax: Float32, place: Place):
        """Quantizes a piece and stores it. `absmax` is that of the token, read only where a token has one scale."""
        spec = self.spec
        kind = operand.scale_kind
        page, offset, first_head, piece, stored = place
        head, part = self._split(first_head, piece)
        scale_strides = operand.scale_strides
        scales = cute.make_tensor(operand.scale, cute.make_layout(1))
        if const_expr(kind == GIVEN):
            # a head past the last one repeats it
            index = _times(head, scale_strides.head)
            if const_expr(spec.by_token):
                index = cutlass.select_(stored, index, Int64(0))
            scale = Float32((scales.iterator + index).load())
        else:
            sharing = const_expr(self._sharing(kind))
            if const_expr(kind != PER_TOKEN):
                absmax = self._absmax(rX)
                absmax = cute.arch.warp_reduction(absmax, cute.arch.fmax, threads_in_group=sharing)
            scale = self._scale(absmax)
            first = part % const_expr(min(sharing, self.lanes)) == 0
            if const_expr(kind == PER_TOKEN):
                first = piece == 0
            if stored and first:
                own = _times(page, scale_strides.outer) + _times(offset, scale_strides.row)
                if const_expr(kind != PER_TOKEN):
                    own += _times(head, scale_strides.head)
                if const_expr(kind in GROUPS):
                    own += _times(part // sharing, scale_strides.group)
                (scales.iterator + own).store(self.scale_dtype(scale))

        codes = self._quantize(rX, absmax, scale, kind)
        strides = operand.cache_strides
        address = operand.cache.toint()
        address += _times(page, strides.outer) + _times(offset, strides.row) + _times(head, strides.head)
        if stored:
            if const_expr(spec.x_packed and operand.is_v):
                address += _times(VALUES * part, strides.piece)
                bytes16 = cute.recast_tensor(codes, Int8)
                for i in cutlass.range_constexpr(VALUES):
                    target = cute.make_ptr(Int8, address, AddressSpace.gmem, assumed_align=1)
                    cute.make_tensor(target, cute.make_layout(1))[0] = bytes16[i]
                    address += strides.piece
            else:
                address += _times(part, strides.piece)
                target = cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=16)
                cute.autovec_copy(codes, cute.make_tensor(target, cute.make_layout(4)))

    @cute.jit
    def _scale(self, absmax: Float32) -> Float32:
        """The scale that is stored, as float32."""
        spec = self.spec
        absmax = cute.arch.fmin(absmax, LARGEST[spec.dtype])  # an Inf counts as the largest finite value
        scale = self._divide(absmax, Float32(CODE_MAX), Float32(1.0 / CODE_MAX))
        scale = cute.arch.fmax(scale, MIN_SCALE[spec.scale_dtype])
        scale = cutlass.select_(absmax == 0.0, Float32(1.0), scale)
        if const_expr(spec.scale_dtype == "float16"):
            scale = Float32(Float16(cute.arch.fmin(scale, LARGEST["float16"])))
        return scale

    @cute.jit
    def _quantize(self, rX: cute.Tensor, absmax: Float32, scale: Float32, kind: str) -> cute.Tensor:
        """16 codes in 4 words.

        A value that overflows or underflows in the division is clamped, or multiplied by a power of two together with
        its scale. With a computed scale that is rare and happens in the packed values; a given scale may be anything.
        """
        spec = self.spec
        bound, power = Float32(LARGEST[spec.dtype]), Float32(1.0)
        if const_expr(kind == GIVEN or (spec.dtype == "bfloat16" and spec.scale_dtype == "float32")):
            size = abs(scale)
            bound = cute.arch.fmin(CODE_MAX * size, bound)
            power = cutlass.select_(size > FAR, Float32(1.0 / FAR), power)
            power = cutlass.select_(size < 1.0 / FAR, Float32(FAR), power)
            scale = scale * power
            if const_expr(kind != GIVEN):
                if power != 1.0:  # also where there is an Inf
                    self._packed(rX, "min.NaN", 0x7F7F)
                    self._packed(rX, "max.NaN", 0xFF7F)
                    if power > 1.0:
                        self._packed(rX, "mul.rn", 0x5F80)
                    else:
                        self._packed(rX, "mul.rn", 0x1F80)
        else:
            # only Inf is beyond 127 scales, or what has the largest scale of float16: 127 * 65536 in bfloat16
            most = const_expr(0x7BFF if spec.dtype == "float16" else 0x4AFE)
            if absmax > const_expr(LARGEST["float16"] if spec.dtype == "float16" else CODE_MAX * 65536):
                self._packed(rX, "min.NaN", most)
                self._packed(rX, "max.NaN", most | 0x8000)
        inverse = Float32(1.0) / scale
        values = rX.load().to(Float32)
        codes = cute.make_rmem_tensor((VALUES // 4,), Int32)
        for word in cutlass.range_constexpr(VALUES // 4):
            quotients = []
            for i in cutlass.range_constexpr(4 * word, 4 * word + 4):
                x = values[i]
                if const_expr(kind == GIVEN):
                    x = cute.arch.fmin(cute.arch.fmax(x, -bound, nan=True), bound, nan=True) * power
                quotients.append(self._divide(x, scale, inverse))
            # rounds half to even, NaN becomes 0; two conversions and a packing are one instruction
            codes[word] = cute.arch.inline_ptx(
                "{\n.reg .s32 a, b, c, d;\n.reg .b32 t;\n"
                "cvt.rni.s32.f32 a, {$r0};\ncvt.rni.s32.f32 b, {$r1};\n"
                "cvt.rni.s32.f32 c, {$r2};\ncvt.rni.s32.f32 d, {$r3};\n"
                "cvt.pack.sat.s8.s32.b32 t, d, c, 0;\ncvt.pack.sat.s8.s32.b32 {$w0}, b, a, t;\n}",
                write_only_types=[Int32],
                read_only_args=quotients,
            )
        return codes

    @cute.jit
    def _packed(self, rX: cute.Tensor, operation: str, constant: int):
        """Each value becomes operation(value, constant), the bits of a number of the same type."""
        kind = const_expr("bf16x2" if self.spec.dtype == "bfloat16" else "f16x2")
        words = cute.recast_tensor(rX, Int32)
        for i in cutlass.range_constexpr(VALUES // 2):
            words[i] = cute.arch.inline_ptx(
                "{\n.reg .b32 t;\nmov.b32 t, "
                + hex(constant << 16 | constant)
                + ";\n"
                + operation
                + "."
                + kind
                + " {$w0}, {$r0}, t;\n}",
                write_only_types=[Int32],
                read_only_args=[words[i]],
            )

    @cute.jit
    def _divide(self, x: Float32, scale: Float32, inverse: Float32) -> Float32:
        """The quotient of x and scale, given RN(1 / scale).

        The product with the inverse is off by less than 2 units in the last place; its remainder, which an FMA gives,
        corrects it. For every x of 11 significant bits the result rounds to the integer that the IEEE quotient rounds
        to: tests/cpu/test_gqa_append.py tries all pairs that are near a tie, and all else is far enough from one.
        """
        quotient = x * inverse
        rest = self._fma(-scale, quotient, x)
        return self._fma(rest, inverse, quotient)

    @cute.jit
    def _fma(self, a: Float32, b: Float32, c: Float32) -> Float32:
        return cute.arch.inline_ptx(
            "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
        )

    def fake_arguments(self) -> tuple:
        """What `__call__` is compiled from: any strides but the last; rows of values and codes in steps of 16 bytes."""
        spec = self.spec
        tokens, h_kv = cute.sym_int(), cute.sym_int()

        def tensor(dtype, shape, steps, align):
            """steps: what each stride is a multiple of; 0 for a stride of 1."""
            strides = tuple(cute.sym_int64(divisibility=step) if step else 1 for step in steps)
            return make_fake_tensor(dtype, shape, strides, assumed_align=align)

        def sizes(count):
            return tuple(cute.sym_int() for _ in range(count))

        def scale(kind):
            rank = {GIVEN: 1, PER_TOKEN: 2, PER_TOKEN_HEAD: 3}.get(kind, 4)
            return tensor(self.scale_dtype, sizes(rank), (1,) * rank, self.scale_dtype.width // 8)

        k, v = (tensor(self.dtype, (tokens, h_kv, spec.d), (8, 8, 0), 16) for _ in range(2))
        if spec.x_packed:
            k_cache = tensor(Int8, (*sizes(2), self.lanes, cute.sym_int(), VALUES), (16, 16, 16, 16, 0), 16)
            v_cache = tensor(Int8, (*sizes(2), spec.d, cute.sym_int()), (1, 1, 1, 1), 1)
        else:
            k_cache, v_cache = (tensor(Int8, (*sizes(3), spec.d), (16, 16, 16, 0), 16) for _ in range(2))
        slots = tensor(Int64, (tokens,), (1,), 8)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return k, v, k_cache, v_cache, scale(spec.k_scale), scale(spec.v_scale), slots, Int32(0), stream
