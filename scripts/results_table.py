"""Put the tables of results/h200.json between the markers in README.md and docs/, and draw its speeds.

    python scripts/results_table.py            rewrite what lies between the markers, and the plots in docs/img/
    python scripts/results_table.py --check    change nothing; exit status 1 when a page is out of date
    python scripts/results_table.py --compare  first look which recorded machine code is still built; may compile

Rows of machine code that is no longer built are marked. Which that is, --compare writes to results/h200.older. A record
from before 2026-11-24 names no machine code: nothing of it is marked.

A pair of markers, `<!-- results:mla:begin -->` and `<!-- results:mla:end -->`, names the part that it holds:

    run           the card, the versions, tests and ceilings
    mla           FP8 MLA decoding, its append, the merge
    mla-sustained the cases that are timed under load as well
    crossover     its cases with each exchange forced
    gqa           every case of GQA decoding and of its append
    gqa-summary   those cases of GQA decoding that have to reach a number
    sink          every case of sink attention
    sink-summary  those that have to reach a number
    sink-routing  few queries, decoded and prefilled
    budget-...    predictions and their errors, see scripts/budget_table.py
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from scripts import budget_table, plots  # noqa: E402
from scripts.bench import kernels_run, records  # noqa: E402
from scripts.bench.kernels_run import mark  # noqa: E402

MARKER = re.compile(r"<!-- results:([a-z-]+):(begin|end) -->")
NO_RESULTS = "No results are recorded yet: `make gpu-check` on an SM90 GPU writes them."
NO_CASES = "The recorded run has no such cases."
MISSING = "–"
FRACTIONS = {"copy_fraction": "copies", "read_fraction": "reads"}

Record = dict[str, Any]
Case = dict[str, Any]


def render(record: Record | None, part: str) -> str:
    """The markdown that belongs between the markers of that name."""
    if record is None:
        return NO_RESULTS
    lines = PARTS[part](record)
    if any(kernels_run.MARK in line for line in lines):
        lines = [*lines, "", kernels_run.FOOTNOTE]
    return "\n".join(lines) or NO_CASES


def _run(record: Record) -> list[str]:
    tests, ceilings = record["tests"], record["ceilings"]
    sanitizer = ", ".join(
        f"{tool} {'not run' if tests['sanitizer'][tool] is None else tests['sanitizer'][tool]}"
        for tool in (*records.SANITIZER_TOOLS, *(more for more in records.MORE_TOOLS if more in tests["sanitizer"]))
    )
    more = f"tvm-ffi {record['tvm_ffi']}, " if "tvm_ffi" in record else ""
    return [
        f"{record['card']}, driver {record['driver']}, torch {record['torch']}, CuTe DSL {record['cutlass_dsl']}, "
        f"{more}{record['date']}. Medians of CUDA-graph replays over rotated inputs larger than the L2 cache.",
        "",
        f"Tests on the GPU: {_plain(tests['passed'])} passed, {_plain(tests['failed'])} failed, "
        f"{_plain(tests['skipped'])} skipped; sanitizer errors: {sanitizer}. Ceilings of this card in the same run: "
        f"reads {ceilings['read_GBps']:.0f} GB/s, copies {ceilings['copy_GBps']:.0f} GB/s, bf16 matrix products "
        f"{ceilings['bf16_gemm_TFLOPs']:.0f} TFLOP/s.",
        *_random_calls(record),
    ]


def _random_calls(record: Record) -> list[str]:
    """What random calls found, where the record has them."""
    entry = record.get("reliability")
    if entry is None:
        return []
    shapes = f", {entry['shapes']:,} shapes" if "shapes" in entry else ""
    seeds = ", ".join(f"{first} to {last}" for first, last in entry["seeds"])
    no_memory = f", {entry['out_of_memory']} not made for want of memory" if entry.get("out_of_memory") else ""
    return [
        "",
        f"Random calls of all operations, from many threads and in graphs: {entry['calls']:,} valid ones "
        f"({len(entry['kernels'])} kernels{shapes}) and {entry['invalid_calls']:,} invalid ones in "
        f"{entry['seconds']:,.0f} s; {entry['wrong']} wrong, {entry['faults']} faults{no_memory}. Seeds {seeds}.",
    ]


def _mla(record: Record) -> list[str]:
    decode = _of(record, "mla_fp8_decode")
    sparse = [case for case in decode if case.get("mode") == "sparse"]
    dense = [case for case in decode if case.get("mode") == "dense"]
    others = _of(record, "mla_fp8_append", "merge_states")
    # a case that raised has no mode; it must show up all the same
    others = [case for case in decode if "mode" not in case] + others
    return _paragraphs(
        _decode_table("sparse", "topk", sparse) if sparse else [],
        _decode_table("dense", "s_k", dense) if dense else [],
        _other_table(others) if others else [],
    )


def _mla_sustained(record: Record) -> list[str]:
    rows = []
    for case in _of(record, "mla_fp8_decode"):
        if "sustained" not in case:
            continue
        loaded = case["sustained"]
        peer: dict[str, Any] = next((entry for entry in case["peers"].values() if "sustained_us" in entry), {})
        under_load = f"{peer['sustained_us'] / loaded['us']:.2f}" if peer else MISSING
        clocks = [f"{mhz:.0f}" if mhz else MISSING for mhz in (case.get("sm_mhz"), loaded.get("sm_mhz"))]
        pairs = ([_short(case["us"]), _short(loaded["us"])], clocks, [_ratio(peer), under_load])
        rows.append([_decode_name(case) + mark(case), *map(" / ".join, pairs)])
    return _markdown(["case", "us after a rest / under load", "MHz", "x FlashMLA"], rows) if rows else []


def _crossover(record: Record) -> list[str]:
    rows = []
    for case in _of(record, "mla_fp8_decode"):
        times = case.get("exchange_us")
        if times:
            shown = [_short(times[exchange]) for exchange in ("none", "codes", "values")]
            rows.append([_decode_name(case) + mark(case), *shown, f"{times['none'] / times['values']:.2f}"])
    header = ["batch x heads x s_q", "each gathers all, us", "codes, us", "values, us", "gain of values"]
    return _markdown(header, rows)


def _gqa(record: Record) -> list[str]:
    decode, append = _of(record, "gqa_decode"), _of(record, "kv_int8_append")
    return _paragraphs(_gqa_table(decode) if decode else [], _other_table(append) if append else [])


def _gqa_summary(record: Record) -> list[str]:
    """What has to reach a number. Layouts and scales that were measured at several sizes share a table with a line a
    size; the others follow. A case in bold misses its number.
    """
    cases = [case for case in _of(record, "gqa_decode") if case.get("must")]
    variants = [_variant(case) for case in cases]
    columns = [variant for variant in dict.fromkeys(variants) if variants.count(variant) > 1]
    inside = [case for case in cases if _variant(case) in columns]
    rows = []
    for size in dict.fromkeys(map(_size, inside)):
        line = {_variant(case): case for case in inside if _size(case) == size}
        needs = _must(next(iter(line.values())))
        rows.append([size, needs, *(_reached(line.get(column)) for column in columns), _ratios(line.values())])
    header = ["`gqa_decode`: batch x s_k", "needs", *columns, "cuDNN over bf16: its time / ours"]
    others = [[_variant(case), _size(case), _must(case), _reached(case)] for case in cases if case not in inside]
    return _paragraphs(
        _markdown(header, rows) if rows else [],
        _markdown(["`gqa_decode`: cache, layout", "batch x s_k", "needs", "reached"], others) if others else [],
    )


def _sink(record: Record) -> list[str]:
    header = ["`sink_attention`: pass, heads", "batch x tokens", "us", "p10 .. p90", "TFLOP/s", "GB/s", "needs"]
    header += ["cuDNN without sinks, us", "its time / ours", "without sinks, us", "relative error"]
    rows = []
    for case in _of_sink(record):
        if "failed" in case:
            rows.append([_sink_name(case) + mark(case), _sink_size(case), "failed", *[MISSING] * (len(header) - 3)])
            continue
        spread = f"{_short(case['us_p10'])} .. {_short(case['us_p90'])}"
        needs = _must(case) + ("" if case.get("met", True) else " (missed)")
        peer: dict[str, Any] = next(iter((case.get("peers") or {}).values()), {})
        cells = [_short(case["us"]), spread, _short(case.get("TFLOPs")), _short(case.get("GBps")), needs]
        cells += [_short(peer.get("us")), _ratio(peer), _short(case.get("us_without_sinks"))]
        rows.append([_sink_name(case) + mark(case), _sink_size(case), *cells, _scientific(case.get("rel_err"))])
    return _markdown(header, rows) if rows else []


def _sink_summary(record: Record) -> list[str]:
    """What has to reach a number; in bold what misses it."""
    header = ["`sink_attention`: pass, heads", "batch x tokens", "needs", "reached", "cuDNN: its time / ours"]
    rows = []
    for case in _of_sink(record):
        if not case.get("must"):
            continue
        reached = "check failed" if "failed" in case else f"{_short(case['us'])} us, {_short(case['TFLOPs'])} TFLOP/s"
        reached = reached if case.get("met") else f"**{reached}**"
        rows.append([_sink_name(case) + mark(case), _sink_size(case), _must(case), reached, _ratios([case])])
    return _markdown(header, rows) if rows else []


def _sink_routing(record: Record) -> list[str]:
    """A table for each batch: rows of keys, columns of queries, both times, that of the route taken in bold."""
    cases = [case for case in _of(record, "sink_attention") if case.get("pass") == "routing"]
    blocks = []
    for batch in dict.fromkeys(case["batch"] for case in cases):
        of_batch = {(case["s_k"], case["s_q"]): case for case in cases if case["batch"] == batch}
        columns = list(dict.fromkeys(s_q for _, s_q in of_batch))
        rows = [
            [str(s_k), *(_both_routes(of_batch.get((s_k, s_q))) for s_q in columns)]
            for s_k in dict.fromkeys(s_k for s_k, _ in of_batch)
        ]
        first = next(iter(of_batch.values()))
        heads = f"{first['h_q']} and {first['h_kv']} heads of {first['d']}"
        header = [f"batch {batch}, {heads}: decoded / prefilled, us; keys", *(f"s_q {s_q}" for s_q in columns)]
        blocks.append(_markdown(header, rows))
    return _paragraphs(*blocks)


def _both_routes(case: Case | None) -> str:
    if case is None or "failed" in case:
        return MISSING if case is None else "check failed"
    times = {name: f"{case[f'{name}_us']:.1f}" for name in ("decode", "prefill")}
    return " / ".join(f"**{us}**" if name == case["route"] else us for name, us in times.items()) + mark(case)


def _of_sink(record: Record) -> list[Case]:
    return [case for case in _of(record, "sink_attention") if case.get("pass") != "routing"]


def _sink_name(case: Case) -> str:
    if "case" in case:  # it raised before it had a key
        return case["case"]
    window = f", window {case['window']}" if "window" in case else ""
    same = ", deterministic" if case.get("deterministic") else ""
    return f"{case['pass']}, {case['h_q']}/{case['h_kv']} of {case['d']}{window}{same}"


def _sink_size(case: Case) -> str:
    return f"{case['batch']} x {case['s_k']}" if "batch" in case else MISSING


PARTS: dict[str, Callable[[Record], list[str]]] = {
    "run": _run,
    "mla": _mla,
    "mla-sustained": _mla_sustained,
    "gqa": _gqa,
    "gqa-summary": _gqa_summary,
    "sink": _sink,
    "sink-summary": _sink_summary,
    "crossover": _crossover,
    "sink-routing": _sink_routing,
    **budget_table.PARTS,
}


def _of(record: Record, *ops: str) -> list[Case]:
    return [case for case in record["cases"] if case["op"] in ops]


def _paragraphs(*blocks: list[str]) -> list[str]:
    """The blocks that have lines, an empty line between them."""
    lines: list[str] = []
    for block in filter(None, blocks):
        lines += [*([""] if lines else []), *block]
    return lines


def _decode_table(mode: str, keys: str, cases: Iterable[dict[str, Any]]) -> list[str]:
    peer = {"sparse": "FlashMLA", "dense": "FlashMLA over a bf16 cache"}[mode]
    header = [f"`mla_fp8_decode`, {mode}: batch x heads x s_q", keys, "us", "p10 .. p90", "TFLOP/s", "GB/s"]
    header += [f"{peer}, us", "its time / ours", "relative error", "lse error"]
    rows = []
    for case in cases:
        name = _queries(case) + mark(case)
        errors = [_scientific(case.get("rel_err")), _scientific(case.get("lse_err"))]
        if "failed" in case:
            rows.append([name, _keys(case), "check failed", *[MISSING] * 5, *errors])
            continue
        spread = f"{_short(case['us_p10'])} .. {_short(case['us_p90'])}"
        rates = [_short(case.get("TFLOPs")), _short(case.get("GBps"))]
        other: dict[str, Any] = next(iter((case.get("peers") or {}).values()), {})
        note = f" ({other['note']})" if other.get("note") else ""
        peer_cells = [_short(other.get("us")) + note, _ratio(other)]
        rows.append([name, _keys(case), _short(case["us"]), spread, *rates, *peer_cells, *errors])
    return _markdown(header, rows)


def _keys(case: Case) -> str:
    """How many keys a query has, at most where lengths are ragged."""
    keys = str(case["topk" if case["mode"] == "sparse" else "s_k"])
    return f"up to {keys}" if case.get("ragged") else keys


def _decode_name(case: Case) -> str:
    """A case of MLA decoding where tables mix both modes."""
    keys = f"topk {_keys(case)}" if case["mode"] == "sparse" else f"{_keys(case)} keys"
    return f"{case['mode']}, {_queries(case)}, {keys}"


def _queries(case: Case) -> str:
    """Batch x heads x s_q."""
    return f"{case['batch']} x {case['h_q']} x {case['s_q']}"


def _gqa_table(cases: Iterable[Case]) -> list[str]:
    header = ["`gqa_decode`: cache, layout", "batch x s_k", "us", "p10 .. p90", "GB/s", "of reads", "needs", "TFLOP/s"]
    header += ["cuDNN over bf16, us", "its time / ours", "relative error", "lse error", "host, us"]
    rows = []
    for case in cases:
        if "case" in case:  # it raised before it had a key
            rows.append([case["case"], MISSING, "failed", *[MISSING] * (len(header) - 3)])
            continue
        name = _variant(case) + mark(case)
        errors = [_scientific(case.get("rel_err")), _scientific(case.get("lse_err"))]
        if "failed" in case:
            rows.append([name, _size(case), "check failed", *[MISSING] * 7, *errors, MISSING])
            continue
        spread = f"{_short(case['us_p10'])} .. {_short(case['us_p90'])}"
        peer: dict[str, Any] = next(iter((case.get("peers") or {}).values()), {})
        needs = _must(case) + ("" if case.get("met", True) else " (missed)")
        cells = [_short(case["us"]), spread, _short(case.get("GBps")), _fraction(case.get("read_fraction")), needs]
        cells += [_short(case.get("TFLOPs")), _short(peer.get("us")), _ratio(peer)]
        rows.append([name, _size(case), *cells, *errors, _short(case.get("host_us"))])
    return _markdown(header, rows)


def _place(case: Case) -> str:
    """Layout, with the page size where there are pages."""
    return f"{case['layout']} {case['page_size']}" if "page_size" in case else case["layout"]


def _variant(case: Case) -> str:
    """What the cache is, whatever its size."""
    scales = "" if case["scales"] == "none" else f" {case['scales'].replace('_', ' ')}"
    return f"{case['kv_dtype']}{scales}, {_place(case)}"


def _size(case: Case) -> str:
    """Batch and length, and what else is not as in most cases."""
    unusual = {"h_q": 32, "d": 128, "s_q": 1, "window": None}
    notes = [f"{key} {case[key]}" for key, usual in unusual.items() if case.get(key, usual) != usual]
    return ", ".join([f"{case['batch']} x {case['s_k']}", *notes])


def _must(case: Case) -> str:
    """What a case has to reach, in words."""
    words = {
        "read_fraction": "{:.2f} of reads",
        "copy_fraction": "{:.2f} of copies",
        "us": "{:g} us",
        "TFLOPs": "{:g} TFLOP/s",
        "ratio": "{:g} x cuDNN",
    }
    return ", ".join(words[key].format(limit) for key, limit in (case.get("must") or {}).items()) or MISSING


def _reached(case: Case | None) -> str:
    """Time and fraction of the ceiling, in bold where that is not enough."""
    if case is None:
        return MISSING
    if "failed" in case:
        return "**check failed**" + mark(case)
    text = f"{_short(case['us'])} us, {_fraction(case.get('read_fraction'))}"
    return (text if case.get("met", True) else f"**{text}**") + mark(case)


def _ratios(cases: Iterable[Case]) -> str:
    """The range of the peers' ratios."""
    ratios = [peer["ratio"] for case in cases for peer in (case.get("peers") or {}).values() if "ratio" in peer]
    if not ratios:
        return MISSING
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} .. {high}"


def _other_table(cases: Iterable[Case]) -> list[str]:
    rows = []
    named = ("scales", "layout", "page_size", "tokens", "splits", "batch", "h_q", "h_kv", "s_q", "d", "case")
    for case in cases:
        sizes = [
            str(case[key]) if key in ("scales", "layout") else f"{key} {case[key]}" for key in named if key in case
        ]
        name = f"`{case['op']}`: " + ", ".join(sizes) + mark(case)
        if "failed" in case:
            rows.append([name, "check failed", *[MISSING] * 3])
            continue
        fraction = next((f"{case[key]:.0%} of {what}" for key, what in FRACTIONS.items() if key in case), MISSING)
        if case.get("must"):
            fraction += f" ({'needs' if case.get('met') else 'missed:'} {_must(case)})"
        rows.append([name, _short(case["us"]), _short(case.get("GBps")), fraction, _short(case.get("host_us"))])
    return _markdown(["operation", "us", "GB/s", "of the ceiling for", "host time of a call, us"], rows)


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]


def _short(value: float | None) -> str:
    """Three significant digits, and no fewer than the integer part has."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _scientific(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1e}"


def _fraction(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def _ratio(peer: dict[str, Any]) -> str:
    return MISSING if "ratio" not in peer else f"{peer['ratio']:.2f}"


def _plain(value: object) -> str:
    return MISSING if value is None else str(value)


def fill(text: str, record: Record | None) -> str:
    """The page with what belongs there between each of its pairs of markers.

    Raises:
        ValueError: there is no pair, a marker is alone, a pair lies in another, or there is no part of that name.
    """
    marks = list(MARKER.finditer(text))
    if not marks:
        raise ValueError("needs a pair of markers, <!-- results:NAME:begin --> and <!-- results:NAME:end -->")
    pieces, end_of_last = [], 0
    for begin, end in zip(marks[::2], [*marks[1::2], None], strict=False):
        part = begin[1]
        if begin[2] != "begin" or end is None or (end[1], end[2]) != (part, "end"):
            raise ValueError(
                f"{begin[0]} has no partner: a pair is begin and, as the next marker, end of the same name"
            )
        if part not in PARTS:
            raise ValueError(f"{begin[0]}: got {part!r}, needs one of {', '.join(PARTS)}")
        pieces += [text[end_of_last : begin.end()], "\n", render(record, part), "\n"]
        end_of_last = end.start()
    return "".join([*pieces, text[end_of_last:]])


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    """README.md, and whatever below docs/ has a marker."""
    found = [path for path in sorted((root / "docs").rglob("*.md")) if MARKER.search(path.read_text(encoding="utf-8"))]
    return [root / "README.md", *found]


def draw(record: Record, folder: pathlib.Path) -> list[str]:
    """Write the plots that the record has cases for, and return their names: none where matplotlib is missing."""
    made = {"mla_speed.svg": _plot_mla, "gqa_speed.svg": _plot_gqa, "sink_speed.svg": _plot_sink}
    return plots.write({name: functools.partial(plot, record) for name, plot in made.items()}, folder)


def _plot_mla(record: Record, plt: Any) -> Any:
    """Bars of TFLOP/s beside FlashMLA's, a panel for sparse and one for dense."""
    decode = [case for case in _of(record, "mla_fp8_decode") if case.get("TFLOPs")]
    panels = [(mode, [case for case in decode if case["mode"] == mode]) for mode in ("sparse", "dense")]
    panels = [(mode, cases) for mode, cases in panels if cases]
    if not panels:
        return None
    widths = [len(cases) for _, cases in panels]
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 4.2), width_ratios=widths, sharey=True, squeeze=False)
    for axis, (mode, cases) in zip(axes[0], panels, strict=True):
        keys = "topk" if mode == "sparse" else "s_k"
        labels = [
            f"{case['batch']}x{case['h_q']}x{case['s_q']}\n{'to ' if case.get('ragged') else ''}{case[keys]}"
            for case in cases
        ]
        _bars(axis, cases, "FlashMLA" if mode == "sparse" else "FlashMLA, bf16 cache", labels)
        axis.set_title(f"{mode}: batch x heads x s_q, {keys}", fontsize=9)
    axes[0][0].set_ylabel("TFLOP/s")
    figure.suptitle(f"mla_fp8_decode on {record['card']}, {record['date']}", fontsize=10)
    return figure


def _plot_gqa(record: Record, plt: Any) -> Any:
    """GB/s over the bytes that a call reads, under the read ceiling; cuDNN's speed in bytes of the same INT8 cache."""
    decode = [case for case in _of(record, "gqa_decode") if case.get("GBps") and case["kv_dtype"] == "int8"]
    plain = [case for case in decode if (case["h_q"], case["s_q"]) == (32, 1) and "window" not in case]
    series: dict[str, list[Case]] = {}
    for case in sorted(plain, key=_bytes_read):
        series.setdefault(_variant(case), []).append(case)
    # the layouts and scales that were measured at more than one size
    series = {name: cases for name, cases in series.items() if len(cases) > 1}
    if not series:
        return None
    figure, axis = plt.subplots(figsize=(9, 4.2))
    axis.axhline(record["ceilings"]["read_GBps"], color="#4a5568", linewidth=1, linestyle="--", label="read ceiling")
    colours = ("#2b6cb0", "#63b3ed", "#c05621", "#f6ad55")
    for place, (name, cases) in enumerate(series.items()):
        places, rates = [_bytes_read(case) for case in cases], [case["GBps"] for case in cases]
        axis.plot(places, rates, marker="o", markersize=4, linewidth=1, color=colours[place % len(colours)], label=name)
    peers = {
        _size(case): (_bytes_read(case), case["GBps"] / peer["ratio"])
        for case in next(iter(series.values()))
        for peer in (case.get("peers") or {}).values()
        if "ratio" in peer
    }
    if peers:
        axis.plot(
            *zip(*peers.values(), strict=True),
            "s",
            color="#a0aec0",
            markersize=5,
            label="cuDNN, bf16 cache (same tokens)",
        )
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    ticks = {_size(case): _bytes_read(case) for case in next(iter(series.values()))}
    labels = [f"{size}\n{_short(places / 1e6)} MB" for size, places in ticks.items()]
    axis.set_xticks(list(ticks.values()), labels, fontsize=7, rotation=20)
    axis.set_xticks([], minor=True)
    axis.set_xlabel("batch x s_k, and the bytes of a call", fontsize=8)
    axis.set_ylabel("GB/s of INT8 cache")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    axis.set_title(f"gqa_decode, 32 query and 8 KV heads of 128, on {record['card']}, {record['date']}", fontsize=9)
    return figure


def _plot_sink(record: Record, plt: Any) -> Any:
    """Bars of TFLOP/s beside cuDNN's without sinks, a panel for the forward and one for the backward."""
    timed = [case for case in _of_sink(record) if case.get("TFLOPs")]
    panels = [(way, [case for case in timed if case["pass"] == way]) for way in ("forward", "backward")]
    panels = [(way, cases) for way, cases in panels if cases]
    if not panels:
        return None
    widths = [len(cases) for _, cases in panels]
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 4.2), width_ratios=widths, sharey=True, squeeze=False)
    for axis, (way, cases) in zip(axes[0], panels, strict=True):
        labels = [_sink_name(case).removeprefix(f"{way}, ").replace(", ", "\n") for case in cases]
        labels = [f"{label}\n{_sink_size(case)}" for label, case in zip(labels, cases, strict=True)]
        _bars(axis, cases, "cuDNN, no sinks", labels)
        axis.set_title(f"{way}: query/KV heads of d, batch x tokens", fontsize=9)
    axes[0][0].set_ylabel("TFLOP/s")
    figure.suptitle(f"sink_attention on {record['card']}, {record['date']}", fontsize=10)
    return figure


def _bars(axis: Any, cases: Sequence[Case], peer: str, labels: Sequence[str]) -> None:
    """TFLOP/s of each case beside those of its peer."""
    ours = [case["TFLOPs"] for case in cases]
    ratios = [next((p["ratio"] for p in (case.get("peers") or {}).values() if "ratio" in p), None) for case in cases]
    theirs = [rate / ratio if ratio else 0.0 for rate, ratio in zip(ours, ratios, strict=True)]
    places = range(len(cases))
    axis.bar([place - 0.2 for place in places], ours, 0.4, label="cute_kernels", color="#2b6cb0")
    axis.bar([place + 0.2 for place in places], theirs, 0.4, label=peer, color="#cbd5e0")
    axis.set_xticks(list(places), labels, fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)


def _bytes_read(case: Case) -> float:
    """Bytes of a call, from its rate."""
    return case["GBps"] * case["us"] * 1e3


def compare(record: Record, path: pathlib.Path, code: Any) -> None:
    """Writes down which of the machine code of a record's cases is no longer built, where that can be said."""
    if reason := kernels_run.not_comparable(record, code.toolchain()):
        print(f"{path.name}: not compared, {reason}")
        return
    kernels = kernels_run.of_cases(record)
    older = kernels_run.no_longer_built(kernels, code.digests_of_specs, kernels_run.shipped_specs)
    kernels_run.write_older(path, kernels, older)
    cases = sum("older" in case for case in kernels_run.marked(record, older)["cases"])
    print(f"{path.name}: {len(older)} of {len(kernels)} kernels are no longer built, which {cases} cases ran")


def main(arguments: Sequence[str] | None = None, root: pathlib.Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    ways.add_argument("--compare", action="store_true", help="first look which machine code is still built")
    parser.add_argument("--results", type=pathlib.Path, default=root / "results" / "h200.json")
    options = parser.parse_args(arguments)
    record = records.read(options.results) if options.results.exists() else None
    if record is not None and options.compare:
        compare(record, options.results, kernels_run.machine_code())
    if record is not None:
        record = kernels_run.marked(record, kernels_run.read_older(options.results))
    stale = []
    for page in pages(root):
        name, old = page.relative_to(root), page.read_text(encoding="utf-8")
        try:
            new = fill(old, record)
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        if new == old:
            continue
        stale.append(name)
        if not options.check:
            page.write_text(new, encoding="utf-8")
    if options.check:
        for name in stale:
            print(f"{name} is out of date: run python scripts/results_table.py", file=sys.stderr)
        return int(bool(stale))
    print(f"rewritten: {', '.join(map(str, stale)) or 'nothing, all up to date'}")
    if record is not None:
        drawn = draw(record, root / "docs" / "img")
        print(f"drawn: {', '.join(drawn) or 'nothing, for matplotlib is not installed or no decode case has a speed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
