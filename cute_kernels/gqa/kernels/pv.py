"""PV of a consumer warp: V from shared memory into registers as it is, and O^T += V^T P^T for 16 keys of a tile."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.device import operands
from cute_kernels.gqa.kernels.fragments import Fragments, Thread, TileKeys
from cute_kernels.gqa.spec import KEYS_PER_WARP as KEYS


class PV(Fragments):
    """Device code for one consumer warp. `raw` are registers with numbers of V as the cache stores them."""

    @cute.jit
    def load_v(self, address: Int32, thread: Thread) -> cute.Tensor:
        """The warp's keys of V: 2 registers for each 16 rows of V^T, 4 of 16-bit numbers.

        address: of V of the tile in shared memory.
        """
        spec = self.spec
        w, lane, _ = thread
        page = spec.box_rows
        loads = const_expr(spec.d * spec.itemsize // 32)
        raw = cute.make_rmem_tensor(4 * loads, Int32)
        for i in cutlass.range_constexpr(loads):
            if const_expr(not self.vllm):
                row = w * KEYS + lane % 16
                x = operands.load_matrices(self.chunk_address(address, row, 2 * i, lane // 16), True)
            elif const_expr(not spec.bytes_cache):
                first = w * KEYS + lane // 16 * 8
                start = address + first // page * self.page_bytes + first % page * 2
                x = operands.load_matrices(start + (16 * i + lane % 16) * (page * 2), False)
            elif const_expr(page > 8):
                first = w * KEYS
                start = address + first // page * self.page_bytes + first % page
                x = operands.load_matrices(start + (32 * i + lane) * page, False)
            else:
                g, t = lane // 4, lane % 4
                start = address + (2 * w + t // 2) * self.page_bytes + 4 * (t % 2) + (32 * i + g) * page
                x = tuple(operands.load_word(start + 8 * j * page) for j in range(4))
            for j in cutlass.range_constexpr(4):
                raw[4 * i + j] = x[j]
        return raw

    @cute.jit
    def mask_v(self, raw: cute.Tensor, keys: TileKeys, lowest: Int32, lane: Int32):
        """Zeros for tokens that no query sees: they may be NaN, and 0 x NaN is NaN."""
        t = lane % 4
        mask = cute.make_rmem_tensor(2, Int32)  # of registers with keys k 0..7 of a fragment, and with 8..15
        # bytes of paged_vllm: a register has four tokens; otherwise two, and others in the second register
        tokens = const_expr(4 if self.pairs_of_tokens else 2)
        for k in cutlass.range_constexpr(2):
            bits = Int32(0)
            for i in cutlass.range_constexpr(tokens):
                token = 4 * t + i if const_expr(tokens == 4) else 2 * t + 8 * k + i
                row = token // 2 + token % 2 * 8 if const_expr(tokens == 4) else token
                key = keys.first + token
                seen = key < keys.length and key >= lowest and ((keys.exists >> row) & 1) == 1
                bits |= cutlass.select_(seen, Int32((1 << (32 // tokens)) - 1), Int32(0)) << (32 // tokens * i)
            mask[k] = bits
        for i in cutlass.range_constexpr(cute.size(raw)):
            raw[i] = raw[i] & mask[self._half(i)]

    def _half(self, i: int) -> int:
        """Whether register i of the raw values has keys k 0..7 or 8..15 of a fragment."""
        if self.pairs_of_tokens:
            return 0
        # as ldmatrix gives them: rows are tokens, 8 at a time; in paged_vllm rows are d and a chunk has 8 tokens
        return i % 4 // 2 if self.vllm else i % 2

    @cute.jit
    def accumulate(self, acc_o: list, p: cute.Tensor, v_scale: cute.Tensor, raw: cute.Tensor):
        """O^T += V^T P^T over the warp's keys; scales of V multiply P before it is rounded."""
        spec = self.spec
        mma = self.mma(self.v_dtype)
        groups = max(self.v_groups, 1)
        blocks = spec.d // 16
        shape_b, shape_a = mma.partition_shape_B((8, 16)), mma.partition_shape_A((16, 16))
        b = [[mma.make_fragment_B(shape_b) for _ in range(groups)] for _ in range(self.n_tiles)]
        scaled_p = cute.make_rmem_tensor(4, Float32)
        for n in cutlass.range_constexpr(self.n_tiles):
            for group in cutlass.range_constexpr(groups):
                for k in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(2):
                        scaled_p[2 * k + c] = p[k, 2 * n + c]
                        if const_expr(self.v_groups > 0):
                            scaled_p[2 * k + c] *= v_scale[k, group]
                self.store_p(scaled_p, b[n][group])
        a = mma.make_fragment_A(shape_a)
        for m in cutlass.range_constexpr(blocks):
            self.widen_v(a, [raw[i] for i in self.v_registers(m)])
            group = const_expr(m * groups // blocks)
            for n in cutlass.range_constexpr(self.n_tiles):
                acc = acc_o[m][n]
                cute.gemm(mma, acc, a[None, None, 0], b[n][group][None, None, 0], acc)

    @cute.jit
    def store_p(self, four: cute.Tensor, b: cute.Tensor):
        """What a thread has of P^T for 8 columns, keys g and g + 8 of two columns, as a fragment of B."""
        rounded = cute.make_rmem_tensor(4, self.v_dtype)
        rounded.store(four.load().to(self.v_dtype))
        r, target = cute.recast_tensor(rounded, Int32), cute.recast_tensor(b, Int32)
        target[0] = operands.transpose(r[0])
        target[1] = operands.transpose(r[1])

    @cute.jit
    def widen_v(self, a: cute.Tensor, raw: list):
        """16 rows of V^T as a fragment of A."""
        if const_expr(self.spec.bytes_cache):
            if const_expr(self.vllm):
                operands.widen_rows(a, raw[0], raw[1], self.is_int8)
            else:
                operands.widen_columns(a, raw[0], raw[1], self.is_int8)
        elif const_expr(self.vllm):
            operands.take(a, raw[0], raw[1], raw[2], raw[3])
        else:
            operands.take(a, raw[0], raw[2], raw[1], raw[3])
