"""Compile-time facts of the GQA decode kernel."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from cute_kernels.gqa.codes import DTYPES, KINDS, ROTATED, SCALE_DTYPES, TYPES, WIDENED, Codes
from cute_kernels.gqa.layouts import (
    GROUP_SIZES,
    HEAD_DIMS,
    KERNEL_LAYOUTS,
    ROTATED_DIMS,
    X_PACKED,
    Which,
    is_kernel_layout,
    kernel_axes,
)

KEYS_PER_TEAM = 16  # keys of a team in a tile: rows of a matrix product
SCALES = {"none": 0, "per_head": 0, "per_token": 1, **{f"per_group_{size}": size for size in GROUP_SIZES}}
COLUMNS = (8, 16)
MAX_ACCUMULATORS = 2048  # columns x d of a warp: 64 registers of O; twice as many spill
D_SPLIT = {512: 4}
"""Warps that share keys, by head dimension: each has a part of d of K, V and O."""
MAX_RANGES = 256
CLUSTERS = (8, 4, 2)  # CTAs that may share a sequence; larger clusters are not portable
BOX_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

SMEM_PER_CTA = 232_448
BYTES_IN_FLIGHT = 131_072  # bytes in flight of an SM; more lengthens the queue of the memory and gains nothing


class TileShape(NamedTuple):
    """K or V of a tile in shared memory, in bytes.

    row       bytes of a token in one row segment: the part of a row that one TMA copy brings
    segments  row segments of a token
    pitch     bytes from a row of a segment to the next: TMA writes to multiples of 128 bytes, also for a single row
    size      bytes of K or V of a tile
    copied    bytes that the TMA copies bring
    """

    row: int
    segments: int
    pitch: int
    size: int
    copied: int


@dataclass(frozen=True)
class GqaDecodeSpec:
    """Compile-time facts of `kernels.decode.GqaDecodeKernel`; constructor argument and cache key.

    q_dtype    dtype of queries and output: "bfloat16" or "float16"
    kv_dtype   a widened type of `gqa.codes`, or q_dtype
    v_dtype    "uint8" if values are rotated 4-bit codes beside int8 or uint8 keys; None: kv_dtype
    d          head dimension: 64, 128, 256 or 512
    columns    query rows (tokens x heads of one KV head) of a CTA, which are columns of S^T and O^T: 8 or 16
    k_scales   "none"; "per_head": one, or one per head; "per_token": per token, or token and head; "per_group_32", ...
    v_scales   scales of V, with the same names
    scale_dtype dtype of both scales: "float16" or "float32"
    layout     `CacheLayout.kernel_layout`: "heads_first" (BNSH, paged_HND), "tokens_first" (BSNH, paged_NHD),
               "x_packed" (paged_vllm), or the axes of a plain layout of another order, such as "rohd"
    paged      whether there is a block table
    box_rows   tokens of one TMA copy: a tile's, or the page size if that is smaller
    alibi      whether there are ALiBi slopes
    softcap    whether scores are capped
    starts     whether sequences begin after their first token: left padding
    warps      consumer warps of a CTA, 4 or 8; each team of `d_split` has 16 keys of a tile, or 32
    key_blocks blocks of 16 keys of a tile that a team has: 1, or 2 for rotated keys
    cluster    1: CTAs take ranges of the line of tiles; 8, 4, 2: a cluster's CTAs share a sequence and KV head
    """

    q_dtype: str
    kv_dtype: str
    d: int
    columns: int
    k_scales: str = "none"
    v_scales: str = "none"
    scale_dtype: str = "float32"
    layout: str = "heads_first"
    paged: bool = False
    box_rows: int = 128
    alibi: bool = False
    softcap: bool = False
    starts: bool = False
    v_dtype: str | None = None
    warps: int = 8
    key_blocks: int = 1
    cluster: int = 1

    kernel: ClassVar[str] = "cute_kernels.gqa.kernels.decode:GqaDecodeKernel"

    def can_implement(self) -> list[str]:
        reasons = []
        if self.q_dtype not in DTYPES:
            reasons.append(f"q_dtype is {self.q_dtype}; it is {' or '.join(DTYPES)}")
        if self.kv_dtype not in (*WIDENED, self.q_dtype) and not self.rotated:
            reasons.append(f"kv_dtype is {self.kv_dtype}; it is {', '.join(WIDENED)} or that of q, {self.q_dtype}")
        if self.rotated and (
            (self.kv_dtype, self.v_dtype) not in KINDS.values()
            or self.v_scales != "per_token"
            or (self.k_rotated and self.k_scales != "per_token")
            or self.scale_dtype != "float32"
            or self.x_packed
        ):
            reasons.append(
                f"v_dtype is {self.v_dtype}; it goes with int8 or uint8 keys and float32 scales of tokens, not packed"
            )
        elif self.rotated and self.d not in ROTATED_DIMS:
            reasons.append(f"d is {self.d}; that of a rotated vector is one of {ROTATED_DIMS}")
        elif self.v_dtype is not None and not self.rotated:
            reasons.append(f"v_dtype is {self.v_dtype}; it is None or {', '.join(ROTATED)}")
        if self.d not in HEAD_DIMS:
            reasons.append(f"d is {self.d}; it is one of {HEAD_DIMS}")
        if self.columns not in COLUMNS or self.columns * self.d > MAX_ACCUMULATORS * self.d_split:
            reasons.append(
                f"{self.columns} columns of {self.d}; a warp has room for 8 or 16 of {MAX_ACCUMULATORS} values"
            )
        elif self.d in HEAD_DIMS and self.kv_dtype in TYPES and self.stages < 2:
            reasons.append(f"{self.columns} columns of {self.d}; shared memory has no room for two stages beside them")
        for name, scales in (("k_scales", self.k_scales), ("v_scales", self.v_scales)):
            if scales not in SCALES:
                reasons.append(f"{name} is {scales}; known are {', '.join(SCALES)}")
            elif scales != "none" and not self.bytes_cache:
                reasons.append(f"{name} is {scales}; a cache of 16-bit numbers has none")
        if self.scale_dtype not in SCALE_DTYPES:
            reasons.append(f"scale_dtype is {self.scale_dtype}; it is {' or '.join(SCALE_DTYPES)}")
        if not is_kernel_layout(self.layout):
            reasons.append(f"layout is {self.layout}; known are {KERNEL_LAYOUTS}")
        if self.warps not in (4, 8) or (self.warps == 4 and self.bytes_cache):
            reasons.append(f"{self.warps} consumer warps; there are 8, or 4 without scales of tokens")
        if self.key_blocks not in (1, 2) or (self.key_blocks == 2 and not self.k_rotated):
            reasons.append(f"key_blocks is {self.key_blocks}; it is 1, or 2 of rotated keys")
        if self.cluster not in (1, *CLUSTERS) or (self.cluster > 1 and self.warps != 8):
            reasons.append(f"cluster is {self.cluster} with {self.warps} warps; it is 1, or one of {CLUSTERS} with 8")
        if self.box_rows not in BOX_ROWS or self.box_rows > self.keys_per_tile:
            reasons.append(f"box_rows is {self.box_rows}; it is a power of two up to {self.keys_per_tile}")
        elif self.box_rows < self.keys_per_tile and not self.paged:
            reasons.append(f"box_rows is {self.box_rows}; without pages it is {self.keys_per_tile}")
        elif self.rotated and self.box_rows > 1 and self.box_rows * self.tile("v").row < 128:
            reasons.append(f"box_rows is {self.box_rows}; TMA writes to multiples of 128 bytes")
        if self.x_packed and (not self.paged or not X_PACKED.accepts_page_size(self.box_rows)):
            sizes = X_PACKED.accepted_page_sizes
            reasons.append(f"layout is {self.layout} with box_rows {self.box_rows}; its page size is {sizes}")
        return reasons

    # ---- the layout of the caches

    @property
    def x_packed(self) -> bool:
        """Whether keys come in chunks of 16 bytes, and values transposed."""
        return self.layout == X_PACKED.kernel_layout

    @property
    def cache_axes(self) -> str:
        """Axes of k_cache, outermost first: o sequences or pages, r tokens, h heads, d (c, x if x-packed)."""
        return kernel_axes(self.layout)

    # ---- types of the products' operands

    @property
    def codes(self) -> Codes:
        """The type of the cache; of K if V has another type."""
        return TYPES[self.kv_dtype]

    @property
    def v_codes(self) -> Codes:
        """The type of V."""
        return ROTATED.get(self.v_dtype or "", self.codes)

    @property
    def rotated(self) -> bool:
        """Whether values are codes of rotated vectors, with zero points."""
        return self.v_dtype in ROTATED

    @property
    def k_rotated(self) -> bool:
        """Whether keys are codes of rotated vectors, with zero points."""
        return self.kv_dtype in ROTATED

    @property
    def bytes_cache(self) -> bool:
        """Whether the cache holds bytes, which are widened in registers."""
        return self.kv_dtype in WIDENED or self.k_rotated

    @property
    def k_operand(self) -> str:
        """Type of Q in QK: float16 holds every widened number exactly, and Q after a power of two."""
        return "float16" if self.bytes_cache else self.q_dtype

    @property
    def q_terms(self) -> int:
        """Numbers of `k_operand` that add up to one of Q: a rotated one in 11 bits would put scores off by 1e-3."""
        return 2 if self.k_rotated else 1

    @property
    def q_values(self) -> int:
        """Numbers of `k_operand` in a block of Q; with rotation the float32 sum of each column follows them."""
        return self.q_terms * self.columns * self.d + (2 * self.columns if self.k_rotated else 0)

    @property
    def v_operand(self) -> str:
        """Type of P in PV. P times a scale of any size needs the exponents of bfloat16."""
        if not self.bytes_cache:
            return self.q_dtype
        return "float16" if self.v_scales in ("none", "per_head") else "bfloat16"

    def scale_groups(self, scales: str) -> int:
        """Returns the scales of a token that multiply S or P: 0 if a scale covers the whole head."""
        size = SCALES[scales]
        return self.d // size if size > 1 else size

    # ---- the warps of a CTA

    @property
    def d_split(self) -> int:
        """Warps of a team: each has one of this many parts of d."""
        return D_SPLIT.get(self.d, 1)

    @property
    def pv_is_late(self) -> bool:
        """Whether a warp adds the values of a tile together with the scores of the next one.

        Two chains of dependent instructions then fill each other's gaps. They need registers.
        """
        return self.key_blocks == 2

    @property
    def teams(self) -> int:
        """Teams of consumer warps, each of which has 16 keys of a tile."""
        return self.warps // self.d_split

    # ---- shared memory, in bytes

    @property
    def itemsize(self) -> int:
        """Bytes of a cache element."""
        return self.codes.itemsize

    @property
    def keys_per_tile(self) -> int:
        """Keys of a tile, 16 or 32 for each team of consumer warps."""
        return KEYS_PER_TEAM * self.teams * self.key_blocks

    def tile(self, which: Which) -> TileShape:
        """Returns the shape of K or V of a tile."""
        codes = self.codes if which == "k" else self.v_codes
        token = self.d * codes.itemsize // codes.values
        row = min(token, 128)
        pitch = 128 if self.box_rows == 1 else row
        size = self.keys_per_tile * (token // row) * pitch
        return TileShape(row, token // row, pitch, size, self.keys_per_tile * token)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage, K and V together."""
        return self.tile("k").size + self.tile("v").size

    @property
    def warp_o_stride(self) -> int:
        """float32 values from a column of a team's O to the next: d + 4, so that stores spread over the banks."""
        return self.d + 4

    @property
    def s_part_values(self) -> int:
        """float32 values of S that the warps of teams exchange: two tiles of them, since a fast warp is one ahead."""
        return 2 * self.warps * KEYS_PER_TEAM * self.columns if self.d_split > 1 else 0

    @property
    def fixed_bytes(self) -> int:
        """Upper bound of the bytes besides the stages: Q twice, O, row_max and row_sum of the teams, barriers."""
        o_bytes = self.teams * self.columns * self.warp_o_stride * 4
        return 2 * self.q_values * 2 + o_bytes + 4 * self.s_part_values + 3072

    @property
    def scale_warps(self) -> int:
        """Warps that load scales of tokens: the rest of the load warp's warpgroup, or one for K and one for V.

        Warps that take turns must not outnumber the stages, and each takes every third (or second) tile across ranges.
        Otherwise a warp could reach a stage that is two phases behind, which a parity wait cannot detect.
        """
        if self.scale_warps_take_turns:
            return min(3, self.stages) if self.key_scales > 0 else 0
        return 2

    @property
    def scale_warps_take_turns(self) -> bool:
        """Whether a scale warp has all scales of a tile: a lane has registers for 8 scales of a key."""
        return self.key_scales <= 8

    @property
    def scale_writers(self) -> int:
        """Scale warps that fill one stage."""
        return min(self.scale_warps, 1) if self.scale_warps_take_turns else self.scale_warps

    @property
    def key_scales(self) -> int:
        """Number of scales of tokens and groups that a key has, of K and of V."""
        return self.scale_groups(self.k_scales) + self.scale_groups(self.v_scales)

    @property
    def scale_values(self) -> int:
        """Number of float32 scales in a stage."""
        return self.keys_per_tile * self.key_scales

    @property
    def page_words(self) -> int:
        """32-bit words of a stage with a bit for each TMA copy, which says whether its page exists."""
        return max(self.keys_per_tile // self.box_rows // 32, 1)

    @property
    def stages(self) -> int:
        """Number of stages: as many as fit, up to BYTES_IN_FLIGHT."""
        stage = self.stage_bytes + 4 * (self.scale_values + self.page_words)
        return min((SMEM_PER_CTA - self.fixed_bytes) // stage, max(-(-BYTES_IN_FLIGHT // self.stage_bytes), 2))

    @property
    def registers(self) -> int:
        """Registers of a thread at launch."""
        return 255 if self.warps == 4 else 168

    @property
    def expected(self) -> dict[str, Any]:
        return {"registers": self.registers, "instructions": ("HMMA.16816", "LDSM.16", "UTMALDG", "MOVM.16")}


def shipped_specs() -> list[GqaDecodeSpec]:
    """Returns the benchmark's variants, and one of each kind of code; others are compiled at their first call."""
    bf16, fp16 = DTYPES
    int8, fp8 = WIDENED[:2]
    head = GqaDecodeSpec(bf16, int8, 128, 8, k_scales="per_head", v_scales="per_head")
    token = replace(head, k_scales="per_token", v_scales="per_token", scale_dtype="float16")
    group = replace(token, k_scales="per_group_32", v_scales="per_group_32")
    four_bits = replace(token, layout="tokens_first", paged=True, box_rows=64, scale_dtype="float32", v_dtype="uint8")
    plain = GqaDecodeSpec(bf16, bf16, 128, 8)
    return [
        head,
        token,
        *(replace(token, cluster=cluster) for cluster in CLUSTERS),
        replace(token, layout="tokens_first", paged=True, box_rows=64),
        replace(head, layout="tokens_first", paged=True, box_rows=16),
        replace(token, columns=16),
        replace(head, q_dtype=fp16, columns=16, alibi=True, softcap=True),
        group,
        replace(head, layout="x_packed", paged=True, box_rows=8),
        replace(token, q_dtype=fp16, kv_dtype=fp8, d=256, layout="x_packed", paged=True, box_rows=16),
        replace(head, kv_dtype=fp8),
        four_bits,
        replace(four_bits, kv_dtype="uint8", key_blocks=2),
        plain,
        replace(plain, d=64, columns=16, layout="tokens_first", paged=True, box_rows=1),
        GqaDecodeSpec(fp16, fp16, 256, 8, layout="x_packed", paged=True, box_rows=32, warps=4),
        replace(token, d=512, layout="tokens_first", paged=True, box_rows=32, scale_dtype="float32"),
        replace(token, d=512, columns=16, cluster=CLUSTERS[0], scale_dtype="float32", box_rows=32),
        replace(head, d=512, kv_dtype=fp8, layout="x_packed", paged=True, box_rows=16),
        GqaDecodeSpec(bf16, bf16, 512, 8, layout="tokens_first", paged=True, box_rows=32),
    ]
