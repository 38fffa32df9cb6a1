"""A timed graph must write what eager calls write: for MLA, its append and the merge, and the rule itself."""

from typing import Any

import pytest
import torch

import cute_kernels
from bench import mla as bench_mla
from bench import records, timing
from bench.mla import Caches, DecodeBench
from bench.timing import Expected, WrongReplay
from cute_kernels.mla.op import mla_fp8_decode
from fp8_mla.formats import FORMATS
from tests.kit.replays import fake_time_graph

CEILINGS = {"read_GBps": 4000.0, "copy_GBps": 4000.0}
SMALL = {
    "sparse": DecodeBench("sparse", 2, 128, 1, 40, must={"us": 2.0}),
    "sparse, ragged": DecodeBench("sparse", 2, 16, 2, 40, ragged=True, sustained=True, power=True),
    "dense": DecodeBench("dense", 2, 16, 1, 128, host=True),
}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Benchmarks of MLA whose GPU is the CPU."""
    monkeypatch.setattr(bench_mla, "CONTEXT", 64)
    monkeypatch.setattr(bench_mla, "SPARSE_CONTEXTS", 4)
    monkeypatch.setattr(bench_mla, "APPEND_TOKENS", 128)
    monkeypatch.setattr(bench_mla, "sets_to_outgrow_l2", lambda bytes_moved: 3)
    monkeypatch.setattr(bench_mla, "host_times", lambda call: {"host_us": 7.5 if call() is not NotImplemented else 0.0})
    monkeypatch.setattr(bench_mla, "_cycles_per_token", lambda bench, us, mhz: 1.0)
    return fake_time_graph(monkeypatch, bench_mla)


def run(bench: DecodeBench) -> dict[str, Any]:
    return bench_mla.run_decode(bench, Caches(bench.cache_tokens, "cpu"), "no peer", CEILINGS)


@pytest.mark.parametrize("bench", SMALL.values(), ids=SMALL)
def test_all_sets_of_all_graphs_are_compared(bench: DecodeBench, timed: list[int]) -> None:
    entry = run(bench)
    assert "failed" not in entry and entry["sets_compared"] == 3
    assert timed == [3] * (1 + 3 * (bench.h_q > 64))
    under_load = (2.2, 1700) if bench.sustained else (None, None)
    assert (entry["us_back_to_back"], entry.get("us_sustained"), entry.get("sm_mhz")) == (1.8, *under_load)
    assert ("watts" in entry, "exchange_us" in entry) == (bench.power, bench.h_q > 64)
    assert records._case_problems(entry) == []


WRONG = {
    "timed": (5, "after the timed replays: set 1"),
    "over poison": (9, "a replay over poison: set 2"),
    "an exchange": (24, "after the timed replays: set 2"),
}


@pytest.mark.parametrize(("first_wrong", "reason"), WRONG.values(), ids=WRONG)
def test_one_bit_of_one_set_costs_the_speed(
    first_wrong: int, reason: str, timed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls: one is checked, two more are expected, three captured and three replayed; then the exchanges."""
    made = []

    def wrong(*arguments: Any, **options: Any) -> Any:
        out, lse = mla_fp8_decode(*arguments, **options)
        made.append(out)
        if len(made) == first_wrong:
            out.view(torch.int16).view(-1)[7] ^= 1
        return out, lse

    monkeypatch.setattr(cute_kernels, "mla_fp8_decode", wrong, raising=False)
    entry = run(SMALL["sparse"])
    assert f"{reason}, out: 1 of 131072 elements differ" in entry["failed"] and entry["met"] is False
    assert not set(entry) & {*records.SPEED_KEYS, "peers", "exchange_us", "scores_us", "sets_compared"}


@pytest.mark.parametrize("case", ["v3.2", "v4", "v4.1_fp4", "merge_states"])
@pytest.mark.parametrize("wrong", [False, True])
def test_append_and_merge_are_compared(
    case: str, wrong: bool, timed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = case if case == "merge_states" else "mla_fp8_append"
    right, made = getattr(cute_kernels, name), []

    def op(*arguments: Any, **options: Any) -> Any:
        results = right(*arguments, **options)
        made.append(arguments)
        if wrong and len(made) == 6:  # one is checked, two are expected, three are captured
            (arguments[1] if results is None else results[0]).view(torch.uint8).view(-1)[-1] ^= 1
        return results

    monkeypatch.setattr(cute_kernels, name, op, raising=False)
    if name == "merge_states":
        monkeypatch.setattr(bench_mla, "V_DIM", 8)
        entry = bench_mla.run_merge(CEILINGS, "cpu")
    else:
        entry = bench_mla.run_append(CEILINGS, "cpu", FORMATS[case])
        assert entry.get("cache_format", "v3.2") == case
    if wrong:
        assert "after the timed replays: set 2" in entry["failed"] and "us" not in entry
    else:
        assert entry["sets_compared"] == 3 and timed == [3]


# --- the rule


def tensors() -> tuple[torch.Tensor, ...]:
    return torch.tensor([1.0, -2.0]).bfloat16(), torch.tensor([0.5], dtype=torch.float32), torch.arange(6).byte()


NAMES = ("out", "lse", "cache")


def problems_of(got: Any, **options: Any) -> list[str]:
    return Expected.of(NAMES, [tensors], **options).problems([got])


def test_the_same_bits_in_other_memory_are_right() -> None:
    assert problems_of(tensors()) == []
    nan = torch.tensor([float("nan")])
    assert Expected.of(["out"], [nan.clone]).problems([nan]) == [], "of the same bits"
    assert Expected.of(["out"], [lambda: torch.zeros(0)]).problems([torch.zeros(0)]) == []


def test_whatever_differs_is_named() -> None:
    out, lse, cache = tensors()
    assert problems_of((out, -lse, cache)) == ["set 0, lse: 1 of 1 elements differ from those of an eager call"]
    zeros = Expected.of(["out"], [lambda: torch.zeros(3)])
    assert zeros.problems([-torch.zeros(3)]) == ["set 0, out: 3 of 3 elements differ from those of an eager call"]
    other = cache.clone()
    other[3] = 9
    assert "set 0, cache: 1 of 6" in problems_of((out, lse, other))[0]
    assert "torch.float16 (2,), not torch.bfloat16" in problems_of((out.half(), lse, cache))[0]
    assert problems_of((out, lse)) == ["set 0: 2 results, 3 expected, 3 names"]
    expected = Expected.of(NAMES, [tensors, tensors])
    assert expected.problems([tensors()]) == ["1 calls, 2 expected results"]
    assert "same memory" in expected.problems([expected.results[0], tensors()])[0]


def test_a_sum_in_any_order_is_held_to_a_limit() -> None:
    got = (torch.tensor([1.0078125, -2.0]).bfloat16(), *tensors()[1:])
    assert problems_of(got, limits={"out": 0.01}) == []
    assert "out: relative error 0.0035, needs 0.003" in problems_of(got, limits={"out": 0.003})[0]
    nan = (torch.tensor([1.0, float("nan")]).bfloat16(), *tensors()[1:])
    assert "relative error nan" in problems_of(nan, limits={"out": 0.01})[0]


def test_what_was_checked_is_expected_of_the_first_set() -> None:
    checked = [t + 1 for t in tensors()]
    expected = Expected.of(NAMES, [tensors], checked=checked)
    checked[0].zero_()
    assert expected.problems([[t + 1 for t in tensors()], tensors()]) == [], "a copy, for the memory is written again"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64])
def test_poison_is_no_number(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, 6).to(dtype)[:, 1:4]  # not contiguous
    timing.poison(tensor)
    assert tensor.float().isnan().all() if dtype.is_floating_point else (tensor == -1).all()


def test_a_replay_that_writes_nothing_or_too_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    expected = Expected.of(NAMES, [tensors])

    def right() -> None:
        for old, new in zip(results, tensors(), strict=True):
            old.copy_(new)

    results = tensors()
    timing.require_expected(right, [results], expected)
    with pytest.raises(WrongReplay, match="a replay over poison: set 0, out: 2 of 2"):
        timing.require_expected(lambda: None, [results], expected)
    results[1].zero_()
    with pytest.raises(WrongReplay, match="after the timed replays: set 0, lse: 1 of 1") as found:
        timing.require_expected(right, [results], expected)
    assert "poison" not in str(found.value)
