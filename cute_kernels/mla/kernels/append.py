"""Append to a paged latent cache: quantizes bf16 tokens and stores each in its slot, in any format."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import CopyG2ROp
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.mla.append_spec import MlaAppendSpec
from cute_kernels.mla.kernels.quantize import VALUES_PER_LANE, quantize
from fp8_mla.formats import FORMATS

WARP = 32
LATENT = WARP * VALUES_PER_LANE  # elements of a warp: each lane has 16


class MlaAppendKernel:
    """kv (tokens, 512 or 576) bf16 -> data and scale rows in kv_cache at slot_mapping (tokens,), in one launch.

    A warp handles `tokens_per_warp` tokens and issues all their loads, slots included, before it uses any. A lane has
    16 neighbouring elements, so lanes are the columns of every format:

    | format    | lanes of a quant tile | data row: bytes a lane stores     | scale row: bytes, by which lanes |
    |-----------|-----------------------|-----------------------------------|----------------------------------|
    | v3.2      | 8                     | 16; and 16 of a tail              | 4 each, 0, 8, 16 and 24          |
    | v3.2_nope | 8                     | 16                                | 4 each, 0, 8, 16 and 24          |
    | v4        | 4                     | 16; 32 of lanes 28 to 31, as read | 1 each, 0, 4 to 28; 0 by lane 28 |
    | v4.1      | 2                     | 16                                | 1 each, every other one          |
    | v4.1_fp4  | 1                     | 8                                 | 1 each                           |

    The rope part of v3.2 is a tail after the 512 elements: eight lanes have that of a token, 8 elements each.

    A token is 1024 or 1152 bytes in and 288 to 656 out, so memory binds. There is no shared memory and no barrier. The
    launch says where rows are, so one kernel serves planar and interleaved pages: the data row of a token is at offset
    * data_stride in its page, its scales are at scale_offset + offset * scale_stride.
    """

    def __init__(self, spec: MlaAppendSpec) -> None:
        self.tokens_per_warp = spec.tokens_per_warp
        self.warps = spec.warps
        self.format = FORMATS[spec.cache_format]
        self.lanes_per_tile = self.format.quant_tile // VALUES_PER_LANE
        self.code_lanes = self.format.nope_dim // VALUES_PER_LANE
        self.code_bytes = VALUES_PER_LANE * self.format.codes.bits // 8  # code bytes of a lane
        self.scale_type = Float32 if self.format.scales.itemsize == 4 else Uint8  # as raw bytes, whatever they mean
        self.rope_offset = self.format.rope.offset if self.format.rope else None
        self.tail_lanes = (self.format.d_qk - LATENT) // 8  # lanes that have elements after the first 512

    @cute.jit
    def __call__(
        self,
        mKV: cute.Tensor,
        mCache: cute.Tensor,
        mSlots: cute.Tensor,
        data_stride: Int32,
        scale_offset: Int32,
        scale_stride: Int32,
        stream: cuda.CUstream,
    ):
        """Launches the kernel.

        Two sizes and one stride of mCache (pages, page_size, any) count: the first ones; the stride is n x 16 bytes.
        """
        tokens = Int32(mKV.shape[0])
        page_size = cute.fast_divmod_create_divisor_v2(Int32(mCache.shape[1]))
        rows = (data_stride, scale_offset, scale_stride)
        self._kernel(mKV, mCache, mSlots, rows, page_size).launch(
            grid=[cute.ceil_div(tokens, self.tokens_per_warp * self.warps), 1, 1],
            block=[WARP * self.warps, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def _kernel(
        self,
        mKV: cute.Tensor,
        mCache: cute.Tensor,
        mSlots: cute.Tensor,
        rows: tuple,
        page_size: cute.FastDivmodDivisorV2,
    ) -> None:
        count = const_expr(self.tokens_per_warp)
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = tid % WARP
        tokens = Int32(mKV.shape[0])
        first = (cta * self.warps + tid // WARP) * count
        load = cute.make_copy_atom(CopyG2ROp(), BFloat16, num_bits_per_copy=128)
        # As in decoding, the next launch may begin once all CTAs of this one have started. Every thread waits for the
        # kernels before this one, which write kv and slots or read the cache.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        if first < tokens:
            mine = lane % count  # the token whose rows this lane finds
            if const_expr(self.tail_lanes > 0):  # and the token whose tail it copies; spare lanes store nothing
                mine = cutlass.min(lane // self.tail_lanes, count - 1)
            slot = mSlots[cutlass.min(first + mine, tokens - 1)]
            latent, tail = cute.make_rmem_tensor((8, 2, count), BFloat16), cute.make_rmem_tensor(8, BFloat16)
            for t in cutlass.range_constexpr(count):
                source = self._row(mKV, first + t, tokens) + cute.assume(VALUES_PER_LANE * lane, divby=16)
                for half in cutlass.range_constexpr(2):
                    cute.copy(load, cute.make_tensor(source + 8 * half, cute.make_layout(8)), latent[None, half, t])
            if const_expr(self.tail_lanes > 0):
                chunk = cute.assume(LATENT + 8 * (lane % self.tail_lanes), divby=8)
                source = self._row(mKV, first + mine, tokens) + chunk
                cute.copy(load, cute.make_tensor(source, cute.make_layout(8)), tail)

            if const_expr(self.lanes_per_tile == 1 and count > 1):
                # Without a shuffle in between, ptxas quantizes a token before it issues the loads of the next one.
                cute.arch.fence_acq_rel_cta()

            # No branch: ptxas would move the loads of other tokens past it, where they wait for the slot.
            num_slots = Int64(mCache.shape[0]) * Int64(mCache.shape[1])
            exists = first + mine < tokens and slot >= 0 and slot < num_slots
            page, offset = divmod(cutlass.select_(exists, Int32(slot), Int32(0)), page_size)
            page_start = mCache.iterator.toint() + Int64(page) * Int64(mCache.stride[0])
            data_stride, scale_offset, scale_stride = rows
            data = page_start + Int64(offset) * Int64(data_stride)
            data = cutlass.select_(exists, data, Int64(0))  # the address of the token's data row; 0 if it has none
            scales = page_start + Int64(scale_offset) + Int64(offset) * Int64(scale_stride)

            for t in cutlass.range_constexpr(count):
                codes, scale = quantize(self.format, latent[None, None, t])
                data_row, scale_row = data, scales
                finder = t * max(self.tail_lanes, 1)  # the first lane that has found the rows
                if const_expr(count > 1):
                    data_row = self._shuffle64(data, finder)
                if const_expr(self.tail_lanes > 0):  # one row a token only: another shuffle takes too many registers
                    scale_row = data_row + self.format.scales.offset
                elif const_expr(count > 1):
                    scale_row = self._shuffle64(scales, finder)
                if data_row != 0:
                    self._store(latent[None, None, t], codes, scale, data_row, scale_row, lane)
            if const_expr(self.tail_lanes > 0):
                if data != 0 and lane < self.tail_lanes * count:
                    self._store_bytes(tail, data + Int64(self.rope_offset + 16 * (lane % self.tail_lanes)), 16)

    @cute.jit
    def _row(self, mKV: cute.Tensor, token: Int32, tokens: Int32) -> cute.Pointer:
        """Returns the elements of a token, at most the last. The product is 64-bit: kv may have over 2^31 elements."""
        return mKV.iterator + cute.assume(Int64(cutlass.min(token, tokens - 1)) * Int64(mKV.stride[0]), divby=8)

    @cute.jit
    def _store(self, latent: cute.Tensor, codes: cute.Tensor, scale, data_row: Int64, scale_row: Int64, lane: Int32):
        """Stores this lane's part of a token's rows, except the tail."""
        if const_expr(self.code_lanes == WARP):
            self._store_bytes(codes, data_row + Int64(self.code_bytes * lane), self.code_bytes)
        else:
            if lane < self.code_lanes:
                self._store_bytes(codes, data_row + Int64(self.code_bytes * lane), self.code_bytes)
            else:
                rope = data_row + Int64(self.rope_offset + 2 * VALUES_PER_LANE * (lane - self.code_lanes))
                for half in cutlass.range_constexpr(2):
                    self._store_bytes(latent[None, half], rope + 16 * half, 16)
                scale = scale * 0  # padding of the scale row, stored by the first of these lanes
        if lane % self.lanes_per_tile == 0:
            width = const_expr(self.format.scales.itemsize)
            pointer = cute.make_ptr(
                self.scale_type,
                scale_row + Int64(width * (lane // self.lanes_per_tile)),
                AddressSpace.gmem,
                assumed_align=width,
            )
            cute.make_tensor(pointer, cute.make_layout(1))[0] = self.scale_type(scale)

    @cute.jit
    def _store_bytes(self, source: cute.Tensor, address: Int64, count: cutlass.Constexpr):
        pointer = cute.make_ptr(Uint8, address, AddressSpace.gmem, assumed_align=count)
        cute.autovec_copy(cute.recast_tensor(source, Uint8), cute.make_tensor(pointer, cute.make_layout(count)))

    @cute.jit
    def _shuffle64(self, value: Int64, lane: int) -> Int64:
        """Returns another lane's `value`."""
        low = cute.arch.shuffle_sync(Int32(value & 0xFFFFFFFF), lane)
        high = cute.arch.shuffle_sync(Int32(value >> 32), lane)
        return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)

    def fake_arguments(self) -> tuple:
        """Returns the arguments for compilation: any strides, those of kv and of pages multiples of 16 bytes."""
        tokens = cute.sym_int()
        mKV = make_fake_tensor(
            BFloat16, (tokens, self.format.d_qk), (cute.sym_int64(divisibility=8), 1), assumed_align=16
        )
        strides = (cute.sym_int64(divisibility=16), cute.sym_int64(), 1)
        mCache = make_fake_tensor(Uint8, tuple(cute.sym_int() for _ in range(3)), strides, assumed_align=16)
        mSlots = make_fake_tensor(Int64, (tokens,), (cute.sym_int64(),), assumed_align=8)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return mKV, mCache, mSlots, Int32(0), Int32(0), Int32(0), stream
