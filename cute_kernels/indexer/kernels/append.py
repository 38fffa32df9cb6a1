"""Append to the paged cache of index keys: quantizes tokens and stores each in its slot."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import CopyG2ROp
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.indexer.append_spec import IndexAppendSpec
from fp8_mla.formats import E8M0_BIAS, FP8_MAX, INDEX_KEY, MIN_INDEX_ABSMAX

D = INDEX_KEY.d_qk
VALUES = 16  # values of a lane: its codes are one store of 16 bytes
LANES = D // VALUES  # lanes of a token
WARP = 32
BF16_MAX = 3.3895313892515355e38  # 0x7F7F


class IndexAppendKernel:
    """k (tokens, 128) -> planar pages at slot_mapping (tokens,), in one launch.

    8 lanes have a token, 4 tokens a warp:

    | part          | per lane                                       |
    |---------------|------------------------------------------------|
    | values        | 2 loads of 16 B (bfloat16), or 4 (float32)     |
    | codes, 128 B  | one store of 16 B                              |
    | scale, 4 B    | lane 0 of a token stores it                    |

    There is no shared memory and no barrier: the largest magnitude takes three shuffles. 256 bytes in, 132 out.
    The rules are those of `fp8_mla.pack_index_keys`, in float32 without flushing subnormals.
    """

    def __init__(self, spec: IndexAppendSpec) -> None:
        reasons = spec.can_implement()
        if reasons:
            raise ValueError(f"{spec}: " + "; ".join(reasons))
        self.spec = spec
        self.dtype = {"bfloat16": BFloat16, "float32": Float32}[spec.dtype]
        self.vector = 128 // self.dtype.width  # values of a 16-byte load

    @cute.jit
    def __call__(self, mK: cute.Tensor, mCache: cute.Tensor, mSlots: cute.Tensor, stream: cuda.CUstream):
        """Launches the kernel.

        mK (tokens, 128), rows contiguous, at multiples of 16 bytes. mCache (num_pages, page_size, 132) bytes: pages at
        multiples of 16 bytes. Only the first stride counts, and a page is planar whatever the other strides are.
        """
        tokens = Int32(mK.shape[0])
        page_size = cute.fast_divmod_create_divisor_v2(Int32(mCache.shape[1]))
        self._kernel(mK, mCache, mSlots, page_size).launch(
            grid=[cute.ceil_div(tokens * LANES, self.spec.warps * WARP), 1, 1],
            block=[self.spec.warps * WARP, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def _kernel(
        self, mK: cute.Tensor, mCache: cute.Tensor, mSlots: cute.Tensor, by_page_size: cute.FastDivmodDivisorV2
    ) -> None:
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        index = cta * (self.spec.warps * WARP) + tid
        token, part = index // LANES, index % LANES
        tokens = Int32(mK.shape[0])
        # lanes past the last token repeat it and store nothing: shuffles need all lanes
        own = cutlass.min(token, tokens - 1)
        slot = mSlots[own]
        values = self._load(mK, own, part)
        codes, scale = self._quantize(values)
        page_size = Int64(mCache.shape[1])
        if token < tokens and slot >= 0 and slot < Int64(mCache.shape[0]) * page_size:
            page, offset = divmod(Int32(slot), by_page_size)
            start = mCache.iterator.toint() + Int64(page) * Int64(mCache.stride[0])
            row = cute.make_ptr(Uint8, start + D * Int64(offset) + VALUES * part, AddressSpace.gmem, assumed_align=16)
            cute.autovec_copy(codes, cute.make_tensor(row, cute.make_layout(VALUES)))
            if part == 0:
                address = start + D * page_size + 4 * Int64(offset)
                cute.make_ptr(Float32, address, AddressSpace.gmem, assumed_align=4).store(scale)

    @cute.jit
    def _load(self, mK: cute.Tensor, token: Int32, part: Int32):
        """Loads 16 values of a token, as float32."""
        loads = const_expr(VALUES // self.vector)
        load = cute.make_copy_atom(CopyG2ROp(), self.dtype, num_bits_per_copy=128)
        raw = cute.make_rmem_tensor((self.vector, loads), self.dtype)
        row = mK.iterator + cute.assume(Int64(token) * Int64(mK.stride[0]), divby=self.vector)
        for i in cutlass.range_constexpr(loads):
            source = row + cute.assume(VALUES * part + i * self.vector, divby=self.vector)
            cute.copy(load, cute.make_tensor(source, cute.make_layout(self.vector)), raw[None, i])
        return raw.load().to(Float32)

    @cute.jit
    def _quantize(self, values: cute.TensorSSA):
        """Returns (16 codes as bytes, the scale of the token)."""
        flat = cute.make_rmem_tensor((VALUES,), Float32)
        flat.store(values.reshape((VALUES,)))
        absmax = Float32(MIN_INDEX_ABSMAX)
        for i in cutlass.range_constexpr(VALUES):
            absmax = cute.arch.fmax(absmax, abs(flat[i]))  # this ignores NaN
        absmax = cute.arch.warp_reduction(absmax, cute.arch.fmax, threads_in_group=LANES)
        absmax = cute.arch.fmin(absmax, BF16_MAX)
        if const_expr(self.spec.scale == "ue8m0"):
            # 448 is 1.75 x 2^8: a magnitude (1 + m) x 2^e needs 2^(e - 8), or twice that if 1 + m is above 1.75
            bits = absmax.bitcast(Int32)
            exponent = ((bits + 0x1FFFFF) >> 23) - 8
            scale, inverse = (exponent << 23).bitcast(Float32), ((2 * E8M0_BIAS - exponent) << 23).bitcast(Float32)
        else:
            # IEEE divisions: approximations differ from the oracle in the last bit now and then
            scale = absmax / Float32(FP8_MAX)
            inverse = Float32(1.0) / scale
        codes = cute.make_rmem_tensor((VALUES,), Float8E4M3FN)
        codes.store((flat.load() * inverse).to(Float8E4M3FN))
        return cute.recast_tensor(codes, Uint8), scale

    def fake_arguments(self) -> tuple:
        """Returns the arguments for compilation: any strides, those of k and of pages multiples of 16 bytes."""
        tokens = cute.sym_int()
        mK = make_fake_tensor(self.dtype, (tokens, D), (cute.sym_int64(divisibility=self.vector), 1), assumed_align=16)
        strides = (cute.sym_int64(divisibility=16), cute.sym_int64(), 1)
        shape = (cute.sym_int(), cute.sym_int(), INDEX_KEY.token_bytes)
        mCache = make_fake_tensor(Uint8, shape, strides, assumed_align=16)
        mSlots = make_fake_tensor(Int64, (tokens,), (cute.sym_int64(),), assumed_align=8)
        return mK, mCache, mSlots, make_fake_stream(use_tvm_ffi_env_stream=True)
