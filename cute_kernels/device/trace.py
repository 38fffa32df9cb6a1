"""Timestamps of a kernel's roles, for a timeline; nothing of it is left in a kernel that is not traced."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int32, Int64, const_expr

STEPS = 64  # of a role that are kept


class Tracer:
    """Stores clocks into an int64 tensor (ctas, roles + 1, STEPS, 2): before [0] and after [1] each step of a role.

    Row `roles` holds (globaltimer, clock64) at the start [0] and at the end [1] of the CTA. One thread of a role calls
    with `leads`. A wgmma or a copy is only issued at its instruction: its end shows in the wait behind it.
    """

    def __init__(self, on: bool, roles: int):
        self.on = on
        self.roles = roles

    @cute.jit
    def stamp(self, base: cute.Pointer, role: cutlass.Constexpr, step: Int32, edge: cutlass.Constexpr, leads):
        """The clock at an edge of a step; `base` points to the tensor's address in shared memory."""
        if const_expr(self.on):
            place = self._place(base, role, step, edge)
            if leads and step < STEPS:
                place[0] = cute.arch.clock64()

    @cute.jit
    def anchor(self, base: cute.Pointer, edge: cutlass.Constexpr):
        """Time and clock at the start (0) or at the end (1) of the CTA; called by one thread."""
        if const_expr(self.on):
            time, clock = (self._place(base, self.roles, Int32(edge), i) for i in range(2))
            time[0] = cute.arch.globaltimer()
            clock[0] = cute.arch.clock64()

    @cute.jit
    def _place(self, base: cute.Pointer, role: cutlass.Constexpr, step: Int32, edge: cutlass.Constexpr) -> cute.Tensor:
        cta, _, _ = cute.arch.block_idx()
        index = ((cta * (self.roles + 1) + role) * STEPS + step) * 2 + edge
        address = cute.make_tensor(base, cute.make_layout(1))[0] + 8 * Int64(index)
        pointer = cute.make_ptr(Int64, address, AddressSpace.gmem, assumed_align=8)
        return cute.make_tensor(pointer, cute.make_layout(1))
