"""One table for the appends and the merge: a line a case, its rate as a fraction of what the card reaches."""

from __future__ import annotations

from collections.abc import Sequence

from bench.kernels_run import mark
from bench.report import markdown
from bench.report.cases import Case, host, must
from bench.report.markdown import MISSING, short

HEADER = ("operation", "us", "GB/s", "of the ceiling for", "host time of a call, us (of torch's `mul_`)")
FRACTIONS = {"copy_fraction": "copies", "read_fraction": "reads"}
WITHOUT_KEY = ("cache_format", "scales", "layout")
"""Keys whose value says by itself what it is."""
WITH_KEY = ("page_size", "tokens", "splits", "batch", "h_q", "h_kv", "s_q", "d", "case")


def table(cases: Sequence[Case]) -> list[str]:
    """The table; no lines where there is no case."""
    return markdown.table(HEADER, map(_row, cases)) if cases else []


def _row(case: Case) -> list[str]:
    sizes = [str(case[key]) for key in WITHOUT_KEY if key in case]
    sizes += [f"{key} {case[key]}" for key in WITH_KEY if key in case]
    name = f"`{case['op']}`: " + ", ".join(sizes) + mark(case)
    if "failed" in case:
        return [name, "check failed", *[MISSING] * 3]
    fraction = next((f"{case[key]:.0%} of {what}" for key, what in FRACTIONS.items() if key in case), MISSING)
    if case.get("must"):
        fraction += f" ({'needs' if case.get('met') else 'missed:'} {must(case)})"
    return [name, short(case["us"]), short(case.get("GBps")), fraction, host(case)]
