"""Three-way covering arrays of `gqa_decode` and `mla_fp8_decode` on the GPU: `tests.kit.covering` has the rows.

Each row is one call with its own inputs, poisoned outputs and poisoned unused slots, against the float64 oracle.
tests/cpu/test_covering.py shows that every possible combination of three values occurs in a row.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kit.covering import FOUR_BIT_ROWS, GQA_ROWS, MLA_ROWS, GqaRow, MlaRow, all_specs

KEPT_BYTES = 2**31


def kernel_specs() -> list[Any]:
    return all_specs()


def label(row: GqaRow | MlaRow) -> str:
    return "-".join(str(value) for value in vars(row).values())


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """Frees memory after a large row, because other processes use the same GPU."""
    yield
    if torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.mark.parametrize("row", [*GQA_ROWS, *FOUR_BIT_ROWS], ids=label)
def test_gqa_decode(row):
    row.check("cuda")


@pytest.mark.parametrize("row", MLA_ROWS, ids=label)
def test_mla_fp8_decode(row):
    row.check("cuda")
