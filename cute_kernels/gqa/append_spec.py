"""Compile-time facts of the append kernel of INT8, FP8 and 4-bit caches."""

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.gqa.codes import DTYPES, INT8, KINDS, ROTATED_KINDS, SCALE_DTYPES, TYPES
from cute_kernels.gqa.layouts import GROUP_SIZES, HEAD_DIMS, ROTATED_DIMS, ScaleKind

WARP = 32
VALUES = 16  # values of a lane's piece of a row: two 16-byte loads, one 16-byte store
MAX_HELD = 4  # pieces of K, and as many of V, that a lane keeps in registers: 16 registers for each pair
GIVEN, PER_TOKEN, PER_TOKEN_HEAD = "given", "per_token", "per_token_head"
GROUPS = {ScaleKind("per_group", size).name: size for size in GROUP_SIZES}
SCALES = (GIVEN, PER_TOKEN, PER_TOKEN_HEAD, *GROUPS)


@dataclass(frozen=True)
class KvAppendSpec:
    """Compile-time facts of :class:`cute_kernels.gqa.kernels.append.KvAppendKernel`: constructor argument, cache key.

    dtype        of the new keys and values: "bfloat16" or "float16"
    d            head dimension
    k_scale      values that share a scale: "given" (per_tensor and per_head: read), "per_token", "per_token_head",
                 "per_group_32" or "per_group_64"
    v_scale      values of V that share a scale; names as for k_scale
    scale_dtype  dtype of both scales: "float16" or "float32"
    kind         the kind of `kv_append`
    x_packed     the layout is paged_vllm. One kernel serves all others through their strides.
    team         lanes that share a unit of work: a token if either scale is per_token, else a head of a token
    held         pieces of 16 values that a lane holds of a unit; 0: too many to hold, so they are read twice
    warps        warps of a CTA
    """

    dtype: str
    d: int
    k_scale: str
    v_scale: str
    scale_dtype: str
    kind: str = INT8
    x_packed: bool = False
    team: int = 8
    held: int = 1
    warps: int = 8

    kernel: ClassVar[str] = "cute_kernels.gqa.kernels.append:KvAppendKernel"

    @classmethod
    def for_launch(
        cls,
        *,
        dtype: str,
        d: int,
        h_kv: int,
        k_scale: str,
        v_scale: str,
        scale_dtype: str,
        kind: str = INT8,
        x_packed: bool = False,
    ) -> "KvAppendSpec":
        """Chooses the variant for a cache of `h_kv` heads: the smallest team that holds a unit in registers, if any."""
        pieces = d // VALUES
        team, held = pieces, 1
        if PER_TOKEN in (k_scale, v_scale):
            pieces *= h_kv
            team = min(WARP, 1 << (pieces - 1).bit_length())
            held = -(-pieces // team)
        return cls(dtype, d, k_scale, v_scale, scale_dtype, kind, x_packed, team, held if held <= MAX_HELD else 0)

    @property
    def codes(self) -> tuple[str, str]:
        """The types of the stored K and V."""
        return KINDS[self.kind]

    @property
    def by_token(self) -> bool:
        """Whether a unit of work is a token with all its heads."""
        return PER_TOKEN in (self.k_scale, self.v_scale)

    def can_implement(self) -> list[str]:
        reasons = []
        for name, value, known in (
            ("dtype", self.dtype, DTYPES),
            ("d", self.d, HEAD_DIMS),
            ("k_scale", self.k_scale, SCALES),
            ("v_scale", self.v_scale, SCALES),
            ("scale_dtype", self.scale_dtype, SCALE_DTYPES),
            ("kind", self.kind, tuple(KINDS)),
        ):
            if value not in known:
                reasons.append(f"{name} is {value!r}; known are {known}")
        if not 1 <= self.warps <= 32:
            reasons.append(f"warps is {self.warps}; a CTA has 1 to 32")
        scales = (self.k_scale, self.v_scale, self.scale_dtype)
        if self.kind != INT8 and scales != (PER_TOKEN_HEAD, PER_TOKEN_HEAD, "float32"):
            reasons.append(f"kind is {self.kind}; it has float32 scales per token and head")
        if self.kind in ROTATED_KINDS and self.x_packed:
            reasons.append(f"kind is {self.kind}; it needs a layout whose tokens are rows")
        if self.kind in ROTATED_KINDS and self.d not in ROTATED_DIMS:
            reasons.append(f"kind is {self.kind} with d {self.d}; that of a rotated vector is one of {ROTATED_DIMS}")
        if reasons:
            return reasons
        pieces = self.d // VALUES
        if self.team not in (4, 8, 16, 32) or self.team < pieces:
            reasons.append(f"team is {self.team}; {pieces} lanes share a head, and a warp has whole teams")
        if not 0 <= self.held <= MAX_HELD:
            reasons.append(f"held is {self.held}; the registers of a lane hold 1 to {MAX_HELD} pieces")
        if not self.by_token and (self.team, self.held) != (pieces, 1):
            reasons.append(f"team is {self.team} and held {self.held}; a head is {pieces} lanes of one piece")
        return reasons

    @property
    def expected(self) -> dict[str, Any]:
        keys = TYPES[self.codes[0]]
        registers = 64 if keys.rotated else {0: 48, 1: 48, 2: 64, 3: 80, 4: 112}[self.held]
        store = f"STG.E.{8 * VALUES // keys.values}"
        return {"registers": registers, "instructions": ("LDG.E.128", store, keys.conversion)}


def sharing(kind: ScaleKind) -> str:
    """Returns the spec's name of a granularity."""
    return GIVEN if kind.granularity in ("per_tensor", "per_head") else kind.name


def shipped_specs() -> list[KvAppendSpec]:
    """Returns the variants that the tests hold to their budget, one of each kind; a call may ask for any other."""
    bf16, fp16 = DTYPES
    token_head: dict[str, Any] = {"k_scale": PER_TOKEN_HEAD, "v_scale": PER_TOKEN_HEAD, "scale_dtype": "float32"}
    return (
        [
            KvAppendSpec.for_launch(dtype=bf16, d=128, h_kv=8, k_scale=kind, v_scale=kind, scale_dtype=scale_dtype)
            for kind, scale_dtype in ((PER_TOKEN_HEAD, "float32"), (GIVEN, "float32"), (PER_TOKEN, "float16"))
        ]
        + [
            KvAppendSpec.for_launch(dtype=bf16, d=128, h_kv=8, **token_head, kind=kind)
            for kind in KINDS
            if kind != INT8
        ]
        + [
            KvAppendSpec.for_launch(
                dtype=fp16, d=256, h_kv=64, k_scale=PER_TOKEN, v_scale=PER_TOKEN, scale_dtype="float32"
            ),
            KvAppendSpec.for_launch(
                dtype=bf16, d=64, h_kv=8, k_scale="per_group_32", v_scale=PER_TOKEN_HEAD, scale_dtype="float16"
            ),
            KvAppendSpec.for_launch(
                dtype=fp16, d=128, h_kv=8, k_scale=GIVEN, v_scale="per_group_64", scale_dtype="float16", x_packed=True
            ),
        ]
    )
