"""What is kept in a register, and what is made again: the compiler's choice, where it does not choose well."""

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def anew(value: Int32) -> Int32:
    """`value`, of which the compiler knows nothing.

    It cannot make the result again, so it keeps it; and it does not make what follows from it where what follows from
    `value` itself is made, so it keeps nothing of that until then.
    """
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])
