"""Compile-time facts of the MLA decode kernel."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from cute_kernels.merge.spec import BLOCK_SCALE_VALUES
from fp8_mla.formats import FORMATS, PAIRS, V3_2, TokenFormat

WIDE = 64  # heads of a CTA, at most
NARROW = (8, 16, 32)  # heads of a CTA for fewer of them
HALF = 32
FEW = 16  # up to this many heads S and O leave registers for six warpgroups
WGMMA_ROWS = 64  # rows of an accumulator: M of an instruction
TOKENS_PER_TILE = 64  # keys of a key tile: the rows of S^T, and the columns that P^T and V^T share
MAX_KEYS = 2**31 - 2**15  # keys of a query: the end of the last of 256 equal parts still fits into 32 bits
WORK_TILE_OVERHEAD = 2  # key tiles that a work tile costs in addition to its own, in a balanced schedule
CUT_TILES = 5  # key tiles that a cut through a query costs: one more work tile, and a merge
MERGE_LANES = (0, 32, 128)
MASKED_SCALE = 2.0**-6  # scale of a masked key, float32: in range of the weights of V, so its tile takes the fast path
PARTIAL_FLOATS = V3_2.d_v // 2 + V3_2.d_v // BLOCK_SCALE_VALUES + 1  # float16 O, block scales, LSE
LINE_BYTES = 128  # bytes of a line of a key's row in shared memory: one row of the 128-byte swizzle
ROLES = ("load", "QK", "PV 0", "PV 1")  # warpgroups, as a traced kernel numbers them; load includes the softmax
EVENTS = (("wait", "load", "softmax"), ("wait", "QK", "store S"), ("wait", "PV"), ("wait", "PV"))  # steps of a key tile


def scale_row(kind: TokenFormat) -> int:
    """Bytes of a key's scales in a stage: its scale row, or only its scales if a token is a single row."""
    return kind.row_bytes[1] if len(kind.row_bytes) > 1 else kind.scales.num_bytes


def expands(kind: TokenFormat) -> bool:
    """Whether codes are expanded in a stage: a key's row is shorter than its codes, at a byte each."""
    return kind.codes.num_bytes < kind.codes.count


class Roles(NamedTuple):
    """The warpgroups of each role."""

    load: tuple[int, ...]
    qk: tuple[int, ...]
    pv: tuple[int, ...]
    softmax: tuple[int, ...] = ()


class Registers(NamedTuple):
    """Registers of a thread of each role. `softmax` is 0 if the load warpgroup makes P."""

    load: int
    qk: int
    pv: int
    softmax: int


@dataclass(frozen=True)
class MlaDecodeSpec:
    """Compile-time facts of `kernels.decode.MlaDecodeKernel`; constructor argument and cache key.

    sparse       keys come from a list of slots per query; otherwise from a block table and a length per request
    merge_lanes  threads that merge a row of partials: several CTAs share the keys of a query, each writes a float16
                 partial, and CTAs with higher numbers merge. 0: one CTA has all keys
    heads        heads of a CTA: 64, or 8, 16 or 32 for a call of no more
    balanced     CTAs have equal shares of the key tiles of all queries, by the lengths on the device, instead of whole
                 queries or equal parts of each. A query that is cut is merged
    trace        the roles store timestamps (device/trace.py)
    inf_if_empty  a query without keys has a log-sum-exp of +inf, as in FlashMLA, instead of -inf
    cache_format  format of the cache, a name of `fp8_mla.formats.FORMATS`
    extra_format  format of a second cache that joins the same softmax; "" without one
    of_two       the call has a second cache of V3.2 without any key: it rounds as with two caches

    Sinks, lengths and the log-sum-exp always exist (a sink of -inf, a length of topk): they cost nothing measurable,
    and each fact less halves the number of kernels.
    """

    sparse: bool
    merge_lanes: int = 0
    heads: int = WIDE
    balanced: bool = False
    trace: bool = False
    inf_if_empty: bool = False
    cache_format: str = V3_2.name
    extra_format: str = ""
    of_two: bool = False

    kernel: ClassVar[str] = "cute_kernels.mla.kernels.decode:MlaDecodeKernel"
    cluster: ClassVar[int] = 1  # CTAs that share the keys of a query token and split
    p_stages: ClassVar[int] = 2  # stages of P, and of what the softmax stores with it
    expanded_ahead: ClassVar[int] = 2  # key tiles that PV expands before its products; loads are as far ahead at least
    launch_registers: ClassVar[dict[int, int]] = {512: 128, 768: 80}  # registers of a thread, by threads of a CTA

    @property
    def compile_options(self) -> str:
        """The register-usage level at which ptxas spills no register, or few if tiles have two formats.

        Levels 0 and 7 differ by up to 6% in speed (64 heads).
        """
        level = 0 if self.few_heads or len(self.kinds) > 1 else 7
        return f"--ptxas-options '--register-usage-level={self.own_level or level}'"

    @property
    def own_level(self) -> int:
        """Register-usage level of ptxas for of two caches with 64 heads; 0 means no override."""
        if not self.has_extra or self.heads < WIDE:
            return 0
        if len(self.kinds) > 1:
            return 0 if self.balanced else 5
        if self.float_scales and self.has_rope:
            return 5 if self.split else 0  # at other levels ptxas serializes wgmma
        return 5 if self.balanced and not (self.float_scales or self.has_rope) else 0

    def can_implement(self) -> list[str]:
        reasons = []
        if TOKENS_PER_TILE != WGMMA_ROWS:
            reasons.append(f"a key tile has {TOKENS_PER_TILE} keys; S of them is one wgmma of {WGMMA_ROWS} rows")
        if self.heads != WIDE and self.heads not in NARROW:
            reasons.append(f"heads is {self.heads}; known are {NARROW} and {WIDE}")
        if self.merge_lanes not in MERGE_LANES:
            reasons.append(f"merge_lanes is {self.merge_lanes}; known are {MERGE_LANES}")
        if self.balanced and not self.split:
            reasons.append(f"balanced is True with merge_lanes {self.merge_lanes}; shares need a merge")
        if self.cache_format not in FORMATS:
            reasons.append(f"cache_format is {self.cache_format!r}; known are {tuple(FORMATS)}")
        if self.extra_format and (self.cache_format, self.extra_format) not in PAIRS:
            reasons.append(f"extra_format is {self.extra_format!r} with {self.cache_format!r}; known pairs are {PAIRS}")
        if self.extra_format and not self.sparse:
            reasons.append(f"extra_format is {self.extra_format!r} with a block table; two caches need indices")
        return reasons

    # ---- formats

    @property
    def token_format(self) -> TokenFormat:
        """The format of the cache."""
        return FORMATS[self.cache_format]

    @property
    def kinds(self) -> tuple[TokenFormat, ...]:
        """The formats that key tiles have: one, or the formats of both caches."""
        if self.extra_format in ("", self.cache_format):
            return (self.token_format,)
        return (self.token_format, FORMATS[self.extra_format])

    @property
    def has_extra(self) -> bool:
        """Whether there is a second cache."""
        return bool(self.extra_format)

    @property
    def is_plain(self) -> bool:
        """Whether the call has one cache, of V3.2."""
        return self.cache_format == V3_2.name and not self.has_extra and not self.of_two

    @property
    def d_qk(self) -> int:
        """Columns of Q."""
        return self.token_format.d_qk

    @property
    def float_scales(self) -> bool:
        """Whether scales are float32: QK then scales products of codes, else it scales keys, which is exact."""
        return self.token_format.scales.dtype == "float32"

    @property
    def splits_p(self) -> bool:
        """Whether P is two bfloat16 numbers in key tiles whose scales are far apart; see `PvWarpgroups.add_bfloat16`.

        A single cache of V3.2 does without: its dense key tiles with 64 heads would take 330 us instead of 270, because
        ptxas then orders the instructions of all tiles differently.
        """
        return not self.is_plain

    @property
    def has_rope(self) -> bool:
        """Whether a token has a rope part."""
        return self.token_format.rope is not None

    @property
    def rope_is_value(self) -> bool:
        """Whether a rope part is a value too, and stays in its stage until PV has read it."""
        return self.has_rope and self.d_qk == self.token_format.d_v

    @property
    def code_lines(self) -> int:
        """Lines of `LINE_BYTES` that a key's codes take in a stage, at a byte each."""
        return max(-(-kind.codes.count // LINE_BYTES) for kind in self.kinds)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a key's scales in a stage."""
        return max(scale_row(kind) for kind in self.kinds)

    @property
    def expands(self) -> bool:
        """Whether a role expands codes of one of the formats."""
        return any(map(expands, self.kinds))

    @property
    def load_expands(self) -> bool:
        """Whether the load warpgroup expands: it does if it has no other work."""
        return self.expands and self.few_heads

    @property
    def pv_expands(self) -> bool:
        """Whether PV expands: it does if the load warpgroup has the softmax, on which S waits."""
        return self.expands and not self.few_heads

    # ---- work and roles

    def head_blocks(self, h_q: int) -> int:
        """Returns the number of CTAs for the heads of a query token."""
        return -(-h_q // self.heads)

    @property
    def split(self) -> bool:
        """Whether several CTAs may share the keys of one query."""
        return self.merge_lanes > 0

    @property
    def few_heads(self) -> bool:
        """Whether there are six warpgroups: separate load and softmax, and two for QK."""
        return self.heads <= FEW

    @property
    def roles(self) -> Roles:
        """The warpgroups of each role; the load warpgroup also makes P if there is no softmax warpgroup."""
        if self.few_heads:
            return Roles(load=(0,), qk=(1, 5), pv=(2, 3), softmax=(4,))
        return Roles(load=(0,), qk=(1,), pv=(2, 3))

    @property
    def page_tma(self) -> bool:
        """Whether TMA brings whole key tiles of a page, which only rows of V3.2 allow; cp.async brings other rows."""
        return not self.sparse and self.cache_format == V3_2.name

    @property
    def pv_issues_tma(self) -> bool:
        """Whether PV warpgroups issue the TMA of key tiles: they see the stage free first."""
        return self.page_tma and not self.few_heads

    @property
    def qk_warpgroups(self) -> int:
        """Number of QK warpgroups; key tile t belongs to number t modulo this."""
        return len(self.roles.qk)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 128 * sum(map(len, self.roles))

    @property
    def registers(self) -> Registers:
        """Registers of each role, after the roles have redistributed registers."""
        two_kinds = len(self.kinds) > 1
        if self.few_heads:
            if two_kinds:
                return Registers(load=48, qk=104, pv=96, softmax=32)
            return Registers(load=32, qk=112, pv=96, softmax=32)
        if self.heads < WIDE:
            if self.float_scales:
                return Registers(load=48, qk=144, pv=160, softmax=0)
            return Registers(load=56, qk=120, pv=168, softmax=0)
        if self.float_scales:
            return Registers(load=32, qk=128, pv=176, softmax=0)  # with fewer for QK ptxas serializes its wgmma
        load = 40 if not two_kinds else 56 if self.balanced else 48
        return Registers(load=load, qk=160 - load, pv=176, softmax=0)

    @property
    def stages(self) -> int:
        """Key tiles in shared memory, 33,792 bytes each for V3.2 with scales: as many as fit beside Q.

        With few heads there are five if codes are expanded: a tile is expanded a step after its copies.
        """
        if self.load_expands:
            return 5
        return 3 if self.heads == WIDE else 4

    @property
    def rope_stages(self) -> int:
        """Key tiles of rope parts in shared memory, 8,192 bytes each.

        With 32 and 64 heads there is one less than of codes, and loads are that many tiles ahead of the softmax: once P
        of a tile is made, QK has read its rope part. With fewer heads each stage has both.
        """
        return self.stages if self.few_heads else self.stages - 1

    @property
    def rope_slots(self) -> int:
        """Rope parts that shared memory holds."""
        if not self.has_rope:
            return 0
        return self.stages if self.rope_is_value else self.rope_stages

    @property
    def mask_stages(self) -> int:
        """Key tiles whose masks are kept: tile t + stages - 1 gets its mask while tile t - 1 may still be read."""
        return 4 if self.heads == WIDE else 8

    @property
    def expected(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "registers": self.launch_registers[self.threads],
            # most bytes that ptxas spills, all between key tiles or on slow paths
            "stack": 48 if self.few_heads or len(self.kinds) > 1 else 32,
            "instructions": ("HGMMA", "UTMALDG", "USETMAXREG", "LDGSTS.E.BYPASS.128"),
        }
        if self.is_plain:
            # up to 16 heads a thread converts 128 numbers of Q at once; what it spills is read between work tiles
            found["stack"] = 32 if self.few_heads and self.split else 0
            # fewer if ptxas keeps loop counters in registers of each thread, which costs 10% of the time
            found["at_least"] = {"USHF": 70 if self.few_heads else 90}
        elif self.float_scales and self.has_rope and self.balanced and self.heads == WIDE:
            found["serialized"] = True  # two caches of V3.2, ragged lengths: no level leaves QK its registers
        return found


def shipped_specs() -> list[MlaDecodeSpec]:
    """Returns every spec that the planner can ask for over one cache of V3.2."""
    return _specs((V3_2.name, ""))


def specs_of_formats() -> list[MlaDecodeSpec]:
    """Returns every spec that the planner can ask for over caches of other formats, and for two caches."""
    return [*_specs(*_OTHERS), *(replace(spec, of_two=True) for spec in shipped_specs() if spec.sparse)]


def covering_specs() -> list[MlaDecodeSpec]:
    """Returns `shipped_specs`, and for other formats and pairs each number of heads, schedule and kind of keys once.

    That is a tenth of `specs_of_formats`. The rest differs little, and compiling all takes half an hour of a core.
    """
    chosen = []
    for i, (name, extra) in enumerate(_OTHERS):
        for j, heads in enumerate((WIDE, NARROW[i % len(NARROW)], NARROW[(i + 1) % len(NARROW)])):
            lanes = MERGE_LANES[(i + j) % len(MERGE_LANES)]
            sparse = bool(extra) or (i + j) % 2 == 0
            balanced = lanes > 0 and (i + j) % 4 > 1
            chosen.append(MlaDecodeSpec(sparse, lanes, heads, balanced, cache_format=name, extra_format=extra))
    two = [MlaDecodeSpec(True, 128, WIDE, True, cache_format=name, extra_format=extra) for name, extra in PAIRS]
    chosen += [MlaDecodeSpec(True, lanes, heads, lanes > 0, of_two=True) for lanes, heads in ((0, WIDE), (32, HALF))]
    return [*shipped_specs(), *chosen, *(spec for spec in two if spec.own_level and spec not in chosen)]


_OTHERS = (*((name, "") for name in FORMATS if name != V3_2.name), *PAIRS)


def _specs(*formats: tuple[str, str]) -> list[MlaDecodeSpec]:
    return [
        MlaDecodeSpec(sparse, lanes, heads, balanced, cache_format=name, extra_format=extra)
        for name, extra in formats
        for balanced in (False, True)
        for sparse in (True, False)
        for lanes in MERGE_LANES
        for heads in (*NARROW, WIDE)
        if (lanes or not balanced) and (sparse or not extra)
    ]
