"""The benchmark of GQA decoding without a GPU: cases, what they must reach, and no speed without a passed check."""

import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

import cute_kernels
from bench import gqa as bench_gqa
from bench import records
from bench.cases import select_benches
from bench.gqa import APPEND_CASES, DECODE_CASES, AppendBench, GqaBench
from cute_kernels.gqa.reference import reference_append, reference_gqa_decode
from tests.kit.gqa_cases import SCALE_NAMES
from tests.kit.replays import fake_time_graph

CEILINGS = {"read_GBps": 4000.0, "copy_GBps": 4000.0}
CASE_KEYS = {"op", "kv_dtype", "scales", "layout", "batch", "h_q", "h_kv", "d", "s_q", "s_k"}


def decode(*, out: torch.Tensor, lse: torch.Tensor, return_lse: bool, **call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernel is called."""
    assert return_lse
    result, result_lse = reference_gqa_decode(**call)
    return out.copy_(result), lse.copy_(result_lse)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces GPU timing; returns how many input sets each timing rotated."""
    sets = fake_time_graph(monkeypatch, bench_gqa)
    monkeypatch.setattr(bench_gqa, "host_times", lambda call: {"host_us": 7.5})
    monkeypatch.setattr(bench_gqa, "sets_to_outgrow_l2", lambda bytes_moved, most=64: 3)
    monkeypatch.setattr(cute_kernels, "gqa_decode", decode, raising=False)
    monkeypatch.setattr(cute_kernels, "kv_int8_append", reference_append, raising=False)
    return sets


def test_every_case_has_a_name_and_a_key_of_its_own() -> None:
    for cases in (DECODE_CASES, APPEND_CASES):
        assert len({case.name for case in cases}) == len(cases)
        assert len({tuple(case.key.items()) for case in cases}) == len(cases)
    for case in DECODE_CASES:
        assert set(case.key) >= CASE_KEYS
        assert ("page_size" in case.key) == case.layout.startswith("paged")
        assert len(case.seqlens) == case.batch
        assert max(case.seqlens) <= case.s_k
        assert not case.peer or (case.layout, case.kv_dtype, case.lengths) == ("BNSH", "int8", ())


MUST: dict[str, tuple[str, int, dict[str, float]]] = {
    "128 x 8192": (r"int8 \S+ (BNSH|paged_NHD_64) 128x32x1 s_k 8192", 4, {"read_fraction": 0.92}),
    "64 x 8192, pages": (r"int8 \S+ paged_NHD_64 64x32x1 s_k 8192", 2, {"read_fraction": 0.96}),
    "ragged, long": (r"24x32x1 s_k 1024\.\.32768", 1, {"read_fraction": 0.88}),
    "256 short ones": (r"256x32x1", 1, {"read_fraction": 0.90}),
    "few heads": (r"8x28x1", 1, {"read_fraction": 0.62}),
    "other head dimensions": (r"int8 .* (64x64x1 s_k 8192 d 64|64x16x1 s_k 8192 d 256)", 2, {"read_fraction": 0.94}),
    "64 x 8192": (r"int8 per_t\S+(or|head) BNSH 64x32x1 s_k 8192", 2, {"read_fraction": 0.92, "ratio": 1.7}),
    "16 x 4096": (r"16x32x1 s_k 4096", 4, {"read_fraction": 0.78}),
    "1 x 131072": (r" 1x32x1 s_k 131072", 4, {"read_fraction": 0.80}),
    "1 x 32768": (r" 1x32x1 s_k 32768", 4, {"us": 26}),
    "1 x 1024": (r" 1x32x1 s_k 1024", 4, {"us": 6}),
    "ragged": (r"32x32x1 s_k 512\.\.16384", 4, {"read_fraction": 0.85}),
    "64 heads": (r"int8 .* 64x64x1 s_k 8192 d 128", 4, {"read_fraction": 0.90}),
    "layouts": (r"(BSNH|NHD_16|NHD_128|HND_64) 64x32x1", 8, {"read_fraction": 0.90}),
    "bf16 and fp8": (r"(bf16|fp8) .* 64x32x1", 4, {"read_fraction": 0.95}),
    "4 queries": (r"64x32x4", 4, {"read_fraction": 0.85}),
    "for information": (r"vllm|per_group|per_token BNSH|window|bf16 .* d 64", 7, {}),
}


@pytest.mark.parametrize("only, count, must", MUST.values(), ids=MUST)
def test_what_must_be_reached(only: str, count: int, must: dict[str, float]) -> None:
    benches, _ = select_benches(quick=False, only=only)
    names = [name for name, _ in benches if name.startswith("gqa_decode")]
    assert len(names) == count
    assert all(case.must == must for case in DECODE_CASES if case.name in names)


def test_no_case_is_without_a_line_above() -> None:
    assert sum(count for _, count, _ in MUST.values()) == len(DECODE_CASES)
    assert Counter(bool(case.must) for case in APPEND_CASES) == {True: 1, False: 4}


def test_quick_runs_few() -> None:
    names = [name for name, _ in select_benches(quick=True, only="^gqa|^kv_int8")[0]]
    assert 4 <= len(names) <= 8
    assert any("bf16" in name for name in names)
    assert any("paged" in name for name in names)
    assert any("append" in name for name in names)


def test_the_ragged_batch() -> None:
    assert len(bench_gqa.LENGTHS) == 32 == len(set(bench_gqa.LENGTHS))
    assert (min(bench_gqa.LENGTHS), max(bench_gqa.LENGTHS)) == (512, 16384)
    assert sum(bench_gqa.LENGTHS) == pytest.approx(32 * 8448, rel=1e-3)
    assert list(bench_gqa.LENGTHS) != sorted(bench_gqa.LENGTHS)


CODES, Q_AND_OUT = 2 * 64 * 8192 * 8 * 128, 2 * 64 * 32 * 128 * 2
BYTES = {
    "per_tensor": (GqaBench(64, 8192), CODES + Q_AND_OUT),
    "per_token": (GqaBench(64, 8192, "per_token"), CODES + Q_AND_OUT + 2 * 64 * 8192 * 2),
    "per_token_head": (GqaBench(64, 8192, "per_token_head"), CODES + Q_AND_OUT + 2 * 64 * 8192 * 8 * 2),
    "per_group": (GqaBench(64, 8192, "per_group_32"), CODES + Q_AND_OUT + 2 * 64 * 8192 * 8 * 4 * 2),
    "pages": (GqaBench(64, 8192, "per_tensor", "paged_NHD", 64), CODES + Q_AND_OUT + 64 * 128 * 4),
    "bf16": (GqaBench(64, 8192, "none", kv_dtype="bf16"), 2 * CODES + Q_AND_OUT),
    "queries": (GqaBench(64, 8192, s_q=4), CODES + 4 * Q_AND_OUT),
    "window": (GqaBench(64, 8192, window=128, s_q=4), CODES // 8192 * 131 + 4 * Q_AND_OUT),
    "lengths": (GqaBench(2, 64, lengths=(10, 64), h_q=8), 2 * 74 * 8 * 128 + 2 * 2 * 8 * 128 * 2),
}


@pytest.mark.parametrize("bench, expected", BYTES.values(), ids=BYTES)
def test_bytes_are_those_that_a_call_has_to_move(bench: GqaBench, expected: int) -> None:
    assert bench.bytes_moved == expected


def test_masked_pairs_are_no_work() -> None:
    pair = 4 * 128 * 32
    assert GqaBench(1, 100).flops == 100 * pair
    assert GqaBench(1, 100, s_q=4).flops == (97 + 98 + 99 + 100) * pair
    assert GqaBench(1, 100, s_q=4, window=98).flops == (97 + 98 + 98 + 98) * pair


SMALL = {
    "contiguous": GqaBench(3, 40, "per_token_head", h_q=8, h_kv=2, host=True),
    "BSNH": GqaBench(3, 40, "per_token", "BSNH", h_q=8, h_kv=2, s_q=2),
    "pages": GqaBench(3, 40, "per_token_head", "paged_NHD", 16, h_q=8, h_kv=2),
    "pages by head": GqaBench(9, 40, "per_group_32", "paged_HND", 16, h_q=8, h_kv=2, window=7),
    "vllm": GqaBench(3, 40, "per_token_head", "paged_vllm", 16, h_q=8, h_kv=2),
    "bf16": GqaBench(3, 40, "none", "paged_NHD", 16, "bf16", h_q=8, h_kv=2, d=64),
    "fp8": GqaBench(3, 40, "per_tensor", "BNSH", 0, "fp8", h_q=8, h_kv=2),
    "ragged": GqaBench(3, 40, "per_tensor", "paged_NHD", 16, lengths=(1, 17, 40), h_q=8, h_kv=2),
    "ragged, contiguous": GqaBench(3, 40, "per_token_head", lengths=(1, 17, 40), h_q=8, h_kv=2),
}


@pytest.mark.parametrize("bench", SMALL.values(), ids=SMALL)
def test_a_case_is_checked_timed_and_recorded(bench: GqaBench, timed: list[int]) -> None:
    bench = dataclasses.replace(bench, must={"us": 2.0})
    entry = bench_gqa.run_decode(bench, bench_gqa.Pool("cpu"), CEILINGS)
    assert "failed" not in entry
    assert timed == [3]
    assert entry.items() >= bench.key.items()
    assert entry["met"] is True
    assert entry["sets_compared"] == 3
    assert entry["must"] == {"us": 2.0}
    assert entry["rel_err"] < 3e-3
    assert entry["GBps"] == round(bench.bytes_moved / 2e3, 1)
    assert ("host_us" in entry) == bench.host
    assert not [problem for problem in records._case_problems(entry)]


@pytest.mark.parametrize("bench", SMALL.values(), ids=SMALL)
def test_input_sets_share_nothing(bench: GqaBench, timed: list[int]) -> None:
    cases = bench_gqa.decode_inputs(bench, bench_gqa.Pool("cpu"))
    if bench.page_size:
        pages = torch.cat([case.block_table.flatten() for case in cases if case.block_table is not None])
        assert sorted(pages.tolist()) == list(range(len(cases[0].k_cache)))
    else:
        assert len({case.k_cache.data_ptr() for case in cases}) == len(cases)
    scale = cases[0].k_scale
    if bench.scales == "none":
        assert scale is None
    elif bench.scales == "per_tensor":
        assert scale is not None and scale.shape == (1,)
    else:
        assert scale is not None and scale.dtype == torch.float16 and scale.unique().numel() > 8
        assert bench.page_size or len({case.k_scale.data_ptr() for case in cases if case.k_scale is not None}) == 3


def test_a_wrong_result_gets_no_speed(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(**call: Any) -> Any:
        results = decode(**call)
        call["out"][-1] *= 1.1
        return results

    monkeypatch.setattr(cute_kernels, "gqa_decode", wrong, raising=False)
    bench = dataclasses.replace(SMALL["pages"], must={"us": 2.0})
    entry = bench_gqa.run_decode(bench, bench_gqa.Pool("cpu"), CEILINGS)
    assert "elements are beyond" in entry["failed"]
    assert entry["met"] is False
    assert not set(entry) & set(records.SPEED_KEYS)
    assert timed == []


@pytest.mark.parametrize("later", ["another bit", "nothing"])
def test_a_graph_that_writes_something_else_gets_no_speed(
    later: str, timed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first five eager calls are right: the checked one, the other two of the rotation, and two of the graph."""
    made = []

    def wrong(**call: Any) -> Any:
        made.append(call)
        if len(made) <= 6:
            return decode(**call)
        if later == "another bit":
            decode(**call)[1].view(torch.int32).view(-1)[-1] ^= 1
        return call["out"], call["lse"]

    monkeypatch.setattr(cute_kernels, "gqa_decode", wrong, raising=False)
    bench = dataclasses.replace(SMALL["contiguous"], must={"us": 2.0}, host=False)
    entry = bench_gqa.run_decode(bench, bench_gqa.Pool("cpu"), CEILINGS)
    assert "the timed graph: a replay over poison: set 0" in entry["failed"]
    assert ("out" in entry["failed"].replace("without", "")) == (later == "nothing")
    assert entry["met"] is False
    assert not set(entry) & {*records.SPEED_KEYS, "peers", "sets_compared"}


def test_rows_that_were_not_compared_must_be_finite_at_least(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def partial(**call: Any) -> Any:
        results = decode(**call)
        call["out"][0] = torch.nan
        return results

    monkeypatch.setattr(cute_kernels, "gqa_decode", partial, raising=False)
    bench = dataclasses.replace(SMALL["pages by head"], batch=10)
    rows, _ = bench_gqa.some_rows(bench_gqa.decode_inputs(bench, bench_gqa.Pool("cpu"))[0], bench.scales)
    assert list(range(10)[rows]) == [1, 3, 5, 7, 9]
    entry = bench_gqa.run_decode(bench, bench_gqa.Pool("cpu"), CEILINGS)
    assert "not every element of the output is finite" in entry["failed"]


def test_the_peer_runs_over_the_same_tokens(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gqa, "SDPBackend", SimpleNamespace(CUDNN_ATTENTION=SDPBackend.MATH))
    for bench in (SMALL["contiguous"], dataclasses.replace(SMALL["contiguous"], scales="per_tensor")):
        bench = dataclasses.replace(bench, peer=True, must={"ratio": 1.0})
        entry = bench_gqa.run_decode(bench, bench_gqa.Pool("cpu"), CEILINGS)
        assert entry["peers"]["cudnn_bf16"].items() >= {"us": 2.0, "ratio": 1.0}.items()
        assert 0 < entry["peers"]["cudnn_bf16"]["rel_err"] < 0.01
        assert entry["met"] is True
        assert timed[-2:] == [3, 3]


def test_a_peer_that_cannot_run_says_why(timed: list[int]) -> None:
    bench = dataclasses.replace(SMALL["contiguous"], peer=True, must={"ratio": 1.7})
    entry = bench_gqa.run_decode(bench, bench_gqa.Pool("cpu"), CEILINGS)
    assert "RuntimeError" in entry["peers"]["cudnn_bf16"]["failed"]
    assert entry["met"] is False
    assert records._case_problems(entry) == []


ATTAINED: list[tuple[dict[str, float], dict[str, Any], bool]] = [
    ({"read_fraction": 0.92}, {"read_fraction": 0.92}, True),
    ({"read_fraction": 0.92}, {"read_fraction": 0.919}, False),
    ({"us": 26}, {"us": 26.0}, True),
    ({"us": 26}, {"us": 26.1}, False),
    ({"us": 26}, {}, False),
    ({"copy_fraction": 0.8}, {"copy_fraction": 0.81}, True),
    ({"ratio": 1.7}, {"peers": {"a": {"us": 1.0, "ratio": 1.7}}}, True),
    ({"ratio": 1.7}, {"peers": {"a": {"us": 1.0, "ratio": 1.69}}}, False),
    ({"ratio": 1.7}, {"peers": {"a": {"failed": "no"}}}, False),
    ({"read_fraction": 0.92, "ratio": 1.7}, {"read_fraction": 0.95}, False),
]


@pytest.mark.parametrize("must, record, expected", ATTAINED)
def test_attained(must: dict[str, float], record: dict[str, Any], expected: bool) -> None:
    assert records.attained(must, record) is expected


def test_the_pool_grows_and_is_shared(timed: list[int]) -> None:
    pool = bench_gqa.Pool("cpu")
    small = pool.codes("k", "int8", (2, 3))
    assert pool.codes("k", "int8", (6,)).data_ptr() == small.data_ptr()
    large = pool.codes("k", "int8", (100, 100))
    assert pool.codes("k", "int8", (2, 3)).data_ptr() == large.data_ptr() != pool.codes("v", "int8", (2,)).data_ptr()
    assert large.min() >= -127
    assert 30 < large.float().std() < 50
    assert pool.codes("k", "fp8", (1000,)).float().isfinite().all()


@pytest.mark.parametrize("bench", APPEND_CASES, ids=lambda bench: bench.name)
def test_an_append_is_checked_timed_and_recorded(
    bench: AppendBench, timed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_gqa, "APPEND_TOKENS", 8192)
    entry = bench_gqa.run_append(bench, "cpu", CEILINGS)
    assert entry["rel_err"] == 0
    assert entry["tokens"] == 8192
    assert entry["copy_fraction"] > 0
    assert entry["sets_compared"] == 3
    assert entry.get("met") == (True if bench.must else None)
    assert timed == [3]


def test_bytes_of_an_append() -> None:
    new, codes, slots = 2 * 65536 * 8 * 128 * 2, 2 * 65536 * 8 * 128, 65536 * 8
    scales = {"per_tensor": 0, "per_token": 1, "per_token_head": 8, "per_group_32": 32}
    for bench in APPEND_CASES:
        assert bench.bytes_moved == new + codes + slots + 2 * 65536 * scales[bench.scales] * 2
        assert bench.scales in SCALE_NAMES


def test_an_append_that_differs_in_one_bit_gets_no_speed(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(**call: Any) -> None:
        reference_append(**call)
        call["v_scale"].view(torch.int16).flatten()[-1] ^= 1

    monkeypatch.setattr(bench_gqa, "APPEND_TOKENS", 64)
    monkeypatch.setattr(cute_kernels, "kv_int8_append", wrong, raising=False)
    entry = bench_gqa.run_append(APPEND_CASES[0], "cpu", CEILINGS)
    assert "v_scale" in entry["failed"]
    assert "k_cache" not in entry["failed"]
    assert entry["met"] is False
    assert timed == []
