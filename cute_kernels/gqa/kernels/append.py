"""Append to an INT8, FP8 or 4-bit cache: quantize new keys and values and store each token in its slot."""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int8, Int32, Int64, const_expr
from cutlass.cute.nvgpu import CopyG2ROp
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.gqa.append_spec import GIVEN, GROUPS, PER_TOKEN, PER_TOKEN_HEAD, VALUES, WARP, KvAppendSpec
from cute_kernels.gqa.codes import INT8, ROTATED, element
from cute_kernels.gqa.kernels.quantize import Quantizer
from cute_kernels.gqa.kernels.quantize_rotated import E4m3Quantizer, RotatedQuantizer

TOKENS_TOGETHER = 16  # paged_vllm: tokens of a head in neighbouring teams, so that their bytes meet in a sector


class RowStrides(NamedTuple):
    """Strides of new keys or values, in elements."""

    token: Int64
    head: Int64


class CacheStrides(NamedTuple):
    """Strides of a cache, in bytes: sequence or page, token, head, and piece of a row (of x-packed V: d)."""

    outer: Int64
    row: Int64
    head: Int64
    piece: Int64


class ScaleStrides(NamedTuple):
    """Strides of scales, in elements; 0 along axes that share a scale."""

    outer: Int64
    row: Int64
    head: Int64
    group: Int64


class Side(NamedTuple):
    """Keys or values: the addresses of new ones, and the targets of codes and scales."""

    rows: cute.Pointer
    row_strides: RowStrides
    cache: cute.Pointer
    cache_strides: CacheStrides
    scale: cute.Pointer
    scale_strides: ScaleStrides


class Task(NamedTuple):
    """A team's task: a token, its first head, the slot, and the number of pieces. `valid`: the task exists."""

    token: Int32
    first_head: Int32
    slot: Int64
    pieces: Int32
    valid: object


class Place(NamedTuple):
    """The target of a piece: page, token, the task's first head, the piece; and whether it is stored at all."""

    page: Int32
    offset: Int32
    first_head: Int32
    piece: Int32
    stored: object


@cute.jit
def _times(index: Int32, stride: Int64) -> Int64:
    """Returns the 64-bit product for index >= 0: zero extension takes half the instructions of sign extension."""
    return (Int64(index) & 0xFFFFFFFF) * stride


class KvAppendKernel:
    """k, v (tokens, h_kv, d) -> codes and scales in the slots of slot_mapping (tokens,), one launch.

    A team of lanes has a task: K and V of a head of a token, or of a token with all its heads if they share a scale.
    A lane has pieces of 16 values, lane, lane + team, ... of the task:

    | part        | per lane and piece                        | a warp's instruction, d 128, a head a team  |
    |-------------|-------------------------------------------|---------------------------------------------|
    | k, v        | 2 loads of 16 B each, all issued first    | 4 heads, half of each sector: L1 joins them |
    | codes       | 1 store of 16 B each                      | 4 rows of 128 B                             |
    | V, x-packed | 16 stores of a byte, page_size apart      | 8 times 4 bytes, if the slots follow        |
    | scales      | 1 store by the first lane that shares it  | 4 scales                                    |

    There is no shared memory and no barrier: absmax is a packed maximum over a lane's values, then shuffles among the
    lanes that share a scale. Threads past the last task or piece repeat the last one, and store nothing. If a token
    does not fit into the registers of a warp (held 0), a second pass reads it from L1 or L2.

    With d 128, a head a team and computed scales, a value takes 13 instructions. At memory speed, 5.2 values per clock
    and SM, that is half of the issue slots.
    """

    def __init__(self, spec: KvAppendSpec) -> None:
        reasons = spec.can_implement()
        if reasons:
            raise ValueError(f"{spec}: " + "; ".join(reasons))
        self.spec = spec
        self.dtype = element(spec.dtype)
        self.scale_dtype = element(spec.scale_dtype)
        self.lanes = spec.d // VALUES  # lanes of a head
        self.threads = spec.warps * WARP
        self.teams = self.threads // spec.team
        self.kinds = (spec.k_scale, spec.v_scale)
        self.quantizer = Quantizer(spec) if spec.codes[0] == INT8 else E4m3Quantizer(spec)
        self.rotated = [code in ROTATED for code in spec.codes]
        self.rotated_quantizer = RotatedQuantizer(spec)
        self.code_types = [element(code) for code in spec.codes]

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

        Caches have their layout's axes; heads_first says whether axis 1 or 2 is the heads (ignored for paged_vllm). A
        given scale comes as (h_kv,) or (1,).
        """
        spec = self.spec
        tokens, h_kv = Int32(mK.shape[0]), Int32(mK.shape[1])
        if const_expr(spec.x_packed):
            rows = Int32(mKCache.shape[3])
        else:
            rows = cutlass.select_(heads_first != 0, Int32(mKCache.shape[2]), Int32(mKCache.shape[1]))
        tasks = tokens
        if const_expr(not spec.by_token):
            tasks = tokens * h_kv
            if const_expr(spec.x_packed):
                tasks = cute.ceil_div(tokens, TOKENS_TOGETHER) * TOKENS_TOGETHER * h_kv
        divisors = (cute.fast_divmod_create_divisor_v2(h_kv), cute.fast_divmod_create_divisor_v2(rows))
        sides = (
            self._side(0, mK, mKCache, mKScale, spec.k_scale, heads_first),
            self._side(1, mV, mVCache, mVScale, spec.v_scale, heads_first),
        )
        num_slots = Int64(mKCache.shape[0]) * Int64(rows)
        self._kernel(sides, mSlots, tokens, h_kv, tasks, num_slots, divisors).launch(
            grid=[cute.ceil_div(tasks, self.teams), 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.jit
    def _side(
        self,
        is_v: cutlass.Constexpr,
        mX: cute.Tensor,
        mCache: cute.Tensor,
        mScale: cute.Tensor,
        kind: str,
        heads_first: Int32,
    ) -> Side:
        """Makes the keys' or the values' side, with the strides of their layout."""
        if const_expr(self.spec.x_packed):
            cache_strides = CacheStrides(*self._wide(mCache, (0, 3, 1, 2)))
        else:
            outer, row, head = self._places(mCache, heads_first)
            piece_bytes = const_expr(VALUES // 2 if self.rotated[is_v] else VALUES)
            cache_strides = CacheStrides(outer, row, head, Int64(piece_bytes))
        row_strides = RowStrides(Int64(mX.stride[0]), Int64(mX.stride[1]))
        scale_strides = self._scale_strides(mScale, kind, heads_first)
        return Side(mX.iterator, row_strides, mCache.iterator, cache_strides, mScale.iterator, scale_strides)

    def _sharing(self, kind: str) -> int:
        """Returns how many neighbouring lanes share a scale."""
        whole = {PER_TOKEN: self.spec.team, PER_TOKEN_HEAD: self.lanes}
        return whole[kind] if kind in whole else GROUPS[kind] // VALUES

    @cute.jit
    def _wide(self, mX: cute.Tensor, axes: tuple):
        return tuple(Int64(mX.stride[axis]) for axis in axes)

    @cute.jit
    def _places(self, mX: cute.Tensor, heads_first: Int32):
        """Returns the strides of (outer, row, head)."""
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
        sides: tuple,
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
        number = cta * self.teams + tid // spec.team
        lane = tid % spec.team
        valid = number < tasks
        number = cutlass.min(number, tasks - 1)
        token, first_head = number, Int32(0)
        if const_expr(not spec.by_token and spec.x_packed):
            block, first_head = divmod(number // TOKENS_TOGETHER, head_divisor)
            token = block * TOKENS_TOGETHER + number % TOKENS_TOGETHER
            valid = valid and token < tokens
            token = cutlass.min(token, tokens - 1)
        elif const_expr(not spec.by_token):
            token, first_head = divmod(number, head_divisor)
        pieces = self.lanes
        if const_expr(spec.by_token):
            pieces = h_kv * self.lanes
        task = Task(token, first_head, mSlots[token], pieces, valid)
        if const_expr(spec.held > 0):
            self._append_held(sides, task, lane, num_slots, row_divisor)
        else:
            self._append_in_two_passes(sides, task, lane, num_slots, row_divisor)

    @cute.jit
    def _append_held(self, sides: tuple, task: Task, lane: Int32, num_slots: Int64, row_divisor):
        """Appends a token whose pieces a lane holds in registers, all loaded before any is used."""
        spec = self.spec
        held = [cute.make_rmem_tensor((VALUES, spec.held), self.dtype) for _ in sides]
        for i in cutlass.range_constexpr(spec.held):
            piece = lane + spec.team * i
            if const_expr(spec.by_token):
                piece = cutlass.min(piece, task.pieces - 1)
            for side in cutlass.range_constexpr(2):
                self._load(sides[side], task, piece, held[side][None, i])
        absmax = [Float32(0.0), Float32(0.0)]
        for side in cutlass.range_constexpr(2):
            if const_expr(self.kinds[side] == PER_TOKEN):
                for i in cutlass.range_constexpr(spec.held):
                    absmax[side] = cute.arch.fmax(absmax[side], self.quantizer.absmax(held[side][None, i]))
                absmax[side] = self._over_team(absmax[side])
        page, offset, stored = self._place(task, num_slots, row_divisor)
        for i in cutlass.range_constexpr(spec.held):
            piece = lane + spec.team * i
            exists = stored
            if const_expr(spec.by_token):
                exists = stored and piece < task.pieces
            place = Place(page, offset, task.first_head, piece, exists)
            for side in cutlass.range_constexpr(2):
                self._append(sides[side], side, held[side][None, i], absmax[side], place)

    @cute.jit
    def _append_in_two_passes(self, sides: tuple, task: Task, lane: Int32, num_slots: Int64, row_divisor):
        """Appends a token that does not fit into registers: the second pass reads it from L1 or L2."""
        spec = self.spec
        turns = cute.ceil_div(task.pieces, spec.team)
        rK, rV = (cute.make_rmem_tensor((VALUES,), self.dtype) for _ in sides)
        k_absmax, v_absmax = Float32(0.0), Float32(0.0)
        for i in cutlass.range(turns, unroll=2):
            piece = cutlass.min(lane + spec.team * i, task.pieces - 1)
            if const_expr(spec.k_scale == PER_TOKEN):
                self._load(sides[0], task, piece, rK)
                k_absmax = cute.arch.fmax(k_absmax, self.quantizer.absmax(rK))
            if const_expr(spec.v_scale == PER_TOKEN):
                self._load(sides[1], task, piece, rV)
                v_absmax = cute.arch.fmax(v_absmax, self.quantizer.absmax(rV))
        if const_expr(spec.k_scale == PER_TOKEN):
            k_absmax = self._over_team(k_absmax)
        if const_expr(spec.v_scale == PER_TOKEN):
            v_absmax = self._over_team(v_absmax)
        page, offset, stored = self._place(task, num_slots, row_divisor)
        for i in cutlass.range(turns, unroll=1):
            piece = lane + spec.team * i
            self._load(sides[0], task, cutlass.min(piece, task.pieces - 1), rK)
            self._load(sides[1], task, cutlass.min(piece, task.pieces - 1), rV)
            place = Place(page, offset, task.first_head, piece, stored and piece < task.pieces)
            self._append(sides[0], 0, rK, k_absmax, place)
            self._append(sides[1], 1, rV, v_absmax, place)

    @cute.jit
    def _load(self, side: Side, task: Task, piece: Int32, rX: cute.Tensor):
        """Starts the loads of a piece. The products are 64-bit: k and v may have more than 2^31 elements."""
        head, part = self._split(task.first_head, piece)
        strides = side.row_strides
        row = _times(task.token, strides.token) + _times(head, strides.head) + Int64(VALUES * part)
        atom = cute.make_copy_atom(CopyG2ROp(), self.dtype, num_bits_per_copy=128)
        for half in cutlass.range_constexpr(2):
            address = side.rows.toint() + 2 * (row + 8 * half)
            source = cute.make_ptr(self.dtype, address, AddressSpace.gmem, assumed_align=16)
            target = cute.make_tensor(rX.iterator + 8 * half, cute.make_layout(8))
            cute.copy(atom, cute.make_tensor(source, cute.make_layout(8)), target)

    @cute.jit
    def _split(self, first_head: Int32, piece: Int32):
        """Returns a piece's head and its number in the head. It shifts: a signed division takes five instructions."""
        head, part = first_head, piece
        if const_expr(self.spec.by_token):
            head, part = piece >> (self.lanes.bit_length() - 1), piece & (self.lanes - 1)
        return head, part

    @cute.jit
    def _place(self, task: Task, num_slots: Int64, rows: cute.FastDivmodDivisorV2):
        """Returns page and offset of a slot, and whether the slot exists."""
        slot = task.slot
        exists = task.valid and slot >= 0 and slot < num_slots
        page, offset = divmod(cutlass.select_(exists, Int32(slot), Int32(0)), rows)
        return page, offset, exists

    def _over_team(self, absmax: Float32) -> Float32:
        """Returns the maximum of all lanes of a team, for a token with one scale."""
        return cute.arch.warp_reduction(absmax, cute.arch.fmax, threads_in_group=self.spec.team)

    @cute.jit
    def _append(self, side: Side, is_v: cutlass.Constexpr, rX: cute.Tensor, absmax: Float32, place: Place):
        """Quantizes a piece and stores it. `absmax` is the token's, and used only if the token has one scale."""
        spec = self.spec
        kind = const_expr(self.kinds[is_v])
        page, offset, first_head, piece, stored = place
        head, part = self._split(first_head, piece)
        scale_strides = side.scale_strides
        scales = cute.make_tensor(side.scale, cute.make_layout(1))
        if const_expr(kind == GIVEN):
            # heads past the last one repeat the last one
            index = _times(head, scale_strides.head)
            if const_expr(spec.by_token):
                index = cutlass.select_(stored, index, Int64(0))
            scale = Float32((scales.iterator + index).load())
        else:
            sharing = const_expr(self._sharing(kind))
            if const_expr(self.rotated[is_v]):
                codes, scale = self.rotated_quantizer.quantize(rX, part)
            else:
                if const_expr(kind != PER_TOKEN):
                    absmax = self.quantizer.absmax(rX)
                    absmax = cute.arch.warp_reduction(absmax, cute.arch.fmax, threads_in_group=sharing)
                scale = self.quantizer.scale(absmax)
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

        if const_expr(not self.rotated[is_v]):
            codes = self.quantizer.codes(rX, absmax, scale, kind)
        strides = side.cache_strides
        address = side.cache.toint()
        address += _times(page, strides.outer) + _times(offset, strides.row) + _times(head, strides.head)
        if stored:
            if const_expr(spec.x_packed and is_v):
                address += _times(VALUES * part, strides.piece)
                bytes16 = cute.recast_tensor(codes, Int8)
                for i in cutlass.range_constexpr(VALUES):
                    target = cute.make_ptr(Int8, address, AddressSpace.gmem, assumed_align=1)
                    cute.make_tensor(target, cute.make_layout(1))[0] = bytes16[i]
                    address += strides.piece
            else:
                address += _times(part, strides.piece)
                words = const_expr(cute.size(codes))
                target = cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=4 * words)
                cute.autovec_copy(codes, cute.make_tensor(target, cute.make_layout(words)))

    def fake_arguments(self) -> tuple:
        """Returns the arguments for compilation: any strides but the last; rows of values and codes by 16 bytes."""
        spec = self.spec
        tokens, h_kv = cute.sym_int(), cute.sym_int()

        def tensor(dtype, shape, steps, align):
            """Makes a fake tensor; `steps` has a divisor of each stride, 0 for a stride of 1."""
            strides = tuple(cute.sym_int64(divisibility=step) if step else 1 for step in steps)
            return make_fake_tensor(dtype, shape, strides, assumed_align=align)

        def sizes(count):
            return tuple(cute.sym_int() for _ in range(count))

        def scale(kind):
            rank = {GIVEN: 1, PER_TOKEN: 2, PER_TOKEN_HEAD: 3}.get(kind, 4)
            return tensor(self.scale_dtype, sizes(rank), (1,) * rank, self.scale_dtype.width // 8)

        k, v = (tensor(self.dtype, (tokens, h_kv, spec.d), (8, 8, 0), 16) for _ in range(2))
        if spec.x_packed:
            k_type, v_type = self.code_types
            k_cache = tensor(k_type, (*sizes(2), self.lanes, cute.sym_int(), VALUES), (16, 16, 16, 16, 0), 16)
            v_cache = tensor(v_type, (*sizes(2), spec.d, cute.sym_int()), (1, 1, 1, 1), 1)
        else:
            k_cache, v_cache = (
                tensor(code, (*sizes(3), spec.d // 2 if rotated else spec.d), (16, 16, 16, 0), 16)
                for code, rotated in zip(self.code_types, self.rotated, strict=True)
            )
        slots = tensor(Int64, (tokens,), (1,), 8)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return k, v, k_cache, v_cache, scale(spec.k_scale), scale(spec.v_scale), slots, Int32(0), stream
