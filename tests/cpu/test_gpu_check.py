"""gpu_check counts every way in which tests can end, and exits with status 1 if anything is missing."""

import copy
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from bench import cases, kernels_run, records
from scripts import gpu_check
from tests.cpu.test_records import RECORD

GOOD = '<testsuites><testsuite tests="5" failures="0" errors="0" skipped="1"/></testsuites>'
BAD = '<testsuites><testsuite tests="5" failures="1" errors="1" skipped="0"/></testsuites>'


def test_counts_of_tests() -> None:
    assert gpu_check.count_tests(GOOD) == {"passed": 4, "failed": 0, "skipped": 1}
    assert gpu_check.count_tests(BAD) == {"passed": 3, "failed": 2, "skipped": 0}
    for nothing in (None, '<testsuites><testsuite tests="0"/></testsuites>'):
        assert gpu_check.count_tests(nothing)["failed"] == 1, "no test is no pass"


@pytest.mark.parametrize(
    ("done", "failed"),
    [([(0, GOOD), (0, GOOD)], 0), ([(0, GOOD), (1, BAD)], 2), ([(0, GOOD), (-11, GOOD)], 1), ([(None, GOOD)], 1)],
    ids=["good", "failures", "a process that died", "out of time"],
)
def test_counts_over_processes(done: Any, failed: int) -> None:
    assert gpu_check.sum_counts(done)["failed"] == failed


def test_tests_that_do_not_compile_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    statuses: list[int] = []

    def run_pytest(selections: Any, folder: pathlib.Path, deadline: float) -> Any:
        made.append(len(selections))
        return [(statuses.pop(0), GOOD)] * len(selections)

    monkeypatch.setattr(gpu_check, "run_pytest", run_pytest)
    for given, processes, failed in (([0, 0, 0], [1, 1, 0, 4], 0), ([1], [1], 1), ([0, 1, 0], [1, 1, 0, 4], 1)):
        made.clear()
        statuses[:] = given
        tests = gpu_check.run_tests(60.0, shards=4, quiet_is_over=lambda: made.append(0))
        assert tests["failed"] == failed and made == processes


LACKING: dict[str, tuple[Any, str]] = {
    "a test": (lambda r: r["tests"].update(failed=2), "2 tests failed"),
    "a race": (lambda r: r["tests"]["sanitizer"].update(racecheck=3), "racecheck: 3 errors"),
    "a tool": (
        lambda r: r["tests"]["sanitizer"].update(memcheck=None, reasons={"memcheck": "gone"}),
        "did not run: gone",
    ),
    "a case": (lambda r: r["cases"].append({"op": "gqa_decode", "layout": "x", "failed": "off"}), "gqa_decode x: off"),
    "a goal": (lambda r: r["cases"][0].update(must={"us": 1.0}, met=False), "misses us 1.0"),
    "a family": (lambda r: r["values"][0].update(wrong={"large": "off"}), "large: off"),
    "random calls": (lambda r: r.update(reliability={"wrong": 1}), "random calls: 1 wrong"),
}


@pytest.mark.parametrize(("damage", "said"), LACKING.values(), ids=LACKING)
def test_whatever_is_lacking_is_said_and_ends_with_status_1(
    damage: Any, said: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = copy.deepcopy(RECORD)
    assert gpu_check.finish(record, tmp_path / "good.jsonl") == 0
    assert "left out: random calls, benchmarks of gqa, benchmarks of sink" in capsys.readouterr().out
    damage(record)
    assert gpu_check.finish(record, tmp_path / "bad.jsonl") == 1
    assert said in capsys.readouterr().out
    assert records.read(tmp_path / "bad.jsonl")["date"] == "some", "it is recorded all the same"


def test_kernels_of_a_section_are_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = [case for case in cases.SECTIONS["gqa"].cases if case.quick]
    specs = gpu_check.needed(["gqa"], quick, 132)
    assert specs and len(specs) < 10
    assert set(kernels_run.shipped_specs()) <= set(gpu_check.needed(["tests"], [], 132))
    assert gpu_check.parse(["--sections", "mla"]).sections == ["mla"]
    assert SimpleNamespace(**vars(gpu_check.parse([]))).sections == list(gpu_check.SECTIONS)
