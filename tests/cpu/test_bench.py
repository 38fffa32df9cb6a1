"""A speed is recorded only if a call's results passed the oracle and its timed graph wrote the same bits.

The CPU stands for the GPU: a replay makes the calls again and copies results into those of the captured calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cute_kernels
from bench import (
    cases,
    ceilings,
    gqa,
    gqa_blocks,
    kernels_run,
    mla,
    peers,
    records,
    run,
    sink,
    timeline,
    timing,
    values,
)
from bench.in_layer import Timing
from bench.peers.offer import Offer
from bench.progress import Progress
from bench.timing import Expected, WrongReplay
from tests.kit import sass
from tests.kit.compare import bits

CEILINGS = {"read_GBps": 4000.0, "copy_GBps": 4000.0}
MLA, GQA, SINK = "mla_fp8_decode", "gqa_decode", "sink_attention"
SMALL: dict[str, Any] = {
    "sparse": mla.MlaCase("sparse", 2, 16, 2, 40, must={"us": 2.0}),
    "sparse, ragged, exchanges": mla.MlaCase("sparse", 2, 128, 1, 40, ragged=True),
    "dense": mla.MlaCase("dense", 2, 16, 1, 128),
    "two caches": mla.MlaCase("sparse", 2, 16, 1, 128, ("v4.1", "v4.1_fp4"), extra_keys=70, page_size=2),
    "append": mla.MlaAppendCase("v4"),
    "merge": mla.MergeCase(splits=2, batch=2, h_q=4),
    "int8": gqa.GqaDecodeCase(2, 300, "per_token_head", "paged_NHD", 64, lengths=(3, 300)),
    "fp8": gqa.GqaDecodeCase(2, 300, "per_tensor", kv_dtype="fp8", s_q=2),
    "16 bits": gqa.GqaDecodeCase(2, 300, "none", kv_dtype="bf16", window=100),
    "blocks": gqa_blocks.GqaBlocksCase(2, 512, "none", "paged_HND", 64, "bf16", s_q=2, blocks=3, index_block=64),
    "int8 append": gqa.GqaAppendCase("per_token_head"),
    "forward": sink.SinkAttentionCase(128, 4, 2, 64),
    "backward": sink.SinkAttentionCase(128, 4, 2, 64, backward=True, sink_cost=True),
    "packed": sink.PackedSinkCase(4, 2, 64, window=50, batch=4, shortest=64, longest=130),
    "routing": sink.RoutingCase(2, 2, 64, 4, 2),
}
EACH = pytest.mark.parametrize("name", SMALL)


def store_of(case: Any) -> Any:
    found = next(section for section in cases.SECTIONS.values() if type(case) in set(map(type, section.cases)))
    return found.store("cpu")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timers that need no GPU, and caches of a few hundred tokens."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    card = SimpleNamespace(multi_processor_count=132, L2_cache_size=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: card)
    for module, sizes in (
        (mla, {"CONTEXTS": {"v3.2": (256, 2)}, "COMPRESSED": (256, 2), "WINDOW_TOKENS": 1024, "APPEND_TOKENS": 128}),
        (gqa, {"APPEND_TOKENS": 128}),
        (sink, {"TOKENS": 256}),
    ):
        for name, value in sizes.items():
            monkeypatch.setattr(module, name, value)
    for module in (run, peers):
        monkeypatch.setattr(module, "prepare", prepare)
    for module in (run, values):
        monkeypatch.setattr(module, "time_together", time_together)


def prepare(calls: Sequence[Callable[[], Any]], *, expected: Expected | None = None) -> Any:
    results = [call() for call in calls]

    def replay() -> None:
        for result, call in zip(results, calls, strict=True):
            for old, new in zip(timing._tensors(result), timing._tensors(call()), strict=True):
                if old is not new:
                    old.copy_(new)

    return SimpleNamespace(replay=replay, results=results, expected=expected)


def time_together(ways: Mapping[str, Any], *, sustained: Any = True, power: bool = False) -> dict[str, Timing]:
    for way in ways.values():
        if way.expected is not None:
            timing.require_expected(way.replay, way.results, way.expected)
    sets = {name: 0 if way.expected is None else len(way.results) for name, way in ways.items()}
    return {name: Timing(2.0, 1.9, 2.1, 1.8, sm_mhz_rested=1980.0, sets_compared=n) for name, n in sets.items()}


def measure(case: Any) -> dict[str, Any]:
    return {**run.measure(case, store_of(case), CEILINGS), "kernels": {}}


@EACH
def test_a_case_that_is_right_has_a_speed(name: str, timed: None) -> None:
    entry = measure(SMALL[name])
    assert "failed" not in entry and records._case_problems(entry) == [], entry.get("failed")
    assert entry["us"] == 2.0 and entry["sets_compared"] >= 2


@EACH
@pytest.mark.parametrize("nth", [1, 3], ids=["the checked call", "another set"])
def test_a_wrong_result_costs_the_speed(name: str, nth: int, timed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle checks the first call. Eager and timed calls both use the set of the third call."""
    case, made = SMALL[name], []

    def damaged(right: Callable[..., Any]) -> Callable[..., Any]:
        def op(*arguments: Any, **options: Any) -> Any:
            result = right(*arguments, **options)
            made.append(1)
            if len(made) == nth or (nth == 1 and len(made) == 2 and name == "routing"):
                target = options.get("k_cache", arguments[1] if result is None and arguments else result)
                target = target[1 if name == "backward" else 0] if isinstance(target, tuple) else target
                flat = bits(target).reshape(-1) if not target.is_contiguous() else bits(target).view(-1)
                flat[: max(1, flat.numel() // 2)] ^= 0x1010 if flat.dtype == torch.int16 else 0x10
                if not target.is_contiguous():
                    bits(target).copy_(flat.view(target.shape))
            return result

        return op

    if name == "backward":
        monkeypatch.setattr(sink, "OPS", SimpleNamespace(sink_attention_backward=SimpleNamespace(
            default=damaged(torch.ops.cute_kernels.sink_attention_backward.default))))  # fmt: skip
    else:
        names = (case.op, GQA) if name == "routing" else (case.op,)
        for op in names:
            monkeypatch.setattr(cute_kernels, op, damaged(getattr(cute_kernels, op)), raising=False)
    entry = measure(case)
    assert made and "failed" in entry and entry.get("met") in (None, False)
    assert not set(entry) & {*records.SPEED_KEYS, "peers", "exchange_us", "sets_compared"}


def test_a_peer_that_computes_something_else_has_no_ratio(timed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def peer(case: Any, inputs: Any, store: Any) -> Offer:
        calls = [mla.decode_call(one) for one in inputs]
        return Offer(calls, factor * calls[0]()[0], inputs[0])

    monkeypatch.setattr(peers, "PEERS", {MLA: {"flash_mla": peer}})
    monkeypatch.setattr(peers, "versions", lambda: {"flash_mla": "1.0"})
    case = dataclasses.replace(SMALL["sparse"], peers=("flash_mla",))
    factor = 1.1
    assert measure(case)["peers"] == {"flash_mla": {"failed": "relative error 0.1"}}
    factor = 1.0
    assert measure(case)["peers"]["flash_mla"]["ratio"] == 1.0
    monkeypatch.setattr(peers, "versions", lambda: {"flash_mla": "missing: it is not there"})
    assert "peers" not in measure(case)


def test_a_family_of_values_that_is_wrong_has_no_time(timed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = mla.check_decode

    def check(*arguments: Any, **options: Any) -> Any:
        found = right(*arguments, **options)
        return dataclasses.replace(found, problems=("wrong",)) if options["q"].abs().max() > 20 else found

    subject = values.Subject(SMALL["sparse"], mla.Caches("cpu"), values.MLA_MUST, (values.SLOW,))
    assert values.run(subject)["met"] is True
    monkeypatch.setattr(mla, "check_decode", check)
    entry = values.run(subject)
    assert "sharp" in entry["wrong"] and not set(entry["wrong"]) & set(entry["values"])


def test_a_case_that_raises_is_recorded_and_the_others_go_on(timed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(kernels_run, "digests", lambda specs: dict.fromkeys(map(repr, specs), "0"))
    broken = dataclasses.replace(SMALL["dense"], formats=("none",))
    wanted = [(broken, mla.Caches("cpu")), (SMALL["int8"], gqa.Pool("cpu"))]
    first, second = run.run_all(wanted, CEILINGS, Progress())
    assert "KeyError" in first["failed"] and second["us"] == 2.0
    assert vars(wanted[0][1])["_made"] == vars(wanted[1][1])["_codes"] == {}, "caches of sections do not fit together"
    assert "FAILED" in run.table([first, second])


# ---- the cases


def test_every_recorded_case_is_still_a_case() -> None:
    known = {records.identity(case.key) for section in cases.SECTIONS.values() for case in section.cases}
    for path in records.RESULTS.glob("*.jsonl"):
        recorded = records.read(path)["cases"]
        assert [records.case_name(case) for case in recorded if records.identity(case) not in known] == []


def test_every_case_has_a_name_of_its_own_and_kernels_that_can_be_built() -> None:
    every = [case for section in cases.SECTIONS.values() for case in section.cases]
    assert len({case.name for case in every}) == len({records.identity(case.key) for case in every}) == len(every)
    assert all(case.op in records.case_name(case.key) for case in every)
    assert [spec for spec in cases.specs(every, 132) if spec.can_implement()] == []


def test_every_peer_that_a_case_names_is_one() -> None:
    named = {(case.op, peer) for section in cases.SECTIONS.values() for case in section.cases for peer in case.peers}
    assert named == {(op, name) for op, makers in peers.PEERS.items() for name in makers}
    assert all(isinstance(text, str) and text for text in peers.versions().values())


# ---- the comparison of a timed graph


def tensors() -> tuple[torch.Tensor, ...]:
    return torch.tensor([1.0, -2.0]).bfloat16(), torch.tensor([0.5], dtype=torch.float32), torch.arange(6).byte()


NAMES = ("out", "lse", "cache")


def problems_of(got: Any, **options: Any) -> list[str]:
    return Expected.of(NAMES, [tensors], **options).problems([got])


def test_whatever_differs_is_named() -> None:
    out, lse, cache = tensors()
    assert problems_of(tensors()) == []
    assert problems_of((out, -lse, cache)) == ["set 0, lse: 1 of 1 elements differ from those of an eager call"]
    assert "set 0, cache: 6 of 6" in problems_of((out, lse, cache + 1))[0]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64])
def test_poison_is_no_number(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, 6).to(dtype)[:, 1:4]  # not contiguous
    timing.poison(tensor)
    assert tensor.float().isnan().all() if dtype.is_floating_point else (tensor == -1).all()


def test_a_replay_that_writes_nothing_or_too_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    expected, results = Expected.of(NAMES, [tensors]), tensors()

    def right() -> None:
        for old, new in zip(results, tensors(), strict=True):
            old.copy_(new)

    timing.require_expected(right, [results], expected)
    with pytest.raises(WrongReplay, match="a replay over poison: set 0, out: 2 of 2"):
        timing.require_expected(lambda: None, [results], expected)
    results[1].zero_()
    with pytest.raises(WrongReplay, match="after the timed replays: set 0, lse: 1 of 1") as found:
        timing.require_expected(right, [results], expected)
    assert "poison" not in str(found.value)


# ---- kernels that measure a card


@pytest.mark.anywhere
@pytest.mark.parametrize("spec", [ceilings.StreamSpec(), timeline.SPEC], ids=["reader", "traced decode"])
def test_kernels_of_the_bench_compile_within_their_budgets(spec: Any) -> None:
    assert sass.report(spec).problems(spec.expected) == []
