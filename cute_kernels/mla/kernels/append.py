"""Append to the paged FP8 latent cache: quantize bf16 tokens and store each in its slot."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import CopyG2ROp
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.mla.append_spec import MlaAppendSpec
from cute_kernels.mla.kernels.quantize import VALUES_PER_LANE, quantize_float32
from fp8_mla.formats import V3_2

LANES_PER_TILE = V3_2.quant_tile // VALUES_PER_LANE
LANES_PER_ROPE = V3_2.rope_dim // 8  # 16 bytes of bf16 a lane
ROPE_OFFSET = V3_2.field("rope").offset


class MlaAppendKernel:
    """kv (tokens, 576) bf16 -> kv_cache (pages, page_size, 656) uint8 at slot_mapping (tokens,), in one launch.

    A warp handles `tokens_per_warp` tokens and issues all their loads, slots included, before it uses any:

    | part             | per lane                                | per warp instruction       |
    |------------------|-----------------------------------------|----------------------------|
    | latent, 1024 B   | 16 values of a quant tile, 2 loads      | one token                  |
    | rope, 128 B      | 8 values of token lane / 8              | all tokens                 |
    | codes, 512 B     | one store of 16 B                       | one token                  |
    | scales, 16 B     | lanes 0, 8, 16, 24 store 4 B            | one token                  |

    No shared memory and no barriers: the largest magnitude of a quant tile takes three shuffles among its 8 lanes. A
    token is 1152 bytes in and 656 out, so memory binds: at its speed 170 instructions a token and warp take less than
    half of the issue slots.

    The rule is that of `fp8_mla.pack`, in float32 without flushing subnormals. cvt.rn.satfinite clamps, also Inf, to
    448, and turns NaN into 0x7F.
    """

    def __init__(self, spec: MlaAppendSpec) -> None:
        reasons = spec.can_implement()
        if reasons:
            raise ValueError(f"{spec}: " + "; ".join(reasons))
        self.tokens_per_warp = spec.tokens_per_warp
        self.warps = spec.warps

    @cute.jit
    def __call__(self, mKV: cute.Tensor, mCache: cute.Tensor, mSlots: cute.Tensor, stream: cuda.CUstream):
        tokens = Int32(mKV.shape[0])
        page_size = cute.fast_divmod_create_divisor_v2(Int32(mCache.shape[1]))
        self._kernel(mKV, mCache, mSlots, page_size).launch(
            grid=[cute.ceil_div(tokens, self.tokens_per_warp * self.warps), 1, 1],
            block=[32 * self.warps, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def _kernel(
        self, mKV: cute.Tensor, mCache: cute.Tensor, mSlots: cute.Tensor, page_size: cute.FastDivmodDivisorV2
    ) -> None:
        count = const_expr(self.tokens_per_warp)
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = tid % 32
        tokens = Int32(mKV.shape[0])
        first = (cta * self.warps + tid // 32) * count
        load = cute.make_copy_atom(CopyG2ROp(), BFloat16, num_bits_per_copy=128)

        if first < tokens:
            # the token whose rope part this lane copies; spare lanes repeat the last one's loads and store nothing
            mine = lane // LANES_PER_ROPE
            rope_token = cutlass.min(first + cutlass.min(mine, count - 1), tokens - 1)
            slot = mSlots[rope_token]
            latent = cute.make_rmem_tensor((8, 2, count), BFloat16)
            rope = cute.make_rmem_tensor((8,), BFloat16)
            for t in cutlass.range_constexpr(count):
                source = self._row(mKV, cutlass.min(first + t, tokens - 1)) + cute.assume(
                    VALUES_PER_LANE * lane, divby=16
                )
                for half in cutlass.range_constexpr(2):
                    cute.copy(load, cute.make_tensor(source + 8 * half, cute.make_layout(8)), latent[None, half, t])
            chunk = cute.assume(V3_2.nope_dim + 8 * (lane % LANES_PER_ROPE), divby=8)
            cute.copy(load, cute.make_tensor(self._row(mKV, rope_token) + chunk, cute.make_layout(8)), rope)

            destination = Int64(0)  # the row of this lane's token; 0: nowhere
            num_slots = Int64(mCache.shape[0]) * Int64(mCache.shape[1])
            if mine < count and first + mine < tokens and slot >= 0 and slot < num_slots:
                page, offset = divmod(Int32(slot), page_size)
                row = Int64(page) * Int64(mCache.stride[0]) + Int64(offset) * Int64(mCache.stride[1])
                destination = mCache.iterator.toint() + row

            for t in cutlass.range_constexpr(count):
                codes, scale = quantize_float32(latent[None, None, t], LANES_PER_TILE)
                target = self._shuffle64(destination, t * LANES_PER_ROPE)
                if target != 0:
                    cute.autovec_copy(codes, self._bytes(target, VALUES_PER_LANE * lane))
                    if lane % LANES_PER_TILE == 0:
                        scales = cute.recast_tensor(self._bytes(target, V3_2.scales.offset), Float32)
                        scales[lane // LANES_PER_TILE] = scale
            if destination != 0:
                bytes16 = self._bytes(destination, ROPE_OFFSET + 16 * (lane % LANES_PER_ROPE))
                cute.autovec_copy(cute.recast_tensor(rope, Uint8), bytes16)

    @cute.jit
    def _row(self, mKV: cute.Tensor, token: Int32) -> cute.Pointer:
        """A token's values. The product is 64-bit: kv may have more than 2^31 elements."""
        return mKV.iterator + cute.assume(Int64(token) * Int64(mKV.stride[0]), divby=8)

    @cute.jit
    def _bytes(self, address: Int64, offset) -> cute.Tensor:
        """16 bytes of a cache row."""
        pointer = cute.make_ptr(Uint8, address + Int64(offset), AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout(16))

    @cute.jit
    def _shuffle64(self, value: Int64, lane: int) -> Int64:
        """`value` of another lane."""
        low = cute.arch.shuffle_sync(Int32(value & 0xFFFFFFFF), lane)
        high = cute.arch.shuffle_sync(Int32(value >> 32), lane)
        return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)

    def fake_arguments(self) -> tuple:
        """What `__call__` is compiled from: any strides, those of kv and the cache multiples of 16 bytes."""
        tokens = cute.sym_int()
        mKV = make_fake_tensor(BFloat16, (tokens, V3_2.d_qk), (cute.sym_int64(divisibility=8), 1), assumed_align=16)
        strides = (cute.sym_int64(divisibility=16), cute.sym_int64(divisibility=16), 1)
        mCache = make_fake_tensor(Uint8, (cute.sym_int(), cute.sym_int(), V3_2.token_bytes), strides, assumed_align=16)
        mSlots = make_fake_tensor(Int64, (tokens,), (cute.sym_int64(),), assumed_align=8)
        return mKV, mCache, mSlots, make_fake_stream(use_tvm_ffi_env_stream=True)
