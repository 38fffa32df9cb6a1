"""Ceilings and peers without a GPU: the best way to read is the ceiling, and a peer that is missing is said to be."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bench import ceilings, peers
from bench.in_layer import Graphs, Timing
from bench.peers import OURS, Peer


def reader(tiles: torch.Tensor, sums: torch.Tensor) -> None:
    """As the kernel leaves it: each CTA's threads have sums of their own, modulo 2^32."""
    total = int(tiles.sum(dtype=torch.int64))
    sums.zero_()
    sums[0, 0] = (total + 2**31) % 2**32 - 2**31


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Microseconds by the number of the way in which bytes are moved."""
    found = {"sum": 2.0, "tma": 1.0, "copy": 4.0}
    monkeypatch.setattr(ceilings, "prepare", lambda calls: ("graph", [call() for call in calls]))
    monkeypatch.setattr(ceilings, "prepare_eager", lambda calls: ("eager", [call() for call in calls]))

    def time_together(ways: Any, *, sustained: bool) -> Any:
        assert not sustained
        assert {name: how for name, (how, _) in ways.items() if how == "eager"} == {"copy": "eager"}
        return {name: Timing(found[name], 0.0, 0.0, 0.0) for name in ways}

    monkeypatch.setattr(ceilings, "time_together", time_together)
    monkeypatch.setattr(ceilings, "time_eager", lambda call, repeats: call() is None or 1e-6)
    return found


BYTES = 4 * ceilings.STREAM_WORDS * 4


@pytest.mark.parametrize("best", ["sum", "tma", "copy"])
def test_the_ceiling_is_the_best_way_to_read(best: str, times: dict[str, float]) -> None:
    times[best] = 0.5
    rates = ceilings.stream_rates(BYTES, "cpu", reader)
    assert list(rates) == list(ceilings.WAYS)
    assert max(rates, key=lambda name: rates[name]) == best and rates[best] == BYTES / 0.5 / 1e3


def test_all_ceilings_have_keys(times: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "compile_kernel", lambda spec: reader)
    found = ceilings.measure_ceilings(stream_bytes=BYTES, gemm_size=8, device="cpu")
    assert found["read_GBps"] == found["tma_GBps"] == round(BYTES / 1e3, 1)
    assert set(found) == {"read_GBps", "sum_GBps", "tma_GBps", "copy_GBps", "bf16_gemm_TFLOPs"}


def test_a_reader_that_misses_a_word_is_no_ceiling(times: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    rates = ceilings.stream_rates(BYTES, "cpu", lambda tiles, sums: reader(tiles[:-1], sums))
    assert set(rates) == {"sum", "copy"}
    assert "no reader by TMA: ValueError: the words add up to" in capsys.readouterr().out


# --- peers


def graphs() -> Graphs:
    return Graphs(1, (), ())


def test_a_peer_that_cannot_run_or_computes_something_else_has_no_ratio() -> None:
    found = {
        "right": peers.ready(lambda: Peer(graphs(), 0.003, "q padded")),
        "wrong": peers.ready(lambda: Peer(graphs(), 0.3)),
        "nan": peers.ready(lambda: Peer(graphs(), float("nan"))),
        "broken": peers.ready(lambda: 1 / 0),  # type: ignore[return-value]
    }
    assert list(peers.ways(graphs(), found)) == [OURS, "right"]
    ours = Timing(2.0, 1.9, 2.1, 1.8, 2.5, 1700.0, 1980.0, 700.0, 3)
    theirs = Timing(3.0, 2.9, 3.1, 2.7, 3.0, 1950.0, 1980.0, 600.0)
    entries = peers.entries(found, {OURS: ours, "right": theirs})
    assert entries["right"] == {
        "us": 3.0,
        "ratio": 1.5,
        "us_back_to_back": 2.7,
        "ratio_back_to_back": 1.5,
        "us_sustained": 3.0,
        "ratio_sustained": 1.2,
        "sm_mhz": 1950,
        "watts": 600,
        "rel_err": 0.003,
        "note": "q padded",
    }
    paired = {OURS: Timing(2.0, 1.9, 2.1, 1.8, 2.5, rounds_us=(2.4, 2.5, 2.6))}
    paired["right"] = Timing(3.0, 2.9, 3.1, 2.7, 3.0, rounds_us=(3.6, 2.5, 3.0))
    assert peers.entries(found, paired)["right"]["ratio_sustained"] == 1.154, "of the same round"
    rested = {name: Timing(2.0, 1.9, 2.1, 1.8) for name in (OURS, "right")}
    assert set(peers.entries(found, rested)["right"]) & {"us_sustained", "ratio_sustained"} == set()
    assert entries["wrong"] == {"failed": "relative error 0.3"} and entries["nan"] == {"failed": "relative error nan"}
    assert entries["broken"] == {"failed": "ZeroDivisionError: division by zero"}


def test_versions_name_what_ran_and_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    found = peers.versions()
    assert found["flash_mla"].startswith("missing: flash_mla cannot be imported") and "in torch" in found["cudnn"]
    (tmp_path / "_flashmla_C.abi3.so").write_bytes(b"kernels")
    module: Any = ModuleType("flash_mla")
    module.__file__ = str(tmp_path / "__init__.py")
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    assert peers.versions()["flash_mla"].startswith("_flashmla_C.abi3.so sha256 ")
    module.__version__ = "1.2"
    assert peers.versions()["flash_mla"].startswith("1.2, _flashmla_C.abi3.so sha256 ")
    assert peers.version_of(SimpleNamespace(__name__="none", __file__=str(tmp_path / "x" / "y"))) == "unknown"
