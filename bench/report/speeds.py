"""The one table of speeds that README and each user page keeps: some cases, all cards side by side."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bench.gqa import LONG_LENGTHS, GqaDecodeCase
from bench.kernels_run import mark
from bench.mla import WINDOW, MlaCase
from bench.records import card_slug, find_case
from bench.report import markdown
from bench.report.cases import Case, Record, faster, name, values_of
from bench.report.markdown import MISSING, hundredths, scientific, short
from bench.sink import SinkAttentionCase

_sparse, _dense = functools.partial(MlaCase, "sparse"), functools.partial(MlaCase, "dense")
_v4 = functools.partial(_sparse, keys=WINDOW, formats=("v4", "v4"), extra_keys=1024)
_contiguous = GqaDecodeCase(64, 8192, "per_token_head")
_paged = functools.partial(GqaDecodeCase, scales="per_token_head", layout="paged_NHD", page_size=64)
_small, _wide = (
    functools.partial(SinkAttentionCase, 16384, 64, 8, 64),
    functools.partial(SinkAttentionCase, 16384, 32, 8, 128),
)
SPEEDS: Final[Mapping[str, Sequence[Any]]] = {
    "headlines": (_sparse(128, 128, 2), _dense(64, 128, 1, 8192), _contiguous, _small(), _small(backward=True)),
    "mla-speed": (
        *(_sparse(1, 128), _sparse(128, 128, 2), _sparse(148, 128, 2, 16384), _sparse(128, 64), _sparse(128, 16)),
        *(_dense(64, 128, 1, 8192), _dense(128, 128, 2, 8192), _dense(1, 128, 1, 131072), _dense(128, 16, 1, 8192)),
        *(_v4(128, 128, 2), _v4(8, 128), _v4(128, 16), _v4(128, 128, 2, formats=("v4.1", "v4.1_fp4"))),
    ),
    "gqa-speed": (
        _contiguous,
        _paged(64, 8192),
        _paged(64, 8192, scales="per_tensor", kv_dtype="fp8"),
        _paged(64, 8192, scales="none", kv_dtype="bf16"),
        *(_paged(1, 131072), _paged(1, 1024), _paged(256, 512), _paged(24, 32768, lengths=LONG_LENGTHS)),
        *(_paged(64, 8192, h_q=64, d=64), _paged(64, 8192, h_q=16, h_kv=2, d=256)),
    ),
    "sink-speed": (
        *(_small(), _small(backward=True), _small(backward=True, deterministic=True)),
        *(_small(window=128), _small(backward=True, window=128)),
        *(_wide(), _wide(backward=True), _wide(backward=True, window=4096)),
    ),
}
"""Cases of each table, by the name of the part."""


def speeds(part: str, records: Sequence[Record]) -> list[str]:
    """Makes a row per recorded case: time and speed for each card, and in the README the error, which pages mention."""
    is_readme = part == "headlines"
    header, rows = ["call" if is_readme else "case"], []
    for record in records:
        card = card_slug(record["card"]).upper()
        header += [f"{card}, us", f"{card}, speed"]
    for wanted in SPEEDS[part]:
        found = [find(record, wanted) for record in records]
        first = next((case for case in found if case is not None), None)
        if first is not None:
            older = next((mark(case) for case in found if mark(case)), "")
            label = f"`{first['op']}`, {name(first)}" if is_readme else name(first)
            cells = [cell for pair in map(_figures, records, found) for cell in pair]
            rows.append([label + older, *cells, *[scientific(first.get("rel_err"))] * is_readme])
    return markdown.table([*header, *["error against float64"] * is_readme], rows) if rows else []


def find(record: Record, case: Any) -> Case | None:
    """Returns a record's entry for a case of the benchmark; None if it has none."""
    return find_case(record, case.key)


def _figures(record: Record, case: Case | None) -> tuple[str, str]:
    """Returns time and speed, and those of the slowest family of values if it was measured."""
    if case is None or "failed" in case:
        return (MISSING if case is None else "check failed"), MISSING
    us, speed = short(case["us"]), faster(case)
    if case["op"] == "gqa_decode" and "read_fraction" in case:
        speed = f"{hundredths(case['read_fraction'])} of reads" + (f"; {speed}" if speed != MISSING else "")
    worst = values_of(record, case)
    if worst:
        us += f"; worst values ({worst['worst_family']}) {worst['worst_ratio']:.2f} x"
        if "worst_ratio_peer" in worst:
            speed += f"; worst values {worst['worst_ratio_peer']:.2f}"
    return us, speed
