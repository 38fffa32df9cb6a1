"""Copies pages of an INT8, FP8 or 4-bit cache as 16-bit numbers."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int8, Int32, Int64, const_expr
from cutlass.cute.nvgpu import CopyG2ROp
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.gqa.append_spec import VALUES, WARP
from cute_kernels.gqa.codes import element
from cute_kernels.gqa.gather_spec import KvGatherSpec
from cute_kernels.gqa.kernels import rotation
from cute_kernels.gqa.kernels.quantize_rotated import product


class KvGatherKernel:
    """Codes and scales of the pages in `mPages` (n,) -> k, v (n, page_size, h_kv, d), in one launch.

    A row is K and V of a token and head. d / 16 lanes have a row, 16 values each:

    | part      | per lane, of K and of V             | a warp's instruction, d 128 |
    |-----------|-------------------------------------|-----------------------------|
    | codes     | 1 load of 16 B, issued before any use | 4 rows of 128 B           |
    | of 4 bits | 1 load of 8 B                       | 4 rows of 64 B              |
    | scales    | 1 load of 4 B, the same in a row    | 4 scales                    |
    | copies    | 2 stores of 16 B                    | 1 KB, without a gap         |

    There is no shared memory and no barrier. A token and head is 2 d bytes in and 4 d out, so memory binds: 64 bytes of
    stores and 32 of loads a thread against some 60 instructions. Products are float32, rounded once. Rotated vectors
    are rotated back by shuffles among the lanes of a row; threads past the last row repeat it for that.
    """

    def __init__(self, spec: KvGatherSpec) -> None:
        reasons = spec.can_implement()
        if reasons:
            raise ValueError(f"{spec}: " + "; ".join(reasons))
        self.spec = spec
        self.dtype = element(spec.dtype)
        self.lanes = spec.d // VALUES
        self.threads = spec.warps * WARP

    @cute.jit
    def __call__(
        self,
        mKCache: cute.Tensor,
        mVCache: cute.Tensor,
        mKScale: cute.Tensor,
        mVScale: cute.Tensor,
        mPages: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        stream: cuda.CUstream,
    ):
        """Launches the kernel.

        Caches are (pages, page_size, h_kv, d) bytes at any strides, scales (pages, page_size, h_kv) likewise; a single
        scale is (1,). There are fewer than 2^31 / d * 16 rows.
        """
        page_size, h_kv = Int32(mKCache.shape[1]), Int32(mKCache.shape[2])
        lanes = Int32(mPages.shape[0]) * page_size * h_kv * self.lanes
        divisors = (cute.fast_divmod_create_divisor_v2(h_kv), cute.fast_divmod_create_divisor_v2(page_size))
        self._kernel(mKCache, mVCache, mKScale, mVScale, mPages, mK, mV, lanes, divisors).launch(
            grid=[cute.ceil_div(lanes, self.threads), 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def _kernel(
        self,
        mKCache: cute.Tensor,
        mVCache: cute.Tensor,
        mKScale: cute.Tensor,
        mVScale: cute.Tensor,
        mPages: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        lanes: Int32,
        divisors: tuple,
    ) -> None:
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        h_divisor, page_divisor = divisors
        index = cta * self.threads + tid
        exists = index < lanes
        index = cutlass.min(index, lanes - 1)
        row, part = index // self.lanes, index % self.lanes
        token, head = divmod(row, h_divisor)
        i, offset = divmod(token, page_divisor)
        # a table may name pages that the cache does not have
        page = cutlass.min(cutlass.max(mPages[i], 0), Int32(mKCache.shape[0]) - 1)
        k_codes, v_codes = self.spec.codes
        rK = cute.make_rmem_tensor((VALUES // k_codes.values,), Int8)
        rV = cute.make_rmem_tensor((VALUES // v_codes.values,), Int8)
        place = (page, offset, head)
        self._load(mKCache, place, part, rK)
        self._load(mVCache, place, part, rV)
        k_scale, v_scale = self._scale(mKScale, place), self._scale(mVScale, place)
        k, v = self._numbers(rK, k_scale, k_codes, part), self._numbers(rV, v_scale, v_codes, part)
        if exists:
            self._store(k, mK, index)
            self._store(v, mV, index)

    @cute.jit
    def _load(self, mCache: cute.Tensor, place: tuple, part: Int32, rX: cute.Tensor):
        """Starts loading a lane's codes."""
        size = const_expr(cute.size(rX))
        address = mCache.iterator.toint() + self._at(mCache, place) + Int64(size * part)
        source = cute.make_ptr(Int8, address, AddressSpace.gmem, assumed_align=size)
        atom = cute.make_copy_atom(CopyG2ROp(), Int8, num_bits_per_copy=8 * size)
        cute.copy(atom, cute.make_tensor(source, cute.make_layout(size)), rX)

    @cute.jit
    def _at(self, mX: cute.Tensor, place: tuple) -> Int64:
        """Returns elements before a page, token and head: 64-bit products, for caches of more than 2^31 elements."""
        return sum((Int64(place[axis]) * Int64(mX.stride[axis]) for axis in range(3)), Int64(0))

    @cute.jit
    def _scale(self, mScale: cute.Tensor, place: tuple) -> Float32:
        if const_expr(self.spec.one_scale):
            return mScale[0]
        return (mScale.iterator + self._at(mScale, place)).load()

    @cute.jit
    def _numbers(self, rX: cute.Tensor, scale: Float32, codes: cutlass.Constexpr, part: Int32) -> cute.Tensor:
        """Returns the numbers of a lane's codes, rounded."""
        x = cute.make_rmem_tensor((VALUES,), Float32)
        if const_expr(codes.rotated):
            words, word = cute.recast_tensor(rX, Int32), scale.bitcast(Int32)
            for i in cutlass.range_constexpr(VALUES):
                code = (words[i // 8] >> 4 * (i % 8)) & 15
                x[i] = product(Float32(code - (word & 15)), (word & -16).bitcast(Float32))
            rotation.hadamard(x, part, self.lanes)
            rotation.flip_signs(x, part, self.spec.d)
            x.store(x.load() * (1.0 / self.spec.d))
        else:
            x.store(cute.recast_tensor(rX, codes.element()).load().to(Float32) * scale)
        values = cute.make_rmem_tensor((VALUES,), self.dtype)
        values.store(x.load().to(self.dtype))
        return values

    @cute.jit
    def _store(self, values: cute.Tensor, mX: cute.Tensor, index: Int32):
        """Stores a lane's values."""
        address = mX.iterator.toint() + 2 * VALUES * Int64(index)
        target = cute.make_ptr(self.dtype, address, AddressSpace.gmem, assumed_align=16)
        cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(VALUES)))

    def fake_arguments(self) -> tuple:
        """Returns the arguments for compilation: any strides of the cache but the last, in steps of 16 bytes."""
        spec = self.spec
        pages, page_size, h_kv, n = (cute.sym_int() for _ in range(4))

        def strides(step: int, count: int) -> tuple:
            return tuple(cute.sym_int64(divisibility=step) for _ in range(count))

        sizes = (pages, page_size, h_kv)
        caches = [
            make_fake_tensor(Int8, (*sizes, spec.d // codes.values), (*strides(16, 3), 1), assumed_align=16)
            for codes in spec.codes
        ]
        if spec.one_scale:
            scales = [make_fake_tensor(Float32, (1,), (1,), assumed_align=4) for _ in "kv"]
        else:
            scales = [make_fake_tensor(Float32, sizes, strides(1, 3), assumed_align=4) for _ in "kv"]
        copies = [
            make_fake_tensor(self.dtype, (n, page_size, h_kv, spec.d), (*strides(8, 3), 1), assumed_align=16)
            for _ in "kv"
        ]
        listed = make_fake_tensor(Int32, (n,), (1,), assumed_align=4)
        return *caches, *scales, listed, *copies, make_fake_stream(use_tvm_ffi_env_stream=True)
