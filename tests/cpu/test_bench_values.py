"""The benchmark over families of values without a GPU: checks, times, the peer, what an entry says."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cute_kernels
from bench import gqa as bench_gqa
from bench import mla as bench_mla
from bench import mla_formats, values
from bench import sink as bench_sink
from bench.gqa import GqaBench
from bench.in_layer import Timing
from bench.mla import DecodeBench
from bench.mla_formats import FormatBench
from bench.sink import SinkBench
from cute_kernels.mla.op import mla_fp8_decode
from fp8_mla import reference_decode
from tests.kit.replays import fake_time_graph
from tests.kit.values import FAMILIES, SLOW

FEW = ("normal", "tokens", SLOW, "small q", "unwritten", "rising")
"""Of the families, as tests of the tool need no more."""


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A GPU that is the CPU; times are 2 us but for the families in the dictionary that this returns."""
    sizes = {"CONTEXT": 64, "SPARSE_CONTEXTS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(bench_mla, name, value)
    for name, value in {"WINDOW": 8, "WINDOW_TOKENS": 128, "CONTEXT": 64, "CONTEXTS": 2}.items():
        monkeypatch.setattr(mla_formats, name, value)
    monkeypatch.setattr(bench_sink, "TOKENS", 128)
    monkeypatch.setattr(values, "SINKS_TOGETHER", 3)
    for module in (bench_mla, mla_formats, bench_gqa):
        monkeypatch.setattr(module, "sets_to_outgrow_l2", lambda *given, **options: 2)
        fake_time_graph(monkeypatch, module)
    fake_time_graph(monkeypatch, values)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(values, "FAMILIES", {name: FAMILIES[name] for name in FEW})
    times: dict[str, float] = {}
    without: Any = values.time_together

    def time_together(ways: Any, **options: Any) -> dict[str, Timing]:
        without(ways, **options)
        us = {name: times.get(name.removeprefix("ours "), 2.0) for name in ways}
        return {name: Timing(us[name], us[name], us[name], us[name]) for name in ways}

    monkeypatch.setattr(values, "time_together", time_together)
    return times


def mla_bench(bench: DecodeBench, peer: Any = "no peer") -> values.ValueBench:
    return values._mla_bench(bench, values._Kept(), bench.cache_tokens, peer, "cpu")


def test_a_case_says_which_family_takes_longest(timed: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    timed |= {"rising": 2.1, "tokens": 2.5, SLOW: 2.9}
    entry = values.run(mla_bench(DecodeBench("sparse", 2, 16, 1, 24)))
    assert list(entry["values"]) == list(FEW) and entry["values"]["rising"] == 2.1
    assert (entry["worst_family"], entry["worst_us"], entry["worst_ratio"]) == ("tokens", 2.5, 1.25)
    assert entry["slow_ratio"] == 1.45 and entry["met"] is False and "wrong" not in entry and "peer" not in entry
    assert entry["must"] == {"worst_ratio": 1.1, "slow_ratio": 1.5}
    said = capsys.readouterr().out
    assert "tokens 1.250, tokens and tiles 1.450  MISSED" in said and "rising 1.05" in said
    timed["tokens"] = 2.05
    assert values.run(mla_bench(DecodeBench("sparse", 2, 16, 1, 24)))["met"] is True


BENCHES: dict[str, Any] = {
    "dense": lambda: mla_bench(DecodeBench("dense", 2, 16, 1, 128)),
    "ragged": lambda: mla_bench(DecodeBench("sparse", 3, 8, 2, 24, ragged=True)),
    "two caches": lambda: values._format_bench(
        FormatBench(("v4", "v4"), 2, 16, topk=8, extra_topk=24), values._Kept(), "no peer", "cpu"
    ),
    "fp4": lambda: values._format_bench(
        FormatBench(("v4.1", "v4.1_fp4"), 2, 8, topk=8, extra_topk=24, ragged=False), values._Kept(), "no peer", "cpu"
    ),
    **{
        f"gqa {dtype} {scales}": lambda dtype=dtype, scales=scales: values._gqa_bench(
            GqaBench(2, 64, scales, kv_dtype=dtype, h_q=4, h_kv=2), values._Kept(), "cpu"
        )
        for dtype, scales in (
            ("int8", "per_token_head"), ("int8", "per_tensor"), ("fp8", "per_tensor"), ("bf16", "none"),
        )
    },
    **{
        f"sink, {backward}": lambda backward=backward: values._sink_bench(
            SinkBench(128, 4, 2, 64, backward=backward), values._Kept(), "cpu"
        )
        for backward in (False, True)
    },
}  # fmt: skip


@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES)
def test_all_families_of_every_kind_of_case_pass_their_check(bench: Any, timed: dict[str, float]) -> None:
    made = bench()
    entry = values.run(made)
    assert "wrong" not in entry and set(entry["values"]) == set(FEW) and entry["met"] is True
    assert entry.items() >= made.key.items() and ("slow_ratio" in entry) == ("mla" in made.name)


def test_a_family_whose_output_is_wrong_has_no_time(timed: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        out, lse = mla_fp8_decode(q, *arguments, **options)
        return out.mul_(1.1) if q.abs().max() < 1e-2 else out, lse

    monkeypatch.setattr(cute_kernels, "mla_fp8_decode", wrong, raising=False)
    entry = values.run(mla_bench(DecodeBench("sparse", 2, 16, 1, 24)))
    assert list(entry["wrong"]) == ["small q"] and "beyond" in entry["wrong"]["small q"]
    assert set(entry["values"]) == set(FEW) - {"small q"}


def test_the_peer_runs_beside_the_worst_families(timed: dict[str, float]) -> None:
    timed |= {"rising": 2.2, "small q": 2.1, "peer rising": 3.3}
    asked = []

    def flash_mla_with_kvcache(**given: Any) -> Any:
        asked.append(given["q"])
        q, cache = given["q"], given["k_cache"].squeeze(2).view(torch.uint8)
        out, lse = reference_decode(q, cache, indices=given["indices"], softmax_scale=given["softmax_scale"])
        return out.bfloat16(), lse.transpose(1, 2)

    metadata = {"get_mla_metadata": lambda: (object(), None)}
    peer = SimpleNamespace(**metadata, flash_mla_with_kvcache=flash_mla_with_kvcache)
    entry = values.run(mla_bench(DecodeBench("sparse", 2, 16, 1, 24), peer))
    assert set(entry["peer"]) == {"normal", "rising", "small q", SLOW} and asked
    assert entry["peer"]["rising"] == {"us": 3.3, "ratio": 1.5} and entry["worst_ratio_peer"] == 1.5
    assert entry["normal_ratio_peer"] == 1.0


def test_cases_are_chosen_run_within_their_time_and_written(
    timed: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    names = [bench.name for bench in values.benches()]
    assert len(set(names)) == len(names) > 50
    assert {name.split()[0] for name in names} == {"mla_fp8_decode", "gqa_decode", "sink_attention"}
    chosen = values.benches(only="sparse 128x128x2 topk 2048 scores exact")
    assert [bench.must for bench in chosen] == [{"worst_ratio": 1.1, "slow_ratio": 1.5, "worst_ratio_peer": 1.25}]
    device = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device_: device)
    assert values.specs_of(chosen)[0].sparse and len(values.all_specs()) > 20

    def broken(family: str) -> values.Ready:
        raise MemoryError(family)

    good = mla_bench(DecodeBench("sparse", 2, 16, 1, 24))
    bad = values.ValueBench("bad", {"op": "bad"}, broken, lambda sms: [])
    written: list[int] = []
    entries, ran = values.run_all([bad, good], 100.0, after=lambda all_: written.append(len(all_)))
    assert entries[0] == {"op": "bad", "failed": "MemoryError: normal"} and entries[1]["met"] is True
    assert written == [1, 2] and len(ran) == 2
    assert values.run_all([good], -1.0) == ([], [])
    monkeypatch.setattr(values, "benches", lambda quick, only: [good])
    monkeypatch.setattr(values, "precompile", lambda specs: None)
    assert values.main(["--out", str(tmp_path / "there" / "values.json")]) == 0
    assert json.loads((tmp_path / "there" / "values.json").read_text())[0]["worst_family"] == "normal"
