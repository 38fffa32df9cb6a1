"""The record of a GPU run and what is made from it: it must not say more than was checked."""

import json
import math
from typing import Any

import pytest
import torch

from cute_kernels.testing import evidence
from cute_kernels.testing.compare import Comparison
from scripts import gpu_check, results_table, sanitize

PASSED = Comparison("case", (), rel_err=0.0021, rel_err_baseline=0.0025, worst=0.4, lse_err=2e-5)
FAILED = Comparison("case", ("out: 3 of 9 elements are wrong",), 0.5, 0.0025, 90.0, math.nan)
SIZES = {"op": "mla_fp8_decode", "mode": "sparse", "batch": 128, "h_q": 128, "s_q": 2, "topk": 2048}
SPEED = {"us": 500.123, "us_p10": 499.0, "us_p90": 510.0, "TFLOPs": 292.1, "GBps": 900.0, "read_fraction": 0.2}


def some_record(**changes: Any) -> dict[str, Any]:
    record = {
        "card": "NVIDIA H200",
        "driver": "580.1",
        "torch": "2.11.0",
        "cutlass_dsl": "4.8.1",
        "date": "2026-01-02",
        "source_digest": "0123456789abcdef" * 4,
        "tests": {
            "passed": 278,
            "failed": 0,
            "skipped": 0,
            "sanitizer": {"memcheck": 0, "racecheck": None, "synccheck": 0},
        },
        "ceilings": {"read_GBps": 4323.0, "copy_GBps": 4277.0, "bf16_gemm_TFLOPs": 782.0},
        "cases": [
            evidence.record_case(
                SIZES, PASSED, lambda: {**SPEED, "peers": {"flash_mla": {"us": 409.0, "ratio": 0.82}}}
            ),
            evidence.record_case({**SIZES, "batch": 16}, FAILED, dict),
            evidence.record_case(
                {"op": "mla_fp8_append", "tokens": 65536}, PASSED, lambda: {**SPEED, "copy_fraction": 0.85}
            ),
        ],
    }
    return {**record, **changes}


def test_a_failed_check_is_recorded_without_a_speed():
    def measure() -> dict[str, float]:
        raise AssertionError("timed although the check failed")

    entry = evidence.record_case(SIZES, FAILED, measure)
    assert entry["rel_err"] == 0.5
    assert entry["lse_err"] is None
    assert "3 of 9 elements" in entry["failed"]
    assert not set(entry) & set(evidence.SPEED_KEYS)


def test_a_good_record_survives_the_disk(tmp_path):
    path = tmp_path / "results" / "h200.json"
    evidence.write(some_record(), path)
    assert evidence.read(path) == some_record()
    assert [file.name for file in path.parent.iterdir()] == ["h200.json"]


BAD_RECORDS: dict[str, dict[str, Any]] = {
    "a speed beside a failed check": {"cases": [{**SIZES, "failed": "out: wrong", "us": 5.0}]},
    "peers beside a failed check": {
        "cases": [{**SIZES, "failed": "out: wrong", "peers": {"p": {"us": 1, "ratio": 1}}}]
    },
    "a speed without a check": {"cases": [{**SIZES, "us": 5.0}]},
    "an error that is no number": {"cases": [{**SIZES, "us": 5.0, "rel_err": math.nan}]},
    "neither a speed nor a reason": {"cases": [{**SIZES, "rel_err": 0.002}]},
    "a time of zero": {"cases": [{**SIZES, "us": 0.0, "rel_err": 0.002}]},
    "a peer without a ratio": {"cases": [{**SIZES, "us": 1.0, "rel_err": 0.002, "peers": {"p": {"us": 1.0}}}]},
    "a case without an op": {"cases": [{"us": 1.0, "rel_err": 0.002}]},
    "cases that are no list": {"cases": {}},
    "no card": {"card": ""},
    "a digest that is none": {"source_digest": "abc"},
    "no test counts": {"tests": {"sanitizer": dict.fromkeys(evidence.SANITIZER_TOOLS)}},
    "a tool left out": {"tests": {"passed": 1, "failed": 0, "skipped": 0, "sanitizer": {"memcheck": 0}}},
    "a ceiling left out": {"ceilings": {"read_GBps": 1.0, "copy_GBps": 1.0}},
}


@pytest.mark.parametrize("changes", BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_a_bad_record_is_refused_and_the_old_file_stays(changes, tmp_path):
    path = tmp_path / "h200.json"
    evidence.write(some_record(), path)
    with pytest.raises(evidence.EvidenceError):
        evidence.write(some_record(**changes), path)
    assert evidence.read(path) == some_record()


def test_a_file_that_is_no_json_is_refused(tmp_path):
    path = tmp_path / "h200.json"
    path.write_text("{")
    with pytest.raises(evidence.EvidenceError, match="h200.json"):
        evidence.read(path)


def test_the_digest_changes_with_names_and_contents(tmp_path):
    for package in evidence.SOURCE_PACKAGES:
        (tmp_path / package / "room").mkdir(parents=True)
        (tmp_path / package / "room" / "op.py").write_text("a = 1\n")
    digests = [evidence.source_digest(tmp_path)]

    def changed() -> bool:
        digests.append(evidence.source_digest(tmp_path))
        return digests[-1] not in digests[:-1]

    op = tmp_path / "cute_kernels" / "room" / "op.py"
    (op.parent / "notes.txt").write_text("no source")
    assert not changed()
    op.write_text("a = 2\n")
    assert changed()
    op.rename(op.with_name("op2.py"))
    assert changed()
    (tmp_path / "fp8_mla" / "room" / "empty.py").touch()
    assert changed()


def test_the_digest_of_this_checkout(root):
    assert len(evidence.source_digest()) == 64
    assert evidence.source_digest() == evidence.source_digest(root)


# --- results_table

README = f"# Title\n\nBefore.\n\n{results_table.BEGIN}\nold\n{results_table.END}\n\nAfter.\n"


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "speed.md").write_text(README)
    (tmp_path / "docs" / "other.md").write_text("# No results here\n")
    return tmp_path


def test_the_pages_are_filled_and_checked(checkout, capsys):
    evidence.write(some_record(), checkout / "results" / "h200.json")
    assert results_table.main(["--check"], root=checkout) == 1
    assert "README.md is out of date" in capsys.readouterr().err
    assert (checkout / "README.md").read_text() == README, "--check changes nothing"
    assert results_table.main([], root=checkout) == 0
    assert results_table.main(["--check"], root=checkout) == 0
    for page in (checkout / "README.md", checkout / "docs" / "speed.md"):
        text = page.read_text()
        assert text.startswith("# Title\n\nBefore.\n")
        assert text.endswith("\n\nAfter.\n")
        assert "| 128 x 128 x 2 | 2048 | 500 | 499 .. 510 | 292 | 900 | 409 | 0.82 | 2.1e-03 | 2.0e-05 |" in text
        assert "| 16 x 128 x 2 | 2048 | check failed |" in text
        assert "85% of copies" in text
        assert "racecheck not run" in text
    assert (checkout / "docs" / "other.md").read_text() == "# No results here\n"

    evidence.write(some_record(date="2026-02-03"), checkout / "results" / "h200.json")
    assert results_table.main(["--check"], root=checkout) == 1


def test_without_results_the_page_says_so(checkout):
    assert results_table.main([], root=checkout) == 0
    assert results_table.NO_RESULTS in (checkout / "README.md").read_text()
    assert results_table.main(["--check"], root=checkout) == 0


def test_a_page_without_markers_is_an_error(checkout, capsys):
    (checkout / "README.md").write_text("# Title\n")
    assert results_table.main([], root=checkout) == 1
    assert "README.md: needs one" in capsys.readouterr().err


def test_the_plot_is_the_same_for_the_same_record(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        assert results_table.draw(some_record(), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert not results_table.draw(some_record(cases=[]), tmp_path / "c.svg")


# --- gpu_check and sanitize


def test_gpu_check_refuses_other_machines(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "needs an SM90 GPU" in capsys.readouterr().err


def test_junit_reports_are_counted():
    report = '<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/><testsuite tests="1"/></testsuites>'
    assert gpu_check.count_tests(report) == {"passed": 4, "failed": 3, "skipped": 3}
    nothing = {"passed": 0, "failed": 1, "skipped": 0}
    assert gpu_check.count_tests(None) == nothing
    assert gpu_check.count_tests('<testsuites><testsuite tests="0"/></testsuites>') == nothing


def test_the_table_shows_speeds_and_failures():
    lines = gpu_check.table(some_record()["cases"]).splitlines()
    assert len(lines) == 4
    assert "128x128x2 topk 2048" in lines[1]
    assert "500.123" in lines[1]
    assert "0.82" in lines[1]
    assert "FAILED" in lines[2]
    assert "tokens 65536" in lines[3]


def test_cards_name_their_files():
    assert gpu_check.card_slug("NVIDIA H200") == "h200"
    assert gpu_check.card_slug("NVIDIA H100 80GB HBM3") == "h100"
    assert gpu_check.card_slug("NVIDIA Other Card") == "nvidia_other_card"


def test_a_bench_that_raises_is_recorded_and_the_others_run():
    def broken(ceilings: dict[str, float]) -> dict[str, Any]:
        raise RuntimeError("illegal memory access")

    cases = gpu_check.run_benches(
        [("mla_fp8_decode sparse 1x128x1 topk 2048", broken), ("other", lambda ceilings: {"op": "other"})],
        {},
        gpu_check.Progress(),
    )
    assert cases[0]["failed"] == "RuntimeError: illegal memory access"
    assert cases[1] == {"op": "other"}
    evidence.validate(some_record(cases=cases[:1]))


CLEAN = f"{sanitize.WORKER_DONE}\n========= ERROR SUMMARY: 0 errors\n"
SANITIZER_OUTPUTS: dict[str, tuple[str, str, int, int | None]] = {
    "clean": ("memcheck", CLEAN, 0, 0),
    "errors": ("memcheck", f"{sanitize.WORKER_DONE}\n========= ERROR SUMMARY: 12 errors\n", 99, 12),
    "clean races": (
        "racecheck",
        f"{sanitize.WORKER_DONE}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
        0,
        0,
    ),
    "races": (
        "racecheck",
        f"{sanitize.WORKER_DONE}\n========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n",
        0,
        3,
    ),
    "one error": ("synccheck", f"{sanitize.WORKER_DONE}\n========= ERROR SUMMARY: 1 error\n", 99, 1),
    "an error without a summary": ("synccheck", "gone\n", 99, 1),
    "a tool that refuses the device": ("memcheck", "========= Error: Device not supported\n", 1, None),
    "a worker that did not finish": ("memcheck", "Traceback\n========= ERROR SUMMARY: 0 errors\n", 1, None),
    "a tool that says nothing": ("memcheck", "", 0, None),
    "only the worker": ("memcheck", f"{sanitize.WORKER_DONE}\n", 0, None),
}


@pytest.mark.parametrize(("tool", "output", "status", "errors"), SANITIZER_OUTPUTS.values(), ids=SANITIZER_OUTPUTS)
def test_sanitizer_outputs(tool, output, status, errors):
    finding = sanitize.parse(tool, output, status)
    assert finding.errors == errors
    assert bool(finding.reason) == (errors is None)


def test_a_missing_sanitizer_is_a_reason_and_no_zero(monkeypatch):
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: None)
    finding = sanitize.run_tool("memcheck")
    assert finding.errors is None
    record = gpu_check.sanitizer_record([finding, sanitize.Finding("racecheck", 0), sanitize.Finding("synccheck", 2)])
    assert record == {
        "memcheck": None,
        "racecheck": 0,
        "synccheck": 2,
        "reasons": {"memcheck": "compute-sanitizer is not installed"},
    }
    json.dumps(record)
