"""Units of O for keys that are scaled: powers of two that keep V in range of float16, one for each 64 values."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint8, const_expr

from cute_kernels.device import softmax, wgmma
from cute_kernels.mla.kernels import codes
from cute_kernels.mla.kernels.pipelines import NamedBarrier
from cute_kernels.mla.kernels.smem import (
    NEEDS_SCALES,
    NEW_UNIT,
    UNITS,
    V_UNIT,
    kind_of_tile,
    place_of_weight,
    scale_words,
)
from cute_kernels.mla.kernels.value_units import (
    MAX_SPREAD,
    WEIGHT_EXPONENT,
    WINDOW,
    ValueUnits,
    inverse_power,
    moved,
    v_moves,
    v_units,
)
from cute_kernels.mla.spec import TOKENS_PER_TILE, scale_row
from fp8_mla.formats import TokenFormat

UNITS_PER_WARP = 2  # units of a softmax warp
TOP_BYTE = 127  # byte of a unit of exponent 0


class ScaledValueUnits(ValueUnits):
    """Device code for the 128 threads of the softmax; see `ValueUnits`. Here V' is exact.

    The limits of a unit are kept as bytes, so that four scales are compared at once:

        v_top     ue8m0: the largest scale that fits; the smallest is 20 less
        v_above   e4m3: 127 less the largest scale that fits; see `codes.above_byte`

    A rope part that is a value has the last unit, ROPE_UNIT, which is fixed.
    """

    @cute.jit
    def reset(self, smem, tid: Int32):
        """Resets the units for a new work tile."""
        lane, index = tid % 32, tid // 32 * UNITS_PER_WARP + tid % 32
        if lane < UNITS_PER_WARP:
            smem.v_power.get_tensor(cute.make_layout(UNITS))[index] = Float32(1.0 / V_UNIT)
            smem.v_highest.get_tensor(cute.make_layout(UNITS))[index] = Int32(0)
            smem.v_top.get_tensor(cute.make_layout(UNITS))[index] = Uint8(TOP_BYTE)
            smem.v_above.get_tensor(cute.make_layout(UNITS))[index] = Uint8(codes.ABOVE_BYTE)
        cute.arch.barrier(barrier_id=NamedBarrier.SOFTMAX, number_of_threads=128)

    @cute.jit
    def weigh(self, smem, stage: Int32, p_stage: Int32, tid: Int32) -> Int32:
        """Stores the weights of a key tile; returns its flags. NEW_UNIT and NEEDS_SCALES differ between warps."""
        kinds, flags = self.spec.kinds, Int32(0)
        if const_expr(len(kinds) > 1):
            if kind_of_tile(smem, self.spec, stage) == 0:
                flags = self.weigh_kind(smem, kinds[0], stage, p_stage, tid)
            else:
                flags = self.weigh_kind(smem, kinds[1], stage, p_stage, tid)
        else:
            flags = self.weigh_kind(smem, kinds[0], stage, p_stage, tid)
        return flags

    @cute.jit
    def weigh_kind(self, smem, kind: cutlass.Constexpr, stage: Int32, p_stage: Int32, tid: Int32) -> Int32:
        """Stores the weights of a tile of one format. Each of a pair of threads has a key's scales of four units."""
        own, row, half = codes.of(kind), scale_row(kind), tid % 2
        words, flags, outside = cute.make_rmem_tensor(row // 8, Int32), Int32(0), Int32(0)
        scale_words(smem, self.spec, stage, tid // 2, row // 2 * half, words)
        tops, above = self.unit_word(smem.v_top, half), self.unit_word(smem.v_above, half)
        powers = cute.make_rmem_tensor(UNITS // 2, Int32)
        self.load_powers(smem, kind, powers, half)
        for i in cutlass.range_constexpr(row // 8):
            misfits = own.misfits(words[i], spread(kind, tops, i), spread(kind, above, i))
            masks = own.scale_mask(i), own.scale_mask(row // 8 + i)
            if const_expr(masks[0] != masks[1]):
                misfits &= cutlass.select_(half == 1, Int32(masks[1]), Int32(masks[0]))
            outside |= misfits
        fits = Int32(1) if outside == 0 else Int32(0)
        if wgmma.every_thread(fits, Int32(NamedBarrier.SOFTMAX)) == 0:
            flags = self.change_kind(smem, kind, stage, p_stage, tid)
            tops = self.unit_word(smem.v_top, half)
            self.load_powers(smem, kind, powers, half)
            self.fit(kind, words, tops)
            cute.arch.barrier(barrier_id=NamedBarrier.SOFTMAX, number_of_threads=128)  # all threads have read the units
        if const_expr(self.spec.split):
            small = Int32(0)
            for i in cutlass.range_constexpr(row // 8):
                small |= own.is_small(words[i], spread(kind, tops, i))
            if cute.arch.vote_any_sync(small != 0):
                flags |= NEEDS_SCALES
        layout = cute.make_layout((TOKENS_PER_TILE, self.spec.p_stages * self.spec.scale_bytes))
        sWeight, place = smem.weight.get_tensor(layout), place_of_weight(tid // 2)
        for i in cutlass.range_constexpr(row // 8):
            weights = cute.recast_tensor(own.value_weights(words[i], spread(kind, tops, i), powers[i % 4]), Float16)
            for j in cutlass.range_constexpr(4):
                sWeight[place, p_stage * self.spec.scale_bytes + row // 2 * half + 4 * i + j] = weights[j]
        return flags

    @cute.jit
    def fit(self, kind: cutlass.Constexpr, words: cute.Tensor, tops: Int32):
        """Changes scales that do not fit to scales whose weights are 0."""
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = codes.of(kind).fitted(words[i], spread(kind, tops, i))

    @cute.jit
    def load_powers(self, smem, kind: cutlass.Constexpr, powers: cute.Tensor, half: Int32):
        """Loads powers of four units as float16, twice each, for scales that are multiplied by them."""
        powers.fill(0)
        if const_expr(codes.of(kind).room > 0):
            sPower = smem.v_power.get_tensor(cute.make_layout(UNITS))
            for i in cutlass.range_constexpr(UNITS // 2):
                powers[i] = (softmax.exponent(sPower[4 * half + i]) + 15) * codes.FIELD

    def unit_word(self, units, half: Int32) -> Int32:
        """Returns the bytes of four units."""
        pointer = cute.recast_ptr(units.data_ptr() + cute.assume(4 * half, divby=4), dtype=Int32)
        return cute.make_tensor(pointer, cute.make_layout(1))[0]

    @cute.jit
    def change_kind(self, smem, kind: cutlass.Constexpr, stage: Int32, p_stage: Int32, tid: Int32) -> Int32:
        """Moves the units of a warp's values if that helps; returns the flags of `weigh`."""
        lane, flags, fits, is_near = tid % 32, Int32(0), Int32(1), Int32(1)
        per_unit, count = self.spec.token_format.d_v // UNITS // kind.quant_tile, kind.num_scales
        sPower = smem.v_power.get_tensor(cute.make_layout(UNITS))
        sHighest = smem.v_highest.get_tensor(cute.make_layout(UNITS))
        sTop = smem.v_top.get_tensor(cute.make_layout(UNITS))
        sAbove = smem.v_above.get_tensor(cute.make_layout(UNITS))
        sUnit, sMove = v_units(smem, UNITS), v_moves(smem, UNITS)
        scales, row = smem.scale.data_ptr(), self.spec.scale_bytes
        for i in cutlass.range(UNITS_PER_WARP, unroll=1):
            index = tid // 32 * UNITS_PER_WARP + i
            most, least = Int32(-codes.EMPTY), Int32(codes.EMPTY)
            for k in cutlass.range_constexpr(2 * per_unit):
                scale = per_unit * index + k // 2
                place = (stage * TOKENS_PER_TILE + lane + 32 * (k % 2)) * row + cutlass.min(scale, count - 1)
                exponent = codes.of(kind).exponent(Int32((scales + place).load()) & 0xFF)
                if scale >= count:  # a rope part has no scale
                    exponent = Int32(-codes.EMPTY)
                most = cutlass.max(most, exponent)
                least = cutlass.min(least, cutlass.select_(exponent == -codes.EMPTY, Int32(codes.EMPTY), exponent))
            old, highest = WEIGHT_EXPONENT - softmax.exponent(sPower[index]), sHighest[index]
            # joins the lanes: all have read the unit that lane 0 stores
            most, least = cute.arch.warp_redux_sync(most, "max"), cute.arch.warp_redux_sync(least, "min")
            new = cutlass.max(moved(old, highest, most, least), codes.of(kind).least_unit)
            if most > new or least < new - WINDOW:
                fits = Int32(0)
            if new != old:
                flags |= NEW_UNIT
            if most - least > MAX_SPREAD:
                is_near = Int32(0)
            if lane == 0:
                sPower[index] = softmax.power_of_two(WEIGHT_EXPONENT - new)
                sHighest[index] = cutlass.max(highest, new)
                sTop[index], sAbove[index] = Uint8(new + TOP_BYTE), Uint8(codes.above_byte(new))
                sUnit[index, p_stage] = softmax.power_of_two(new - WEIGHT_EXPONENT)
                sMove[index, p_stage] = softmax.power_of_two(old - new)
        if wgmma.every_thread(fits, Int32(NamedBarrier.SOFTMAX)) == 0:
            flags |= self.slow_flag(is_near)
        return flags

    @cute.jit
    def finish(self, smem, p_stage: Int32, tid: Int32):
        """Stores the units of a work tile with its last key tile; each warp calls it for its own units."""
        sPower, sUnit = smem.v_power.get_tensor(cute.make_layout(UNITS)), v_units(smem, UNITS)
        lane, index = tid % 32, tid // 32 * UNITS_PER_WARP + tid % 32
        if lane < UNITS_PER_WARP:
            unit = inverse_power(sPower[index])
            if const_expr(self.spec.has_rope):
                unit = Float32(cutlass.select_(index == UNITS - 1, Float32(codes.ROPE_UNIT), unit))
            sUnit[index, p_stage] = unit


def spread(kind: TokenFormat, word: Int32, i: int) -> Int32:
    """Spreads the bytes of four units over the four scales in word i of half a key's scales."""
    scales = {64: 0x3210, 32: (0x1100, 0x3322)[i % 2], 16: 0x1111 * (i % 4)}[kind.quant_tile]
    return word if scales == 0x3210 else Int32(cute.arch.prmt(word, Int32(0), Int32(scales)))
