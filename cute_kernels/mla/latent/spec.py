"""What is fixed at compile time in the decode kernel over any latent cache format, of one cache or two."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from cute_kernels.mla.spec import CACHE_FORMAT, MERGE_LANES, NARROW, WIDE, MlaDecodeSpec, Registers
from fp8_mla.formats import FORMATS, PAIRS, TokenFormat


@dataclass(frozen=True)
class LatentDecodeSpec(MlaDecodeSpec):
    """Compile-time facts of `kernels.decode.MlaDecodeKernel` where rows of any format come by cp.async: two formats.

    cache_format  of the cache, a name of `fp8_mla.formats.FORMATS`
    extra_format  of a second cache that joins the same softmax; "" where there is none
    """

    cache_format: str = field(kw_only=True)
    extra_format: str = ""

    splits_p: ClassVar[bool] = True

    @property
    def compile_options(self) -> str:
        """Levels at which ptxas spills no register, or few where tiles have two formats."""
        level = 0 if self.few_heads or len(self.kinds) > 1 else 7
        return f"--ptxas-options '--register-usage-level={self.own_level or level}'"

    @property
    def own_level(self) -> int:
        """The level of two caches, with 64 heads, where it is not that of other tiles; else 0."""
        if not self.has_extra or self.heads < WIDE:
            return 0
        if len(self.kinds) > 1:
            return 0 if self.balanced else 5
        if self.float_scales and self.has_rope:
            return 5 if self.split else 0  # at other levels ptxas serializes wgmma
        return 5 if self.balanced and not (self.float_scales or self.has_rope) else 0

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        reasons = super().can_implement()
        if self.cache_format not in FORMATS:
            reasons.append(f"cache_format is {self.cache_format!r}; known are {tuple(FORMATS)}")
        if self.extra_format and (self.cache_format, self.extra_format) not in PAIRS:
            reasons.append(f"extra_format is {self.extra_format!r} with {self.cache_format!r}; known pairs are {PAIRS}")
        if self.extra_format and not self.sparse:
            reasons.append(f"extra_format is {self.extra_format!r} with a block table; two caches need indices")
        return reasons

    @property
    def token_format(self) -> TokenFormat:
        """The format of the cache."""
        return FORMATS[self.cache_format]

    @property
    def kinds(self) -> tuple[TokenFormat, ...]:
        """The formats that key tiles have: one, or that of the cache and that of the second one."""
        if self.extra_format in ("", self.cache_format):
            return (self.token_format,)
        return (self.token_format, FORMATS[self.extra_format])

    @property
    def has_extra(self) -> bool:
        """Whether there is a second cache."""
        return bool(self.extra_format)

    @property
    def page_tma(self) -> bool:
        """Whether whole key tiles of a page come by TMA: all rows come by cp.async."""
        return False

    @property
    def registers(self) -> Registers:
        """Of each role, after the roles have exchanged registers."""
        if self.few_heads and len(self.kinds) > 1:
            return Registers(load=48, qk=104, pv=96, softmax=32)
        if self.float_scales or self.few_heads:
            return super().registers
        if self.heads < WIDE:
            return Registers(load=56, qk=120, pv=168, softmax=0)
        if len(self.kinds) > 1:
            load = 56 if self.balanced else 48
            return Registers(load=load, qk=160 - load, pv=176, softmax=0)
        return Registers(load=40, qk=120, pv=176, softmax=0)

    @property
    def stages(self) -> int:
        """Key tiles in shared memory: with few heads five, where a tile is expanded a step after its copies."""
        return 5 if self.load_expands else super().stages

    @property
    def _stack(self) -> int:
        """Bytes that ptxas spills at most, all between key tiles or on slow paths."""
        return 48 if self.few_heads or len(self.kinds) > 1 else 32

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        return {
            "registers": self.launch_registers[self.threads],
            "stack": self._stack,
            # two V3.2 caches of ragged lengths: no level and no form tried leaves QK its registers
            "serialized": self.has_extra
            and self.float_scales
            and self.has_rope
            and self.balanced
            and self.heads == WIDE,
            "instructions": ("HGMMA", "UTMALDG", "USETMAXREG", "LDGSTS.E.BYPASS.128"),
        }


def shipped_specs() -> list[LatentDecodeSpec]:
    """Every specification that the planner can ask for."""
    return [
        LatentDecodeSpec(
            sparse=sparse, merge_lanes=lanes, heads=heads, balanced=balanced, cache_format=name, extra_format=extra
        )
        for name, extra in [*((name, "") for name in FORMATS), *PAIRS]
        for balanced in (False, True)
        for sparse in (True, False)
        for lanes in MERGE_LANES
        for heads in (*NARROW, WIDE)
        if (lanes or not balanced) and (sparse or not (extra or name == CACHE_FORMAT))
    ]


def covering_specs() -> list[LatentDecodeSpec]:
    """Some of `shipped_specs`, a tenth: of each format and pair each number of heads, schedule and kind of keys once.

    They differ in little else, and to compile all takes half an hour of a core.
    """
    forms = [*((name, "") for name in FORMATS), *PAIRS]
    chosen = []
    for i, (name, extra) in enumerate(forms):
        for j, heads in enumerate((WIDE, NARROW[i % len(NARROW)], NARROW[(i + 1) % len(NARROW)])):
            lanes = MERGE_LANES[(i + j) % len(MERGE_LANES)]
            sparse = bool(extra) or name == CACHE_FORMAT or (i + j) % 2 == 0
            balanced = lanes > 0 and (i + j) % 4 > 1
            chosen.append(LatentDecodeSpec(sparse, lanes, heads, balanced, cache_format=name, extra_format=extra))
    two = [LatentDecodeSpec(True, 128, WIDE, True, cache_format=name, extra_format=extra) for name, extra in PAIRS]
    return [*chosen, *(spec for spec in two if spec.own_level and spec not in chosen)]
