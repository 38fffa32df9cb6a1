"""Timestamps of a kernel's roles, for a timeline. A kernel without a trace contains no instruction for it."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int32, Int64, const_expr

STEPS = 64  # steps of each role; later ones are not stored


class Tracer:
    """Stores clocks into an int64 tensor (ctas, roles + 1, STEPS, 2): before [0] and after [1] each step of a role.

    Row `roles` holds (globaltimer, clock64) at the start [0] and at the end [1] of the CTA. One thread of a role calls
    with `leads`. A wgmma or a copy is asynchronous, so its end shows in the wait after it.
    """

    def __init__(self, on: bool, roles: int):
        self.on = on
        self.roles = roles

    @cute.jit
    def start(self, base: cute.Pointer, trace: Int64):
        """Stores the address of this CTA's timestamps in the tensor `trace`; one thread calls it before all others."""
        if const_expr(self.on):
            cta, _, _ = cute.arch.block_idx()
            cta_bytes = (self.roles + 1) * STEPS * 16
            cute.make_tensor(base, cute.make_layout(1))[0] = trace + Int64(cta) * cta_bytes
            self.anchor(base, 0)

    @cute.jit
    def stamp(
        self,
        base: cute.Pointer,
        role: cutlass.Constexpr,
        step: Int32,
        edge: cutlass.Constexpr,
        leads,
        starts_next: cutlass.Constexpr = False,
    ):
        """Stores the clock at an edge of a step; with `starts_next` also as the beginning of the next step.

        `base` points to the address that `start` stored in shared memory.

        One block of PTX computes everything from one number, so no register is occupied between two stamps. With two
        numbers, ptxas serialized the wgmma of a CTA of 64 heads (C7512).
        """
        if const_expr(self.on):
            first = role * STEPS
            kept = cutlass.select_(leads, step + first, Int32(-1))  # as an unsigned number, -1 is above all steps
            limit = first + STEPS - int(starts_next)
            cute.arch.inline_ptx(
                f"{{\n.reg .pred p;\n.reg .b64 place;\nsetp.lt.u32 p, {{$r1}}, {limit};\n"
                "ld.volatile.shared.b64 place, [{$r0}];\nmad.wide.s32 place, {$r1}, 16, place;\n"
                + "".join(
                    f"@p st.global.b64 [place + {8 * e}], {{$r2}};\n" for e in range(edge, edge + 1 + starts_next)
                )
                + "}",
                read_only_args=[Int32(base.toint()), kept, cute.arch.clock64()],
            )

    @cute.jit
    def anchor(self, base: cute.Pointer, edge: cutlass.Constexpr):
        """Stores time and clock at the start (0) or end (1) of the CTA; called by one thread."""
        if const_expr(self.on):
            address = cute.make_tensor(base, cute.make_layout(1))[0] + 16 * (self.roles * STEPS + edge)
            pointer = cute.make_ptr(Int64, address, AddressSpace.gmem, assumed_align=8)
            place = cute.make_tensor(pointer, cute.make_layout(2))
            place[0], place[1] = cute.arch.globaltimer(), cute.arch.clock64()
