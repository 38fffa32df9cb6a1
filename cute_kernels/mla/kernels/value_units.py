"""Units of O: powers of two that keep V in range of float16, whatever the scales of keys are."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from cute_kernels.device import pairs, softmax, wgmma
from cute_kernels.mla.kernels.pipelines import NamedBarrier
from cute_kernels.mla.kernels.smem import (
    BFLOAT16,
    HALVES,
    NEW_UNIT,
    V_UNIT,
    WARPS,
    place_of_weight,
    scale_tensor,
)
from cute_kernels.mla.kernels.tile import QUANT_TILES
from cute_kernels.mla.spec import TOKENS_PER_TILE, MlaDecodeSpec

WEIGHT_EXPONENT = 6  # exponent of the largest weight: below 2^7, and 448 x 2^7 is in range of float16
WINDOW = 20  # scales this many exponents below the unit fit: weights down to 2^-14 are normal float16 numbers
MAX_SPREAD = 32  # exponents: beyond this spread the values of one key outweigh all others (flag HALVES)
HEADROOM = 2  # exponents that a new unit leaves above the largest scale of a key tile, so that the next tiles fit too
MAX_EXPONENT, MAX_FALL = 40, 60  # a unit is at most 2^40 and at least 2^-60 of its largest: float32 holds O in each
MIN_WEIGHT, MAX_WEIGHT = pairs.float_bits(2.0**-14), pairs.float_bits(2.0**7)  # as bits
NONE = 1000  # an exponent beyond any


class ValueUnits:
    """Device code for the 128 threads of the softmax: weights of V, relative to the unit of each quant tile j.

        weight_kj = scale_kj 2^(6 - E_j) in [2^-14, 2^7)      V' = code weight as float16      O'_j = sum P V'

    E_j is 0 at first, which fits scales of 2^-20 to 2. It moves when a key tile has a larger scale, or a scale below
    the window although all scales of that tile fit into one window; O'_j moves with it. A key tile that fits no window
    is multiplied in bfloat16 in the same units (flag BFLOAT16), so the next one is fast again.

    A pair of threads has the weights of a key. If a weight is out of range, warp j looks at all keys of quant tile j.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.spec = spec

    @cute.jit
    def reset(self, smem, tid: Int32):
        """Resets the units for a new work tile."""
        if tid % 32 == 0:
            smem.v_power.get_tensor(cute.make_layout(WARPS))[tid // 32] = Float32(1.0 / V_UNIT)
            smem.v_highest.get_tensor(cute.make_layout(WARPS))[tid // 32] = Int32(0)
        cute.arch.barrier(barrier_id=NamedBarrier.SOFTMAX, number_of_threads=128)

    @cute.jit
    def weigh(self, smem, stage: Int32, p_stage: Int32, tid: Int32) -> Int32:
        """Stores the weights of a key tile; returns its flags. Only NEW_UNIT differs between warps."""
        weight, flags = self.weights(smem, stage, tid), Int32(0)
        outside = pairs.max_unsigned(weight[0].bitcast(Int32) - MIN_WEIGHT, weight[1].bitcast(Int32) - MIN_WEIGHT)
        fits = pairs.at_most_unsigned(outside, Int32(MAX_WEIGHT - MIN_WEIGHT - 1))
        if wgmma.every_thread(fits, Int32(NamedBarrier.SOFTMAX)) == 0:
            flags = self.change(smem, stage, p_stage, tid)
            changed = self.weights(smem, stage, tid)
            weight[0], weight[1] = changed[0], changed[1]
            cute.arch.barrier(barrier_id=NamedBarrier.SOFTMAX, number_of_threads=128)  # all threads have read the units
        sWeight = smem.weight.get_tensor(cute.make_layout((TOKENS_PER_TILE, 2 * QUANT_TILES)))
        place = place_of_weight(tid // 2)
        for i in cutlass.range_constexpr(2):
            sWeight[place, p_stage * QUANT_TILES + 2 * (tid % 2) + i] = weight[i].to(Float16)
        return flags

    @cute.jit
    def weights(self, smem, stage: Int32, tid: Int32) -> cute.Tensor:
        """Computes two weights of key tid / 2."""
        scale, power = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        start = cute.assume((stage * TOKENS_PER_TILE + tid // 2) * QUANT_TILES + 2 * (tid % 2), divby=2)
        cute.autovec_copy(cute.make_tensor(smem.scale.data_ptr() + start, cute.make_layout(2)), scale)
        start = cute.assume(2 * (tid % 2), divby=2)
        cute.autovec_copy(cute.make_tensor(smem.v_power.data_ptr() + start, cute.make_layout(2)), power)
        scale.store(scale.load() * power.load())
        return scale

    @cute.jit
    def change(self, smem, stage: Int32, p_stage: Int32, tid: Int32) -> Int32:
        """Moves the unit of quant tile j, in warp j, if that helps; returns the flags of `weigh`.

        A tile of zeros moves no unit: unwritten and masked keys have scales of 0.
        """
        lane, warp = tid % 32, tid // 32
        sPower = smem.v_power.get_tensor(cute.make_layout(WARPS))
        sHighest = smem.v_highest.get_tensor(cute.make_layout(WARPS))
        most, least = Int32(-NONE), Int32(NONE)
        for i in cutlass.range_constexpr(2):
            scale = scale_tensor(smem, self.spec.stages)[warp, stage * TOKENS_PER_TILE + lane + 32 * i]
            bits = scale.bitcast(Int32) & 0x7FFFFFFF
            exponent = (bits >> 23) - 127
            most = cutlass.max(most, cutlass.select_(bits == 0, Int32(-NONE), exponent))
            least = cutlass.min(least, cutlass.select_(bits == 0, Int32(NONE), exponent))
        old, highest = WEIGHT_EXPONENT - softmax.exponent(sPower[warp]), sHighest[warp]
        # joins the lanes: all have read the unit that lane 0 stores
        most, least = cute.arch.warp_redux_sync(most, "max"), cute.arch.warp_redux_sync(least, "min")
        new = moved(old, highest, most, least)
        fits = Int32(0) if most > new or least < new - WINDOW else Int32(1)
        sUnit, sMove = v_units(smem), v_moves(smem)
        if lane == 0:
            sPower[warp], sHighest[warp] = softmax.power_of_two(WEIGHT_EXPONENT - new), cutlass.max(highest, new)
            sUnit[warp, p_stage] = softmax.power_of_two(new - WEIGHT_EXPONENT)
            sMove[warp, p_stage] = softmax.power_of_two(old - new)
        flags = Int32(NEW_UNIT) if new != old else Int32(0)
        if wgmma.every_thread(fits, Int32(NamedBarrier.SOFTMAX)) == 0:
            flags |= self.slow_flag(Int32(0) if most - least > MAX_SPREAD else Int32(1))
        return flags

    @cute.jit
    def slow_flag(self, is_near: Int32) -> Int32:
        """Returns BFLOAT16, or HALVES if scales of any thread are far apart."""
        flag = Int32(BFLOAT16)
        if const_expr(self.spec.splits_p):
            if wgmma.every_thread(is_near, Int32(NamedBarrier.SOFTMAX)) == 0:
                flag = Int32(HALVES)
        return flag

    @cute.jit
    def finish(self, smem, p_stage: Int32, tid: Int32):
        """Stores the units of a work tile with its last key tile."""
        sPower, sUnit = smem.v_power.get_tensor(cute.make_layout(WARPS)), v_units(smem)
        if tid % 32 == 0:
            sUnit[tid // 32, p_stage] = inverse_power(sPower[tid // 32])


@cute.jit
def moved(old: Int32, highest: Int32, most: Int32, least: Int32) -> Int32:
    """Returns the exponent of a unit, after exponent `old`, for a key tile with scales from `least` to `most`.

    `highest` is the largest exponent so far in the work tile.
    """
    new, spread = old, most - least
    if most > old or (least < old - WINDOW and spread <= WINDOW):
        new = most + cutlass.min(cutlass.max(WINDOW - spread, 0), HEADROOM)
    return cutlass.min(cutlass.max(new, highest - MAX_FALL), MAX_EXPONENT)


def v_units(smem, units: int = QUANT_TILES) -> cute.Tensor:
    """Returns units of O, (unit, stage of P): of a work tile with its last key tile, and of each tile with flags."""
    return smem.v_unit.get_tensor(cute.make_layout((units, 2)))


def v_moves(smem, units: int = QUANT_TILES) -> cute.Tensor:
    """Returns old unit / new unit of O for each key tile, (unit, stage of P); valid with flag NEW_UNIT."""
    return smem.v_move.get_tensor(cute.make_layout((units, 2)))


def inverse_power(power: Float32) -> Float32:
    """Returns 1 over a power of two from 2^-126 to 2^126."""
    return ((254 << 23) - power.bitcast(Int32)).bitcast(Float32)
