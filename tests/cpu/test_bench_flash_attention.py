"""FlashAttention 3 and 4 as peers, without a GPU: how they are found, what they are asked, what a record says."""

import importlib
import pathlib
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cute_kernels
from bench import flash_attention, peers, records
from bench import gqa as bench_gqa
from bench import sink as bench_sink
from bench.flash_attention import FA4, Replaced
from bench.gqa import DECODE_CASES, GqaBench
from bench.report import cases as report
from bench.sink import SinkBench
from cute_kernels.gqa.reference import reference_gqa_decode
from tests.cpu.test_bench_gqa import CEILINGS, decode
from tests.kit.replays import fake_time_graph

FORWARD_SCHEMA = """q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k
    max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale
    v_descale softmax_scale is_causal window_size_left window_size_right softcap is_rotary_interleaved
    scheduler_metadata num_splits pack_gqa sm_margin s_aux cp_world_size cp_rank cp_tot_seqused_k"""
SCHEDULE_SCHEMA = """batch_size max_seqlen_q max_seqlen_k num_heads num_heads_k headdim headdim_v qkv_dtype seqused_k
    cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q leftpad_k page_size max_seqlen_k_new is_causal
    window_size_left window_size_right has_softcap num_splits pack_gqa sm_margin"""
INTERFACE = """
import dsl_for_test.tensor
import quack

def _flash_attn_fwd():
    return dsl_for_test.tensor.Tensor()[...]

def _flash_attn_bwd():
    return "gradients"
"""


class FA3:
    """The operators, computed by the references; notes what they are asked."""

    def __init__(self, error: float = 0.0) -> None:
        self.error = error
        self.asked: list[dict[str, Any]] = []
        self.scheduled: list[dict[str, Any]] = []

    def get_scheduler_metadata(self, **call: Any) -> torch.Tensor:
        assert list(call) == SCHEDULE_SCHEMA.split()
        self.scheduled.append(call)
        return torch.full((1,), len(self.scheduled), dtype=torch.int32)

    def fwd(self, **call: Any) -> list[torch.Tensor]:
        assert list(call) == FORWARD_SCHEMA.split()
        self.asked.append(call)
        window = None if call["window_size_left"] < 0 else call["window_size_left"] + 1
        assert call["is_causal"] and call["window_size_right"] == (-1 if window is None else 0)
        options: dict[str, Any] = {"window": window, "softmax_scale": call["softmax_scale"]}
        batch = len(call["cu_seqlens_q"]) - 1
        out: Any
        if call["page_table"] is None:
            q, k, v = (call[name].unflatten(0, (batch, -1)) for name in "qkv")
            out = cute_kernels.sink_attention(q, k, v, call["s_aux"].float(), **options)
        else:
            scales = {f"{name}_scale": call[f"{name}_descale"] for name in "kv" if call[f"{name}_descale"] is not None}
            scales = {name: scale[0].contiguous() for name, scale in scales.items()}
            q = call["q"].unflatten(0, (batch, -1)).bfloat16()
            pages = {"block_table": call["page_table"], "cache_seqlens": call["seqused_k"], "layout": "paged_NHD"}
            out, _ = reference_gqa_decode(q, call["k"], call["v"], **scales, **pages, **options)
        return [(out * (1 + self.error)).bfloat16().flatten(0, 1), torch.zeros(()), torch.zeros(()), torch.zeros(())]


class SomeFA4:
    """The same of FA4; compiles nothing outside of `compiling`."""

    def __init__(self, error: float = 0.0) -> None:
        self.error, self.ready, self.open = error, False, False
        self.asked: list[dict[str, Any]] = []
        self.sinks: dict[int, torch.Tensor] = {}

    def compiling(self) -> Any:
        self.ready = True
        return _Open(self)

    def forward(self, q: Any, k: Any, v: Any, **call: Any) -> tuple[Any, ...]:
        assert self.ready
        self.asked.append(call)
        window = call.get("window_size_left")
        assert call["causal"] and call["return_lse"] and call.get("window_size_right", 0) == 0
        assert call["learnable_sink"].dtype == torch.bfloat16
        options = {"window": None if window is None else window + 1, "softmax_scale": call["softmax_scale"]}
        sinks = call["learnable_sink"].float()
        out, lse = cute_kernels.sink_attention(q, k, v, sinks, **options, return_lse=True)
        self.sinks[lse.data_ptr()] = sinks
        return out * (1 + self.error), lse, None, None

    def backward(self, q: Any, k: Any, v: Any, out: Any, d_out: Any, lse: Any, **call: Any) -> tuple[Any, ...]:
        self.asked.append(call)
        window = call.get("window_size_left")
        numbers = (True, None if window is None else window + 1, call["softmax_scale"], False)
        tensors = (d_out, out, lse, q, k, v, self.sinks[lse.data_ptr()], None, None)
        dq, dk, dv, _ = bench_sink.OPS.sink_attention_backward.default(*tensors, *numbers)
        return dq, dk, dv * (1 + self.error)

    def as_peer(self) -> FA4:
        return FA4(self.forward, self.backward, self.compiling)


class _Open:
    def __init__(self, fa4: SomeFA4) -> None:
        self.fa4 = fa4

    def __enter__(self) -> None:
        self.fa4.open = True

    def __exit__(self, *_: object) -> None:
        self.fa4.open = False


# ---- sink attention


@pytest.fixture
def sinks_timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(bench_sink, "TOKENS", 512)
    return fake_time_graph(monkeypatch, bench_sink)


def with_peers(monkeypatch: pytest.MonkeyPatch, fa3: Any, fa4: Any) -> None:
    monkeypatch.setattr(flash_attention, "fa3", lambda: fa3)
    monkeypatch.setattr(flash_attention, "fa4", lambda: fa4)


@pytest.mark.parametrize("window", [None, 70])
def test_fa3_takes_packed_sequences_and_sinks_in_bfloat16(
    window: int | None, sinks_timed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fa3 = FA3()
    with_peers(monkeypatch, fa3, "not installed")
    entry = bench_sink.run(SinkBench(256, 4, 2, 64, window=window), {}, "cpu")
    assert "failed" not in entry and records._case_problems(entry) == []
    assert list(entry["peers"]) == ["fa3"]
    assert entry["peers"]["fa3"]["ratio"] == 1.0 and 0 < entry["peers"]["fa3"]["rel_err"] < 0.01
    assert entry["peers"]["fa3"]["note"] == "sinks in bfloat16, packed sequences"
    asked = fa3.asked[0]
    assert asked["q"].shape == (512, 4, 64) and asked["k"].shape == (512, 2, 64)
    assert asked["cu_seqlens_q"].tolist() == asked["cu_seqlens_k"].tolist() == [0, 256, 512]
    assert asked["cu_seqlens_q"].dtype == torch.int32
    assert asked["s_aux"].dtype == torch.bfloat16
    assert (asked["max_seqlen_q"], asked["max_seqlen_k"]) == (256, 256)
    assert (asked["window_size_left"], asked["window_size_right"]) == ((-1, -1) if window is None else (69, 0))
    assert asked["softmax_scale"] == 1.3 * 64**-0.5
    inputs = {call["q"].data_ptr() for call in fa3.asked}
    assert len(inputs) == bench_sink.SETS


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("window", [None, 70])
def test_fa4_runs_forward_and_backward(
    backward: bool, window: int | None, sinks_timed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fa4 = SomeFA4()
    with_peers(monkeypatch, "not installed", fa4.as_peer())
    entry = bench_sink.run(SinkBench(256, 4, 2, 64, backward=backward, window=window), {}, "cpu")
    assert "failed" not in entry and records._case_problems(entry) == []
    assert list(entry["peers"]) == ["fa4"]
    assert 0 < entry["peers"]["fa4"]["rel_err"] < 0.01
    assert ("which get no gradient" in entry["peers"]["fa4"]["note"]) == backward
    assert not fa4.open
    assert all(call["softmax_scale"] == 1.3 * 64**-0.5 and call["causal"] for call in fa4.asked)
    assert {call.get("window_size_left") for call in fa4.asked} == {None if window is None else 69}


def test_both_join_cudnn_and_the_fastest_decides(sinks_timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with_peers(monkeypatch, FA3(), SomeFA4().as_peer())
    entry = bench_sink.run(SinkBench(256, 4, 2, 64, peer=True, must={"ratio": 1.0}), {}, "cpu")
    assert list(entry["peers"]) == ["cudnn", "fa3", "fa4"]
    assert "RuntimeError" in entry["peers"]["cudnn"]["failed"]
    assert entry["met"] is True
    assert report.must(entry) == "1 x the fastest peer"


def test_sums_in_a_fixed_order_have_no_peer(sinks_timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with_peers(monkeypatch, FA3(), SomeFA4().as_peer())
    entry = bench_sink.run(SinkBench(256, 4, 2, 64, backward=True, deterministic=True), {}, "cpu")
    assert entry["peers"] == {}


@pytest.mark.parametrize("backward", [False, True])
def test_a_wrong_peer_gets_no_ratio(backward: bool, sinks_timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with_peers(monkeypatch, FA3(0.1), SomeFA4(0.1).as_peer())
    entry = bench_sink.run(SinkBench(256, 4, 2, 64, backward=backward), {}, "cpu")
    assert set(entry["peers"]) == ({"fa4"} if backward else {"fa3", "fa4"})
    assert all(peer["failed"].startswith("relative error 0.1") for peer in entry["peers"].values())
    assert "failed" not in entry and records._case_problems(entry) == []


def test_a_peer_that_raises_says_why_and_stops_nothing(sinks_timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fwd(**call: Any) -> None:
        raise RuntimeError("only Hopper\nand a trace")

    with_peers(monkeypatch, SimpleNamespace(fwd=fwd), "not installed")
    entry = bench_sink.run(SinkBench(256, 4, 2, 64), {}, "cpu")
    assert entry["peers"] == {"fa3": {"failed": "RuntimeError: only Hopper"}}
    assert entry["us"] == 2.0


# ---- GQA


PAGES: dict[str, Any] = {"layout": "paged_NHD", "page_size": 16, "h_q": 8, "h_kv": 2, "paged_peers": True}
GQA = {
    "int8": GqaBench(3, 48, "per_token_head", **PAGES),
    "int8, ragged": GqaBench(3, 48, "per_token_head", lengths=(1, 17, 48), **PAGES),
    "int8, window": GqaBench(3, 48, "per_token_head", **PAGES, window=30),
    "int8, queries": GqaBench(3, 48, "per_token_head", **PAGES, s_q=3),
    "bf16": GqaBench(3, 48, "none", kv_dtype="bf16", **PAGES, d=64),
    "fp8": GqaBench(3, 48, "per_tensor", kv_dtype="fp8", **PAGES),
}
NOTES = {
    ("int8", "bf16"): "a bf16 cache of as many tokens",
    ("int8", "fp8"): "a fp8 cache of as many tokens, q rounded to fp8 before",
    ("bf16", "bf16"): None,
    ("fp8", "fp8"): "q rounded to fp8 before",
}


@pytest.fixture
def gqa_timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(bench_gqa, "sets_to_outgrow_l2", lambda bytes_moved, most=64: 3)
    monkeypatch.setattr(cute_kernels, "gqa_decode", decode, raising=False)
    return fake_time_graph(monkeypatch, bench_gqa)


@pytest.mark.parametrize("bench", GQA.values(), ids=GQA)
def test_fa3_decodes_over_pages(bench: GqaBench, gqa_timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    fa3 = FA3()
    with_peers(monkeypatch, fa3, "not installed")
    entry = bench_gqa.run_decode(bench, bench_gqa.Pool("cpu"), CEILINGS)
    assert "failed" not in entry and records._case_problems(entry) == []
    assert list(entry["peers"]) == [f"fa3_{dtype}" for dtype in bench_gqa.FLASH_DTYPES[bench.kv_dtype]]
    for name, peer in entry["peers"].items():
        assert peer["ratio"] == 1.0 and 0 < peer["rel_err"] < 0.01
        assert peer.get("note") == NOTES[bench.kv_dtype, name.removeprefix("fa3_")]
    assert len(fa3.scheduled) == 3 * len(entry["peers"])
    for call in fa3.asked:
        made = fa3.scheduled[int(call["scheduler_metadata"]) - 1]
        same = ("cu_seqlens_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "num_splits", "pack_gqa", "sm_margin")
        for key in (*same, "window_size_left", "window_size_right", "is_causal"):
            assert call[key] is made[key] or call[key] == made[key]
        assert call["q"].shape == (bench.batch * bench.s_q, bench.h_q, bench.d)
        assert call["q"].dtype == call["k"].dtype == call["v"].dtype == made["qkv_dtype"]
        assert call["k"].shape == call["v"].shape == (3 * 9, 16, 2, bench.d)
        assert call["k"].data_ptr() != call["v"].data_ptr()
        assert call["cu_seqlens_q"].tolist() == [row * bench.s_q for row in range(4)]
        assert call["seqused_k"].tolist() == list(bench.seqlens)
        assert call["page_table"].dtype == torch.int32 and call["page_table"].shape == (3, 3)
        assert (made["batch_size"], made["page_size"]) == (3, 16)
        assert (made["num_heads"], made["num_heads_k"], made["headdim"], made["headdim_v"]) == (8, 2, bench.d, bench.d)
        fp8 = call["q"].dtype == torch.float8_e4m3fn
        for which in "qkv":
            scale = call[f"{which}_descale"]
            assert (scale is not None) == fp8
            if scale is not None:
                assert scale.shape == (3, 2) and scale.dtype == torch.float32
                assert (which != "q" and bench.kv_dtype == "fp8") or bool((scale == 1).all())


def test_fp8_probabilities_have_a_limit_of_their_own(gqa_timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {}
    for error in (0.03, 0.06):
        with_peers(monkeypatch, FA3(error), "not installed")
        entries[error] = bench_gqa.run_decode(GQA["int8"], bench_gqa.Pool("cpu"), CEILINGS)["peers"]
    assert "relative error 0.03" in entries[0.03]["fa3_bf16"]["failed"]
    assert "ratio" in entries[0.03]["fa3_fp8"]
    assert "relative error 0.06" in entries[0.06]["fa3_fp8"]["failed"]
    assert peers.PEER_LIMIT < 0.03 < peers.FP8_LIMIT < 0.06


def test_a_missing_fa3_costs_nothing(gqa_timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with_peers(monkeypatch, "not installed", "not installed")
    entry = bench_gqa.run_decode(GQA["int8"], bench_gqa.Pool("cpu"), CEILINGS)
    assert entry["peers"] == {} and gqa_timed == [3]


def test_fa3_runs_the_cases_in_pages_and_no_ratio_hangs_on_it() -> None:
    chosen = [case for case in DECODE_CASES if case.paged_peers]
    assert len(chosen) == 19
    assert all((case.layout, case.page_size) == ("paged_NHD", 64) and "ratio" not in case.must for case in chosen)
    assert {case.kv_dtype for case in chosen} == {"int8", "bf16", "fp8"}
    assert {case.d for case in chosen} == {64, 128, 256}


# ---- finding them


@pytest.fixture
def wheel(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A vLLM whose own code must not run, a DSL, and a quack that replaces a method of the DSL's tensors."""
    files = {
        "vllm/__init__.py": "raise RuntimeError('vLLM has been imported')",
        "vllm/vllm_flash_attn/__init__.py": "raise RuntimeError('vllm_flash_attn has been imported')",
        "vllm/vllm_flash_attn/cute/__init__.py": "from vllm.vllm_flash_attn.cute.interface import _flash_attn_fwd",
        "vllm/vllm_flash_attn/cute/interface.py": INTERFACE,
        "dsl_for_test/__init__.py": "",
        "dsl_for_test/cute.py": "from dsl_for_test.tensor import Tensor, make",
        "dsl_for_test/tensor.py": (
            "class Tensor:\n    def __getitem__(self, i):\n        return 'plain'\n\ndef make():\n    return 'plain'\n"
        ),
        "quack/__init__.py": (
            "from dsl_for_test import tensor\n"
            "tensor.Tensor.__getitem__ = lambda self, i: 'sugar'\n"
            "def make():\n    return 'sugar'\n"
            "tensor.make = make\n"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(flash_attention, "DSL", "dsl_for_test")
    ours = ("vllm", "quack", "dsl_for_test")
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ours}
    importlib.invalidate_caches()
    for cached in (flash_attention.fa3, flash_attention.fa4):
        cached.cache_clear()
    yield tmp_path / "vllm" / "vllm_flash_attn"
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    sys.modules.update(kept)
    for cached in (flash_attention.fa3, flash_attention.fa4):
        cached.cache_clear()


def test_fa4_is_imported_without_vllm_and_leaves_the_dsl_as_it_was(wheel: pathlib.Path) -> None:
    fa4 = flash_attention.fa4()
    assert isinstance(fa4, FA4), fa4
    tensor = sys.modules["dsl_for_test.tensor"]
    assert "vllm" not in sys.modules and "vllm.vllm_flash_attn" not in sys.modules
    assert tensor.Tensor()[...] == tensor.make() == fa4.forward() == "plain"
    for _ in range(2):
        with fa4.compiling():
            assert fa4.forward() == tensor.make() == "sugar"
        assert fa4.forward() == tensor.make() == "plain"
    assert fa4.backward() == "gradients"
    assert flash_attention.fa4() is fa4


def test_what_is_replaced_in_a_block_is_undone_where_it_raises(wheel: pathlib.Path) -> None:
    tensor: Any = importlib.import_module("dsl_for_test.tensor")
    replaced = Replaced("dsl_for_test")
    with pytest.raises(KeyError), replaced.during():
        tensor.make = lambda: "other"
        raise KeyError
    assert tensor.make() == "plain"
    with replaced.during():
        assert tensor.make() == "other"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quack/__init__.py": "raise AttributeError('ThrMma')"}, "AttributeError: ThrMma"),
        ({"quack/__init__.py": None}, "quack is not installed"),
        ({"vllm/vllm_flash_attn/cute/interface.py": None}, "no cute/interface.py"),
        ({"vllm/vllm_flash_attn": None}, "vllm is installed without vllm_flash_attn"),
    ],
)
def test_why_there_is_no_fa4(change: dict[str, str | None], reason: str, wheel: pathlib.Path) -> None:
    root = wheel.parents[1]
    for name, text in change.items():
        if text is None:
            (root / name).rename(root / "gone")
            if name.startswith("quack"):
                (root / "quack").rmdir()
        else:
            (root / name).write_text(text, encoding="utf-8")
    importlib.invalidate_caches()
    assert reason in str(flash_attention.fa4())
    assert flash_attention.versions()["fa4"].startswith("missing: ")
    assert "vllm" not in sys.modules


def test_fa3_is_a_library_that_is_loaded_alone(wheel: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash_attention.fa3() == "vllm_flash_attn has no _vllm_fa3_C.abi3.so"
    (wheel / "_vllm_fa3_C.abi3.so").write_bytes(b"no library")
    flash_attention.fa3.cache_clear()
    assert "_vllm_fa3_C.abi3.so cannot be loaded: " in str(flash_attention.fa3())
    assert flash_attention.versions()["fa3"].startswith("missing: _vllm_fa3_C.abi3.so cannot be loaded: ")
    flash_attention.fa3.cache_clear()
    loaded, operators = [], types.SimpleNamespace()

    def load_library(path: str) -> None:
        loaded.append(path)
        operators.fwd = FA3().fwd

    monkeypatch.setattr(torch, "ops", SimpleNamespace(_vllm_fa3_C=operators, load_library=load_library))
    assert flash_attention.fa3() is operators
    assert loaded == [str(wheel / "_vllm_fa3_C.abi3.so")]
    assert "vllm" not in sys.modules
    text = flash_attention.versions()["fa3"]
    assert text.startswith("vllm of unknown version, _vllm_fa3_C.abi3.so sha256 ") and len(text.split()[-1]) == 16
    assert "quack-kernels of unknown version" in flash_attention.versions()["fa4"]


def test_without_vllm_a_record_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (flash_attention.fa3, flash_attention.fa4):
        cached.cache_clear()
    monkeypatch.setattr(flash_attention, "_folder", lambda: "vllm is not installed")
    found = peers.versions()
    assert found["fa3"] == found["fa4"] == "missing: vllm is not installed"
    for cached in (flash_attention.fa3, flash_attention.fa4):
        cached.cache_clear()


# ---- tables


CASE: dict[str, Any] = {
    "op": "sink_attention",
    "peers": {
        "cudnn": {"us": 3.0, "ratio": 1.5},
        "fa3": {"us": 1.98, "ratio": 0.99, "ratio_sustained": 1.01},
        "fa4": {"failed": "no"},
    },
}


def test_tables_keep_flash_attention_apart() -> None:
    assert report.peer_of(CASE) == CASE["peers"]["cudnn"] and report.peer_name(CASE) == "cudnn"
    assert report.ratios(CASE) == [1.5]
    assert report.faster(CASE) == "1.50 x cuDNN without sinks, 0.99 x FA3 (1.01 under load)"
    alone = {"op": "sink_attention", "peers": {"fa3": {"us": 1.0, "ratio": 0.5}}}
    assert report.peer_of(alone) == {} and report.peer_name(alone) == "" and report.ratios(alone) == []
    assert report.faster(alone) == "0.50 x FA3" and report.faster({"op": "sink_attention"}) == "–"
