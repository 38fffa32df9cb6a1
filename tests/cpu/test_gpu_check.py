"""`gpu_check`: what it runs, what it keeps of an earlier run, and when it reports success."""

import functools
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import kernels_run, parts, records
from bench.cases import card_slug, run_benches, table
from bench.progress import Progress
from bench.records import kernel_id
from bench.sanitizing import tools as sanitize
from scripts import gpu_check
from tests.cpu.tiny_spec import TinySpec
from tests.gpu import conftest
from tests.kit.made_up_records import (
    ACCUMULATOR,
    PASSED,
    TOOLCHAIN,
    accuracy_rows,
    coded_record,
    random_calls,
    some_record,
)


@pytest.mark.parametrize("whole", [some_record(), coded_record()], ids=["before", "with machine code"])
def test_a_record_may_come_from_two_runs(whole):
    tools = dict.fromkeys(records.SANITIZER_TOOLS)
    nothing = {"passed": None, "failed": None, "skipped": None, "sanitizer": {**tools, "reasons": {"all": "left out"}}}
    tests_run = {**whole, "cases": [], "ceilings": {**whole["ceilings"], "read_GBps": 1.0}, "date": "2026-01-03"}
    benchmark_run = {**whole, "tests": nothing}
    assert parts.completed(tests_run, benchmark_run) == {**whole, "date": "2026-01-03"}
    assert parts.completed(benchmark_run, tests_run) == whole
    only_counts = {**tests_run, "tests": {**whole["tests"], "sanitizer": nothing["sanitizer"]}}
    other_counts = {**whole, "tests": {**whole["tests"], "passed": 1}}
    assert parts.completed(only_counts, other_counts) == {**whole, "date": "2026-01-03"}
    if "kernels" in whole:
        found = records.with_reliability(whole, random_calls(0, 9))
        assert parts.completed({**tests_run, "kernels": {}}, found)["kernels"] == found["kernels"]
        assert parts.completed(tests_run, found)["reliability"] == found["reliability"]
        assert "kernels" not in parts.completed({**some_record(), "cases": []}, found)


def test_all_runs_of_a_case_are_kept_and_its_figures_are_medians():
    def run_of(us: float, date: str, rel_err: float = 1e-3, kernels: tuple[str, ...] = ("a",)) -> dict[str, Any]:
        speed = {"us": us, "GBps": 1000.0 / us, "sm_mhz_rested": 1980, "peers": {"x": {"us": 2.0, "ratio": 2.0 / us}}}
        case = {"op": "gqa_decode", "batch": 1, "rel_err": rel_err, **speed, "must": {"us": 3.5}, "met": us <= 3.5}
        return {**some_record(), "cases": [{**case, "kernels": list(kernels)}], "date": date}

    first, second, third = run_of(2.0, "2026-01-01"), run_of(4.0, "2026-01-02", 2e-3), run_of(5.0, "2026-01-03")
    two = parts.completed(second, first)
    case = two["cases"][0]
    assert [run["date"] for run in case["runs"]] == ["2026-01-01", "2026-01-02"]
    assert [run["us"] for run in case["runs"]] == [2.0, 4.0]
    assert (case["us"], case["met"], case["rel_err"], case["sm_mhz_rested"]) == (3.0, True, 2e-3, 1980)
    assert case["peers"]["x"]["ratio"] == 0.75
    case = parts.completed(third, two)["cases"][0]
    assert ([run["us"] for run in case["runs"]], case["us"], case["met"]) == ([2.0, 4.0, 5.0], 4.0, False)
    assert parts.completed(two, second) == two, "a run that is there already is no other run"
    assert "runs" not in parts.completed(run_of(4.0, "2026-01-02", kernels=("b",)), first)["cases"][0]
    failed = {**first, "cases": [{"op": "gqa_decode", "batch": 1, "rel_err": 1.0, "failed": "wrong"}]}
    assert parts.completed(failed, second)["cases"] == failed["cases"]


def test_what_is_kept_is_of_the_same_machine_and_machine_code():
    here = coded_record()
    nothing_known: dict[str, Any] = {"changed": lambda kept: pytest.fail("the sources are the same")}
    parts.require_same(here, here, **nothing_known)
    parts.require_same(some_record(), here, **nothing_known)  # versions that it does not name
    for key in ("card", "driver", "torch", "cutlass_dsl", "tvm_ffi", "cuda", "cudnn", "python"):
        with pytest.raises(ValueError, match=f"--keep: got {key} 'another'"):
            parts.require_same({**here, key: "another"}, here, **nothing_known)
    edited = {**here, "source_digest": "f" * 64}
    parts.require_same(edited, here, changed=lambda kept: [])
    with pytest.raises(ValueError, match="of other sources: TinySpec"):
        parts.require_same(edited, here, changed=lambda kept: ["TinySpec() is built to other code now"])


def test_machine_code_of_another_record_is_looked_at(monkeypatch):
    code = SimpleNamespace(toolchain=lambda: TOOLCHAIN, digests_of_specs=None)
    monkeypatch.setattr(kernels_run, "machine_code", lambda: code)
    assert parts.changed_code(some_record()) == ["it names no machine code"]
    assert "another toolchain" in parts.changed_code(coded_record(toolchain={"cuda": "cu12"}))[0]
    record = coded_record()
    first = next(iter(record["kernels"]))
    monkeypatch.setattr(kernels_run, "no_longer_built", lambda kernels, digests, known: [first])
    assert parts.changed_code(record) == ["MlaAppendSpec(tokens_per_cta=0) is built to other code now"]


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
    "crashed after its report": (-11, JUNIT.format(4, 0), 4),
    "out of time": (None, None, 0),
    "out of time after its report": (None, JUNIT.format(4, 0), 0),
    "nothing collected": (5, JUNIT.format(0, 0), 0),
    "broken collection": (2, JUNIT.format(4, 0), 4),
}


@pytest.mark.parametrize(("status", "report", "passed"), PROCESSES.values(), ids=PROCESSES)
def test_a_process_that_ended_badly_is_a_failure(status, report, passed):
    good = (0, JUNIT.format(5, 0))
    assert gpu_check.sum_counts([good, good]) == {"passed": 10, "failed": 0, "skipped": 0}
    counts = gpu_check.sum_counts([good, (status, report), good])
    assert counts == {"passed": 10 + passed, "failed": 1, "skipped": 0}


def test_all_tests_run_once_and_only_after_their_kernels(monkeypatch):
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
    monkeypatch.setattr(gpu_check, "STUCK_S", 2)
    selections = [["-k", name] for name in ("test_a", "test_b", "test_c")]
    done = gpu_check.run_pytest(selections, tmp_path, time.monotonic() + 8)
    assert [status for status, _ in done] == [0, 1, None]
    assert gpu_check.sum_counts(done) == {"passed": 1, "failed": 2, "skipped": 0}
    said = capfd.readouterr().out
    assert "say so" in said
    assert "-k test_c: not done" in said
    assert 'test_some.py", line 4 in test_c' in said, "a test that is stuck says where"


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
    lines = table(some_record()["cases"]).splitlines()
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
    assert card_slug("NVIDIA H200") == "h200"
    assert card_slug("NVIDIA H100 80GB HBM3") == "h100"
    assert card_slug("NVIDIA Other Card") == "nvidia_other_card"


def test_a_bench_that_raises_is_recorded_and_the_others_run():
    def broken(ceilings: dict[str, float]) -> dict[str, Any]:
        raise RuntimeError("illegal memory access")

    cases = run_benches(
        [("mla_fp8_decode sparse 1x128x1 topk 2048", broken), ("other", lambda ceilings: {"op": "other"})],
        {},
        Progress(),
    )
    assert cases[0]["failed"] == "RuntimeError: illegal memory access"
    assert cases[1] == {"op": "other"}
    records.validate(some_record(cases=cases[:1]))


# --- what is good


def good_record(**changes: Any) -> dict[str, Any]:
    """A record that lacks nothing."""
    record = coded_record()
    cases = [case for case in record["cases"] if "failed" not in case and case.get("met", True)]
    record["tests"]["sanitizer"] = {"memcheck": 0, "racecheck": 0, "synccheck": 0, "initcheck": 0}
    record |= {"cases": cases, "accuracy": accuracy_rows(), "accumulator": ACCUMULATOR, "values": []}
    return {**records.with_reliability(record, random_calls(0, 9)), **changes}


def with_tests(**counts: Any) -> dict[str, Any]:
    return good_record(tests={**good_record()["tests"], **counts})


def with_sanitizer(**counts: Any) -> dict[str, Any]:
    return with_tests(sanitizer={**good_record()["tests"]["sanitizer"], **counts})


MISSED = records.with_must({**good_record()["cases"][0]}, {"us": 26.0})
FAILED = {"op": "merge_states", "splits": 8, "failed": "RuntimeError: no", "kernels": []}
LACKING: dict[str, tuple[dict[str, Any], str]] = {
    "a failed test": (with_tests(failed=3), "3 tests failed"),
    "a finding": (with_sanitizer(racecheck=2), "racecheck: 2 errors"),
    "a finding of initcheck": (with_sanitizer(initcheck=1), "initcheck: 1 errors"),
    "a tool that did not run": (
        with_sanitizer(memcheck=None, reasons={"memcheck": "gqa: not done after 240 s"}),
        "memcheck did not run: gqa: not done after 240 s",
    ),
    "initcheck did not run": (with_sanitizer(initcheck=None, reasons={"initcheck": "no"}), "initcheck did not run: no"),
    "a must that is missed": (
        good_record(cases=[MISSED]),
        "mla_fp8_decode sparse 128x128x2 topk 2048: misses us 26.0",
    ),
    "a failed case": (good_record(cases=[FAILED]), "merge_states splits 8: RuntimeError: no"),
    "a case of unknown code": (
        good_record(cases=[{**good_record()["cases"][0], "kernels": []}]),
        "mla_fp8_decode sparse 128x128x2 topk 2048: ran no kernel that is known",
    ),
    "no machine code": (some_record(cases=[], tests=good_record()["tests"]), "the machine code that ran is not known"),
    "a wrong random call": (
        good_record(reliability={**good_record()["reliability"], "wrong": 1}),
        "random calls: 1 wrong",
    ),
    "a fault": (good_record(reliability={**good_record()["reliability"], "faults": 2}), "random calls: 2 faults"),
}


@pytest.mark.parametrize(("record", "reason"), LACKING.values(), ids=LACKING)
def test_what_is_lacking_is_said_and_ends_with_1(record, reason, capsys):
    records.validate(record)
    assert gpu_check.shortcomings(record) == [reason]
    assert gpu_check.report(record, [], False) == 1
    assert f"NOT GOOD: {reason}" in capsys.readouterr().out


def test_what_was_left_out_is_named_and_no_shortcoming(capsys):
    assert gpu_check.report(good_record(), [], False) == 0
    assert "left out" not in capsys.readouterr().out
    tools = {**dict.fromkeys(records.SANITIZER_TOOLS), "reasons": {"all": parts.LEFT_OUT}}
    tests = {"passed": None, "failed": None, "skipped": None, "sanitizer": tools}
    record = {**good_record(tests=tests, cases=[])}
    del record["reliability"], record["accumulator"], record["values"]
    assert gpu_check.report(record, [], False) == 0
    said = "left out: tests, compute-sanitizer, benchmarks, random calls, accuracy, families of values\n"
    assert said in capsys.readouterr().out
    without_gqa = [case for case in good_record()["cases"] if case["op"] not in parts.OPS["gqa"]]
    assert gpu_check.report(good_record(cases=without_gqa), [], False) == 0
    assert "left out: benchmarks of gqa\n" in capsys.readouterr().out
    assert gpu_check.report(good_record(), [], True) == 0
    assert "left out: some benchmark cases" in capsys.readouterr().out
    assert gpu_check.report(good_record(), ["random calls are not in the record: no"], False) == 1
    # a record older than initcheck
    old = with_tests(sanitizer=dict.fromkeys(records.SANITIZER_TOOLS, 0))
    assert gpu_check.shortcomings(old) == []


# --- a whole run, on an invented card


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A machine whose parts return what a test sets."""
    found = SimpleNamespace(tests={"passed": 5, "failed": 0, "skipped": 0}, us=1.0, kept=[], code_works=True)
    found.values = []
    found.peers, found.inaccurate, found.ceilings = {"flash_mla": "1"}, [], some_record()["ceilings"]
    found.findings = [sanitize.Finding(tool, 0) for tool in sanitize.TOOLS]
    counts = dict.fromkeys(("wrong", "faults", "out_of_memory"), 0)
    found.fuzzed = {**counts, "calls": 10**5, "invalid_calls": 10**4, "seconds": 1.0, "seeds": [[0, 9]]}
    found.fuzzed |= {"device": "NVIDIA H200", "shapes": 5, "specifications": 1, "findings": [], "fault_reports": []}

    def digests_of_specs(specs):
        if not found.code_works:
            raise RuntimeError("no cubin")
        return {spec: SimpleNamespace(sass=f"{spec.width:064x}", launch="0" * 64) for spec in specs}

    def run_bench(op, ceilings):
        kernels_run.compile.get_kernel(TinySpec())
        speeds = {"us": found.us, "GBps": 2000.0, "read_fraction": round(2000.0 / ceilings["read_GBps"], 3)}
        entry = records.record_case({"op": op, "tokens": 1}, PASSED, lambda: speeds)
        return records.with_must({**entry, "sets_compared": 2}, {"us": 2.0})

    def select(quick, only, sections):
        ops = {"mla": "mla_fp8_append", "gqa": "gqa_decode", "sink": "sink_attention"}
        chosen = [ops[name] for name in ops if name in sections]
        return [(op, functools.partial(run_bench, op)) for op in chosen], 0

    def run_tests(meanwhile, seconds):
        meanwhile()
        return found.tests

    found.code = SimpleNamespace(
        toolchain=lambda: TOOLCHAIN, digests_of_specs=digests_of_specs, precompile=lambda specs, processes=None: None
    )
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "PARTIAL_RESULT", tmp_path / "build" / "partial.json")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(gpu_check, "is_sm90", lambda device: True)
    monkeypatch.setattr(gpu_check, "run_tests", run_tests)
    monkeypatch.setattr(gpu_check, "measure_ceilings", lambda: found.ceilings)
    monkeypatch.setattr(gpu_check, "select_benches", select)
    monkeypatch.setattr(
        gpu_check.bench_values, "run_all", lambda benches, seconds: (found.values, [[] for _ in found.values])
    )
    monkeypatch.setattr(gpu_check.bench_values, "benches", lambda quick, only: [])
    monkeypatch.setattr(gpu_check.bench_values, "all_specs", lambda: [])
    monkeypatch.setattr(gpu_check, "versions", lambda: found.peers)
    more = {"accuracy": accuracy_rows(), "accumulator": ACCUMULATOR}
    monkeypatch.setattr(gpu_check.accuracy, "measure", lambda: (more, found.inaccurate))
    monkeypatch.setattr(sanitize, "run_tools", lambda: found.findings)
    monkeypatch.setattr(gpu_check.fuzz, "short", lambda first_seed: found.fuzzed)
    monkeypatch.setattr(kernels_run, "machine_code", lambda: found.code)
    monkeypatch.setattr(kernels_run, "shipped_specs", lambda: [TinySpec(64)])
    monkeypatch.setattr(kernels_run.compile, "_kernels", {TinySpec(): lambda: None})
    found.path = tmp_path / "results" / "h200.json"
    return found


def test_a_good_run_is_recorded_with_its_machine_code(card, capsys, tmp_path):
    card.path.parent.mkdir()
    kernels_run.older_file(card.path).write_text("0123456789abcdef  a kernel of the record before\n")
    assert gpu_check.main([]) == 0
    record = records.read(card.path)
    ran, tested = (kernel_id(f"{width:064x}", "0" * 64) for width in (128, 64))
    assert record["cases"][0]["kernels"] == [ran]
    assert set(record["kernels"]) == {ran, tested} and record["toolchain"] == TOOLCHAIN
    assert record["kernels"][ran]["spec"] == "TinySpec(width=128, fault='')"
    assert "all that ran is good" in capsys.readouterr().out
    assert not kernels_run.older_file(card.path).exists()


@pytest.mark.parametrize("what", ["a test", "a tool", "a must", "digests", "random calls", "a wrong call", "accuracy"])
def test_the_record_is_written_whatever_is_lacking(what, card, capsys, tmp_path):
    options = []
    if what == "a test":
        card.tests["failed"] = 1
    if what == "a tool":
        card.findings[1] = sanitize.Finding("racecheck", None, "sink: not done after 240 s")
    if what == "a must":
        card.us = 2.5
    if what == "accuracy":
        card.inaccurate = ["accuracy, N(0,1): fp8 scores: no"]
    if what == "digests":
        card.code_works = False
    if what == "a wrong call":
        card.fuzzed["wrong"] = 1
    if what == "random calls":
        (tmp_path / "fuzz.json").write_text(json.dumps(random_calls(0, 9, toolchain={"cuda": "cu12"})))
        options = ["--reliability", str(tmp_path / "fuzz.json")]
    assert gpu_check.main(options) == 1
    said = capsys.readouterr().out
    reasons = {
        "a test": "1 tests failed",
        "a tool": "racecheck did not run: sink: not done after 240 s",
        "a must": "mla_fp8_append tokens 1: misses us 2.0",
        "accuracy": "accuracy, N(0,1): fp8 scores: no",
        "digests": "the machine code that ran is not known",
        "random calls": "random calls are not in the record: reliability.toolchain: got",
        "a wrong call": "random calls: 1 wrong, 0 faults",
    }
    assert f"NOT GOOD: {reasons[what]}" in said and f"{3 if what == 'a must' else 1} shortcomings" in said
    assert records.read(card.path)["tests"]["failed"] == (what == "a test")


def test_families_of_values_come_into_the_record_and_parts_of_them_are_joined(card, capsys, tmp_path):
    entry: dict[str, Any] = {
        "op": "mla_fp8_decode",
        "topk": 64,
        "values": {"normal": 2.0, "tokens": 3.0},
        "worst_family": "tokens",
    }
    entry |= {"must": {"worst_ratio": 1.1}, "met": False, "worst_ratio": 1.5, "worst_us": 3.0}
    entries = [
        entry,
        {**entry, "topk": 128, "met": True, "wrong": {"channel": "out: 3 elements"}},
        {"op": "gqa_decode", "failed": "no"},
    ]
    card.code.digests_of_specs = lambda specs: {}
    paths = [tmp_path / "0.json", tmp_path / "1.json"]
    for path, card.values in zip(paths, (entries[:1], entries[1:]), strict=True):
        card.values = [dict(one) for one in card.values]
        assert gpu_check.main(["--sections", "values", "--out", str(path)]) == 1
    said = capsys.readouterr().out
    assert "NOT GOOD: values, mla_fp8_decode topk 64: misses worst_ratio 1.1" in said
    assert "NOT GOOD: values, mla_fp8_decode topk 128, channel: out: 3 elements" in said
    assert "NOT GOOD: values, gqa_decode: no" in said
    whole = parts.merged([records.read(path) for path in paths])
    assert {records.identity(one) for one in whole["values"]} == {records.identity(one) for one in entries}
    wrong: list[dict[str, Any]] = [{"values": {}}, {"worst_family": "channel"}, {"wrong": {"tokens": "no"}}]
    for changes in [*wrong, {"failed": "no"}]:
        with pytest.raises(records.RecordError, match=r"values\[0\]"):
            records.validate(some_record(values=[{**entry, **changes}]))


def test_random_calls_come_into_the_record(card, tmp_path):
    files = []
    for first in (0, 100):
        files.append(tmp_path / f"{first}.json")
        files[-1].write_text(json.dumps(random_calls(first, first + 99)))
    assert gpu_check.main(["--reliability", *map(str, files)]) == 0
    assert records.read(card.path)["reliability"]["seeds"] == [[0, 199]]


def test_two_runs_with_other_sources_share_a_record_where_machine_code_is_the_same(card, monkeypatch, tmp_path):
    assert gpu_check.main(["--skip-tests", "--skip-sanitizer"]) == 0
    partial = tmp_path / "build" / "partial.json"
    assert records.read(partial)["tests"]["passed"] is None and not card.path.exists()
    monkeypatch.setattr(records, "source_digest", lambda: "e" * 64)
    monkeypatch.setattr(gpu_check, "require_same", functools.partial(gpu_check.require_same, changed=lambda kept: []))
    assert gpu_check.main(["--skip-benchmarks", "--keep", str(partial)]) == 0
    record = records.read(card.path)
    assert record["tests"]["passed"] == 5 and len(record["cases"]) == 3 and len(record["kernels"]) == 2


SECTIONS_OF_CALLS = (["tests", "sanitizer", "random"], ["mla", "accuracy"], ["gqa", "sink"])


def run_sections(card: Any, folder: Any) -> list[str]:
    """A whole run in three calls; each writes its part."""
    paths = []
    for number, sections in enumerate(SECTIONS_OF_CALLS):
        card.ceilings = {**some_record()["ceilings"], "read_GBps": 4000.0 + 500 * number}
        paths.append(str(folder / f"{number}.json"))
        assert gpu_check.main(["--sections", *sections, "--out", paths[-1]]) == 0
    return paths


def test_sections_are_run_one_by_one_and_merged_without_a_gpu(card, monkeypatch, capsys, tmp_path):
    paths = run_sections(card, tmp_path)
    tests, mla, others = (records.read(tmp_path / f"{number}.json") for number in range(3))
    assert tests["cases"] == [] and tests["tests"]["passed"] == 5 and "accuracy" not in tests
    assert [case["op"] for case in mla["cases"]] == ["mla_fp8_append"] and mla["tests"]["passed"] is None
    assert mla["accumulator"] == ACCUMULATOR and "accuracy" not in others
    assert [case["op"] for case in others["cases"]] == ["gqa_decode", "sink_attention"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    capsys.readouterr()
    for order in ([0, 1, 2], [2, 1, 0]):
        card.path.unlink(missing_ok=True)
        assert gpu_check.main(["--merge", *(paths[number] for number in order)]) == 0
        whole = records.read(card.path)
        assert [case["op"] for case in whole["cases"]] == ["mla_fp8_append", "gqa_decode", "sink_attention"]
        assert whole["tests"] == tests["tests"] and whole["accumulator"] == ACCUMULATOR
        assert whole["ceilings"]["read_GBps"] == 5000 and whole["peers"] == {"flash_mla": "1"}
        assert [case["read_fraction"] for case in whole["cases"]] == [0.4, 0.4, 0.4], "all of the same ceiling"
        assert "left out: random calls" in capsys.readouterr().out


def test_merging_some_parts_is_a_part(card, capsys, tmp_path):
    paths = run_sections(card, tmp_path)
    assert gpu_check.main(["--merge", *paths[:2]]) == 0
    assert not card.path.exists() and "left out: benchmarks of gqa, benchmarks of sink" in capsys.readouterr().out
    assert len(records.read(tmp_path / "build" / "partial.json")["cases"]) == 1
    assert gpu_check.main(["--sections", "sink"]) == 0
    assert (tmp_path / "build" / "gpu_check_sink.json").exists()


def test_parts_with_different_cases_of_a_section_are_merged(card, monkeypatch, capsys, tmp_path):
    """A record has its place in results/ once all cases are there."""
    paths = run_sections(card, tmp_path)
    sink = records.read(tmp_path / "2.json")
    more = {**sink, "cases": [{**case, "tokens": 2} for case in sink["cases"]]}
    records.write(more, tmp_path / "more.json")
    names = ["mla_fp8_append", "gqa_decode a", "gqa_decode b", "sink_attention a", "sink_attention b"]
    monkeypatch.setattr(gpu_check, "select_benches", lambda *_: ([(name, None) for name in names], 0))
    capsys.readouterr()
    assert gpu_check.main(["--merge", *paths]) == 0
    said = capsys.readouterr().out
    assert "not all cases: 1 of 2 cases of gqa_decode, 1 of 2 cases of sink_attention" in said
    assert "left out: some benchmark cases" in said and not card.path.exists()
    assert gpu_check.main(["--merge", *paths, str(tmp_path / "more.json")]) == 0
    assert "not all cases" not in capsys.readouterr().out
    found = [(case["op"], case["tokens"]) for case in records.read(card.path)["cases"]]
    two = [(op, tokens) for op in ("gqa_decode", "sink_attention") for tokens in (1, 2)]
    assert found == [("mla_fp8_append", 1), *two]


def test_parts_of_other_peers_or_cards_are_no_record(card, tmp_path):
    paths = run_sections(card, tmp_path)
    for change in ({"peers": {"flash_mla": "2"}}, {"card": "NVIDIA H100"}):
        records.write({**records.read(tmp_path / "1.json"), **change}, tmp_path / "other.json")
        with pytest.raises(ValueError, match="--keep: got (flash_mla '2'|card 'NVIDIA H100')"):
            gpu_check.main(["--merge", paths[0], str(tmp_path / "other.json")])
    missing = {**records.read(tmp_path / "1.json"), "peers": {"flash_mla": "missing: no such module"}}
    for pair in ((records.read(tmp_path / "0.json"), missing), (missing, records.read(tmp_path / "0.json"))):
        assert parts.merged(pair)["peers"] == {"flash_mla": "1"}


def test_fractions_follow_the_better_ceiling_and_musts_follow_fractions():
    case = {"op": "gqa_decode", "us": 1.0, "rel_err": 0.0, "read_fraction": 0.9, "must": {"read_fraction": 0.85}}
    case["met"] = True
    assert parts.rescaled(case, {"read_GBps": 4000.0}, {"read_GBps": 4000.0}) is case
    found = parts.rescaled(case, {"read_GBps": 4000.0}, {"read_GBps": 4400.0})
    assert (found["read_fraction"], found["met"]) == (0.818, False)


def test_every_section_has_kernels_that_are_compiled_first():
    for name in ("mla", "gqa", "sink", "accuracy"):
        assert gpu_check.benchmark_specs([name])
    assert gpu_check.benchmark_specs(["tests", "random"]) == []
