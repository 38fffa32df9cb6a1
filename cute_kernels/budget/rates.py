"""How fast each unit of a card is, measured. Clocks and bytes are per SM unless a name says otherwise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rates:
    """Unit rates of one card. `math.inf` marks a unit that an estimate treats as free.

    card             name of the card
    sms              SMs of the card
    sm_mhz           SM clock while a decode kernel runs, MHz
    gemm_tflops      a long bf16 matrix product, whole card, TFLOP/s: the tensor core at the clock that it can sustain
    read_gbps        a stream that is only read, whole card, GB/s
    copy_gbps        a copy within the card, bytes read plus bytes written, GB/s
    tensor_flops     bf16 FLOP per clock that wgmma issues at most
    smem_bytes       bytes per clock through the port of shared memory, reads and writes together
    conversion       values per clock of each step from an fp8 code to a stored bf16 value; the steps add up
    dsm_async_bytes  bytes per clock that a CTA sends into its peer's shared memory by st.async, both sending
    dsm_bulk_bytes   bytes per clock that a CTA sends by bulk copies of 4 KB
    row_cycles       clocks from the loads of a random 656-byte row to its data, all SMs loading from HBM
    """

    card: str
    sms: int
    sm_mhz: float
    gemm_tflops: float
    read_gbps: float
    copy_gbps: float
    tensor_flops: float
    smem_bytes: float
    conversion: tuple[float, ...]
    dsm_async_bytes: float
    dsm_bulk_bytes: float
    row_cycles: float

    def __post_init__(self) -> None:
        wrong = [
            f"{field.name}: got {value!r}, needs a positive number"
            for field in dataclasses.fields(self)
            if field.name not in ("card", "conversion", "row_cycles")
            and not (isinstance(value := getattr(self, field.name), int | float) and value > 0)
        ]
        if not self.conversion or not all(rate > 0 for rate in self.conversion):
            wrong.append(f"conversion: got {self.conversion!r}, needs positive numbers")
        if not self.row_cycles >= 0:
            wrong.append(f"row_cycles: got {self.row_cycles!r}, needs a number of at least 0")
        if wrong:
            raise ValueError("; ".join(wrong))

    def measured(self, figures: Mapping[str, Any]) -> Rates:
        """Returns these rates with those in `figures` replaced, by field name.

        Raises:
            ValueError: a name is not a rate, or a value is not a rate's.
        """
        names = {field.name for field in dataclasses.fields(self)}
        unknown = sorted(set(figures) - names)
        if unknown:
            raise ValueError(f"figures: got {', '.join(unknown)}; known are {', '.join(sorted(names))}")
        values = dict(figures)
        if "conversion" in values:
            values["conversion"] = tuple(values["conversion"])
        return dataclasses.replace(self, **values)

    # ---- clocks of one SM

    def conversion_cycles(self, values: float) -> float:
        """Clocks to convert `values` fp8 codes."""
        return values * sum(1 / rate for rate in self.conversion)

    def tensor_cycles(self, flops: float) -> float:
        """Clocks of the tensor core at its full issue rate."""
        return flops / self.tensor_flops

    def sustained_cycles(self, flops: float) -> float:
        """Clocks of the tensor core at the power-limited rate of a long matrix product, in units of `sm_mhz`."""
        return flops * self.sm_mhz * self.sms / (self.gemm_tflops * 1e6)

    def read_cycles(self, nbytes: float) -> float:
        """Clocks to read from HBM while all SMs read."""
        return nbytes * self.sm_mhz * self.sms / (self.read_gbps * 1e3)

    def smem_cycles(self, nbytes: float) -> float:
        """Clocks of the port of shared memory for `nbytes`."""
        return nbytes / self.smem_bytes

    # ---- the whole card

    def us(self, cycles: float) -> float:
        """Microseconds of `cycles` SM clocks."""
        return cycles / self.sm_mhz

    def read_us(self, nbytes: float) -> float:
        """Microseconds to read `nbytes` with the whole card."""
        return nbytes / (self.read_gbps * 1e3)

    def copy_us(self, nbytes: float) -> float:
        """Microseconds to move `nbytes`, reads and writes counted, with the whole card."""
        return nbytes / (self.copy_gbps * 1e3)


# One H200, 132 SMs, driver 580. `scripts/run_h800_bench.sh` measures clock, product, reads and copies of any card;
# results/h200.jsonl has the ceilings of the card that it was recorded on: cards differ by 4%.
H200 = Rates(
    card="NVIDIA H200",
    sms=132,
    sm_mhz=1980,  # most cases of results/h200.jsonl ran at it; 1965 under light load
    gemm_tflops=782,  # 8192^3 through torch
    read_gbps=4323,  # torch.sum over 4 GiB
    copy_gbps=4277,  # device to device
    tensor_flops=4096,  # nominal: m64n64k16 in 32 clocks; loops of wgmma by two warpgroups reach 99% of it
    smem_bytes=128,  # nominal
    conversion=(512 / 21.4,),  # 21.4 clocks a token: fp8 -> f16 -> f32 -> bf16, x scale, st.shared, one warpgroup
    dsm_async_bytes=16.4,  # st.async of 16 bytes, whatever the number of CTAs
    dsm_bulk_bytes=19.2,  # bulk copies of 4 KB and more; 11.6 with copies of 1 KB
    # Gather and conversion by one warpgroup take 63.4 clocks a row with 32 rows in flight and 42.9 with 64: 22 of these
    # clocks do not depend on the number in flight (the conversion); 41 x 32 = 20.5 x 64 = 1312 are a row's latency.
    row_cycles=1312,
)

# The estimate for an H800 in the published description of FlashMLA's kernel: nominal tensor core, the four instructions
# of a conversion at their documented rates, everything else free.
PUBLISHED_H800 = Rates(
    card="H800, published estimate",
    sms=132,
    sm_mhz=1830,
    gemm_tflops=989,
    read_gbps=math.inf,
    copy_gbps=math.inf,
    tensor_flops=989e12 / 1830e6 / 132,
    smem_bytes=math.inf,
    conversion=(64, 64, 16, 256),  # fp8 -> half, half -> float32, float32 -> bf16, x scale
    dsm_async_bytes=math.inf,
    dsm_bulk_bytes=math.inf,
    row_cycles=0,
)
