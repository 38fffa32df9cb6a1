"""The record of a GPU run and what is made from it: they must not claim more than was checked."""

import json
import math
from typing import Any

import pytest

from bench import records
from bench.timing import WrongReplay
from scripts import add_reliability
from tests.kit.made_up_records import (
    FAILED,
    PASSED,
    SIZES,
    coded_record,
    kernel,
    random_calls,
    some_record,
    timed_case,
)


def test_a_failed_check_is_recorded_without_a_speed():
    def measure() -> dict[str, float]:
        raise AssertionError("timed although the check failed")

    entry = records.record_case(SIZES, FAILED, measure)
    assert entry["rel_err"] == 0.5
    assert entry["lse_err"] is None
    assert "3 of 9 elements" in entry["failed"]
    assert not set(entry) & set(records.SPEED_KEYS)


def test_a_wrong_replay_is_a_failed_check():
    def measure() -> dict[str, float]:
        raise WrongReplay("the timed graph: set 1, out: 3 of 9 elements differ")

    entry = records.with_must(records.record_case(SIZES, PASSED, measure), {"us": 1.0})
    assert entry["failed"].startswith("the timed graph: set 1") and entry["met"] is False
    assert not set(entry) & set(records.SPEED_KEYS)


@pytest.mark.parametrize("record", [some_record(), coded_record()], ids=["before", "with machine code"])
def test_a_good_record_survives_the_disk(record, tmp_path):
    path = tmp_path / "results" / "h200.json"
    records.write(record, path)
    assert records.read(path) == record
    assert [file.name for file in path.parent.iterdir()] == ["h200.json"]


BAD_RECORDS: dict[str, dict[str, Any]] = {
    "a speed with a failed check": {"cases": [{**SIZES, "failed": "out: wrong", "us": 5.0}]},
    "peers with a failed check": {"cases": [{**SIZES, "failed": "out: wrong", "peers": {"p": {"us": 1, "ratio": 1}}}]},
    "a speed without a check": {"cases": [{**SIZES, "us": 5.0}]},
    "an error that is no number": {"cases": [{**SIZES, "us": 5.0, "rel_err": math.nan}]},
    "neither a speed nor a reason": {"cases": [{**SIZES, "rel_err": 0.002}]},
    "a time of zero": {"cases": [{**SIZES, "us": 0.0, "rel_err": 0.002}]},
    "a peer without a ratio": {"cases": [{**SIZES, "us": 1.0, "rel_err": 0.002, "peers": {"p": {"us": 1.0}}}]},
    "a case without an op": {"cases": [{"us": 1.0, "rel_err": 0.002}]},
    "cases that are no list": {"cases": {}},
    "no card": {"card": ""},
    "a digest that is none": {"source_digest": "abc"},
    "no test counts": {"tests": {"sanitizer": dict.fromkeys(records.SANITIZER_TOOLS)}},
    "a tool left out": {"tests": {"passed": 1, "failed": 0, "skipped": 0, "sanitizer": {"memcheck": 0}}},
    "a ceiling left out": {"ceilings": {"read_GBps": 1.0, "copy_GBps": 1.0}},
    "a version that is none": {"tvm_ffi": ""},
    "a peer of no version": {"peers": {"flash_mla": None}},
    "no count of initcheck": {
        "tests": {
            **some_record()["tests"],
            "sanitizer": {"memcheck": 0, "racecheck": 0, "synccheck": 0, "initcheck": -1},
        }
    },
}
CODED = coded_record()
FIRST = CODED["cases"][0]
BAD_CODE: dict[str, dict[str, Any]] = {
    "no toolchain": {"toolchain": {}},
    "kernels that are no object": {"kernels": []},
    "a name that is not the kernel's": {"kernels": {**CODED["kernels"], "0123456789abcdef": kernel(0)[1]}},
    "a kernel without a spec": {"kernels": {**CODED["kernels"], kernel(50)[0]: {**kernel(50)[1], "spec": ""}}},
    "a case of a kernel that is not there": {"cases": [{**FIRST, "kernels": [kernel(50)[0]]}]},
    "a case that says nothing of kernels": {"cases": [{k: v for k, v in FIRST.items() if k != "kernels"}]},
    "what was timed was not compared": {"cases": [{k: v for k, v in FIRST.items() if k != "sets_compared"}]},
    "random calls of another kernel": {"reliability": {**random_calls(0, 9), "kernels": [kernel(77)[0]]}},
    "random calls without seeds": {"reliability": {**random_calls(0, 9), "kernels": [], "seeds": []}},
    "random calls without a count": {"reliability": {**random_calls(0, 9), "kernels": [], "wrong": None}},
    "seeds that end before they begin": {"reliability": {**random_calls(0, 9), "kernels": [], "seeds": [[3, 2]]}},
}


@pytest.mark.parametrize("changes", BAD_CODE.values(), ids=BAD_CODE)
def test_a_record_that_says_too_much_of_machine_code_is_refused(changes):
    with pytest.raises(records.RecordError):
        records.validate(coded_record(**changes))


@pytest.mark.parametrize("changes", BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_a_bad_record_is_refused_and_the_old_file_stays(changes, tmp_path):
    path = tmp_path / "h200.json"
    records.write(some_record(), path)
    with pytest.raises(records.RecordError):
        records.write(some_record(**changes), path)
    assert records.read(path) == some_record()


def test_a_file_that_is_no_json_is_refused(tmp_path):
    path = tmp_path / "h200.json"
    path.write_text("{")
    with pytest.raises(records.RecordError, match="h200.json"):
        records.read(path)


def test_the_digest_changes_with_names_and_contents(tmp_path):
    for package in records.SOURCE_PACKAGES:
        (tmp_path / package / "room").mkdir(parents=True)
        (tmp_path / package / "room" / "op.py").write_text("a = 1\n")
    digests = [records.source_digest(tmp_path)]

    def changed() -> bool:
        digests.append(records.source_digest(tmp_path))
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
    assert len(records.source_digest()) == 64
    assert records.source_digest() == records.source_digest(root)


def test_every_version_that_decides_a_result_is_named(monkeypatch):
    monkeypatch.setattr(records.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    machine = records.machine()
    assert set(machine) == {"card", "date", "driver", "torch", "cutlass_dsl", *records.MORE_TEXT_KEYS}
    assert machine["tvm_ffi"].count(".") >= 2 and machine["python"].startswith("3.")


# --- random calls


def write(path, *entries):
    files = []
    for number, entry in enumerate(entries):
        files.append(path / f"{number}.json")
        files[-1].write_text(json.dumps(entry))
    return files


def test_random_calls_of_several_runs_are_added_up(tmp_path):
    more = random_calls(100, 199, calls=1, faults=2, kernels=dict([kernel(0), kernel(78)]))
    total = records.read_reliability(write(tmp_path, random_calls(200, 299), random_calls(5000, 6000), more))
    assert [total[key] for key in records.RELIABILITY_COUNTS] == [120_001, 36_000, 0, 2]
    assert total["seconds"] == 301.5 and total["seeds"] == [[100, 299], [5000, 6000]]
    assert total["shapes"] == 5900, "shapes of several runs may be the same"
    assert total["device"] == "NVIDIA H200" and "findings" not in total
    assert set(total["kernels"]) == {kernel(n)[0] for n in (0, 77, 78)}
    record = records.with_reliability(coded_record(), total)
    assert record["reliability"]["kernels"] == list(total["kernels"])
    assert set(record["kernels"]) == set(coded_record()["kernels"]) | set(total["kernels"])
    assert records.reliability_of(record) == total


OTHER = {kernel(5, kernel(0)[1]["spec"])[0]: kernel(5, kernel(0)[1]["spec"])[1]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a seed of both": (random_calls(299, 400), "seeds: 299 is in both"),
    "inside of the other": (random_calls(210, 220), "seeds: 210 is in both"),
    "other machine code of the same spec": (random_calls(300, 400, kernels=OTHER), "ran other machine code"),
    "another toolchain": (random_calls(300, 400, toolchain={"cuda": "cu12"}), "toolchain: got"),
    "no machine code": ({k: v for k, v in random_calls(300, 400).items() if k != "kernels"}, "kernels: got"),
    "no number of faults": (random_calls(300, 400, faults="none"), "faults: got 'none'"),
}


@pytest.mark.parametrize(("entry", "reason"), REFUSED.values(), ids=REFUSED)
def test_random_calls_that_do_not_add_up_are_refused(entry, reason, tmp_path):
    for pair in ((random_calls(200, 299), entry), (entry, random_calls(200, 299))):
        with pytest.raises(records.RecordError):
            records.add_reliability(*pair)
    with pytest.raises(records.RecordError, match=reason):
        records.read_reliability(write(tmp_path, random_calls(200, 299), entry))


def test_random_calls_join_the_record_that_ran_the_same_code_alone(tmp_path, capsys):
    path = tmp_path / "h200.json"
    records.write(coded_record(), path)
    files = write(tmp_path, random_calls(0, 99), random_calls(100, 199), random_calls(200, 299))
    assert add_reliability.main([str(path), *map(str, files[:2])]) == 0
    assert records.read(path)["reliability"]["seeds"] == [[0, 199]]
    assert add_reliability.main([str(path), "--more", str(files[2])]) == 0
    assert records.read(path)["reliability"]["seeds"] == [[0, 299]]
    assert add_reliability.main([str(path), "--more", str(files[2])]) == 1
    assert "200 is in both" in capsys.readouterr().err
    for changes in ({"kernels": OTHER}, {"toolchain": {"cuda": "cu12"}}):
        [bad] = write(tmp_path, random_calls(300, 399, **changes))
        assert add_reliability.main([str(path), str(bad)]) == 1
    assert records.read(path)["reliability"]["calls"] == 180_000
    with pytest.raises(records.RecordError, match="needs that of the record, None"):
        records.with_reliability(some_record(), random_calls(0, 9))


def test_a_must_under_load():
    case = timed_case()
    assert records.attained({"ratio": 1.4, "ratio_sustained": 1.25, "us_sustained": 340.0}, case)
    assert not records.attained({"ratio_sustained": 1.26}, case)
    assert not records.attained({"us_sustained": 339.0}, case)
    assert not records.attained({"ratio_sustained": 1.0}, {**case, "peers": {"a": {"us": 1.0, "ratio": 2.0}}})
