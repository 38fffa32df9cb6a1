"""What is fixed at compile time in the decode kernel over any latent cache format, of one cache or two."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from cute_kernels.mla.spec import CACHE_FORMAT, MERGE_LANES, NARROW, WIDE, MlaDecodeSpec, Registers
from fp8_mla.formats import FORMATS, PAIRS, TokenFormat

LINE_BYTES = 128  # of a key's row in shared memory: one row of the 128-byte swizzle


def scale_row(kind: TokenFormat) -> int:
    """Bytes of a key's scales in a stage: its scale row, or its scales where there is one row a token."""
    return kind.row_bytes[1] if len(kind.row_bytes) > 1 else kind.scales.num_bytes


def expands(kind: TokenFormat) -> bool:
    """Whether a role makes codes of others in a stage: a key's row is shorter than its codes, a byte each."""
    return kind.codes.num_bytes < kind.codes.count


@dataclass(frozen=True)
class LatentDecodeSpec(MlaDecodeSpec):
    """Compile-time facts of `latent.kernels.decode.LatentDecodeKernel`: those of `MlaDecodeSpec`, and two formats.

    cache_format  of the cache, a name of `fp8_mla.formats.FORMATS`
    extra_format  of a second cache that joins the same softmax; "" where there is none
    """

    cache_format: str = field(kw_only=True)
    extra_format: str = ""

    kernel: ClassVar[str] = "cute_kernels.mla.latent.kernels.decode:LatentDecodeKernel"
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
    def d_qk(self) -> int:
        """Columns of Q."""
        return self.token_format.d_qk

    @property
    def float_scales(self) -> bool:
        """Whether scales are float32: products of codes are scaled then, else keys are, which is exact."""
        return self.token_format.scales.dtype == "float32"

    @property
    def has_rope(self) -> bool:
        """Whether a token has a rope part."""
        return self.token_format.rope is not None

    @property
    def rope_is_value(self) -> bool:
        """Whether a rope part is a value too, so that it stays in its stage until PV has read it."""
        return self.has_rope and self.d_qk == self.token_format.d_v

    @property
    def rope_slots(self) -> int:
        """Key tiles of rope parts in shared memory."""
        if not self.has_rope:
            return 0
        return self.stages if self.rope_is_value else self.rope_stages

    @property
    def expands(self) -> bool:
        """Whether a role makes codes of others: of one of the formats."""
        return any(map(expands, self.kinds))

    @property
    def load_expands(self) -> bool:
        """Whether that is the load warpgroup: where it does nothing else."""
        return self.expands and self.few_heads

    @property
    def pv_expands(self) -> bool:
        """Whether these are the PV warpgroups: where the load warpgroup has the softmax, which is on the path of S."""
        return self.expands and not self.few_heads

    @property
    def expanded_ahead(self) -> int:
        """Key tiles that PV has expanded beyond the one it multiplies; no more than loads are ahead of the softmax."""
        return 2

    @property
    def code_lines(self) -> int:
        """Lines of `LINE_BYTES` that a key's codes take in a stage, where each is a byte."""
        return max(-(-kind.codes.count // LINE_BYTES) for kind in self.kinds)

    @property
    def scale_bytes(self) -> int:
        """Of a key in a stage."""
        return max(scale_row(kind) for kind in self.kinds)

    @property
    def pv_issues_tma(self) -> bool:
        """Whether PV warpgroups issue TMA: all rows come by cp.async."""
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
        """Key tiles in shared memory: as many as Q leaves room for, but four where one more would be of no use.

        A tile that is expanded gets there a step later, so with few heads the fifth takes its place.
        """
        if self.load_expands:
            return 5
        return 3 if self.heads == WIDE else 4

    @property
    def mask_stages(self) -> int:
        """Key tiles whose masks are kept: more than stages."""
        return 4 if self.stages == 3 else 8

    @property
    def rope_stages(self) -> int:
        """With 32 and 64 heads: key tiles that loads are ahead of the softmax."""
        return self.stages if self.few_heads else self.stages - 1

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
