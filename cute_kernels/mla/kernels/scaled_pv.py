"""The two PV warpgroups for keys that are scaled as operands: O^T += V^T P^T."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import pairs, registers, wgmma
from cute_kernels.mla.kernels import codes
from cute_kernels.mla.kernels.pv import KEY_BLOCKS, ROW_BLOCKS, PvWarpgroups
from cute_kernels.mla.kernels.smem import (
    BFLOAT16,
    ROPE_BYTES,
    UNITS,
    WARPS,
    codes_bytes,
    kind_of_tile,
    line_offset,
    of_kind,
    stage_kinds,
    weights,
)
from cute_kernels.mla.kernels.value_units import inverse_power, v_units
from cute_kernels.mla.spec import LINE_BYTES, TOKENS_PER_TILE, WGMMA_ROWS, MlaDecodeSpec

EVEN, ODD = 0x5410, 0x7632  # PRMT: the lower halves of two words, the upper halves
VALUES_PER_WARP = 64


class ScaledKeyPvWarpgroups(PvWarpgroups):
    """Device code for 2 x 128 threads; see `PvWarpgroups` for which values and keys a thread has.

        O += (weight code) P      an exact float16 number times P as float16, summed in float32, in units of 64 values

    A rope part is the last 64 values, those of one warp, and becomes float16 too. A tile with a scale or a rope part
    out of range of float16 is added in bfloat16 (`add_bfloat16`).

    If these warpgroups expand codes (`expand`), they do so `expanded_ahead` tiles ahead: the first tiles before
    everything else, tile t + 2 once the products of tile t are done, 8 rows a warp. There is no deadlock. P of tile t
    needs tiles up to t expanded, which is done before PV waits for it. `raw` of tile t + 2 needs P of t, or of an
    earlier tile, and stages that PV has freed with tile t - 1. For n tiles of a CTA PV waits for `raw` of n +
    expanded_ahead, and the load warpgroup gives n + rope_stages, those after the last tile with NO_TILE. No phase is
    missed: a stage comes again only after all PV threads have freed it, each after it has waited for `raw` and `full`.
    """

    def __init__(self, spec: MlaDecodeSpec):
        super().__init__(spec)
        self.units = UNITS
        self.moving_units = UNITS - 1 if spec.has_rope else UNITS
        self.expanded = [which for which, kind in enumerate(spec.kinds) if codes.of(kind).expands]

    @cute.jit
    def expand(self, smem, tile: Int32, wg: Int32, tid: Int32):
        """Expands the codes of a key tile once they are copied, and arrives on `full`; does nothing for other codes.

        It also does nothing for a tile after the last one.
        """
        stage = self.edges.raw.index(tile)
        self.edges.raw.wait(smem, tile)
        if stage_kinds(smem, self.spec)[stage] == self.expanded[0]:
            start = Int32(smem.codes.data_ptr().toint()) + stage * codes_bytes(self.spec)
            own = codes.of(self.spec.kinds[self.expanded[0]])
            own.expand(start, TOKENS_PER_TILE // (2 * WARPS), 128 * wg + tid)
            self.edges.keys.arrive(smem, tile)

    # ---- values of a tile

    @cute.jit
    def load_first(self, smem, raw: cute.Tensor, stage: Int32, line: Int32, wg: Int32, tid: Int32):
        """Starts loading the first values of a tile before P is there; not rope parts, which QK may still replace."""
        if const_expr(self.spec.has_rope):
            if not self.has_rope(wg, tid):
                self.load_values(smem, raw, stage, 0, 0, line, wg, tid)
        else:
            self.load_values(smem, raw, stage, 0, 0, line, wg, tid)

    @cute.jit
    def load_late(self, smem, raw: cute.Tensor, stage: Int32, line: Int32, wg: Int32, tid: Int32):
        """Starts loading the first values of a rope part once P is there."""
        if const_expr(self.spec.has_rope):
            if self.has_rope(wg, tid):
                self.load_values(smem, raw, stage, 0, 0, line, wg, tid)

    @cute.jit
    def has_rope(self, wg: Int32, tid: Int32):
        """Returns whether a warp has the rope part."""
        return wg == 1 and tid // 32 == WARPS - 1

    @cute.jit
    def line(self, wg: Int32, tid: Int32):
        """Returns the offset of a thread's codes of its first key in a stage; of its eight numbers for a rope part."""
        warp_idx, g, q = tid // 32, tid % 32 // 4, tid % 4
        code_line, chunk, row = 2 * wg + warp_idx // 2, 4 * (warp_idx % 2) + g // 2, 2 * q
        line = code_line * (TOKENS_PER_TILE * LINE_BYTES) + line_offset(row, chunk) + g % 2 * 8
        if const_expr(self.spec.has_rope):
            half = (self.spec.code_lines - 1) * (TOKENS_PER_TILE * LINE_BYTES)
            in_half = half + line_offset(row, codes.of(self.spec.kinds[0]).rest_chunk(g // 2)) + g % 2 * 8
            is_last = wg == 1 and warp_idx == WARPS - 2
            line = cutlass.select_(is_last, in_half, cutlass.select_(self.has_rope(wg, tid), line_offset(row, g), line))
        return registers.opaque(Int32(line))

    @cute.jit
    def load_values(self, smem, raw: cute.Tensor, stage: Int32, block, half, line: Int32, wg: Int32, tid: Int32):
        """Loads, for a thread's four keys of a block of 16 keys (4), eight codes, or four rope numbers.

        `half` says which four rope numbers.
        """
        base = Int32(smem.codes.data_ptr().toint()) + stage * codes_bytes(self.spec)
        if const_expr(self.spec.has_rope):
            if self.has_rope(wg, tid):
                base = Int32(smem.rope.data_ptr().toint()) + stage * ROPE_BYTES + 8 * half
        for i in cutlass.range_constexpr(4):
            key = (line ^ (16 * (i % 2))) + LINE_BYTES * (i % 2 + 8 * (i // 2))  # the odd key's chunks are swapped
            address = base + block * (16 * LINE_BYTES) + key
            pointer = cute.make_ptr(Int32, address, AddressSpace.smem, assumed_align=8)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), raw[None, i])

    @cute.jit
    def scale_operand(self, operand: cute.Tensor, multipliers: cute.Tensor):
        """Multiplies A by the weights of its keys."""
        for i in cutlass.range_constexpr(4):
            operand[i] = pairs.multiply_half(operand[i], multipliers[i // 2])

    @cute.jit
    def order_rope(self, raw: cute.Tensor, m: cutlass.Constexpr, operand: cute.Tensor):
        """Makes A from numbers of a rope part, from its half m // 2, as QK has left them."""
        for i in cutlass.range_constexpr(4):
            a, b = raw[m % 2, i // 2 * 2], raw[m % 2, i // 2 * 2 + 1]
            operand[i] = Int32(cute.arch.prmt(a, b, Int32(ODD if i % 2 else EVEN)))

    def unit_index(self, wg: Int32, tid: Int32) -> Int32:
        """Returns the index of the unit that a thread's values have: of the 64 values of its warp."""
        return WARPS * wg + tid // 32

    def quant_tile(self, smem, stage: Int32, wg: Int32, tid: Int32) -> Any:
        """Returns the quant tile of a thread's eight values in the format of a tile."""
        warp, tiles = WARPS * wg + tid // 32, []
        for kind in self.spec.kinds:
            per_warp = VALUES_PER_WARP // kind.quant_tile
            tiles.append(warp if per_warp == 1 else per_warp * warp + tid % 32 // 4 // (8 // per_warp))
        return of_kind(kind_of_tile(smem, self.spec, stage), tiles)

    @cute.jit
    def load_multipliers(
        self, smem, quant_tile: Int32, p_stage: Int32, block: cutlass.Constexpr, tid: Int32
    ) -> cute.Tensor:
        """Loads the multipliers of a thread's four keys of a block, two in a word."""
        words = cute.make_rmem_tensor(2, Int32)
        numbers = cute.recast_tensor(words, Float16)
        start = weights(smem, p_stage, quant_tile, tid, self.spec.scale_bytes)[None, block // 2].iterator
        cute.autovec_copy(cute.make_tensor(start + block % 2 * 4, cute.make_layout(4)), numbers)
        return words

    @cute.jit
    def add_tile(self, smem, mma: cute.TiledMma, acc_o, raw, pages: tuple, tile: Int32, line, wg, tid):
        """Adds V^T P^T to O^T. Converts the next row blocks while wgmma reads the current ones.

        `raw` has the codes of the first 16 keys, or the first half of their rope part.
        """
        stage, p_stage = self.edges.keys.index(tile), self.edges.p.index(tile)
        rP = self.p_operands(smem, mma, tid)[None, None, None, p_stage]
        shape = mma.partition_shape_A((WGMMA_ROWS, 16))
        fragments = [mma.make_fragment_A(shape) for _ in range(self.v_fragments)]
        is_rope = False
        if const_expr(self.spec.has_rope):
            is_rope = self.has_rope(wg, tid)
        quant_tile = self.quant_tile(smem, stage, wg, tid)
        for block in cutlass.range_constexpr(KEY_BLOCKS):
            multipliers = self.load_multipliers(smem, quant_tile, p_stage, block, tid)
            for m in cutlass.range_constexpr(ROW_BLOCKS):
                fragment = fragments[(ROW_BLOCKS * block + m) % self.v_fragments]
                operand = cute.recast_tensor(fragment, Int32)
                if const_expr(self.spec.has_rope):
                    if is_rope:
                        if const_expr(m == 0):
                            self.load_values(smem, raw[1], stage, block, 1, line, wg, tid)
                        if const_expr(m == 2 and block + 1 < KEY_BLOCKS):
                            self.load_values(smem, raw[0], stage, block + 1, 0, line, wg, tid)
                        self.order_rope(raw[m // 2], m, operand)
                    else:
                        if const_expr(m == 0 and block + 1 < KEY_BLOCKS):
                            self.load_values(smem, raw[(block + 1) % 2], stage, block + 1, 0, line, wg, tid)
                        codes.value_operand(raw[block % 2], m, operand)
                        self.scale_operand(operand, multipliers)
                else:
                    if const_expr(m == 0 and block + 1 < KEY_BLOCKS):
                        self.load_values(smem, raw[(block + 1) % 2], stage, block + 1, 0, line, wg, tid)
                    codes.value_operand(raw[block % 2], m, operand)
                    self.scale_operand(operand, multipliers)
                warpgroup.fence()
                wgmma.issue(mma, acc_o[m], fragment, rP, True, [(0, block)])
                if const_expr(block + 1 == KEY_BLOCKS and m == 2):  # all values of the tile are in registers
                    self.edges.keys.release(smem, tile)
                if const_expr((m + 1) % (self.v_fragments // 2) == 0):
                    warpgroup.commit_group()
                    if const_expr(block + 1 == KEY_BLOCKS and m + 1 == ROW_BLOCKS):
                        warpgroup.wait_group(0)
                    else:
                        warpgroup.wait_group(1)

    @cute.jit
    def add_rounded(self, smem, mma: cute.TiledMma, acc_o, stage: Int32, p_stage: Int32, line: Int32, wg, tid):
        """Does what `PvWarpgroups.add_rounded` does; here V in units of O is exact."""
        rP = self.p_operands(smem, mma, tid, BFloat16)[None, None, None, p_stage]
        fragments = [mma.make_fragment_A(mma.partition_shape_A((WGMMA_ROWS, 16))) for _ in range(2)]
        raw, scales = cute.make_rmem_tensor((2, 4), Int32), cute.make_rmem_tensor(4, Float32)
        is_rope = False
        if const_expr(self.spec.has_rope):
            is_rope = self.has_rope(wg, tid)
        which, quant_tile = kind_of_tile(smem, self.spec, stage), self.quant_tile(smem, stage, wg, tid)
        power = inverse_power(v_units(smem, UNITS)[self.unit_index(wg, tid), p_stage])
        sFlags = smem.rope_flags.get_tensor(cute.make_layout((WARPS, self.spec.stages)))
        for block in cutlass.range(KEY_BLOCKS, unroll=1):
            for i in cutlass.range_constexpr(4):
                key = stage * TOKENS_PER_TILE + 16 * block + 2 * (tid % 4) + i % 2 + 8 * (i // 2)
                byte = smem.scale.data_ptr() + (key * self.spec.scale_bytes + quant_tile)
                bits = Int32(byte.load()) & 0xFF
                scales[i] = of_kind(which, [codes.of(kind).scale_of(bits) for kind in self.spec.kinds]) * power
            b = cute.make_tensor(rP[None, None, block].iterator, rP.layout)
            for m in cutlass.range_constexpr(ROW_BLOCKS):
                fragment = fragments[m % 2]
                operand = cute.recast_tensor(fragment, Int32)
                self.load_values(smem, raw, stage, block, m // 2, line, wg, tid)
                if is_rope:
                    self.order_rope(raw, m, operand)
                    is_float16 = sFlags[block, stage] & BFLOAT16 == 0
                    for i in cutlass.range_constexpr(4):
                        operand[i] = codes.rope_over_unit(operand[i], is_float16)
                else:
                    codes.value_operand(raw, m, operand)
                    for i in cutlass.range_constexpr(4):
                        first = i // 2 * 2
                        operand[i] = codes.scale_to_bfloat16(operand[i], scales[first], scales[first + 1])
                warpgroup.fence()
                wgmma.issue(mma, acc_o[m], fragment, b, True, [(0, 0)])
                warpgroup.commit_group()
                warpgroup.wait_group(0 if m + 1 == ROW_BLOCKS else 1)
