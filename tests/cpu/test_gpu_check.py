"""`gpu_check`: what it runs, what it keeps of another run, what it calls good."""


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


