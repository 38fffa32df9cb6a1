"""The parts of results/README.md that show one card: every recorded case, one table per operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bench.kernels_run import mark
from bench.records import MORE_TOOLS, SANITIZER_TOOLS, case_name
from bench.report import markdown
from bench.report.cases import (
    Case,
    Record,
    cases_of,
    faster,
    fraction,
    host,
    must,
    name,
    peer_of,
    spread,
)
from bench.report.markdown import MISSING, hundredths, plain, scientific, short

ERRORS = ("relative error", "lse error")
COLUMNS: dict[str, Callable[[Case], str]] = {
    "us": lambda case: short(case.get("us")) if "failed" not in case else "check failed",
    "p10 .. p90": spread,
    "back to back": lambda case: short(case.get("us_back_to_back")),
    "under load": lambda case: short(case.get("us_sustained")),
    "at MHz": lambda case: short(case.get("sm_mhz")),
    "TFLOP/s": lambda case: short(case.get("TFLOPs")),
    "GB/s": lambda case: short(case.get("GBps")),
    "of the ceiling": fraction,
    "needs": must,
    "faster than": lambda case: faster(case, times=True),
    "without sinks": lambda case: short(case.get("us_without_sinks")),
    ERRORS[0]: lambda case: scientific(case.get("rel_err")),
    ERRORS[1]: lambda case: scientific(case.get("lse_err")),
    "host, us (of `mul_`)": host,
}
"""Columns of a table of cases. A column without any figure is left out."""


def case_table(title: str, cases: Sequence[Case]) -> list[str]:
    """Makes a row per case. A failed case has its errors and no figure."""
    rows = []
    for case in cases:
        shown = ("us", *ERRORS) if "failed" in case else COLUMNS
        rows.append([name(case) + mark(case), *(COLUMNS[one](case) if one in shown else MISSING for one in COLUMNS)])
    return dense([title, *COLUMNS], rows)


class Columns(NamedTuple):
    """A table of one card that pages show side by side with other cards': its header, and a row per case."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def side_by_side(parts: Mapping[str, Columns]) -> list[str]:
    """Joins the columns of each card, by its name, in one table with a row for each case of any card."""
    cases = dict.fromkeys(row[0] for part in parts.values() for row in part.rows)
    cells = [{row[0]: row[1:] for row in part.rows} for part in parts.values()]
    header = [f"{card}: {column}" for card, part in parts.items() for column in part.header[1:]]
    absent = [[MISSING] * (len(part.header) - 1) for part in parts.values()]
    rows = [
        [case, *(cell for found, none in zip(cells, absent, strict=True) for cell in found.get(case, none))]
        for case in cases
    ]
    return dense([*(part.header[0] for part in [*parts.values()][:1]), *header], rows)


def dense(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Makes a table without columns that have no figure in any row; nothing if there is no row."""
    kept = [place for place in range(len(header)) if any(row[place] != MISSING for row in rows)]
    names, *picked = ([row[place] for place in kept] for row in (header, *rows))
    return markdown.table(names, picked) if rows else []


# ---- the run


def run(record: Record) -> list[str]:
    """Returns card and versions, tests, sanitizers and ceilings; random calls."""
    tests, ceilings = record["tests"], record["ceilings"]
    tools = (*SANITIZER_TOOLS, *(tool for tool in MORE_TOOLS if tool in tests["sanitizer"]))
    sanitizer = ", ".join(
        f"{tool} {'not run' if tests['sanitizer'][tool] is None else tests['sanitizer'][tool]}" for tool in tools
    )
    tvm_ffi = f"tvm-ffi {record['tvm_ffi']}, " if "tvm_ffi" in record else ""
    peers = "".join(f" {name}: {version}." for name, version in record.get("peers", {}).items())
    return [
        f"{record['card']}, driver {record['driver']}, torch {record['torch']}, CuTe DSL {record['cutlass_dsl']}, "
        f"{tvm_ffi}{record['date']}. "
        f"Tests on the GPU: {plain(tests['passed'])} passed, {plain(tests['failed'])} failed, "
        f"{plain(tests['skipped'])} skipped; sanitizer errors: {sanitizer}. Ceilings of this card in the same run: "
        f"reads {ceilings['read_GBps']:.0f} GB/s, copies {ceilings['copy_GBps']:.0f} GB/s, bf16 matrix products "
        f"{ceilings['bf16_gemm_TFLOPs']:.0f} TFLOP/s.{peers}{several(record)}",
        *random_calls(record),
    ]


def several(record: Record) -> str:
    """Returns how many cases are medians of several runs."""
    counts = [len(case["runs"]) for case in record["cases"] if "runs" in case]
    if not counts:
        return ""
    return f" {len(counts)} of {len(record['cases'])} cases are medians of {max(counts)} runs, all of which are kept."


def random_calls(record: Record) -> list[str]:
    """Returns the findings of random calls, if the record has them."""
    entry = record.get("reliability")
    if entry is None:
        return []
    shapes = f", {entry['shapes']:,} shapes" if "shapes" in entry else ""
    rounds = ", ".join(f"{first} to {last}" for first, last in entry["rounds"])
    no_memory = f", {entry['out_of_memory']} not made for want of memory" if entry.get("out_of_memory") else ""
    return [
        f"Random calls of all operations, from many threads and in graphs: {entry['calls']:,} valid ones "
        f"({entry['kernels']} kernels{shapes}) and {entry['invalid_calls']:,} invalid ones in "
        f"{entry['seconds']:,.0f} s; {entry['wrong']} wrong, {entry['faults']} faults{no_memory}. Rounds {rounds}.",
    ]


# ---- a part an operation


def mla(record: Record) -> list[str]:
    """Returns MLA decoding over the 656-byte format."""
    usual = [case for case in cases_of(record, "mla_fp8_decode") if "cache_format" not in case]
    return case_table("`mla_fp8_decode`: batch x heads x s_q", usual)


def mla_formats(record: Record) -> list[str]:
    """Returns MLA decoding over the other formats, with one cache and with two."""
    others = [case for case in cases_of(record, "mla_fp8_decode") if "cache_format" in case]
    return case_table("`mla_fp8_decode`, formats: batch x heads x s_q", others)


def gqa(record: Record) -> list[str]:
    """Returns GQA decoding."""
    return case_table("`gqa_decode`: cache, layout, batch x s_k", cases_of(record, "gqa_decode"))


def sink(record: Record) -> list[str]:
    """Returns forward and backward of sink attention."""
    return case_table("`sink_attention`: pass, query/KV heads, batch x tokens", passes(record))


def append_merge(record: Record) -> list[str]:
    """Returns the appends and the merge."""
    return case_table("operation", cases_of(record, "mla_fp8_append", "kv_int8_append", "merge_states"))


def passes(record: Record) -> list[Case]:
    """Returns the cases of forward and backward."""
    return [case for case in cases_of(record, "sink_attention") if case.get("pass") != "routing"]


# ---- what single operations have besides


def power(record: Record) -> list[str]:
    """Returns the cases whose power was measured: each kernel alone under load, ours and FlashMLA's."""
    figures = {"us_loaded_alone": "us alone under load", "sm_mhz": "MHz", "watts": "W"}
    rows = []
    for case in cases_of(record, "mla_fp8_decode"):
        if "watts" in case:
            cells = [name(case) + mark(case)]
            for entry in (case, peer_of(case)):
                watts, us = entry.get("watts"), entry.get("us_loaded_alone")
                energy = None if watts is None or us is None else watts * us * 1e-3
                cells += [*(short(entry.get(key)) for key in figures), short(energy)]
            rows.append([*cells, hundredths(peer_of(case).get("ratio_loaded_alone"))])
    own = [*figures.values(), "mJ a call"]
    return dense(["case", *own, *(f"FlashMLA: {column}" for column in own), "its time / ours"], rows)


def crossover(record: Record) -> Columns:
    """Returns the cases that are timed with each exchange forced."""
    ways = ("none", "codes", "values")
    rows = [
        [name(case), *(short(case["exchange_us"][way]) + mark(case) for way in ways)]
        for case in cases_of(record, "mla_fp8_decode")
        if "exchange_us" in case
    ]
    return Columns(["batch x heads x s_q", *(f'"{way}", us' for way in ways)], rows)


WAYS = {"exact": "exact", "bf16 keys": "keys in bf16", "flash_mla": "FlashMLA"}
"""Entries of the record's accuracy, and their names in the table."""


def accuracy(record: Record) -> Columns:
    """Returns errors of output and log-sum-exp, a row for each kind of inputs."""
    rows = []
    for row in record.get("accuracy", ()):
        found = [row["errors"].get(way, {}) for way in WAYS]
        cells = [f"{scientific(one.get('out'))}, {scientific(one.get('lse'))}" if one else MISSING for one in found]
        rows.append([f"{row['inputs']}; {row['scales'].replace('power_of_two', 'powers of two')}", *cells])
    return Columns(["inputs; scales", *(f"{way}: out, log-sum-exp" for way in WAYS.values())], rows)


def routing(record: Record) -> Columns:
    """Returns microseconds of few queries, decoded and prefilled; the chosen route is bold."""
    cases = [case for case in cases_of(record, "sink_attention") if case.get("pass") == "routing"]
    queries = list(dict.fromkeys(case["s_q"] for case in cases))
    by_size: dict[tuple[int, int], dict[int, Case]] = {}
    for case in cases:
        by_size.setdefault((case["batch"], case["s_k"]), {})[case["s_q"]] = case
    rows = [
        [f"{batch} x {keys}", *(_both_routes(row.get(s_q)) for s_q in queries)]
        for (batch, keys), row in by_size.items()
    ]
    return Columns(["batch x keys: decoded / prefilled, us", *(f"s_q {s_q}" for s_q in queries)], rows)


def _both_routes(case: Case | None) -> str:
    if case is None or "failed" in case:
        return MISSING if case is None else "check failed"
    times = {route: f"{case[f'{route}_us']:.1f}" for route in ("decode", "prefill")}
    return " / ".join(f"**{us}**" if route == case["route"] else us for route, us in times.items()) + mark(case)


def values(record: Record) -> Columns:
    """Returns a row for each case that was timed with families of values."""
    ratios = {
        "worst_ratio": "x N(0,1)",
        "slow_ratio": "slow family, x",
        "normal_ratio_peer": "FlashMLA / ours",
        "worst_ratio_peer": "with the worst",
    }
    rows = []
    for entry in record.get("values", []):
        label = case_name(entry)
        if "failed" in entry:
            rows.append([label, "failed", *[MISSING] * (2 + len(ratios))])
            continue
        wrong = f"; not measured: {', '.join(entry['wrong'])}" if "wrong" in entry else ""
        normal = short(entry["values"].get("normal")) + mark(entry)
        times = [normal, entry["worst_family"] + wrong, short(entry["worst_us"])]
        rows.append([label, *times, *(hundredths(entry.get(key)) for key in ratios)])
    return Columns(["case", "N(0,1), us", "worst values", "us", *ratios.values()], rows)
