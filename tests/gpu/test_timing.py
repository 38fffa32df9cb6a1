"""The three timings on a GPU, for a kernel of known time, for one computation under two names, and under load."""

import functools
import statistics
from typing import Any

import pytest
import torch

from bench import ceilings, nvml
from bench.in_layer import Timing, prepare, small_kernel, time_calls, time_together
from cute_kernels import mla_fp8_decode
from cute_kernels.runtime.compile import compile_kernel
from tests.kit.mla_cases import sparse_case

pytestmark = pytest.mark.alone
SPINS = (40_000, 400_000, 8_000_000)
"""Clocks of a kernel that only waits: about 20 us, 200 us and 4 ms."""


def spin(clocks: int) -> Any:
    """A call of a kernel with one thread that ends after this number of SM clocks."""
    return functools.partial(torch.cuda._sleep, clocks)


@pytest.mark.parametrize("clocks", SPINS)
def test_a_kernel_of_known_clocks_has_that_time(clocks: int) -> None:
    """The time of a call in a layer includes its launch, of one to three microseconds."""
    found = time_calls([spin(clocks)] * 4)
    assert found.sm_mhz is not None and found.sm_mhz_rested is not None, "NVML says no clock"
    for us, mhz in ((found.us, found.sm_mhz_rested), (found.us_sustained, found.sm_mhz)):
        assert us is not None
        assert clocks / mhz * 0.99 < us < clocks / mhz * 1.01 + 4.0, found
    assert found.us_back_to_back == pytest.approx(found.us, rel=0.01, abs=2.5), "nothing overlaps"
    assert found.us_p10 <= found.us <= found.us_p90


def test_twice_the_clocks_take_twice_the_time() -> None:
    """Differences do not contain the time of a launch."""
    ways = {str(factor): prepare([spin(200_000 * factor)] * 4) for factor in (1, 2, 3)}
    found = time_together(ways)
    for name in ("us", "us_back_to_back", "us_sustained"):
        one, two, three = (getattr(timing, name) for timing in found.values())
        assert (three - two) / (two - one) == pytest.approx(1.0, abs=0.01), name


def test_a_kernel_as_small_as_those_subtracted_takes_a_launch() -> None:
    found = time_calls([small_kernel()] * 64)
    assert 0.5 < found.us < 5.0
    assert found.us == pytest.approx(found.us_back_to_back, rel=0.15), "of the same kernel, nothing is subtracted twice"


def matmul(size: int) -> Any:
    a, b = (torch.randn((size, size), device="cuda", dtype=torch.float32).bfloat16() for _ in range(2))
    return functools.partial(torch.mm, a, b, out=torch.empty_like(a))


def decode(batch: int) -> Any:
    case = sparse_case(batch=batch, h_q=128, topk=2048, num_slots=65_536, padded=False, device="cuda")
    out, lse = (buffer.tensor for buffer in case.outputs())
    return functools.partial(mla_fp8_decode, case.q, case.kv_cache, **case.options(), out=out, lse=lse)


SAME: dict[str, Any] = {
    "a spin": lambda: [spin(100_000)] * 8,
    "a matrix product that lowers the clock": lambda: [matmul(4096) for _ in range(4)],
    "a decode with overlapping launches": lambda: [decode(1) for _ in range(32)],
    "a large decode": lambda: [decode(128) for _ in range(2)],
}


def noise(ours: Timing, peer: Timing) -> dict[str, float]:
    """How much the card varies equal times in this run: half the spread of replays, and of ratios of a round."""
    replays = max((timing.us_p90 - timing.us_p10) / timing.us for timing in (ours, peer)) / 2
    ratios = [theirs / own for own, theirs in zip(ours.rounds_us, peer.rounds_us, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {"us": replays, "us_back_to_back": replays, "under load": (high - low) / 2}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_a_peer_that_is_the_same_kernel_has_the_ratio_1(make: Any) -> None:
    """The ratio is within 1%, or within what the card's clock does meanwhile. Under load it is that of a round.

    The clock of a hot H100 fell by a fifth between rounds of the matrix product, so that both medians were 4% apart.
    """
    calls = make()
    found = time_together({"ours": prepare(calls), "peer": prepare(calls)})
    ours, peer = found.values()
    ratios = {name: getattr(peer, name) / getattr(ours, name) for name in ("us", "us_back_to_back")}
    ratios["under load"] = peer.sustained_ratio(ours)
    for name, bound in noise(ours, peer).items():
        assert ratios[name] == pytest.approx(1.0, abs=max(0.01, bound)), (name, bound, found)


def test_load_lowers_the_clock_of_what_power_limits_and_counts_energy() -> None:
    found = time_together({"": prepare([matmul(8192) for _ in range(2)])}, power=True)[""]
    assert found.sm_mhz is not None and found.sm_mhz_rested is not None and found.us_sustained is not None
    assert found.sm_mhz < found.sm_mhz_rested and found.us_sustained > found.us
    assert found.watts is not None and 300 < found.watts < 800
    idle = time_together({"": prepare([spin(200_000)] * 8)}, power=True)[""]
    assert idle.watts is not None and idle.watts < 0.6 * found.watts
    assert idle.us_loaded_alone == pytest.approx(idle.us_sustained, rel=0.01), (
        "a spin is alone, and at one clock, in both"
    )


def test_nvml_knows_this_gpu() -> None:
    mhz, joules = nvml.sm_mhz(), nvml.joules()
    assert mhz is not None and 200 < mhz < 2200
    assert joules is not None and joules > 0


# --- ceilings


def test_the_plain_reader_reads_all_words() -> None:
    data = torch.rand(4096 * 1000 + 77, dtype=torch.float32, device="cuda")
    kernel = compile_kernel(ceilings.StreamSpec())
    ceilings.reader_call(data, kernel)
    with pytest.raises(ValueError, match="the words add up to"):
        ceilings.reader_call(data, lambda tiles, sums: kernel(tiles[:-1], sums))


def test_the_ceiling_is_the_best_way_to_read() -> None:
    found = ceilings.measure_ceilings()
    ways = {name: found[f"{name}_GBps"] for name in ceilings.WAYS}
    assert found["read_GBps"] == max(ways.values()), ways
    assert min(ways.values()) > 0.7 * found["read_GBps"], ways
