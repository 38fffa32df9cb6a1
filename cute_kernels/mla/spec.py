"""What is fixed at compile time in the MLA decoding kernel without an exchange."""

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.merge.spec import UNIT_VALUES
from fp8_mla.formats import V3_2

WIDE = 64  # heads of a CTA, at most
NARROW = (8, 16, 32)  # and where there are few
FEW = 16  # heads, at most, that leave registers for six warpgroups
TOKENS_PER_TILE = 64
MAX_KEYS = 2**31 - 2**15  # that a query can name: the end of the last of 256 equal parts still fits into 32 bits
WORK_TILE_OVERHEAD = 2  # key tiles that a work tile costs beside its own, in a balanced schedule
CUT_TILES = 5  # key tiles that a cut through a query costs: a work tile more, and a merge
MERGE_LANES = (0, 32, 128)
MASKED_SCALE = 2.0**-6  # of a masked key: within reach of both weights, or its tile would be added up the rare way
# of a row of a split in scratch memory: 512 float16 numbers, units of 64 of them, a log-sum-exp
PARTIAL_FLOATS = V3_2.d_v // 2 + V3_2.d_v // UNIT_VALUES + 1
COLUMN_WEIGHT = 2.0**7  # where heads are columns: scales from 2^-12 to 1, of values up to 448, are below 2^7 with it
ROLES = ("keys", "scores", "values 0", "values 1")  # warpgroups, as a traced kernel numbers them
# of a tile, for each of them
EVENTS = (("wait", "fill", "softmax"), ("wait", "QK", "hand over"), ("wait", "PV"), ("wait", "PV"))


@dataclass(frozen=True)
class MlaDecodeSpec:
    """Compile-time facts of `kernels.decode.MlaDecodeKernel`; constructor argument and cache key.

    sparse    keys come from a list of slots per query; otherwise from a block table and a length per request
    merge_lanes  several CTAs share the keys of a query: each writes a float16 partial, and CTAs behind them merge with
              this many threads a row. 0: one CTA has all keys
    heads     of a CTA: 64, or as few as there are
    balanced  CTAs have equal shares of the tiles of all queries, by the lengths that they find there, instead of whole
              queries or equal parts of each: a query that is cut is merged
    trace     the roles leave timestamps (device/trace.py)

    Sinks, lengths and the log-sum-exp are always there (a sink of -inf, a length of topk): they cost nothing
    measurable, and every fact less halves the number of kernels to compile.
    """

    sparse: bool
    merge_lanes: int = 0
    heads: int = WIDE
    balanced: bool = False
    trace: bool = False

    kernel: ClassVar[str] = "cute_kernels.mla.kernels.decode:MlaDecodeKernel"
    cluster: ClassVar[int] = 1  # CTAs that share the keys of a query token and split

    @property
    def compile_options(self) -> str:
        """Levels at which ptxas spills no register; what it makes of them differs by up to 6% (64 heads, 0 and 7)."""
        return f"--ptxas-options '--register-usage-level={0 if self.few_heads else 7}'"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        reasons = []
        if self.heads != WIDE and self.heads not in NARROW:
            reasons.append(f"heads is {self.heads}; known are {NARROW} and {WIDE}")
        if self.merge_lanes not in MERGE_LANES:
            reasons.append(f"merge_lanes is {self.merge_lanes}; known are {MERGE_LANES}")
        if self.balanced and not self.split:
            reasons.append(f"balanced is True with merge_lanes {self.merge_lanes}; shares need a merge")
        return reasons

    def head_blocks(self, h_q: int) -> int:
        """CTAs for the heads of a query token."""
        return -(-h_q // self.heads)

    @property
    def few_heads(self) -> bool:
        """Whether S and O leave registers for six warpgroups: copies and softmax are apart, and two score in turn."""
        return self.heads <= FEW

    @property
    def offers(self) -> bool:
        """Whether values start copies of tiles that keys have found: values know first that there is room for them."""
        return not self.sparse and not self.few_heads

    @property
    def score_groups(self) -> int:
        """Warpgroups that score: tile t is scored by t modulo as many."""
        return 2 if self.few_heads else 1

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 768 if self.few_heads else 512

    @property
    def registers(self) -> tuple[int, int, int, int]:
        """Of a thread that brings keys, scores (`score_groups`), adds values (two warpgroups), makes P if apart.

        At launch all of 512 threads have 128, and all of 768 have 80.
        """
        if self.few_heads:
            return (32, 112, 96, 32)
        if self.heads < WIDE:
            return (48, 144, 160, 0)
        return (32, 128, 176, 0)  # fewer for scores, and ptxas serializes products for want of registers

    @property
    def split(self) -> bool:
        """Whether several CTAs may share the keys of one query."""
        return self.merge_lanes > 0

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        # Where ptxas takes a loop's counters for values of each thread, fewer are left: 10% of the time
        return {
            "registers": 80 if self.few_heads else 128,
            "stack": 0,
            "instructions": ("HGMMA", "UTMALDG", "USETMAXREG", "LDGSTS.E.BYPASS.128"),
            "at_least": {"USHF": 90},
        }


def shipped_specs() -> list[MlaDecodeSpec]:
    """Every specification that the planner can ask for."""
    return [
        MlaDecodeSpec(sparse=sparse, merge_lanes=lanes, heads=heads)
        for sparse in (True, False)
        for lanes in MERGE_LANES
        for heads in (*NARROW, WIDE)
    ] + [
        MlaDecodeSpec(sparse=sparse, merge_lanes=lanes, heads=heads, balanced=True)
        for sparse in (True, False)
        for lanes in MERGE_LANES[1:]
        for heads in (*NARROW, WIDE)
    ]
