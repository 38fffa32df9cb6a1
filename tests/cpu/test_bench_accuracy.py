"""The table of accuracy and the probe of the FP8 accumulator, on arithmetic that is known."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import accumulator, accuracy
from bench.accumulator import probe
from tests.kit.compare import emulate_bf16_decode


def sums_with(bits: int, *, of_products: int | None = None, rounds: bool = False, guard: int = 0) -> accumulator.Sums:
    """An accumulator that cuts each product, and itself, so many bits below the largest number of an instruction."""

    def cut(x: torch.Tensor, exponent: torch.Tensor, keep: int) -> torch.Tensor:
        grid = torch.exp2(exponent - keep)
        return (torch.round(x / grid) if rounds else torch.trunc(x / grid)) * grid

    def sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        acc = torch.zeros(64, 64, dtype=torch.float64)
        for first in range(0, 128, 32):
            parts = a[:, None, first : first + 32].double() * b[None, :, first : first + 32].double()
            largest = torch.maximum(parts.abs().amax(-1), acc.abs()).clamp_min(2.0**-60)
            exponent = torch.floor(torch.log2(largest))
            keep = bits if of_products is None else of_products
            total = cut(parts, exponent[..., None], keep + guard).sum(-1) + cut(acc, exponent, bits + guard)
            acc = cut(total, torch.floor(torch.log2(total.abs().clamp_min(2.0**-60))), bits)
        return acc.float()

    return sums


@pytest.mark.parametrize("bits", [12, 13, 14])
def test_the_probe_finds_the_bits_that_are_kept(bits: int) -> None:
    found = probe(sums_with(bits))
    assert found == {
        "bits_same": bits,
        "bits_after": bits,
        "bits_before": bits,
        "positive": "truncated",
        "negative": "truncated",
        "lost_together": 0.0,
    }


def test_the_probe_tells_rounding_and_guard_bits() -> None:
    assert probe(sums_with(13, rounds=True))["positive"] == "rounded"
    assert probe(sums_with(13, guard=3))["lost_together"] == 15.0
    found = probe(sums_with(14, of_products=12))
    assert (found["bits_same"], found["bits_after"], found["bits_before"]) == (12, 12, 14)


def test_an_exact_accumulator_keeps_all_that_can_be_asked() -> None:
    found = probe(lambda a, b: a.double() @ b.double().T)
    assert found["bits_same"] == found["bits_after"] == 32


def test_a_kernel_that_is_wrong_says_nothing_of_bits() -> None:
    found = probe(lambda a, b: sums_with(13)(a, b) + torch.eye(64))
    assert found == {"problem": "64 of 4096 sums of small integers are wrong"}


def test_codes_are_exact() -> None:
    assert accumulator._codes(torch.tensor([448.0, 2.0**-9])).tolist() == [0x7E, 1]
    with pytest.raises(ValueError, match="does not hold"):
        accumulator._codes(torch.tensor([449.0]))


# --- the table


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BATCH": 2, "HEADS": 4, "TOPK": 64}.items():
        monkeypatch.setattr(accuracy, name, value)


@pytest.mark.parametrize("name", accuracy.INPUTS)
@pytest.mark.usefixtures("small")
def test_inputs_are_what_they_are_called(name: str) -> None:
    cases = {scales: accuracy.INPUTS[name](scales, device="cpu") for scales in accuracy.SCALES}
    for case in cases.values():
        found = accuracy.errors(case, "no peer")
        assert set(found) == {"exact", accuracy.BF16}
        assert accuracy.shortcomings(found) == []
        assert found["exact"]["out"] < 4e-3 and found["exact"]["lse"] < 1e-5
    if name != f"scores x {accuracy.SHARP:g}":
        assert accuracy.errors(cases["power_of_two"], "")[accuracy.BF16]["lse"] < 1e-4
    if name == "quant tiles of q 2^20 apart":
        tiles = cases["arbitrary"].q[..., :512].unflatten(-1, (4, 128)).float().abs().amax((0, 1, 2, 4))
        assert (tiles[0] / tiles[1]).log2() == pytest.approx(20, abs=1)


@pytest.mark.usefixtures("small")
def test_the_peer_is_asked_with_its_own_arguments() -> None:
    case = accuracy.INPUTS["N(0,1)"]("arbitrary", device="cpu")

    def flash_mla_with_kvcache(*, indices: torch.Tensor, k_cache: torch.Tensor, **others: Any) -> Any:
        assert k_cache.dtype == torch.float8_e4m3fn and k_cache.dim() == 4 and others["is_fp8_kvcache"]
        out, lse = emulate_bf16_decode(**case.arguments())
        return out, lse.transpose(1, 2)

    peer: Any = SimpleNamespace(
        get_mla_metadata=lambda: (object(), None), flash_mla_with_kvcache=flash_mla_with_kvcache
    )
    found = accuracy.errors(case, peer)
    assert found[accuracy.FLASH_MLA] == found[accuracy.BF16]
    peer.flash_mla_with_kvcache = lambda **others: 1 / 0
    assert accuracy.errors(case, peer)[accuracy.FLASH_MLA] == {"failed": "ZeroDivisionError: division by zero"}


def figures(out: float, lse: float) -> dict[str, float]:
    return {"out": out, "lse": lse, "lse_rms": lse / 3, "lse_size": 10.0}


WORSE: dict[str, tuple[dict[str, Any], str]] = {
    "exact": ({"exact": figures(1e-3, 4e-5)}, "exact scores: log-sum-exp off by 4.0e-05, needs 3.0e-05"),
    "failed": ({"exact": {"failed": "ValueError: no"}}, "exact scores: ValueError: no"),
}


@pytest.mark.parametrize(("changes", "reason"), WORSE.values(), ids=WORSE)
def test_what_is_less_accurate_than_promised_is_said(changes: dict[str, Any], reason: str) -> None:
    right = {"exact": figures(1e-3, 1e-6), accuracy.BF16: figures(3e-3, 9e-4)}
    assert accuracy.shortcomings(right) == []
    (said,) = accuracy.shortcomings({**right, **changes})
    assert said.startswith(reason)


def test_a_run_returns_both_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "INPUTS", {"N(0,1)": lambda scales: SimpleNamespace()})
    wrong = {"exact": figures(1e-3, 4e-5), accuracy.BF16: figures(3e-3, 9e-4)}
    monkeypatch.setattr(accuracy, "errors", lambda case, peer: wrong)
    monkeypatch.setattr(accumulator, "on_card", functools.partial(sums_with, 13))
    found, problems = accuracy.measure()
    assert [row["scales"] for row in found["accuracy"]] == list(accuracy.SCALES)
    assert found["accumulator"]["bits_same"] == 13
    assert problems == [
        f"accuracy, N(0,1), {scales}: exact scores: log-sum-exp off by 4.0e-05, needs 3.0e-05"
        for scales in accuracy.SCALES
    ]
