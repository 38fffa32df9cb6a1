"""Tables of results: what pages show of a record, and that they show all of it."""

from pathlib import Path
from typing import Any

import pytest

from bench import kernels_run, records
from bench.report import pages, plots, speeds
from cute_kernels.budget.rates import H200
from scripts import budget_table, results_table
from tests.kit.made_up_records import (
    ACCUMULATOR,
    FAILED,
    SIZES,
    accuracy_rows,
    coded_record,
    random_calls,
    some_record,
    timed_case,
)

H100 = "NVIDIA H100 80GB HBM3"


def render(part: str, *found: dict[str, Any]) -> str:
    """A part of pages from these records."""
    return pages.render(pages.Recorded(list(found), [], []), part)


def column(text: str, name: str) -> list[str]:
    """The cells of a table's column."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [row[lines[0].index(name)] for row in lines[2:]]


# ---- pages


def page(*parts: str) -> str:
    """A page with a pair of markers for each part."""
    pairs = [f"<!-- results:{part}:begin -->\nold\n<!-- results:{part}:end -->\n" for part in parts]
    return "\n".join(["# Title\n\nBefore.\n", *pairs, "After.\n"])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(page("headlines"))
    for folder in ("docs", "results"):
        (tmp_path / folder).mkdir()
    (tmp_path / "results" / "README.md").write_text(page("run", "mla", "gqa", "append-merge"))
    (tmp_path / "docs" / "gqa_decode.md").write_text(page("gqa-speed"))
    (tmp_path / "docs" / "other.md").write_text("# No results here\n")
    return tmp_path


def test_the_pages_are_filled_and_checked(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records.write(some_record(), checkout / "results" / "h200.json")
    assert results_table.main(["--check"], root=checkout) == 1
    assert "README.md is out of date" in capsys.readouterr().err
    assert (checkout / "README.md").read_text() == page("headlines"), "--check changes nothing"
    assert results_table.main([], root=checkout) == 0
    assert results_table.main(["--check"], root=checkout) == 0
    readme = (checkout / "README.md").read_text()
    tables = (checkout / "results" / "README.md").read_text()
    gqa = (checkout / "docs" / "gqa_decode.md").read_text()
    for text in (readme, tables, gqa):
        assert text.startswith("# Title\n\nBefore.\n") and text.endswith("\n\nAfter.\n") and "old" not in text
    for line in (
        "| sparse, 128 x 128 x 2, 2048 keys | 500 | 499 .. 510 | 292 | 900 | 0.20 of reads | 0.82 x FlashMLA (409 us)",
        "| sparse, 16 x 128 x 2, 2048 keys | check failed |",
        "| int8 per tensor, BNSH, 32 x 512..16384 | 500 | 499 .. 510 |",
        "| fp8 per tensor, BNSH, 64 x 8192, s_q 4, window 128 | check failed |",
        "| `kv_int8_append`: per_tensor, BNSH, tokens 65536, h_kv 8, d 128 | 500 |",
        "| 900 | 0.85 of copies | 0.80 of copies |",
    ):
        assert line in tables
    assert "racecheck not run" in tables and "racecheck" not in readme + gqa
    assert "| int8 per tensor, BNSH, 64 x 8192 | 500 | 0.95 of reads, 1.80 x cuDNN over bf16 | 2.1e-03 |" in gqa
    records.write(some_record(date="2026-02-03"), checkout / "results" / "h200.json")
    assert results_table.main(["--check"], root=checkout) == 1


def test_without_results_the_page_says_so(checkout: Path) -> None:
    assert results_table.main([], root=checkout) == 0
    assert pages.NO_RESULTS in (checkout / "README.md").read_text()
    assert results_table.main(["--check"], root=checkout) == 0


def test_a_page_without_markers_is_an_error(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_markers_that_are_no_pair_are_an_error(text: str, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "docs" / "other.md").write_text(text)
    assert results_table.main([], root=checkout) == 1
    assert "other.md: <!-- results:" in capsys.readouterr().err
    assert (checkout / "docs" / "other.md").read_text() == text


def test_the_pages_of_the_checkout_are_up_to_date(root: Path) -> None:
    assert results_table.main(["--check"], root=root) == 0


def test_every_part_has_a_page(root: Path) -> None:
    """A page that is rewritten without its markers would lose a table that nothing else shows."""
    text = "".join(path.read_text(encoding="utf-8") for path in pages.pages(root))
    assert not [part for part in pages.PARTS if f"<!-- results:{part}:begin -->" not in text]


def test_every_recorded_case_is_in_a_table(root: Path) -> None:
    """A benchmark that no part shows would be in the record and on no page."""
    for record in pages.read(root).cards:
        for case in record["cases"]:
            alone = pages.Recorded([{**record, "cases": [case]}], [], [])
            shown = [part for part in ("mla", "mla-formats", "gqa", "sink", "sink-routing", "append-merge")
                     if pages.PARTS[part](alone)]  # fmt: skip
            assert len(shown) == 1, case


def test_every_named_case_of_the_tables_of_speeds_is_recorded(root: Path) -> None:
    record = pages.read(root).cards[0]
    missing = [key for keys in speeds.SPEEDS.values() for key in keys if speeds.find(record, key) is None]
    assert not missing


# ---- rows


def test_a_case_has_three_times_and_its_peer() -> None:
    record = coded_record(cases=[timed_case(kernels=[], sets_compared=2)])
    records.validate(record)
    text = render("mla", record)
    for name, cell in {
        "us": "300",
        "p10 .. p90": "299 .. 303",
        "back to back": "296",
        "under load": "340",
        "at MHz": "1650",
        "faster than": "1.40 x FlashMLA (1.25 under load) (420 us)",
    }.items():
        assert column(text, name) == [cell]
    power = render("mla-power", record).splitlines()[-1]
    assert "| 345 | 1650 | 698 | 241 | 422 | 1950 | 610 | 257 | 1.22 |" in power
    assert "1.40 x FlashMLA (1.25 under load)" in render("headlines", record)
    for case in (timed_case(us_sustained=0.0), timed_case(us_back_to_back=-1.0)):
        with pytest.raises(records.RecordError, match="needs a positive number"):
            records.validate(some_record(cases=[case]))


def test_a_failed_check_has_no_figure() -> None:
    failed = some_record(cases=[records.record_case(SIZES, FAILED, dict)])
    assert "2048 keys | check failed | – | 5.0e-01 |" in render("headlines", failed)
    raised = [
        {"op": op, "case": "int8 64x32x1", "failed": "RuntimeError: no"}
        for op in ("gqa_decode", "mla_fp8_decode", "sink_attention")
    ]
    record = some_record(cases=[*some_record()["cases"], *raised])
    for part in ("mla", "gqa", "sink"):
        (line,) = (line for line in render(part, record).splitlines() if "int8 64x32x1" in line)
        assert "check failed" in line


def test_the_worst_family_of_values_stands_beside_the_usual_one() -> None:
    entry = {**SIZES, "values": {"normal": 499.0, "tokens": 520.0}, "slow_ratio": 1.2}
    entry |= {"worst_family": "tokens", "worst_us": 520.0, "worst_ratio": 1.042, "worst_ratio_peer": 0.79}
    assert "worst" not in render("headlines", some_record())
    assert render("values", some_record()) == pages.NO_CASES
    record = some_record(values=[entry, {**entry, "batch": 1, "failed": "no", "values": {}}])
    text = render("headlines", record)
    assert "| 500; worst values (tokens) 1.04 x | 0.82 x FlashMLA; worst values 0.79 x |" in text
    lines = render("values", record).splitlines()
    assert lines[2] == "| mla_fp8_decode sparse 128x128x2 topk 2048 | 499 | tokens | 520 | 1.04 | 1.20 | 0.79 |"
    assert lines[3].startswith("| mla_fp8_decode sparse 1x128x2 topk 2048 | failed |")


def test_what_a_case_needs_says_when_it_is_missed() -> None:
    needs = column(render("gqa", some_record()), "needs")
    assert needs[:2] == ["0.90 of reads, 1.7 x the fastest peer", "26 us (missed)"]
    assert column(render("sink", some_record()), "needs")[1] == "260 us (missed)"


def test_other_formats_have_a_table_of_their_own() -> None:
    two = timed_case(cache_format="v4", extra_cache_format="v4", topk=128, extra_topk=1024, must={"ratio": 1.35})
    cases = [two, timed_case(cache_format="v3.2_nope"), {**two, "ragged": True, "failed": "no", "us": None}]
    record = some_record(cases=cases)
    lines = render("mla-formats", record).splitlines()
    assert lines[2].startswith("| v4 + v4: 128 x 128 x 2, 128 + 1024 keys | 300 | 299 .. 303 | 296 | 340 | 1650 |")
    assert lines[3].startswith("| v3.2_nope: sparse, 128 x 128 x 2, 2048 keys | 300 |")
    assert lines[4].startswith("| v4 + v4: 128 x 128 x 2, 128 + up to 1024 keys | check failed |")
    assert len({line.count("|") for line in lines}) == 1
    assert render("mla", record) == render("headlines", record) == pages.NO_CASES
    assert len({records.identity(case) for case in cases}) == 3


def test_a_table_of_speeds_takes_exact_scores() -> None:
    exact, fp8 = timed_case(scores="exact"), timed_case(scores="fp8", us=250.0)
    assert records.identity(exact) != records.identity(fp8)
    for cases in ([exact, fp8], [fp8, exact]):
        assert column(render("headlines", some_record(cases=cases)), "H200, us") == ["300"]
    names = [line.split(" | ")[0] for line in render("mla", some_record(cases=[exact, fp8])).splitlines()[2:]]
    assert names[1] == f"{names[0]}, fp8 scores"


def test_routes_of_few_queries() -> None:
    assert render("sink-routing", some_record()).splitlines()[2:] == [
        "| 1 x 64 | **5.0** / 10.0 |",
        "| 1 x 8192 | **5.0** / 10.0 |",
    ]


def test_the_table_of_accuracy() -> None:
    lines = render("mla-accuracy", some_record(accuracy=accuracy_rows())).splitlines()
    assert lines[2] == "| N(0,1) | arbitrary | 1.7e-03, 1.0e-06 | 1.7e-03, 6.0e-05 | 2.9e-03, 3.0e-04 | –, – |"
    assert lines[3].startswith("| N(0,1) | powers of two |") and lines[3].endswith("| 3.1e-03, 2.0e-04 |")
    assert len(lines) == 6


def test_the_sentence_on_the_accumulator() -> None:
    assert "What is smaller is truncated. Of 31" in render("accumulator", some_record(accumulator=ACCUMULATOR))
    found = {**ACCUMULATOR, "negative": "rounded", "lost_together": 15.0}
    text = render("accumulator", some_record(accumulator=found))
    assert "truncated if positive, rounded if negative. " in text and text.endswith("15 of 15.5 bits remain.")
    assert "failed: no." in render("accumulator", some_record(accumulator={"problem": "no"}))


def test_the_run_shows_random_calls_and_versions() -> None:
    assert "Random calls" not in render("run", coded_record())
    record = records.with_reliability(coded_record(), random_calls(0, 4799, calls=123_456))
    record["tests"]["sanitizer"]["initcheck"] = 3
    text = render("run", record)
    assert "123,456 valid ones (2 kernels, 900 shapes) and 12,000 invalid ones in 10" in text
    assert "0 wrong, 0 faults. Seeds 0 to 4799." in text
    assert "CuTe DSL 4.8.1, tvm-ffi 0.1.15, 2026" in text and "synccheck 0, initcheck 3." in text


# ---- several cards, machine code that is no longer built


def test_pages_show_all_cards() -> None:
    both = some_record(), some_record(card=H100, cases=[timed_case()])
    assert f"{both[0]['card']}:" not in render("mla", both[0])
    text = render("headlines", *both)
    assert text.startswith("| call | H200, us | H200, speed | H100, us | H100, speed | error against float64 |")
    assert "| 500 | 0.82 x FlashMLA | 300 | 1.40 x FlashMLA (1.25 under load) | 2.1e-03 |" in text
    assert "| 500 | 1.10 x cuDNN without sinks | – | – |" in text
    mla = render("mla", *both)
    assert mla.index("NVIDIA H200:\n\n| `mla") < mla.index(f"{H100}:\n\n| `mla")
    assert H100 not in render("gqa", *both), "it has no such case"
    assert render("budget-mla", *both) == render("budget-mla", both[0]), "what no card changes, once"
    run = render("run", *both)
    assert "NVIDIA H200, driver 580.1" in run and f"{H100}, driver 580.1" in run


def test_records_are_read_in_the_order_of_pages(tmp_path: Path) -> None:
    for name, card in (("h100", H100), ("h200", "NVIDIA H200")):
        records.write(some_record(card=card), tmp_path / "results" / f"{name}.json")
    assert [record["card"] for record in pages.read(tmp_path).cards] == ["NVIDIA H200", H100]


def test_the_budget_of_another_card_has_its_ceilings_and_is_calibrated_on_none() -> None:
    cases = [timed_case(scores="exact")]
    h200, h100 = (some_record(card=card, cases=cases) for card in ("NVIDIA H200", H100))
    assert budget_table.rates_of(h200) == H200
    assert budget_table.rates_of(h100).read_gbps == h100["ceilings"]["read_GBps"]
    assert "(calibrated on it)" in render("budget-errors", h200)
    assert "(calibrated on it)" not in render("budget-errors", h100)


def test_rows_of_machine_code_that_is_no_longer_built_are_marked(checkout: Path) -> None:
    path, record = checkout / "results" / "h200.json", coded_record()
    records.write(record, path)
    assert results_table.main([], root=checkout) == 0
    unmarked = (checkout / "results" / "README.md").read_text()
    assert "†" not in unmarked
    older = [name for place in (0, 2, 3, 9) for name in record["cases"][place]["kernels"]]
    kernels_run.write_older(path, record["kernels"], older)
    assert results_table.main(["--check"], root=checkout) == 1
    assert results_table.main([], root=checkout) == 0
    text = (checkout / "results" / "README.md").read_text()
    for start in (
        "| sparse, 128 x 128 x 2, 2048 keys † | 500 |",
        "| `mla_fp8_append`: tokens 65536 † | 500 |",
        "| int8 per tensor, BNSH, 64 x 8192 † | 500 |",
        "| sparse, 16 x 128 x 2, 2048 keys | check failed |",
    ):
        assert start in text
    assert text.count(kernels_run.FOOTNOTE) == 3, "a footnote a part"
    assert "2048 keys † | 500 |" in (checkout / "README.md").read_text()
    kernels_run.write_older(path, record["kernels"], [])
    assert results_table.main([], root=checkout) == 0
    assert (checkout / "results" / "README.md").read_text() == unmarked


def test_every_table_of_cases_can_mark_a_row() -> None:
    record = coded_record()
    record["cases"][0] |= {"watts": 700, "exchange_us": {"none": 2.0, "codes": 1.0, "values": 1.0}}
    whole = kernels_run.marked(record, record["kernels"])
    for part in ("mla", "mla-power", "crossover", "gqa", "gqa-speed", "sink", "sink-speed", "sink-routing"):
        lines = [line for line in render(part, whole).splitlines() if line.startswith("| ")]
        assert sum("†" in line for line in lines) == len(lines) - 2 > 0, part
    assert "†" in render("budget-errors", whole)


def test_what_is_still_built_is_compared_or_the_reason_is_said(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert "2048 keys † | 500 |" in (checkout / "README.md").read_text()


# ---- plots


def test_the_plots_are_the_same_for_the_same_record(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ["mla_speed.svg", "gqa_speed.svg", "sink_speed.svg"]
    for folder in ("a", "b"):
        assert plots.draw(some_record(), tmp_path / folder) == names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    for text in ("GB/s", "cuDNN", "int8 per tensor, BNSH, 64 x 8192"):
        assert text in (tmp_path / "a" / "gqa_speed.svg").read_text()
    assert plots.draw(some_record(cases=[]), tmp_path / "c") == []
