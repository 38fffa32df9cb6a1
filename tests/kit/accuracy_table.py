"""The accuracy that docs/users promises, as tests read it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def int8_error() -> float:
    """The error that INT8 codes with a scale per token and head cause in an output, from docs/users/gqa_decode.md."""
    page = (ROOT / "docs" / "users" / "gqa_decode.md").read_text(encoding="utf-8")
    row = re.search(r"^\| `per_token_head` \|[^|]*\| ([\d.]+)%", page, re.MULTILINE)
    assert row
    return float(row[1]) / 100
