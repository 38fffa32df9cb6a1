"""The benchmark of the other latent formats without a GPU: inputs, checks, FlashMLA's arguments."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cute_kernels
from bench import mla_formats, records
from bench.cases import select_benches
from bench.mla_formats import CASES, FormatBench, FormatCaches
from cute_kernels.mla.op import mla_fp8_decode
from fp8_mla import FORMATS, reference_decode
from tests.kit.replays import fake_time_graph

CEILINGS = {"read_GBps": 4000.0}
SMALL = {
    "two caches": FormatBench(("v4", "v4"), 2, 16, 2, topk=8, extra_topk=24, must={"us": 2.0}),
    "pages of 2, ragged": FormatBench(("v4", "v4"), 3, 8, topk=8, extra_topk=80, page_size=2, ragged=True),
    "one cache": FormatBench(("v4",), 2, 16, topk=24),
    "fp4": FormatBench(("v4.1", "v4.1_fp4"), 2, 16, topk=8, extra_topk=24),
    "no rope": FormatBench(("v3.2_nope",), 2, 16, topk=24),
}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes = {"WINDOW": 8, "WINDOW_TOKENS": 256, "CONTEXT": 96, "CONTEXTS": 4, "TOKENS_PER_CHUNK": 100}
    for name, value in sizes.items():
        monkeypatch.setattr(mla_formats, name, value)
    monkeypatch.setattr(mla_formats, "sets_to_outgrow_l2", lambda bytes_moved: 3)
    return fake_time_graph(monkeypatch, mla_formats)


@pytest.mark.parametrize("bench", SMALL.values(), ids=SMALL)
def test_a_case_is_checked_timed_and_recorded(bench: FormatBench, timed: list[int]) -> None:
    entry = mla_formats.run(bench, FormatCaches("cpu"), "no peer", CEILINGS)
    assert "failed" not in entry and entry["sets_compared"] == 3 and timed == [3]
    assert entry.items() >= bench.key.items() and entry["peers"] == {}
    assert entry["rel_err"] < 4e-3 and entry["TFLOPs"] == round(bench.flops / 2e6, 1)
    assert records._case_problems(entry) == [] and entry.get("met", True)


@pytest.mark.parametrize("bench", SMALL.values(), ids=SMALL)
def test_inputs_name_keys_of_the_caches(bench: FormatBench, timed: list[int]) -> None:
    for call in mla_formats.inputs(bench, FormatCaches("cpu")):
        for cache, indices in (("kv_cache", "indices"), ("extra_kv_cache", "extra_indices")):
            if indices in call:
                slots = call[cache].shape[0] * call[cache].shape[1]
                assert call[indices].min() >= 0 and call[indices].max() < slots
                assert all(len(set(row.tolist())) == len(row) for row in call[indices].flatten(0, 1))


@pytest.mark.parametrize("row", [0, -1])
def test_a_wrong_output_gets_no_speed(row: int, timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any, **options: Any) -> Any:
        out, lse = mla_fp8_decode(*arguments, **options)
        out[row] *= 1.1
        return out, lse

    monkeypatch.setattr(cute_kernels, "mla_fp8_decode", wrong, raising=False)
    entry = mla_formats.run(SMALL["two caches"], FormatCaches("cpu"), "no peer", CEILINGS)
    assert "beyond" in entry["failed"] and entry["met"] is False and timed == []


@pytest.mark.parametrize("name", ["two caches", "pages of 2, ragged", "one cache"])
def test_flash_mla_gets_the_same_bytes_and_padded_heads(name: str, timed: list[int]) -> None:
    bench = dataclasses.replace(SMALL[name], must={"ratio": 1.0})
    asked: list[dict[str, Any]] = []

    def flash_mla_with_kvcache(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(given)
        assert given["q"].shape[2] == 64 and given["k_cache"].shape[2:] == (1, 584)
        assert given["k_cache"].stride(0) % 576 == 0 and given["head_dim_v"] == 512
        extra = given["extra_k_cache"]
        out, lse = reference_decode(
            given["q"],
            given["k_cache"],
            indices=given["indices"],
            s_aux=given["attn_sink"],
            softmax_scale=given["softmax_scale"],
            cache_format="v4",
            extra_kv_cache=extra,
            extra_indices=given["extra_indices_in_kvcache"],
            extra_topk_length=given["extra_topk_length"],
        )
        return out.bfloat16(), lse.transpose(1, 2)

    peer: Any = SimpleNamespace(
        get_mla_metadata=lambda: (object(), None), flash_mla_with_kvcache=flash_mla_with_kvcache
    )
    entry = mla_formats.run(bench, FormatCaches("cpu"), peer, CEILINGS)
    assert entry["met"] is True and asked
    found = entry["peers"]["flash_mla"]
    assert found["note"] == "q padded to 64 heads" and found["ratio"] == 1.0 and "ratio_sustained" not in found


def test_flash_mla_has_no_kernel_of_other_formats(timed: list[int]) -> None:
    peer: Any = SimpleNamespace()
    for name in ("fp4", "no rope"):
        assert mla_formats.run(SMALL[name], FormatCaches("cpu"), peer, CEILINGS)["peers"] == {}


def test_cases_have_names_and_keys_of_their_own_and_what_they_move() -> None:
    assert len({case.name for case in CASES}) == len({tuple(case.key.items()) for case in CASES}) == len(CASES)
    assert len({records.identity(case.key) for case in CASES}) == len(CASES)
    first = CASES[0]
    assert first.name == "mla_fp8_decode v4 + v4 128x128x2 topk 128 + 1024"
    assert first.keys_read == (256 * 128, 256 * 1024)
    assert first.flops == 256 * 1152 * 128 * 2 * 1024
    rows = 256 * 128 * (2 * 512 + 2 * 512 + 4)
    assert first.bytes_moved == 256 * 1152 * (FORMATS["v4"].token_bytes + 4) + rows
    ragged = next(case for case in CASES if case.ragged)
    assert min(ragged.extra_lengths) >= 64 and max(ragged.extra_lengths) <= 8192
    names = [name for name, _ in select_benches(quick=False, only=r"v4|v3\.2_nope", sections=["mla"])[0]]
    appends = [f"mla_fp8_append {name}" for name in FORMATS if name != "v3.2"]
    assert names == [*(case.name for case in CASES), *appends]
