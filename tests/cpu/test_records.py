"""The record of a GPU run and what is made from it: they must not claim more than was checked."""

import json
import math
from typing import Any

import pytest

from bench import kernels_run, records
from bench.report import pages, plots
from bench.timing import WrongReplay
from cute_kernels.budget.rates import H200
from scripts import add_reliability, budget_table, results_table
from tests.kit.made_up_records import (
    ACCUMULATOR,
    FAILED,
    PASSED,
    SIZES,
    accuracy_rows,
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
    records.write(some_record(), checkout / "results" / "h200.json")
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

    records.write(some_record(date="2026-02-03"), checkout / "results" / "h200.json")
    assert results_table.main(["--check"], root=checkout) == 1


def test_without_results_the_page_says_so(checkout):
    assert results_table.main([], root=checkout) == 0
    assert pages.NO_RESULTS in (checkout / "README.md").read_text()
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
    assert [part for part in pages.PARTS if pages.render(record, part) == pages.NO_CASES] == [
        "headlines",
        "mla",
        "mla-sustained",
        "mla-scores",
        "mla-formats",
        "mla-accuracy",
        "accumulator",
        "gqa",
        "gqa-summary",
        "sink",
        "sink-summary",
        "sink-routing",
        "values",
        "budget-errors",
    ]


def test_headlines_name_their_conditions():
    (line,) = (line for line in pages.render(some_record(), "headlines").splitlines() if "sparse" in line)
    assert line == (
        "| `mla_fp8_decode`, sparse | 128 requests x 2 tokens, 128 heads, topk 2048 | 500 | 0.82 x FlashMLA | 2.1e-03 |"
    )
    (line,) = (line for line in pages.render(some_record(), "headlines").splitlines() if "forward" in line)
    assert "4 x 16384 tokens, 64/8 heads of 64, causal, with sinks | 500 | 1.10 x cuDNN without sinks" in line
    failed = pages.render(some_record(cases=[records.record_case(SIZES, FAILED, dict)]), "headlines")
    assert "topk 2048 | check failed | – | 5.0e-01 |" in failed


# --- three times, two cards


def test_a_case_has_three_times_and_so_has_its_peer():
    record = coded_record(cases=[timed_case(kernels=[], sets_compared=2)])
    records.validate(record)
    header, _, line = pages.render(record, "mla").splitlines()
    assert "| us | p10 .. p90 | back to back, us | under load, us | at MHz |" in header
    assert "| 128 x 128 x 2 | 2048 | 300 | 299 .. 303 | 296 | 340 | 1650 | 486 | 1400 | 420 | 1.40 | 1.25 |" in line
    assert "in-layer: a small kernel before each call" in pages.render(record, "run")
    power = pages.render(record, "mla-sustained").splitlines()[-1]
    assert "| 300 | 340 | 345 | 1650 | 698 | 241 | 1.40 / 1.25 / 1.22 | 420 | 425 | 422 | 1950 | 610 | 257 |" in power
    assert pages.render(record, "headlines").splitlines()[-1].count("1.40 x FlashMLA (1.25 under load)") == 1
    for case in (timed_case(us_sustained=0.0), timed_case(us_back_to_back=-1.0)):
        with pytest.raises(records.RecordError, match="needs a positive number"):
            records.validate(some_record(cases=[case]))
    assert "back to back, us" not in pages.render(some_record(), "mla"), "an older record"
    assert "calls back to back. Tests" in pages.render(some_record(), "run")


def test_the_worst_family_of_values_stands_beside_the_usual_one():
    entry = {**{key: SIZES[key] for key in SIZES}, "values": {"normal": 499.0, "tokens": 520.0}, "slow_ratio": 1.2}
    entry |= {"worst_family": "tokens", "worst_us": 520.0, "worst_ratio": 1.042, "worst_ratio_peer": 0.79}
    assert "worst" not in pages.render(some_record(), "headlines")
    assert pages.render(some_record(), "values") == pages.NO_CASES
    record = some_record(values=[entry, {**entry, "batch": 1, "failed": "no", "values": {}}])
    text = pages.render(record, "headlines")
    assert "| 500, worst values (tokens) 520, 1.04 x | 0.82 x FlashMLA, worst values 0.79 |" in text
    lines = pages.render(record, "values").splitlines()
    assert lines[2] == "| mla_fp8_decode sparse 128x128x2 topk 2048 | 499 | tokens | 520 | 1.04 | 1.20 | – | 0.79 |"
    assert lines[3].startswith("| mla_fp8_decode sparse 1x128x2 topk 2048 | failed |")
    assert text.count("worst values") == 2, "where nothing was measured, nothing is shown"


def test_a_must_under_load():
    case = timed_case()
    assert records.attained({"ratio": 1.4, "ratio_sustained": 1.25, "us_sustained": 340.0}, case)
    assert not records.attained({"ratio_sustained": 1.26}, case)
    assert not records.attained({"us_sustained": 339.0}, case)
    assert not records.attained({"ratio_sustained": 1.0}, {**case, "peers": {"a": {"us": 1.0, "ratio": 2.0}}})


def test_exact_and_fp8_scores_stand_side_by_side():
    exact, fp8 = timed_case(scores="exact"), timed_case(scores="fp8", us=250.0)
    assert records.identity(exact) != records.identity(fp8)
    text = pages.render(some_record(cases=[exact, fp8]), "headlines")
    assert "| exact scores: 300; fp8 scores: 250 |" in text
    names = [line.split(" | ")[0] for line in pages.render(some_record(cases=[exact, fp8]), "mla").splitlines()[2:]]
    assert names == ["| 128 x 128 x 2", "| 128 x 128 x 2, fp8 scores"]


def test_pages_show_both_cards(checkout, capsys):
    (checkout / "README.md").write_text(page("headlines", "run", "mla", "budget-mla", "budget-errors"))
    records.write(some_record(), checkout / "results" / "h200.json")
    assert results_table.main([], root=checkout) == 0
    one = (checkout / "README.md").read_text()
    assert "NVIDIA H200:" not in one
    other = some_record(card="NVIDIA H100 80GB HBM3", cases=[timed_case()])
    records.write(other, checkout / "results" / "h100.json")
    assert results_table.main(["--check"], root=checkout) == 1
    assert results_table.main([], root=checkout) == 0
    text = (checkout / "README.md").read_text()
    assert "| call | conditions | H200: us | H200: speed | H100: us | H100: speed | error against float64 |" in text
    assert "| 500 | 0.82 x FlashMLA | 300 | 1.40 x FlashMLA (1.25 under load) | 2.1e-03 |" in text
    assert "| 500 | 1.10 x cuDNN without sinks | – | – |" in text
    for title in ("NVIDIA H200:", "NVIDIA H100 80GB HBM3:"):
        assert text.count(f"{title}\n\n| `mla_fp8_decode`, sparse") == 1
    assert text.index("NVIDIA H200:") < text.index("NVIDIA H100 80GB HBM3:")
    assert text.count("tensor core, sustained") == one.count("tensor core, sustained"), "what no card changes, once"
    assert "NVIDIA H200, driver 580.1" in text and "NVIDIA H100 80GB HBM3, driver 580.1" in text
    only_h100 = ["--results", str(checkout / "results" / "h100.json")]
    assert results_table.main(only_h100, root=checkout) == 0
    assert "H200" not in (checkout / "README.md").read_text().split("budget-mla")[0]


def test_the_budget_of_another_card_has_its_ceilings_and_is_calibrated_on_none():
    cases = [timed_case(scores="exact")]
    h200, h100 = (some_record(card=card, cases=cases) for card in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
    assert budget_table.rates_of(h200) == H200
    assert budget_table.rates_of(h100).read_gbps == h100["ceilings"]["read_GBps"]
    assert "(calibrated on it)" in pages.render(h200, "budget-errors")
    assert "(calibrated on it)" not in pages.render(h100, "budget-errors")


def test_cases_of_other_formats_have_a_table_of_their_own():
    two = timed_case(cache_format="v4", extra_cache_format="v4", topk=128, extra_topk=1024, must={"ratio": 1.35})
    cases = [two, timed_case(cache_format="v3.2_nope"), {**two, "ragged": True, "failed": "no", "us": None}]
    record = some_record(cases=cases)
    lines = pages.render(record, "mla-formats").splitlines()
    assert lines[2].startswith("| v4 + v4 | 128 x 128 x 2 | 128 + 1024 | 300 | 299 .. 303 | 296 | 340 | 1650 |")
    assert lines[2].endswith("| 1.35 x FlashMLA | 420 | 1.40 | 1.25 | 2.1e-03 | 2.0e-05 |")
    assert lines[3].startswith("| v3.2_nope | 128 x 128 x 2 | 2048 | 300 |")
    assert lines[4].startswith("| v4 + v4 | 128 x 128 x 2 | 128 + up to 1024 | check failed |")
    assert len({line.count("|") for line in lines}) == 1
    assert pages.render(record, "mla") == pages.render(record, "headlines") == pages.NO_CASES
    assert len({records.identity(case) for case in cases}) == 3


def test_the_table_of_accuracy():
    lines = pages.render(some_record(accuracy=accuracy_rows()), "mla-accuracy").splitlines()
    assert lines[0].startswith("| inputs | scales | exact: out, log-sum-exp | fp8: out, log-sum-exp |")
    assert lines[2] == ("| N(0,1) | arbitrary | 1.7e-03, 1.0e-06 | 1.7e-03, 6.0e-05 | 2.9e-03, 3.0e-04 | –, – |"), (
        "FlashMLA failed"
    )
    assert lines[3].startswith("| N(0,1) | powers of two |") and lines[3].endswith("| 3.1e-03, 2.0e-04 |")
    assert len(lines) == 6


def test_the_sentence_on_the_accumulator():
    text = pages.render(some_record(accumulator=ACCUMULATOR), "accumulator")
    assert text.startswith("Measured on NVIDIA H200: of a product, 13 bits below the largest product")
    assert text.endswith("What is smaller is truncated; 31 products of half the last bit together are lost.")
    found = {**ACCUMULATOR, "negative": "rounded", "lost_together": 15.0}
    text = pages.render(some_record(accumulator=found), "accumulator")
    assert "truncated where it is positive, rounded where it is negative; " in text
    assert text.endswith("together leave 15 of 15.5 such bits.")
    assert "failed" in pages.render(some_record(accumulator={"problem": "no"}), "accumulator")


def test_every_block_has_a_page(root):
    """A page that is rewritten without its markers would lose a table that nothing else shows."""
    text = "".join(path.read_text(encoding="utf-8") for path in pages.pages(root))
    lost = {part for part in pages.PARTS if f"<!-- results:{part}:begin -->" not in text}
    assert lost <= {"headlines", "sink-summary"}, "the README has one of these, and a table for users the rest"


def test_every_op_has_a_place():
    """A benchmark that no part shows would be in the record and on no page."""
    text = "\n".join(pages.render(some_record(), part) for part in pages.PARTS)
    for op in {case["op"] for case in some_record()["cases"]}:
        assert f"`{op}`" in text


def test_a_case_that_raised_is_in_the_tables():
    raised = [
        {"op": op, "case": "int8 64x32x1", "failed": "RuntimeError: no"}
        for op in ("gqa_decode", "mla_fp8_decode", "sink_attention")
    ]
    record = some_record(cases=[*some_record()["cases"], *raised])
    for part in ("mla", "gqa", "sink"):
        (line,) = (line for line in pages.render(record, part).splitlines() if "int8 64x32x1" in line)
        assert "failed" in line


def test_the_summary_of_gqa_shows_what_is_needed_and_missed():
    lines = pages.render(some_record(), "gqa-summary").splitlines()
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
        pages.render(some_record(), part).splitlines() for part in ("sink", "sink-summary", "sink-routing")
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
        assert plots.draw(some_record(), tmp_path / folder) == names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    for text in ("read ceiling", "cuDNN", "int8 per tensor, BNSH", "64 x 8192"):
        assert text in (tmp_path / "a" / "gqa_speed.svg").read_text()
    assert plots.draw(some_record(cases=[]), tmp_path / "c") == []


def test_the_run_shows_random_calls_and_more_versions(checkout):
    assert "Random calls" not in pages.render(coded_record(), "run")
    record = records.with_reliability(coded_record(), random_calls(0, 4799, calls=123_456))
    record["tests"]["sanitizer"]["initcheck"] = 3
    text = pages.render(record, "run")
    assert "123,456 valid ones (2 kernels, 900 shapes) and 12,000 invalid ones in 10" in text
    assert "0 wrong, 0 faults. Seeds 0 to 4799." in text
    assert "CuTe DSL 4.8.1, tvm-ffi 0.1.15, 2026" in text and "synccheck 0, initcheck 3." in text


def test_rows_of_machine_code_that_is_no_longer_built_are_marked(checkout, capsys):
    path = checkout / "results" / "h200.json"
    record = coded_record()
    records.write(record, path)
    assert results_table.main([], root=checkout) == 0
    unmarked = (checkout / "README.md").read_text()
    assert "†" not in unmarked
    places = (0, 2, 3, 9)  # decode, its append, gqa_decode and kv_int8_append
    older = [name for place in places for name in record["cases"][place]["kernels"]]
    kernels_run.write_older(path, record["kernels"], older)
    assert results_table.main(["--check"], root=checkout) == 1
    assert results_table.main([], root=checkout) == 0
    readme, gqa = (checkout / "README.md").read_text(), (checkout / "docs" / "gqa_decode.md").read_text()
    for start, text in (
        ("| 128 x 128 x 2 † | 2048 | 500 |", readme),
        ("| `mla_fp8_append`: tokens 65536 † | 500 |", readme),
        ("| 64 x 8192 | 0.90 of reads, 1.7 x cuDNN | 500 us, 0.95 † | 500 us, 0.95 |", readme),
        ("| int8 per tensor, BNSH † | 64 x 8192 |", gqa),
    ):
        assert start in text
    assert readme.count("† ") - readme.count("† |") == 2 == readme.count(kernels_run.FOOTNOTE), "a footnote a table"
    assert "| 16 x 128 x 2 | 2048 | check failed |" in readme
    kernels_run.write_older(path, record["kernels"], [])
    assert results_table.main([], root=checkout) == 0
    assert (checkout / "README.md").read_text() == unmarked
    assert [file.name for file in path.parent.iterdir()] == ["h200.json"]


def test_every_table_of_cases_can_mark_a_row():
    record = coded_record()
    sustained = {"sustained": {"us": 1.0}, "exchange_us": {"none": 2.0, "codes": 1.0, "values": 1.0}}
    sustained["scores_us"] = {"exact": 2.0, "fp8": 2.0}
    record["cases"][0] |= sustained
    whole = kernels_run.marked(record, record["kernels"])
    parts = ("mla", "mla-sustained", "mla-scores", "crossover", "gqa", "gqa-summary")
    for part in (*parts, "sink", "sink-summary", "sink-routing"):
        lines = [line for line in pages.render(whole, part).splitlines() if line.startswith("| ")]
        rules = sum(line.startswith("| --- |") for line in lines)
        assert sum("†" in line for line in lines) == len(lines) - 2 * rules > 0, part
    assert "†" in pages.render(whole, "budget-errors")


def test_what_is_still_built_is_compared_or_the_reason_is_said(checkout, capsys, monkeypatch):
    path = checkout / "results" / "h200.json"
    records.write(coded_record(), path)
    code: Any = type("Code", (), {"toolchain": staticmethod(lambda: {"cuda": "cu12"})})
    monkeypatch.setattr(kernels_run, "machine_code", lambda: code)
    assert results_table.main(["--compare"], root=checkout) == 0
    assert "not compared, it is of another toolchain: " in capsys.readouterr().out
    gone = coded_record()["cases"][0]["kernels"]
    code.toolchain = staticmethod(lambda: coded_record()["toolchain"])
    code.digests_of_specs = None
    monkeypatch.setattr(kernels_run, "no_longer_built", lambda kernels, digests, known: gone)
    assert results_table.main(["--compare"], root=checkout) == 0
    assert "1 of 15 kernels are no longer built, which 1 cases ran" in capsys.readouterr().out
    assert kernels_run.read_older(path) == set(gone)
    assert "128 x 128 x 2 † | 2048" in (checkout / "README.md").read_text()
