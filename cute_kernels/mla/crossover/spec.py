"""Compile-time facts of the MLA decode kernel whose CTAs exchange keys."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from cute_kernels.mla.spec import MERGE_LANES, WIDE, Roles

EXCHANGES = ("codes", "values")
WEIGHT = 8.0  # times a scale between 2^-17 and 2^-2 (values up to 112): a normal float16 number below 2
ROLES = ("load", "QK", "PV 0", "PV 1")  # warpgroups, as a traced kernel numbers them; QK includes the softmax
# steps of a key tile for each role; load has no softmax here, but the name keeps the numbering of steps
EVENTS = (("wait", "load", "softmax"), ("wait", "QK", "store P"), ("wait", "PV"), ("wait", "PV"))


class Registers(NamedTuple):
    """Registers of a thread of each role, after the roles have redistributed registers."""

    load: int
    qk: int
    pv: int


@dataclass(frozen=True)
class MlaCrossoverSpec:
    """Compile-time facts of `crossover.kernels.decode.MlaCrossoverKernel`; constructor argument and cache key.

    sparse       keys come from a list of slots per query; otherwise from a block table and a length per request
    merge_lanes  threads that merge a row of partials: several CTAs share the keys of a query, each writes a float16
                 partial, and CTAs with higher numbers merge. 0: one CTA has all keys
    exchange     two CTAs with 64 heads each gather half of each key tile and send each other "codes", rows as gathered,
                 which both convert, or "values", float16 numbers
    trace        the roles store timestamps (device/trace.py)
    inf_if_empty  a query without keys has a log-sum-exp of +inf, as in FlashMLA, instead of -inf
    """

    sparse: bool
    merge_lanes: int = 0
    exchange: str = "values"
    trace: bool = False
    inf_if_empty: bool = False

    kernel: ClassVar[str] = "cute_kernels.mla.crossover.kernels.decode:MlaCrossoverKernel"
    compile_options: ClassVar[str] = "--ptxas-options '--register-usage-level=5'"
    """The register-usage level at which ptxas spills nothing."""
    cluster: ClassVar[int] = 2  # CTAs that share the keys of a query token and split
    heads: ClassVar[int] = WIDE  # heads of a CTA
    balanced: ClassVar[bool] = False
    has_extra: ClassVar[bool] = False
    few_heads: ClassVar[bool] = False
    roles: ClassVar[Roles] = Roles(load=(0,), qk=(1,), pv=(2, 3))
    threads: ClassVar[int] = 512  # threads of a CTA
    registers: ClassVar[Registers] = Registers(load=72, qk=104, pv=168)
    """Registers of a thread by role; at launch each thread has 128."""

    def can_implement(self) -> list[str]:
        reasons = []
        if self.exchange not in EXCHANGES:
            reasons.append(f"exchange is {self.exchange!r}; known are {EXCHANGES}")
        if self.merge_lanes not in MERGE_LANES:
            reasons.append(f"merge_lanes is {self.merge_lanes}; known are {MERGE_LANES}")
        return reasons

    def head_blocks(self, h_q: int) -> int:
        """Returns the number of CTAs for the heads of a query token: whole clusters."""
        return -(-h_q // (self.heads * self.cluster)) * self.cluster

    @property
    def split(self) -> bool:
        """Whether several CTAs may share the keys of one query."""
        return self.merge_lanes > 0

    @property
    def expected(self) -> dict[str, Any]:
        sends = {"codes": "STAS", "values": "UBLKCP"}[self.exchange]
        return {
            "registers": 128,
            # with codes, loads and sends of the load warpgroup need up to nine registers more than its 72
            "stack": 32 if self.exchange == "codes" else 0,
            "instructions": ("HGMMA", "UTMALDG", "USETMAXREG", "LDG.E.128", sends),
            # fewer if ptxas keeps loop counters in registers of each thread, which costs 10% of the time
            "at_least": {"USHF": 75},
        }


def shipped_specs() -> list[MlaCrossoverSpec]:
    """Returns every spec that a call can ask for."""
    return [
        MlaCrossoverSpec(sparse=sparse, merge_lanes=lanes, exchange=exchange)
        for sparse in (True, False)
        for lanes in MERGE_LANES
        for exchange in EXCHANGES
    ]
