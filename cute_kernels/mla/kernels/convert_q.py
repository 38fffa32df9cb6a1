"""Q as float16, where float16 holds it."""

import cutlass.cute as cute
from cutlass import Int32

MIN_PEAK, MAX_PEAK = 2.0**-8, 65504.0  # of 128 numbers, between which float16 holds all of them as well as bf16 does
MAX_EXPONENT = 120  # powers of two up to this size, and their inverses, are normal float32 numbers


@cute.jit
def max_magnitudes(a: Int32, b: Int32) -> Int32:
    """The larger magnitudes of two pairs of float16; `a` has no signs."""
    return cute.arch.inline_ptx(
        "{\n.reg .b32 t;\nabs.f16x2 t, {$r1};\nmax.f16x2 {$w0}, {$r0}, t;\n}",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )
