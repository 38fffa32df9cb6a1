"""PV of GQA decoding: O^T += V^T P^T over a warp's 16 keys, V from bytes in shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.device import operands
from cute_kernels.gqa.kernels.fragments import Fragments
from cute_kernels.gqa.spec import KEYS_PER_WARP as KEYS


class ValueMma(Fragments):
    """Device code for a consumer warp."""

    @cute.jit
    def load(self, address: Int32, w: Int32, lane: Int32) -> cute.Tensor:
        """The warp's keys of V as they are: 2 registers for each 16 rows of V^T, 4 of 16-bit numbers."""
        spec = self.spec
        page = spec.box_rows
        loads = const_expr(spec.d * spec.itemsize // 32)
        raw = cute.make_rmem_tensor(4 * loads, Int32)
        for i in cutlass.range_constexpr(loads):
            if const_expr(not self.vllm):
                row = w * KEYS + lane % 16
                x = operands.load_matrices(self.chunk_address(address, row, 2 * i, lane // 16), True)
            elif const_expr(not spec.bytes_cache):
                key = w * KEYS + lane // 16 * 8
                first = address + key // page * self.page_bytes + key % page * 2 + (16 * i + lane % 16) * (page * 2)
                x = operands.load_matrices(first, False)
            elif const_expr(page > 8):
                key = w * KEYS
                first = address + key // page * self.page_bytes + key % page + (32 * i + lane) * page
                x = operands.load_matrices(first, False)
            else:
                g, t = lane // 4, lane % 4
                first = address + (2 * w + t // 2) * self.page_bytes + 4 * (t % 2) + (32 * i + g) * page
                x = tuple(operands.load_word(first + 8 * j * page) for j in range(4))
            for j in cutlass.range_constexpr(4):
                raw[4 * i + j] = x[j]
        return raw

    @cute.jit
    def multiply(self, acc_o, p: cute.Tensor, v_scale: cute.Tensor, raw: cute.Tensor):
        """Adds P V of the warp's keys to O; P times a scale of the token or group is rounded, not P and the scale."""
        spec = self.spec
        mma = self.mma(self.v_dtype)
        groups = max(self.v_groups, 1)
        blocks = spec.d // 16
        shape_b, shape_a = mma.partition_shape_B((8, 16)), mma.partition_shape_A((16, 16))
        b = [[mma.make_fragment_B(shape_b) for _ in range(groups)] for _ in range(self.n_tiles)]
        scaled = cute.make_rmem_tensor(4, Float32)
        for n in cutlass.range_constexpr(self.n_tiles):
            for group in cutlass.range_constexpr(groups):
                for k in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(2):
                        scaled[2 * k + c] = p[k, 2 * n + c]
                        if const_expr(self.v_groups > 0):
                            scaled[2 * k + c] *= v_scale[k, group]
                self.store_p(scaled, b[n][group])
        a = mma.make_fragment_A(shape_a)
        for m in cutlass.range_constexpr(blocks):
            self.widen(a, [raw[i] for i in self.registers_of_block(m)])
            group = const_expr(m * groups // blocks)
            for n in cutlass.range_constexpr(self.n_tiles):
                acc = acc_o[m][n]
                cute.gemm(mma, acc, a[None, None, 0], b[n][group][None, None, 0], acc)

    @cute.jit
    def store_p(self, four: cute.Tensor, b: cute.Tensor):
        """Makes what a thread has of P^T for 8 query rows, keys g and g + 8 of two rows, a fragment of B."""
        rounded = cute.make_rmem_tensor(4, self.v_dtype)
        rounded.store(four.load().to(self.v_dtype))
        r, target = cute.recast_tensor(rounded, Int32), cute.recast_tensor(b, Int32)
        target[0] = operands.transpose(r[0])
        target[1] = operands.transpose(r[1])

    def registers_of_block(self, m: int) -> range:
        """Which registers of the raw values have rows 16 m .. 16 m + 15 of V^T."""
        count = 2 * self.spec.itemsize
        return range(count * m, count * (m + 1))

    @cute.jit
    def widen(self, a: cute.Tensor, raw: list):
        """Makes 16 rows of V^T a fragment of A."""
        if const_expr(self.spec.bytes_cache):
            if const_expr(self.vllm):
                operands.widen_rows(a, raw[0], raw[1], self.is_int8)
            else:
                operands.widen_columns(a, raw[0], raw[1], self.is_int8)
        elif const_expr(self.vllm):
            operands.take(a, raw[0], raw[1], raw[2], raw[3])
        else:
            operands.take(a, raw[0], raw[2], raw[1], raw[3])

    @cute.jit
    def mask(self, raw: cute.Tensor, begin: Int32, length: Int32, lowest: Int32, valid: Int32, lane: Int32):
        """Zeros the tokens of V that do not exist: they may be NaN, and 0 x NaN would be NaN."""
        t = lane % 4
        mask = cute.make_rmem_tensor(2, Int32)  # of registers with keys k 0..7 of a fragment, and with 8..15
        # bytes of paged_vllm: a register has four tokens; otherwise two, and others in the second register
        tokens = const_expr(4 if self.pairs_of_tokens else 2)
        for k in cutlass.range_constexpr(2):
            bits = Int32(0)
            for i in cutlass.range_constexpr(tokens):
                token = 4 * t + i if const_expr(tokens == 4) else 2 * t + 8 * k + i
                row = token // 2 + token % 2 * 8 if const_expr(tokens == 4) else token
                key = begin + token
                seen = key < length and key >= lowest and ((valid >> row) & 1) == 1
                bits |= cutlass.select_(seen, Int32((1 << (32 // tokens)) - 1), Int32(0)) << (32 // tokens * i)
            mask[k] = bits
        for i in cutlass.range_constexpr(cute.size(raw)):
            raw[i] = raw[i] & mask[self.half_of_register(i)]

    def half_of_register(self, i: int) -> int:
        """Whether register i of the raw values has keys k 0..7 or 8..15 of a fragment."""
        if self.pairs_of_tokens:
            return 0
        # as ldmatrix gives them: rows are tokens, 8 at a time; in paged_vllm rows are d and a chunk has 8 tokens
        return i % 4 // 2 if self.vllm else i % 2
