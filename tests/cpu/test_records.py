"""A record says no more than was checked, and which cases ran machine code that is no longer built."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from bench import kernels_run, records
from bench.records import RecordError
from cute_kernels.merge.spec import shipped_specs
from tests.kit import sass
from tests.kit.compare import Comparison

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = shipped_specs()[0]
CASE: dict[str, Any] = {
    **{"op": "merge_states", "batch": 2, "h_q": 4, "s_q": 1, "us": 2.0, "rel_err": 0.001, "sets_compared": 3},
    "kernels": {repr(SPEC): "0123456789abcdef"},
    "peers": {"other": {"us": 3.0, "ratio": 1.5}},
}
RECORD: dict[str, Any] = {
    **dict.fromkeys((*records.SAME_MACHINE, "date"), "some"),
    "tests": {"passed": 5, "failed": 0, "skipped": None, "sanitizer": dict.fromkeys(records.SANITIZER_TOOLS, 0)},
    "ceilings": dict.fromkeys(records.CEILING_KEYS, 1000.0),
    "cases": [CASE],
    "values": [{"op": "merge_states", "values": {"normal": 2.0}, "worst_family": "normal"}],
}


def test_a_record_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    records.write(RECORD, tmp_path / "card.jsonl")
    assert records.read(tmp_path / "card.jsonl") == RECORD
    assert len((tmp_path / "card.jsonl").read_text().splitlines()) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["card.jsonl"]


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a speed of a failed check": (lambda r: r["cases"][0].update(failed="wrong"), "of a failed check"),
    "a speed without a check": (lambda r: r["cases"][0].pop("rel_err"), "a speed needs a check"),
    "a timed graph that nobody compared": (lambda r: r["cases"][0].pop("sets_compared"), "a speed needs a check"),
    "a speed of unknown machine code": (lambda r: r["cases"][0].pop("kernels"), "needs the machine code"),
    "no speed": (lambda r: r["cases"][0].pop("us"), "neither a time nor the reason"),
    "a speed of zero": (lambda r: r["cases"][0].update(us=0.0), "needs a positive number"),
    "a peer without a ratio": (lambda r: r["cases"][0]["peers"]["other"].pop("ratio"), "needs us and ratio"),
    "a time of a wrong family": (lambda r: r["values"][0].update(wrong={"normal": "why"}), "of a failed check"),
    "no count of tests": (lambda r: r["tests"].pop("failed"), "tests.failed"),
    "no sanitizer": (lambda r: r["tests"]["sanitizer"].pop("racecheck"), "tests.racecheck"),
    "no ceiling": (lambda r: r["ceilings"].pop("read_GBps"), "ceilings.read_GBps"),
    "no driver": (lambda r: r.pop("driver"), "driver: needs a text"),
}


@pytest.mark.parametrize(("damage", "said"), WRONG.values(), ids=WRONG)
def test_a_record_that_says_too_much_is_not_written(
    damage: Callable[[dict[str, Any]], object], said: str, tmp_path: pathlib.Path
) -> None:
    record = copy.deepcopy(RECORD)
    records.write(record, tmp_path / "card.jsonl")
    damage(record)
    with pytest.raises(RecordError, match=said):
        records.write(record, tmp_path / "card.jsonl")
    assert records.read(tmp_path / "card.jsonl") == RECORD


def test_a_failed_check_is_never_timed() -> None:
    def measure() -> dict[str, Any]:
        raise AssertionError("timed")

    wrong = Comparison("a case", ("an element is off",), 0.5, 0.001, 9.0, float("nan"))
    entry = records.record_case({"op": "merge_states"}, wrong, measure)
    assert "an element is off" in entry["failed"] and (entry["rel_err"], entry["lse_err"]) == (0.5, None)
    assert records.with_must(entry, {"us": 1.0})["met"] is False


def test_parts_are_joined_where_they_are_of_one_machine() -> None:
    other = {**copy.deepcopy(RECORD), "tests": {"passed": None, "failed": None, "skipped": None, "sanitizer": {}}}
    other["cases"] = [{**CASE, "us": 1.0}, {**CASE, "batch": 3}]
    whole = records.joined([RECORD, other])
    assert [case["us"] for case in whole["cases"]] == [1.0, 2.0] and whole["tests"] == RECORD["tests"]
    with pytest.raises(RecordError, match="driver: got '580', needs that of the other parts"):
        records.joined([RECORD, {**other, "driver": "580"}])


# ---- machine code


def test_a_case_of_other_machine_code_is_an_older_one() -> None:
    same = kernels_run.marked(RECORD, lambda spec: "0123456789abcdef")
    assert same == RECORD
    changed = kernels_run.marked(RECORD, lambda spec: "fedcba9876543210")
    assert changed["cases"][0]["older"] is True and kernels_run.mark(changed["cases"][0]) == kernels_run.MARK
    assert kernels_run.marked(changed, lambda spec: "0123456789abcdef") == RECORD
    for text in ("NoSpec(d=512)", repr(SPEC).replace("d=512", "d_v=512"), repr(SPEC).replace("d=512", "d=-3"), "1 +"):
        gone = {**RECORD, "cases": [{**CASE, "kernels": {text: "0123456789abcdef"}}]}
        assert kernels_run.marked(gone, lambda spec: "0123456789abcdef")["cases"][0]["older"] is True


def test_digests_name_machine_code_and_nothing_else() -> None:
    """The digest stays if a kernel has another name, and changes with one more instruction or register."""
    cubins = sass.compiled(SPEC).cubins
    digest = sass.digest_of(cubins)
    assert digest == sass.digest(SPEC) and len(digest) == 16
    renamed = tuple(cubin.replace(b"MergeKernel", b"OtherKernel") for cubin in cubins)
    assert renamed != cubins and sass.digest_of(renamed) == digest
    code = cubins[0].rindex(bytes.fromhex("4d79000000000000"))  # an EXIT
    damaged = cubins[0][:code] + bytes.fromhex("1879000000000000") + cubins[0][code + 8 :]
    assert sass.digest_of([damaged]) != digest
    assert len({sass.digest(spec) for spec in shipped_specs()[:3]}) == 3


def test_cubins_are_found_in_a_library() -> None:
    cubin = sass.compiled(SPEC).cubins[0]
    library = b"\x7fELF" + bytes(60) + cubin + b"more"
    (found,) = sass.embedded_cubins(library)
    assert sass.digest_of([found]) == sass.digest_of([cubin])
    with pytest.raises(ValueError, match="without a cubin"):
        sass.embedded_cubins(b"\x7fELF" + bytes(60))


def test_what_a_case_asked_for_is_noted() -> None:
    from cute_kernels.runtime import compile

    before = compile._kernels
    with kernels_run.noting() as asked:
        compile._kernels.get(SPEC)
    assert list(asked) == [SPEC] and compile._kernels is before


# ---- the records of this repository


@pytest.mark.parametrize("path", sorted(records.RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_records_are_valid(path: pathlib.Path) -> None:
    record = records.read(path)
    assert path.stem == records.card_slug(record["card"]) and len(record["cases"]) > 100
