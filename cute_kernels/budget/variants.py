"""The demands of each kernel variant on each unit, for one token.

MLA: cycles are per token and CTA of 64 query heads, in tiles of 64 tokens. GQA: per token and KV head.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from cute_kernels.budget.rates import Rates
from cute_kernels.gqa.codes import CODES
from cute_kernels.gqa.spec import SCALES
from cute_kernels.mla.spec import TOKENS_PER_TILE, WIDE
from fp8_mla.formats import V3_2

NOPE_DIM, ROPE_DIM, QK_DIM = V3_2.nope_dim, V3_2.rope_dim, V3_2.d_qk
TOKEN_BYTES = V3_2.token_bytes
OPERAND_BYTES = 2 * QK_DIM  # bytes of a token as bf16


class Unit(enum.Enum):
    """Units that a token takes time of."""

    TENSOR = "tensor core"
    POWER = "tensor core, sustained"  # the same products at the clock that a long matrix product sustains
    SMEM = "shared memory"
    CONVERSION = "conversion"
    GATHER = "gather"  # waiting for rows that were requested too late
    DSM = "DSM"
    HBM = "HBM"
    LATENCY = "latency"  # latency of a chain in which nothing overlaps; calibrated, not derived

    def __str__(self) -> str:
        return self.value


class Exchange(enum.Enum):
    """The data that the two CTAs of a cluster send each other for every second token."""

    NOTHING = "nothing"
    BF16_ASYNC = "bf16, st.async"
    BF16_BULK = "bf16, bulk copy"
    RAW_BULK = "raw bytes, bulk copy"


@dataclass(frozen=True)
class MlaVariant:
    """A way to build the MLA decoding kernel.

    name            name in tables
    exchange        NOTHING: no cluster, every CTA gathers and converts all tokens of its tiles
    rows_in_flight  rows that a CTA has requested and not yet received
    latency_cycles  cycles per token in which the tensor core waits because QK, softmax and PV of a tile follow one
                    another: calibrated. 0 if it never waits, which is a bound and not a forecast
    page_cycles     part of latency_cycles that dense keys save: TMA brings tiles that are ranges of a page
    cta_cycles      cycles of a CTA in addition to its tiles (first rows, Q, epilogue): calibrated
    start_cycles    cycles of a launch before Q and tiles: its start, and first rows that all CTAs request at once
    swap_ab         S^T = K Q^T: keys go from raw rows to operands in registers, for both products
    built           whether this package has the variant: the others are predictions
    heads           heads of a CTA
    """

    name: str
    exchange: Exchange = Exchange.NOTHING
    rows_in_flight: int = 32
    latency_cycles: float = 0.0
    page_cycles: float = 0.0
    cta_cycles: float = 0.0
    start_cycles: float = 0.0
    swap_ab: bool = False
    built: bool = False
    heads: int = WIDE

    @property
    def cluster(self) -> int:
        """Number of CTAs that share the rows of a tile."""
        return 1 if self.exchange is Exchange.NOTHING else 2

    @property
    def chains(self) -> tuple[tuple[Unit, ...], ...]:
        """Groups of units whose times add up, because one role uses them one after the other. Groups overlap."""
        # the producer's registers hold a row from its loads to its conversion, so the two do not overlap
        roles: tuple[tuple[Unit, ...], ...] = (Unit.TENSOR, Unit.LATENCY), (Unit.CONVERSION, Unit.GATHER)
        if self.swap_ab:  # rows are copied raw; the warpgroups that multiply convert them
            roles = (Unit.TENSOR, Unit.LATENCY), (Unit.CONVERSION,), (Unit.GATHER,)
        return (*roles, *((unit,) for unit in (Unit.POWER, Unit.SMEM, Unit.DSM, Unit.HBM)))

    def demands(self, rates: Rates, readers: int = 1) -> dict[Unit, float]:
        """Cycles per token of each unit.

        Args:
            rates: unit rates of the card.
            readers: CTAs that read the same row at about the same time: the first from HBM, the others from L2 or,
                in a cluster, from each other.
        """
        if readers < self.cluster:
            raise ValueError(f"readers: got {readers}; {self.name} shares rows between {self.cluster} CTAs")
        flops = self.heads * (QK_DIM + NOPE_DIM) * 2
        gathered = 1 / self.cluster
        converted = 1 if self.exchange is Exchange.RAW_BULK else gathered
        sent = {
            Exchange.NOTHING: 0.0,
            Exchange.BF16_ASYNC: OPERAND_BYTES / 2 / rates.dsm_async_bytes,
            Exchange.BF16_BULK: OPERAND_BYTES / 2 / rates.dsm_bulk_bytes,
            Exchange.RAW_BULK: TOKEN_BYTES / 2 / rates.dsm_bulk_bytes,
        }[self.exchange]
        return {
            Unit.TENSOR: rates.tensor_cycles(flops),
            Unit.POWER: rates.sustained_cycles(flops),
            Unit.SMEM: rates.smem_cycles(self._smem_bytes()),
            Unit.CONVERSION: self._conversion_cycles(rates) * converted,
            Unit.GATHER: rates.row_cycles / self.rows_in_flight * gathered,
            Unit.DSM: sent,
            Unit.HBM: rates.read_cycles(TOKEN_BYTES / readers),
            Unit.LATENCY: self.latency_cycles,
        }

    def _conversion_cycles(self, rates: Rates) -> float:
        """Clocks that convert a token's codes."""
        if not self.swap_ab:
            return rates.conversion_cycles(NOPE_DIM)
        return 2 * NOPE_DIM / 64  # for both products, pairs of e4m3 at 64 values a clock

    def _smem_bytes(self) -> float:
        """Bytes that a token moves through the port of shared memory."""
        if self.swap_ab:  # the row written; codes read for both products; Q and P read once for 64 keys or values
            read = 2 * NOPE_DIM + 2 * ROPE_DIM
            scores = 2 * 4 * self.heads  # float32, written by the warpgroups that multiply, read by the softmax
            return TOKEN_BYTES + read + 2 * self.heads * (QK_DIM + NOPE_DIM) / TOKENS_PER_TILE + scores
        # m64n64k16 with both operands in shared memory: 2 KB of Q and 2 KB of K, 36 times a tile
        qk = (2048 + 2048) * (QK_DIM // 16) / TOKENS_PER_TILE
        pv = 2 * NOPE_DIM  # each value once; P of this warpgroup's own tiles comes from registers
        p = 2 * 2 * WIDE  # P written for the other warpgroup, which reads it
        written = OPERAND_BYTES  # the converted token, whichever CTA converted it
        exchanged = {
            Exchange.NOTHING: 0.0,
            Exchange.BF16_ASYNC: 0.0,  # sent from registers
            Exchange.BF16_BULK: OPERAND_BYTES / 2,  # the copy engine reads what this CTA converted
            Exchange.RAW_BULK: 2.5 * TOKEN_BYTES,  # raw token written and read, its half read once more to be sent
        }[self.exchange]
        return qk + pv + p + written + exchanged


# `model.calibrate` gives the two numbers of each variant from batch 128, 128 heads, s_q 2, topk 2048 (4 waves of 32
# tiles) and s_q 4, topk 512 (8 waves of 8 tiles): 297.2 and 184.3 us without a cluster, and, in an earlier run, 380.4
# and 230.8 us with the crossover of values. START_CYCLES lies between what a launch of one wave needs (64 x 128 x 1,
# topk 2048) and what batch 4 needs.
LATENCY_CYCLES, CTA_CYCLES, START_CYCLES = 31.4, 11_123.0, 8_000.0
SWAP_AB = MlaVariant(
    "no cluster, keys made in registers",
    rows_in_flight=192,
    latency_cycles=LATENCY_CYCLES,
    page_cycles=1.5,
    cta_cycles=CTA_CYCLES,
    start_cycles=START_CYCLES,
    swap_ab=True,
    built=True,
)
TURNS = MlaVariant(
    "crossover of values, two stages of a tile in turns",
    latency_cycles=51.4,
    cta_cycles=13_387.4,
    built=True,
)
# No consumer waits here: this is what a kernel could reach, not what one has shown. The fixed part of a CTA is the
# built kernel's; 64 rows in flight need registers for four passes of 16, which the journal's version 3a had.
OVERLAPPED_32 = MlaVariant("no cluster, tiles overlapped, 32 rows in flight", cta_cycles=CTA_CYCLES)
OVERLAPPED = MlaVariant("no cluster, tiles overlapped, 64 rows in flight", rows_in_flight=64, cta_cycles=CTA_CYCLES)
CROSSOVER_ASYNC = MlaVariant("crossover of bf16 by st.async", Exchange.BF16_ASYNC, 64, cta_cycles=CTA_CYCLES)
CROSSOVER_BULK = MlaVariant("crossover of bf16 by bulk copy", Exchange.BF16_BULK, 64, cta_cycles=CTA_CYCLES)
CROSSOVER_RAW = MlaVariant("crossover of raw bytes by bulk copy", Exchange.RAW_BULK, 64, cta_cycles=CTA_CYCLES)

MLA_VARIANTS = (SWAP_AB, TURNS, OVERLAPPED_32, OVERLAPPED, CROSSOVER_ASYNC, CROSSOVER_BULK, CROSSOVER_RAW)
MLA_BUILT = SWAP_AB
"""The kernel of `mla_fp8_decode` with 33 heads and more. `TURNS` has to be asked for."""

MLA_HALF = replace(SWAP_AB, name="32 heads", heads=32, latency_cycles=37.4, page_cycles=5.3, cta_cycles=7_950.0)
"""The kernel for 17 to 32 heads, and for more over few keys. Three numbers fit three cases within 3%: 128 x 32 x 1 with
topk 2048 (65 us) and with 8192 dense keys (212 us), and 2 x 128 x 1 (13.7 us)."""

MLA_NARROW = replace(
    SWAP_AB, name="16 heads", heads=16, rows_in_flight=256, latency_cycles=39.0, page_cycles=8.8, cta_cycles=9_100.0
)
"""The kernel for fewer heads. `latency_cycles` fit 128 x 16 x 1 with topk 2048 (58 us); `page_cycles` are just enough
for HBM to bind with 8192 dense keys (176 us)."""


@dataclass(frozen=True)
class GqaVariant:
    """A cache that `gqa_decode` reads.

    kv_dtype     "int8", "float8_e4m3fn", "bfloat16" or "float16"
    scales       a key of `cute_kernels.gqa.spec.SCALES`, for K and V alike
    d            head dimension
    columns      query rows that a CTA multiplies at a time
    scale_bytes  bytes of a scale
    """

    kv_dtype: str = "int8"
    scales: str = "none"
    d: int = 128
    columns: int = 8
    scale_bytes: int = 2

    @property
    def name(self) -> str:
        """Name in tables."""
        scales = {
            "none": "no scales of tokens",
            "per_head": "scales of heads",
            "per_token": "scales of tokens and heads",
        }
        return f"{self.kv_dtype}, {scales.get(self.scales, f'scales of groups of {SCALES[self.scales]}')}"

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token's key and value in one head, scales included."""
        size = SCALES[self.scales]
        scales = self.d // size if size > 1 else size if self.scales == "per_token" else 0
        return 2 * (self.d * CODES[self.kv_dtype].itemsize + scales * self.scale_bytes)

    @property
    def chains(self) -> tuple[tuple[Unit, ...], ...]:
        """Every unit is a group of its own: eight warps with tiles of their own keep all units busy side by side."""
        return tuple((unit,) for unit in (Unit.TENSOR, Unit.SMEM, Unit.CONVERSION, Unit.HBM))

    def demands(self, rates: Rates, readers: int = 1) -> dict[Unit, float]:
        """Cycles per token and KV head of each unit; `readers` CTAs share a read from HBM."""
        values = 2 * self.d
        return {
            Unit.TENSOR: rates.tensor_cycles(2 * values * self.columns),
            # TMA writes the bytes and ldmatrix reads them
            Unit.SMEM: rates.smem_cycles(2 * self.bytes_per_token),
            Unit.CONVERSION: values * CODES[self.kv_dtype].clocks,
            Unit.HBM: rates.read_cycles(self.bytes_per_token / readers),
        }


GQA_VARIANTS = (
    GqaVariant(),
    GqaVariant(scales="per_token"),
    GqaVariant(scales="per_group_32"),
    GqaVariant("float8_e4m3fn"),
    GqaVariant("bfloat16"),
)
