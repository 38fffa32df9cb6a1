"""The record of a GPU run and what is made from it: it must not say more than was checked."""

import json
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels.testing import evidence
from cute_kernels.testing.compare import Comparison
from scripts import gpu_check, results_table, sanitize
from tests.gpu import conftest

PASSED = Comparison("case", (), rel_err=0.0021, rel_err_baseline=0.0025, worst=0.4, lse_err=2e-5)
FAILED = Comparison("case", ("out: 3 of 9 elements are wrong",), 0.5, 0.0025, 90.0, math.nan)
SIZES = {"op": "mla_fp8_decode", "mode": "sparse", "batch": 128, "h_q": 128, "s_q": 2, "topk": 2048}
GQA_SIZES = {"batch": 64, "h_q": 32, "h_kv": 8, "d": 128, "s_q": 1, "s_k": 8192}
PER_TENSOR = {"op": "gqa_decode", "kv_dtype": "int8", "scales": "per_tensor", "layout": "BNSH", **GQA_SIZES}
PER_HEAD = {**PER_TENSOR, "scales": "per_token_head", "layout": "paged_NHD", "page_size": 64}
APPEND = {"op": "kv_int8_append", "tokens": 65536, "h_kv": 8, "d": 128, "scales": "per_tensor", "layout": "BNSH"}
SPEED = {"us": 500.123, "us_p10": 499.0, "us_p90": 510.0, "TFLOPs": 292.1, "GBps": 900.0, "read_fraction": 0.2}


def gqa_cases() -> list[dict[str, Any]]:
    """Two variants at several sizes, one case that misses, two whose check failed, and an append."""

    def case(
        key: dict[str, Any], check: Comparison, must: dict[str, float], fraction: float = 0.95, **more: Any
    ) -> dict[str, Any]:
        entry = evidence.record_case(key, check, lambda: {**SPEED, "read_fraction": fraction, **more})
        return evidence.with_must(entry, must)

    peers = {"cudnn_bf16": {"us": 900.2, "ratio": 1.8, "rel_err": 0.003}}
    ragged = {"batch": 32, "s_k": "512..16384"}
    copied = {**SPEED, "copy_fraction": 0.85}
    del copied["read_fraction"]
    return [
        case(PER_TENSOR, PASSED, {"read_fraction": 0.9, "ratio": 1.7}, peers=peers),
        case({**PER_TENSOR, "batch": 1, "s_k": 32768}, PASSED, {"us": 26.0}, 0.2, us_p10=1.0, GBps=2000.0),
        case({**PER_TENSOR, **ragged}, PASSED, {"read_fraction": 0.85}, GBps=700.0),
        case(PER_HEAD, PASSED, {"read_fraction": 0.9}, GBps=902.0, host_us=7.5),
        case({**PER_HEAD, **ragged}, FAILED, {"read_fraction": 0.85}),
        case({**PER_TENSOR, "kv_dtype": "fp8", "s_q": 4, "window": 128}, FAILED, {"read_fraction": 0.85}),
        evidence.with_must(evidence.record_case(APPEND, PASSED, lambda: copied), {"copy_fraction": 0.8}),
    ]


def sink_cases() -> list[dict[str, Any]]:
    """A forward that is good enough, a backward that is not, a failed check, and both routes of two sizes."""
    sizes = {"batch": 4, "h_q": 64, "h_kv": 8, "d": 64, "s_q": 16384, "s_k": 16384}
    forward, backward = ({"op": "sink_attention", "pass": way, **sizes} for way in ("forward", "backward"))
    peers = {"cudnn": {"us": 550.0, "ratio": 1.1, "rel_err": 0.002}}
    routed = {"op": "sink_attention", "pass": "routing", "s_q": 1, "h_q": 64, "h_kv": 8, "d": 64, "batch": 1}
    times = {"us": 5.0, "route": "decode", "decode_us": 5.04, "prefill_us": 9.96}
    return [
        evidence.with_must(evidence.record_case(forward, PASSED, lambda: {**SPEED, "peers": peers}), {"ratio": 1.05}),
        evidence.with_must(
            evidence.record_case({**backward, "window": 128}, PASSED, lambda: {**SPEED, "us_without_sinks": 497.0}),
            {"us": 260.0},
        ),
        evidence.with_must(evidence.record_case({**backward, "deterministic": True}, FAILED, dict), {"TFLOPs": 1.0}),
        *(evidence.record_case({**routed, "s_k": s_k}, PASSED, lambda: times) for s_k in (64, 8192)),
    ]


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
            *gqa_cases(),
            *sink_cases(),
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


def page(*parts: str) -> str:
    """A page with a pair of markers for each part."""
    pairs = [f"<!-- results:{part}:begin -->\nold\n<!-- results:{part}:end -->\n" for part in parts]
    return "\n".join(["# Title\n\nBefore.\n", *pairs, "After.\n"])


README = page("run", "mla", "gqa-summary")


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "mla_decode.md").write_text(page("mla"))
    (tmp_path / "docs" / "gqa_decode.md").write_text(page("gqa"))
    (tmp_path / "docs" / "other.md").write_text("# No results here\n")
    return tmp_path


def test_the_pages_are_filled_and_checked(checkout, capsys):
    evidence.write(some_record(), checkout / "results" / "h200.json")
    assert results_table.main(["--check"], root=checkout) == 1
    assert "README.md is out of date" in capsys.readouterr().err
    assert (checkout / "README.md").read_text() == README, "--check changes nothing"
    assert results_table.main([], root=checkout) == 0
    assert results_table.main(["--check"], root=checkout) == 0
    readme = (checkout / "README.md").read_text()
    mla, gqa = ((checkout / "docs" / f"{room}_decode.md").read_text() for room in ("mla", "gqa"))
    for text in (readme, mla, gqa):
        assert text.startswith("# Title\n\nBefore.\n")
        assert text.endswith("\n\nAfter.\n")
        assert "old" not in text
    for text in (readme, mla):
        assert "| 128 x 128 x 2 | 2048 | 500 | 499 .. 510 | 292 | 900 | 409 | 0.82 | 2.1e-03 | 2.0e-05 |" in text
        assert "| 16 x 128 x 2 | 2048 | check failed |" in text
        assert "| `mla_fp8_append`: tokens 65536 | 500 | 900 | 85% of copies |" in text
    assert "racecheck not run" in readme
    assert "racecheck" not in mla + gqa
    assert "mla_fp8" not in gqa
    for name in ("int8 per tensor, BNSH", "int8 per token head, paged_NHD 64"):
        assert f"| {name} | 64 x 8192 |" in gqa
        assert f" {name} |" in readme
    assert "| int8 per tensor, BNSH | 32 x 512..16384 | 500 | 499 .. 510 |" in gqa
    assert "| fp8 per tensor, BNSH | 64 x 8192, s_q 4, window 128 | check failed |" in gqa
    assert "`kv_int8_append`: per_tensor, BNSH, tokens 65536" in gqa
    assert "85% of copies (needs 0.80 of copies)" in gqa
    assert "kv_int8_append" not in readme
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
    assert "README.md: needs a pair" in capsys.readouterr().err


BAD_MARKERS = {
    "no end": "<!-- results:run:begin -->",
    "no begin": "<!-- results:run:end -->",
    "the wrong order": "<!-- results:run:end --><!-- results:run:begin -->",
    "two names": "<!-- results:run:begin --><!-- results:mla:end -->",
    "one in another": page("run").replace("old", page("mla")),
    "one too many": page("run") + "<!-- results:mla:begin -->",
    "no such part": page("nothing"),
}


@pytest.mark.parametrize("text", BAD_MARKERS.values(), ids=BAD_MARKERS)
def test_markers_that_are_no_pair_are_an_error(text, checkout, capsys):
    (checkout / "docs" / "other.md").write_text(text)
    assert results_table.main([], root=checkout) == 1
    assert "other.md: <!-- results:" in capsys.readouterr().err
    assert (checkout / "docs" / "other.md").read_text() == text


def test_a_record_without_such_cases_says_so():
    record = some_record(cases=[])
    assert [part for part in results_table.PARTS if results_table.render(record, part) == results_table.NO_CASES] == [
        "mla",
        "mla-sustained",
        "gqa",
        "gqa-summary",
        "sink",
        "sink-summary",
        "sink-routing",
        "budget-errors",
    ]


def test_every_op_has_a_place():
    """A benchmark that no part shows would be in the record and on no page."""
    text = "\n".join(results_table.render(some_record(), part) for part in results_table.PARTS)
    for op in {case["op"] for case in some_record()["cases"]}:
        assert f"`{op}`" in text


def test_a_case_that_raised_is_in_the_tables():
    raised = [
        {"op": op, "case": "int8 64x32x1", "failed": "RuntimeError: no"}
        for op in ("gqa_decode", "mla_fp8_decode", "sink_attention")
    ]
    record = some_record(cases=[*some_record()["cases"], *raised])
    for part in ("mla", "gqa", "sink"):
        (line,) = (line for line in results_table.render(record, part).splitlines() if "int8 64x32x1" in line)
        assert "failed" in line


def test_the_summary_of_gqa_shows_what_is_needed_and_missed():
    lines = results_table.render(some_record(), "gqa-summary").splitlines()
    columns = ["int8 per tensor, BNSH", "int8 per token head, paged_NHD 64"]
    assert (
        lines[0] == f"| `gqa_decode`: batch x s_k | needs | {' | '.join(columns)} | cuDNN over bf16: its time / ours |"
    )
    assert lines[2:5] == [
        "| 64 x 8192 | 0.90 of reads, 1.7 x cuDNN | 500 us, 0.95 | 500 us, 0.95 | 1.80 |",
        "| 1 x 32768 | 26 us | **500 us, 0.20** | – | – |",
        "| 32 x 512..16384 | 0.85 of reads | 500 us, 0.95 | **check failed** | – |",
    ]
    assert lines[-1] == "| fp8 per tensor, BNSH | 64 x 8192, s_q 4, window 128 | 0.85 of reads | **check failed** |"


def test_the_tables_of_sink_attention():
    whole, summary, routing = (
        results_table.render(some_record(), part).splitlines() for part in ("sink", "sink-summary", "sink-routing")
    )
    name, size = "forward, 64/8 of 64", "4 x 16384"
    assert whole[2].startswith(f"| {name} | {size} | 500 | 499 .. 510 | 292 | 900 | 1.05 x cuDNN | 550 | 1.10 |")
    assert "| backward, 64/8 of 64, window 128 |" in whole[3] and "(missed)" in whole[3] and "| 497 |" in whole[3]
    assert "deterministic | 4 x 16384 | failed |" in whole[4] and len(whole) == 5
    assert summary[2:] == [
        f"| {name} | {size} | 1.05 x cuDNN | 500 us, 292 TFLOP/s | 1.10 |",
        f"| backward, 64/8 of 64, window 128 | {size} | 260 us | **500 us, 292 TFLOP/s** | – |",
        f"| backward, 64/8 of 64, deterministic | {size} | 1 TFLOP/s | **check failed** | – |",
    ]
    assert routing[2:] == ["| 64 | **5.0** / 10.0 |", "| 8192 | **5.0** / 10.0 |"]


def test_the_plots_are_the_same_for_the_same_record(tmp_path):
    pytest.importorskip("matplotlib")
    names = ["mla_speed.svg", "gqa_speed.svg", "sink_speed.svg"]
    for folder in ("a", "b"):
        assert results_table.draw(some_record(), tmp_path / folder) == names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    for text in ("read ceiling", "cuDNN", "int8 per tensor, BNSH", "64 x 8192"):
        assert text in (tmp_path / "a" / "gqa_speed.svg").read_text()
    assert results_table.draw(some_record(cases=[]), tmp_path / "c") == []


# --- gpu_check and sanitize


def test_a_record_may_come_from_two_runs():
    whole = some_record()
    tools = dict.fromkeys(evidence.SANITIZER_TOOLS)
    nothing = {"passed": None, "failed": None, "skipped": None, "sanitizer": {**tools, "reasons": {"all": "left out"}}}
    of_tests = {**whole, "cases": [], "ceilings": {**whole["ceilings"], "read_GBps": 1.0}, "date": "2026-01-03"}
    of_benchmarks = {**whole, "tests": nothing}
    assert gpu_check.completed(of_tests, of_benchmarks) == {**whole, "date": "2026-01-03"}
    assert gpu_check.completed(of_benchmarks, of_tests) == whole
    only_counts = {**of_tests, "tests": {**whole["tests"], "sanitizer": nothing["sanitizer"]}}
    other_counts = {**whole, "tests": {**whole["tests"], "passed": 1}}
    assert gpu_check.completed(only_counts, other_counts) == {**whole, "date": "2026-01-03"}
    for key in ("source_digest", "card", "driver", "torch", "cutlass_dsl"):
        with pytest.raises(ValueError, match=f"--keep: got {key} 'another'"):
            gpu_check.completed(of_tests, {**of_benchmarks, key: "another"})


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


JUNIT = '<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="0"/></testsuites>'
PROCESSES: dict[str, tuple[int | None, str | None, int]] = {
    "one test failed": (1, JUNIT.format(4, 1), 3),
    "crashed before its report": (-11, None, 0),
    "crashed behind its report": (-11, JUNIT.format(4, 0), 4),
    "out of time": (None, None, 0),
    "out of time behind its report": (None, JUNIT.format(4, 0), 0),
    "nothing collected": (5, JUNIT.format(0, 0), 0),
    "broken collection": (2, JUNIT.format(4, 0), 4),
}


@pytest.mark.parametrize(("status", "report", "passed"), PROCESSES.values(), ids=PROCESSES)
def test_a_process_that_ended_badly_is_a_failure(status, report, passed):
    good = (0, JUNIT.format(5, 0))
    assert gpu_check.sum_counts([good, good]) == {"passed": 10, "failed": 0, "skipped": 0}
    counts = gpu_check.sum_counts([good, (status, report), good])
    assert counts == {"passed": 10 + passed, "failed": 1, "skipped": 0}


def test_all_tests_run_once_and_only_behind_their_kernels(monkeypatch):
    calls: list[list[list[str]]] = []

    def run_pytest(selections, folder, deadline):
        calls.append(selections)
        return [(status, JUNIT.format(2, 0))] * len(selections)

    monkeypatch.setattr(gpu_check, "run_pytest", run_pytest)
    status = 0
    assert gpu_check.run_tests(3) == {"passed": 8, "failed": 0, "skipped": 0}
    rest = [["-m", "not alone", "--shard", part] for part in ("1/3", "2/3", "3/3")]
    assert calls == [[["--compile-only"]], [["-m", "alone"]], rest]
    status = 3
    assert gpu_check.run_tests(3) == {"passed": 0, "failed": 1, "skipped": 0}
    assert len(calls) == 4, "tests ran without kernels"


def test_pytest_processes_run_side_by_side_and_not_for_ever(monkeypatch, tmp_path, capfd):
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "test_some.py").write_text(
        "import time\ndef test_a(): pass\ndef test_b(): assert 0, 'say so'\ndef test_c(): time.sleep(60)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    selections = [["-k", name] for name in ("test_a", "test_b", "test_c")]
    done = gpu_check.run_pytest(selections, tmp_path, time.monotonic() + 8)
    assert [status for status, _ in done] == [0, 1, None]
    assert gpu_check.sum_counts(done) == {"passed": 1, "failed": 2, "skipped": 0}
    said = capfd.readouterr().out
    assert "say so" in said
    assert "-k test_c: not done" in said


def test_shards_are_a_partition():
    items = list(range(103))
    parts = []
    for text in ("1/4", "2/4", "3/4", "4/4"):
        part = conftest.shard(text)
        config = SimpleNamespace(getoption=lambda name, default, part=part: part)
        session: Any = SimpleNamespace(config=config, items=items[:])
        conftest.pytest_collection_finish(session)
        parts.append(session.items)
    assert sorted(sum(parts, [])) == items
    assert {len(part) for part in parts} == {25, 26}
    for text in ("0/4", "5/4", "1", "a/b"):
        with pytest.raises(ValueError):
            conftest.shard(text)


def test_the_table_shows_speeds_and_failures():
    lines = gpu_check.table(some_record()["cases"]).splitlines()
    assert len(lines) == 16
    assert "128x128x2 topk 2048" in lines[1]
    assert "500.123" in lines[1]
    assert "0.82" in lines[1]
    assert "FAILED" in lines[2]
    assert "tokens 65536" in lines[3]
    assert lines[4].startswith("gqa_decode int8 per_tensor BNSH 64x32x1 s_k 8192 d 128 ")
    assert "read_fraction 0.9 ratio 1.7 met" in lines[4]
    assert "us 26.0 MISSED" in lines[5]
    assert lines[7].startswith("gqa_decode int8 per_token_head paged_NHD_64 64x32x1 s_k 8192 d 128 ")
    assert "FAILED" in lines[9]
    assert "window 128" in lines[9]
    assert "copy_fraction 0.8 met" in lines[10]
    assert lines[11].startswith("sink_attention forward 4x64x16384 s_k 16384 d 64 ")
    assert "us 260.0 MISSED" in lines[12] and "deterministic" in lines[13] and "routing" in lines[14]


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


def test_what_parts_of_the_calls_found_is_added_up():
    found = [sanitize.Finding("racecheck", 2, output="a"), sanitize.Finding("racecheck", 0, output="b")]
    assert sanitize.join("racecheck", found) == sanitize.Finding("racecheck", 2, output="a\nb")
    unseen = sanitize.Finding("racecheck", None, "gqa: not done after 240 s")
    assert sanitize.join("racecheck", [*found, unseen]).errors is None
    assert sanitize.join("racecheck", [*found, unseen]).reason == "gqa: not done after 240 s"


def test_a_missing_sanitizer_is_a_reason_and_no_zero(monkeypatch):
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: None)
    finding = sanitize.run_tool("memcheck", "mla")
    assert finding.errors is None
    record = gpu_check.sanitizer_record([finding, sanitize.Finding("racecheck", 0), sanitize.Finding("synccheck", 2)])
    assert record == {
        "memcheck": None,
        "racecheck": 0,
        "synccheck": 2,
        "reasons": {"memcheck": "compute-sanitizer is not installed"},
    }
    json.dumps(record)
