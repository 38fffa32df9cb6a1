"""The benchmark of sink attention without a GPU: cases, what they must reach, and no speed without a passed check."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.nn.attention import SDPBackend

import cute_kernels
from bench import records
from bench import sink as bench_sink
from bench.cases import select_benches
from bench.sink import CASES, ROUTING_CASES, RoutingBench, SinkBench
from cute_kernels.sink.op import sink_attention
from tests.kit.replays import fake_time_graph


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces GPU timing; returns how many input sets each timing rotated."""
    sets = fake_time_graph(monkeypatch, bench_sink)
    monkeypatch.setattr(bench_sink, "TOKENS", 512)
    monkeypatch.setattr(bench_sink, "sets_to_outgrow_l2", lambda bytes_moved, most: 2)
    monkeypatch.setattr(bench_sink, "SDPBackend", SimpleNamespace(CUDNN_ATTENTION=SDPBackend.MATH))
    return sets


SMALL: dict[str, dict[str, Any]] = {
    "forward": {"peer": True, "must": {"ratio": 1.0}},
    "forward, window": {"window": 70, "must": {"us": 2.0}},
    "backward": {"backward": True, "peer": True, "must": {"ratio": 1.0}, "sink_cost": True},
    "backward, window": {"backward": True, "window": 70, "deterministic": True, "must": {"TFLOPs": 1.0}},
}


def small(**options: Any) -> SinkBench:
    return SinkBench(256, 4, 2, 64, **options)


@pytest.mark.parametrize("options", SMALL.values(), ids=SMALL)
def test_a_case_is_checked_timed_and_recorded(options: dict[str, Any], timed: list[int]) -> None:
    bench = small(**options)
    entry = bench_sink.run(bench, {}, "cpu")
    assert "failed" not in entry
    assert timed and set(timed) == {bench_sink.SETS}
    assert entry.items() >= bench.key.items()
    assert entry["met"] is True
    assert 0 < entry["rel_err"] < 5e-3
    assert entry["TFLOPs"] == round(bench.flops / 2e6, 1)
    assert ("us_without_sinks" in entry) == bench.sink_cost
    assert records._case_problems(entry) == []
    if bench.peer:
        assert entry["peers"]["cudnn"]["ratio"] == 1.0
        assert 0 < entry["peers"]["cudnn"]["rel_err"] < 0.01


def off(right: Callable[..., Any], part: int, sequence: int, row: int) -> Callable[..., Any]:
    """A function that returns tensors, one row of one of them 10% off."""

    def wrong(*arguments: Any, **options: Any) -> Any:
        results = right(*arguments, **options)
        (results[part] if results[part].dim() == 1 else results[part][sequence, row]).mul_(1.1)
        return results

    return wrong


@pytest.mark.parametrize(("sequence", "row"), [(0, 0), (-1, -1), (0, 130)])
def test_a_wrong_output_gets_no_speed(
    sequence: int, row: int, timed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cute_kernels, "sink_attention", off(sink_attention, 0, sequence, row), raising=False)
    entry = bench_sink.run(small(must={"us": 2.0}), {}, "cpu")
    assert "beyond" in entry["failed"] and entry["met"] is False
    assert timed == [] and not set(entry) & set(records.SPEED_KEYS)


@pytest.mark.parametrize(
    ("part", "row"), [(0, 0), (0, -1), (1, 0), (1, -1), (2, 0), (2, -1), (3, 0)], ids=lambda value: str(value)
)
def test_a_wrong_gradient_gets_no_speed(part: int, row: int, timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = off(bench_sink.OPS.sink_attention_backward.default, part, -1, row)
    monkeypatch.setattr(
        bench_sink, "OPS", SimpleNamespace(sink_attention_backward=SimpleNamespace(default=wrong))
    )  # fmt: skip
    entry = bench_sink.run(small(backward=True), {}, "cpu")
    assert bench_sink.NAMES[part] in entry["failed"]
    assert timed == []


def later_off(right: Callable[..., Any], part: int, error: float) -> Callable[..., Any]:
    """A function whose first four calls return right tensors; later calls return one wrong tensor."""
    made = []

    def wrong(*arguments: Any, **options: Any) -> Any:
        results = right(*arguments, **options)
        made.append(results)
        if len(made) > 4:
            results[part].mul_(1 + error)
        return results

    return wrong


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("part", "error"), [(0, 0.002), (0, 0.02), (1, 0.004), (3, 1e-6)])
def test_a_graph_of_gradients_has_the_bits_of_eager_calls_but_dq(
    part: int, error: float, deterministic: bool, timed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = later_off(bench_sink.OPS.sink_attention_backward.default, part, error)
    monkeypatch.setattr(bench_sink, "OPS", SimpleNamespace(sink_attention_backward=SimpleNamespace(default=wrong)))
    entry = bench_sink.run(small(backward=True, deterministic=deterministic), {}, "cpu")
    if part == 0 and error < bench_sink.GRADIENTS_LIMIT and not deterministic:
        assert entry["sets_compared"] == bench_sink.SETS
        return
    assert bench_sink.NAMES[part] in entry["failed"] and "a replay over poison" in entry["failed"]
    assert not set(entry) & set(records.SPEED_KEYS)


def test_graphs_of_both_routes_are_compared(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = later_off(cute_kernels.gqa_decode, 1, 1e-6)
    monkeypatch.setattr(cute_kernels, "gqa_decode", wrong, raising=False)
    entry = bench_sink.run_routing(RoutingBench(2, 1, 300, 4, 2), {}, "cpu")
    assert "set 0, lse" in entry["failed"] and "us" not in entry


def test_a_peer_that_cannot_run_says_why(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_sink, "SDPBackend", SDPBackend)  # cuDNN on a CPU
    entry = bench_sink.run(small(peer=True, must={"ratio": 1.0}), {}, "cpu")
    assert "RuntimeError" in entry["peers"]["cudnn"]["failed"] and entry["met"] is False
    assert records._case_problems(entry) == []


@pytest.mark.parametrize("s_q", [1, 8])
def test_both_routes_are_checked_and_timed(s_q: int, timed: list[int]) -> None:
    bench = RoutingBench(2, s_q, 300, 4, 2)
    entry = bench_sink.run_routing(bench, {}, "cpu")
    assert entry.items() >= {**bench.key, "route": "decode", "decode_us": 2.0, "prefill_us": 2.0}.items()
    assert timed == [2, 2]
    assert records._case_problems(entry) == []


def test_every_case_has_a_name_and_a_key_of_its_own() -> None:
    both: list[Any] = [*CASES, *ROUTING_CASES]
    assert len({case.name for case in both}) == len(both)
    assert len({tuple(case.key.items()) for case in both}) == len(both)
    assert all(case.batch * case.s == bench_sink.TOKENS for case in CASES)


MUST: dict[str, tuple[str, dict[str, float]]] = {
    "forward, 64": (r"forward 4x64 s 16384 d 64$", {"ratio": 1.03}),
    "forward, 128": (r"forward 4x32 s 16384 d 128$", {"ratio": 1.05}),
    "forward, small window": (r"forward 4x64 s 16384 d 64 window 128$", {"us": 750}),
    "forward, large window": (r"forward 4x32 s 16384 d 128 window 4096$", {"TFLOPs": 545}),
    "backward, 64": (r"backward 4x64 s 16384 d 64$", {"ratio": 1.02}),
    "backward, 128": (r"backward 4x32 s 16384 d 128$", {"ratio": 1.02}),
    "backward, small window": (r"backward 4x64 s 16384 d 64 window 128$", {"us": 2600}),
}


@pytest.mark.parametrize(("only", "must"), MUST.values(), ids=MUST)
def test_what_must_be_reached(only: str, must: dict[str, float]) -> None:
    [(name, _)], _ = select_benches(quick=False, only=only)
    (case,) = (case for case in CASES if case.name == name)
    assert case.must == must
    assert case.peer or "ratio" not in must


def test_no_case_must_reach_more() -> None:
    assert sum(bool(case.must) for case in CASES) == len(MUST)


def test_flops_count_pairs_that_are_seen() -> None:
    assert SinkBench(16384, 1, 1, 64).pairs == 4 * 16384 * 16385 // 2
    assert SinkBench(4, 1, 1, 64, window=3).pairs == bench_sink.TOKENS // 4 * (1 + 2 + 3 + 3)
    assert SinkBench(4, 1, 1, 64, window=9).pairs == bench_sink.TOKENS // 4 * (1 + 2 + 3 + 4)
    forward, backward = (SinkBench(16384, 64, 8, 64, backward=way) for way in (False, True))
    assert forward.flops == 4 * 64 * 64 * forward.pairs
    assert backward.flops * 4 == forward.flops * 10
    assert forward.bytes_moved == 65536 * (64 + 64 + 8 + 8) * 64 * 2 + 65536 * 64 * 4


def test_the_kernels_of_all_cases_can_be_built() -> None:
    assert all(spec.can_implement() == [] for spec in bench_sink.specs())
