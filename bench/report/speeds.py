"""The one table of speeds that README and each user page keeps: some cases, all cards side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from bench.kernels_run import mark
from bench.records import card_slug
from bench.report import markdown
from bench.report.cases import Case, Record, faster, name, values_of
from bench.report.markdown import MISSING, hundredths, scientific, short

Key = Mapping[str, Any]
UNUSUAL: Final = ("window", "ragged", "deterministic", "cache_format")
"""Fields that a case has only where it is unlike most: a key that does not name them wants cases without."""


def _mla(mode: str, batch: int, heads: int, s_q: int, keys: int, **more: Any) -> Key:
    counted = {"topk" if mode == "sparse" else "s_k": keys}
    return {"op": "mla_fp8_decode", "mode": mode, "batch": batch, "h_q": heads, "s_q": s_q, **counted, **more}


def _gqa(batch: int, keys: int | str, dtype: str, scales: str, layout: str, **more: Any) -> dict[str, Any]:
    sizes = {"batch": batch, "s_k": keys, "h_q": 32, "h_kv": 8, "d": 128, "s_q": 1}
    return {"op": "gqa_decode", **sizes, "kv_dtype": dtype, "scales": scales, "layout": layout, **more}


def _sink(way: str, d: int, **more: Any) -> Key:
    heads = {"h_q": 4096 // d, "h_kv": 8, "d": d}
    return {"op": "sink_attention", "pass": way, "batch": 4, "s_k": 16384, **heads, **more}


V4: Final[Key] = {"cache_format": "v4", "extra_cache_format": "v4", "extra_topk": 1024}
FP4: Final[Key] = {"cache_format": "v4.1", "extra_cache_format": "v4.1_fp4", "extra_topk": 1024}
TOKEN_HEAD: Final = ("int8", "per_token_head")
PAGES: Final[Key] = {"layout": "paged_NHD", "page_size": 64}
SPEEDS: Final[Mapping[str, Sequence[Key]]] = {
    "headlines": (
        _mla("sparse", 128, 128, 2, 2048),
        _mla("dense", 64, 128, 1, 8192),
        _gqa(64, 8192, *TOKEN_HEAD, "BNSH"),
        _sink("forward", 64),
        _sink("backward", 64),
    ),
    "mla-speed": (
        _mla("sparse", 1, 128, 1, 2048),
        _mla("sparse", 128, 128, 2, 2048),
        _mla("sparse", 148, 128, 2, 16384),
        _mla("sparse", 128, 64, 1, 2048),
        _mla("sparse", 128, 16, 1, 2048),
        _mla("dense", 64, 128, 1, 8192),
        _mla("dense", 128, 128, 2, 8192),
        _mla("dense", 1, 128, 1, 131072),
        _mla("dense", 128, 16, 1, 8192),
        _mla("sparse", 128, 128, 2, 128, **V4),
        _mla("sparse", 8, 128, 1, 128, **V4),
        _mla("sparse", 128, 16, 1, 128, **V4),
        _mla("sparse", 128, 128, 2, 128, **FP4),
    ),
    "gqa-speed": (
        _gqa(64, 8192, *TOKEN_HEAD, "BNSH"),
        _gqa(64, 8192, *TOKEN_HEAD, **PAGES),
        _gqa(64, 8192, "fp8", "per_tensor", **PAGES),
        _gqa(64, 8192, "bf16", "none", **PAGES),
        _gqa(1, 131072, *TOKEN_HEAD, **PAGES),
        _gqa(1, 1024, *TOKEN_HEAD, **PAGES),
        _gqa(256, 512, *TOKEN_HEAD, **PAGES),
        _gqa(24, "1024..32768", *TOKEN_HEAD, **PAGES),
        _gqa(64, 8192, *TOKEN_HEAD, **PAGES) | {"h_q": 64, "d": 64},
        _gqa(64, 8192, *TOKEN_HEAD, **PAGES) | {"h_q": 16, "h_kv": 2, "d": 256},
    ),
    "sink-speed": (
        _sink("forward", 64),
        _sink("backward", 64),
        _sink("backward", 64, deterministic=True),
        _sink("forward", 64, window=128),
        _sink("backward", 64, window=128),
        _sink("forward", 128),
        _sink("backward", 128),
        _sink("backward", 128, window=4096),
    ),
}
"""Cases of each table, by the name of the part."""


def speeds(part: str, records: Sequence[Record]) -> list[str]:
    """A row a case that some record has; time and speed for each card, and in the README the error, which pages say."""
    is_readme = part == "headlines"
    header, rows = ["call" if is_readme else "case"], []
    for record in records:
        card = card_slug(record["card"]).upper()
        header += [f"{card}, us", f"{card}, speed"]
    for key in SPEEDS[part]:
        found = [find(record, key) for record in records]
        first = next((case for case in found if case is not None), None)
        if first is not None:
            older = next((mark(case) for case in found if mark(case)), "")
            cells = [cell for pair in map(_figures, records, found) for cell in pair]
            rows.append([_label(part, first) + older, *cells, *[scientific(first.get("rel_err"))] * is_readme])
    return markdown.table([*header, *["error against float64"] * is_readme], rows) if rows else []


def find(record: Record, key: Key) -> Case | None:
    """The case that a key names, with exact scores; None if the record has none."""
    return next(
        (
            case
            for case in record["cases"]
            if all(case.get(field) == value for field, value in key.items())
            and not any(field in case for field in UNUSUAL if field not in key)
            and case.get("scores", "exact") == "exact"
        ),
        None,
    )


def _label(part: str, case: Case) -> str:
    return f"`{case['op']}`, {name(case)}" if part == "headlines" else name(case)


def _figures(record: Record, case: Case | None) -> tuple[str, str]:
    """Time and speed, with those of the family of values that takes longest where it was measured."""
    if case is None or "failed" in case:
        return (MISSING if case is None else "check failed"), MISSING
    us, speed = short(case["us"]), faster(case)
    if case["op"] == "gqa_decode" and "read_fraction" in case:
        speed = f"{hundredths(case['read_fraction'])} of reads" + (f", {speed}" if speed != MISSING else "")
    worst = values_of(record, case)
    if worst:
        us += f"; worst values ({worst['worst_family']}) {worst['worst_ratio']:.2f} x"
        if "worst_ratio_peer" in worst:
            speed += f"; worst values {worst['worst_ratio_peer']:.2f} x"
    return us, speed
