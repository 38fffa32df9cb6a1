"""Register allocation: how to keep ptxas from rematerializing a value if that costs more than a register."""

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def opaque(value: Int32) -> Int32:
    """Hide the value's origin so that ptxas keeps it in a register instead of rematerializing it.

    It also delays values that are derived from the result: ptxas cannot compute them where `value` itself is computed,
    so they take no registers until they are used.
    """
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])
