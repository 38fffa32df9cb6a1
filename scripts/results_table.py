"""Put the tables of results/h200.json between the markers in README.md and docs/, and draw its speeds.

python scripts/results_table.py            rewrite what lies between the markers, and docs/img/mla_speed.svg
python scripts/results_table.py --check    change nothing; exit status 1 when a page is out of date
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from cute_kernels.testing import evidence  # noqa: E402

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NO_RESULTS = "No results are recorded yet: `make gpu-check` on an SM90 GPU writes them."
MISSING = "–"


def render(record: dict[str, Any] | None) -> str:
    """The markdown that belongs between the markers."""
    if record is None:
        return NO_RESULTS
    tests, ceilings = record["tests"], record["ceilings"]
    sanitizer = ", ".join(
        f"{tool} {'not run' if tests['sanitizer'][tool] is None else tests['sanitizer'][tool]}"
        for tool in evidence.SANITIZER_TOOLS
    )
    lines = [
        f"{record['card']}, driver {record['driver']}, torch {record['torch']}, CuTe DSL {record['cutlass_dsl']}, "
        f"{record['date']}. Medians of CUDA-graph replays over rotated inputs larger than the L2 cache.",
        "",
        f"Tests on the GPU: {_plain(tests['passed'])} passed, {_plain(tests['failed'])} failed, "
        f"{_plain(tests['skipped'])} skipped; sanitizer errors: {sanitizer}. Ceilings of this card in the same run: "
        f"reads {ceilings['read_GBps']:.0f} GB/s, copies {ceilings['copy_GBps']:.0f} GB/s, bf16 matrix products "
        f"{ceilings['bf16_gemm_TFLOPs']:.0f} TFLOP/s.",
    ]
    decode = [case for case in record["cases"] if case["op"] == "mla_fp8_decode"]
    for mode, keys in (("sparse", "topk"), ("dense", "s_k")):
        cases = [case for case in decode if case.get("mode") == mode]
        if cases:
            lines += ["", *_decode_table(mode, keys, cases)]
    others = [case for case in record["cases"] if case["op"] != "mla_fp8_decode"]
    if others:
        lines += ["", *_other_table(others)]
    return "\n".join(lines)


def _decode_table(mode: str, keys: str, cases: Iterable[dict[str, Any]]) -> list[str]:
    peer = {"sparse": "FlashMLA", "dense": "FlashMLA over a bf16 cache"}[mode]
    header = [f"`mla_fp8_decode`, {mode}: batch x heads x s_q", keys, "us", "p10 .. p90", "TFLOP/s", "GB/s"]
    header += [f"{peer}, us", "its time / ours", "relative error", "lse error"]
    rows = []
    for case in cases:
        name = f"{case['batch']} x {case['h_q']} x {case['s_q']}"
        errors = [_scientific(case.get("rel_err")), _scientific(case.get("lse_err"))]
        if "failed" in case:
            rows.append([name, _plain(case[keys]), "check failed", *[MISSING] * 5, *errors])
            continue
        spread = f"{_short(case['us_p10'])} .. {_short(case['us_p90'])}"
        rates = [_short(case.get("TFLOPs")), _short(case.get("GBps"))]
        other: dict[str, Any] = next(iter((case.get("peers") or {}).values()), {})
        ratio = MISSING if "ratio" not in other else f"{other['ratio']:.2f}"
        note = f" ({other['note']})" if other.get("note") else ""
        peer_cells = [_short(other.get("us")) + note, ratio]
        rows.append([name, _plain(case[keys]), _short(case["us"]), spread, *rates, *peer_cells, *errors])
    return _markdown(header, rows)


def _other_table(cases: Iterable[dict[str, Any]]) -> list[str]:
    rows = []
    for case in cases:
        sizes = {key: case[key] for key in ("tokens", "splits", "batch", "h_q", "s_q", "d", "case") if key in case}
        name = f"`{case['op']}`: " + ", ".join(f"{key} {value}" for key, value in sizes.items())
        if "failed" in case:
            rows.append([name, "check failed", *[MISSING] * 3])
            continue
        fractions = {"copy_fraction": "copies", "read_fraction": "reads"}
        fraction = next((f"{case[key]:.0%} of {what}" for key, what in fractions.items() if key in case), MISSING)
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


def _plain(value: object) -> str:
    return MISSING if value is None else str(value)


def replace_between_markers(text: str, body: str) -> str:
    """The page with `body` between its markers.

    Raises:
        ValueError: the markers are not there exactly once each, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"needs one {BEGIN} and, after it, one {END}")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{body}\n{END}{rest.split(END)[1]}"


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    """README.md, and whatever below docs/ has a marker."""
    found = [path for path in sorted((root / "docs").rglob("*.md")) if BEGIN in path.read_text(encoding="utf-8")]
    return [root / "README.md", *found]


def draw(record: dict[str, Any], path: pathlib.Path) -> bool:
    """Bars of TFLOP/s beside FlashMLA's, a panel for sparse and one for dense. False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    # the same record gives the same bytes: no date, no random ids
    matplotlib.rcParams["svg.hashsalt"] = "cute_kernels"
    import matplotlib.pyplot as plt

    decode = [case for case in record["cases"] if case["op"] == "mla_fp8_decode" and case.get("TFLOPs")]
    panels = [(mode, [case for case in decode if case["mode"] == mode]) for mode in ("sparse", "dense")]
    panels = [(mode, cases) for mode, cases in panels if cases]
    if not panels:
        return False
    widths = [len(cases) for _, cases in panels]
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 4.2), width_ratios=widths, sharey=True, squeeze=False)
    for axis, (mode, cases) in zip(axes[0], panels, strict=True):
        ours = [case["TFLOPs"] for case in cases]
        ratios = [
            next((p["ratio"] for p in (case.get("peers") or {}).values() if "ratio" in p), None) for case in cases
        ]
        theirs = [rate / ratio if ratio else 0.0 for rate, ratio in zip(ours, ratios, strict=True)]
        places = range(len(cases))
        axis.bar([place - 0.2 for place in places], ours, 0.4, label="cute_kernels", color="#2b6cb0")
        peer = "FlashMLA" if mode == "sparse" else "FlashMLA, bf16 cache"
        axis.bar([place + 0.2 for place in places], theirs, 0.4, label=peer, color="#cbd5e0")
        keys = "topk" if mode == "sparse" else "s_k"
        labels = [f"{case['batch']}x{case['h_q']}x{case['s_q']}\n{case[keys]}" for case in cases]
        axis.set_xticks(list(places), labels, fontsize=7)
        axis.set_title(f"{mode}: batch x heads x s_q, {keys}", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    axes[0][0].set_ylabel("TFLOP/s")
    figure.suptitle(f"mla_fp8_decode on {record['card']}, {record['date']}", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
    return True


def main(arguments: Sequence[str] | None = None, root: pathlib.Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    parser.add_argument("--results", type=pathlib.Path, default=root / "results" / "h200.json")
    options = parser.parse_args(arguments)
    record = evidence.read(options.results) if options.results.exists() else None
    body = render(record)
    stale = []
    for page in pages(root):
        name, old = page.relative_to(root), page.read_text(encoding="utf-8")
        try:
            new = replace_between_markers(old, body)
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
    if record is not None and not draw(record, root / "docs" / "img" / "mla_speed.svg"):
        print("no plot: matplotlib is not installed, or no decode case has a speed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
