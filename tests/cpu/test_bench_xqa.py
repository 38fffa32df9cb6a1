"""XQA as a peer, without a GPU and without nvcc: how it is compiled, what it is asked, what a record says of it."""

import ctypes
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cute_kernels
from bench import flash_attention, peers, records, xqa
from bench import gqa as bench_gqa
from bench.gqa import GqaBench
from cute_kernels.gqa.reference import reference_gqa_decode
from tests.cpu.test_bench_gqa import CEILINGS, decode
from tests.kit.replays import fake_time_graph

FORM = xqa.FORMS[0]


class Wrapper:
    """The kernel, computed by the reference; notes what it is asked."""

    def __init__(self, error: float = 0.0) -> None:
        self.error = error
        self.asked: list[tuple[Any, ...]] = []

    def __call__(self, *call: Any) -> None:
        self.asked.append(call)
        (sm90, sms, h_kv, window, q_scale, q_scales, out, out_scale, q, sinks, k, v, k_sf, v_sf, table, longest) = call[
            :16
        ]
        (lengths, batch, kv_scale, kv_scales, queries, starts, mask, semaphores, scratch, pdl) = call[16:]
        assert (sm90, sms, window, q_scale, out_scale, kv_scale, queries, pdl) == (True, 132, 0, 1.0, 1.0, 1.0, 1, True)
        assert all(given is None for given in (q_scales, sinks, k_sf, v_sf, starts, mask))
        assert h_kv == k.shape[2] and batch == len(q) and longest == table.shape[1] * 64
        assert k.dtype == v.dtype == torch.float8_e4m3fn and k.data_ptr() != v.data_ptr()
        assert q.dtype == torch.bfloat16 and bool((q.to(torch.float8_e4m3fn).bfloat16() == q).all())
        assert table.dtype == lengths.dtype == semaphores.dtype == torch.int32 and lengths.shape == (batch, 1)
        assert semaphores.numel() >= batch * h_kv and not semaphores.any() and scratch.dtype == torch.uint8
        assert kv_scales is None or (kv_scales.dtype == torch.float32 and kv_scales.numel() == 1)
        pages = {"block_table": table, "cache_seqlens": lengths[:, 0], "layout": "paged_NHD"}
        result, _ = reference_gqa_decode(q, k, v, kv_scales, kv_scales, **pages)
        out.copy_(result * (1 + self.error))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(bench_gqa, "sets_to_outgrow_l2", lambda bytes_moved, most=64: 3)
    monkeypatch.setattr(cute_kernels, "gqa_decode", decode, raising=False)
    monkeypatch.setattr(flash_attention, "fa3", lambda: "not installed")
    return fake_time_graph(monkeypatch, bench_gqa)


PAGES: dict[str, Any] = {"layout": "paged_NHD", "page_size": 64, "h_q": 8, "h_kv": 2, "paged_peers": True}
CASES = {
    "int8": GqaBench(3, 128, "per_token_head", **PAGES),
    "ragged": GqaBench(3, 128, "per_token_head", lengths=(1, 67, 128), **PAGES),
    "fp8": GqaBench(3, 128, "per_tensor", kv_dtype="fp8", **PAGES),
}
OTHERS = {
    "bf16": GqaBench(3, 128, "none", kv_dtype="bf16", **PAGES),
    "window": GqaBench(3, 128, "per_token_head", window=7, **PAGES),
    "queries": GqaBench(3, 128, "per_token_head", s_q=2, **PAGES),
    "another form": GqaBench(3, 128, "per_token_head", d=64, **PAGES),
}


@pytest.mark.parametrize("bench", CASES.values(), ids=CASES)
def test_it_decodes_over_pages_of_fp8(bench: GqaBench, timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = Wrapper()
    monkeypatch.setattr(xqa, "wrapper", lambda form: wrapper)
    entry = bench_gqa.run_decode(bench, bench_gqa.Pool("cpu"), CEILINGS)
    assert "failed" not in entry and list(entry["peers"]) == ["xqa_fp8"]
    peer = entry["peers"]["xqa_fp8"]
    assert peer["ratio"] == 1.0 and 0 < peer["rel_err"] < 0.01
    one_scale = "q in FP8, one scale for keys and values"
    assert peer["note"] == (one_scale if bench.kv_dtype == "fp8" else "a fp8 cache of as many tokens, q in FP8")
    assert (wrapper.asked[0][19] is not None) == (bench.kv_dtype == "fp8")
    assert (
        len({call[6].data_ptr() for call in wrapper.asked}) == len({call[23].data_ptr() for call in wrapper.asked}) == 3
    )


@pytest.mark.parametrize("bench", OTHERS.values(), ids=OTHERS)
def test_other_cases_are_left_out(bench: GqaBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xqa, "wrapper", lambda form: pytest.fail("compiled"))
    assert bench_gqa.run_xqa(bench, [], bench_gqa.Pool("cpu")) == {}


def test_a_wrong_result_gets_no_ratio(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xqa, "wrapper", lambda form: Wrapper(0.06))
    entry = bench_gqa.run_decode(CASES["int8"], bench_gqa.Pool("cpu"), CEILINGS)
    assert "relative error 0.06" in entry["peers"]["xqa_fp8"]["failed"]
    assert records._case_problems({**entry, "TFLOPs": 1.0}) == []


@pytest.fixture
def wheel(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """FlashInfer's sources, a package that must not be imported."""
    package = tmp_path / "flashinfer"
    for name in xqa.SOURCES:
        path = package / "data" / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, encoding="utf-8")
    (package / "__init__.py").write_text("raise RuntimeError('FlashInfer has been imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(xqa, "FOLDER", tmp_path / "build")
    monkeypatch.setattr(xqa, "_nvcc", lambda: "nvcc")
    xqa.wrapper.cache_clear()
    yield package / "data"
    xqa.wrapper.cache_clear()


def test_it_is_compiled_once_and_loaded(wheel: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> None:
        assert options["check"] and options["timeout"] == xqa.COMPILE_SECONDS
        commands.append(command)
        pathlib.Path(command[command.index("-o") + 1]).write_text("code", encoding="utf-8")

    loaded: list[str] = []

    def load_module(path: str) -> Any:
        loaded.append(path)
        return SimpleNamespace(xqa_wrapper="the function")

    fake = SimpleNamespace(__file__="/site/tvm_ffi/__init__.py", load_module=load_module)
    monkeypatch.setitem(sys.modules, "tvm_ffi", fake)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: None)
    assert xqa.wrapper(FORM) == "the function"
    compiled = [command for command in commands if "-c" in command]
    assert sorted(command[command.index("-c") + 1] for command in compiled) == sorted(
        str(wheel / "csrc" / name) for name in xqa.SOURCES
    )
    for command in compiled:
        assert {"-DHEAD_ELEMS=128", "-DHEAD_GRP_SIZE=4", "-DTOKENS_PER_PAGE=64"} < set(command)
        assert "-I/site/tvm_ffi/include" in command and f"-I{wheel / 'csrc'}" in command
    assert [command[1] for command in commands].count("-shared") == 1 and commands[-1][1] == "-shared"
    [library] = xqa.FOLDER.iterdir()
    assert loaded == [str(library)] and library.read_text(encoding="utf-8") == "code"
    commands.clear()
    xqa.wrapper.cache_clear()
    assert xqa.wrapper(FORM) == "the function" and commands == []
    (wheel / "csrc" / "xqa" / "mha.cu").write_text("changed", encoding="utf-8")
    xqa.wrapper.cache_clear()
    assert xqa.wrapper(FORM) == "the function" and len(commands) == len(xqa.SOURCES) + 1
    assert "flashinfer" not in sys.modules


def test_what_cannot_be_compiled_is_said_in_the_case(wheel: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="error: no such thing")

    monkeypatch.setitem(sys.modules, "tvm_ffi", SimpleNamespace(__file__="/site/tvm_ffi/__init__.py"))
    monkeypatch.setattr(subprocess, "run", run)
    assert xqa.wrapper(FORM) == "XQA cannot be compiled: error: no such thing"
    found = bench_gqa.run_xqa(CASES["int8"], [], bench_gqa.Pool("cpu"))
    assert found["xqa_fp8"].failed == "XQA cannot be compiled: error: no such thing"
    assert not any(xqa.FOLDER.iterdir())


def test_a_record_says_what_is_missing(wheel: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert xqa.version().startswith("flashinfer-python ") and "csrc/xqa sha256 " in xqa.version()
    monkeypatch.setattr(xqa, "_nvcc", lambda: None)
    assert peers.versions()["xqa"] == "missing: there is no nvcc to compile FlashInfer's kernels"
    assert bench_gqa.run_xqa(CASES["int8"], [], bench_gqa.Pool("cpu")) == {}
    (wheel / "csrc" / "xqa" / "mha_sm90.cu").unlink()
    assert xqa.version() == "missing: flashinfer is installed without the sources of XQA"
    assert "is not compiled for" in str(xqa.wrapper(xqa.Form(64, 8, 64)))


def test_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xqa.importlib.util, "find_spec", lambda name: None)
    assert xqa.version() == "missing: flashinfer is not installed"
