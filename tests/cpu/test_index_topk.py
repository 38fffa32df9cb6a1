"""The highest logits of each row on a CPU against a sort in Python, and which kernel a call gets."""

import itertools
import math

import pytest
import torch

from cute_kernels import index_topk
from cute_kernels.indexer.topk_spec import LONG_QUADS, MAX_WIDTH, SHORT_QUADS, TopkSpec, quads_for
from tests.kit.index_cases import FAMILIES, lengths_around, logits_of, table_of


def expected(row: list[float], topk: int) -> list[int]:
    """Sorted from the highest value, equal values by position. NaN counts as -inf."""
    ranked = sorted(range(len(row)), key=lambda t: (math.inf if math.isnan(row[t]) else -row[t], t))
    chosen = sorted(ranked[:topk])
    return chosen + [-1] * (topk - len(chosen))


@pytest.mark.parametrize("family", FAMILIES)
def test_values(family: str) -> None:
    logits = logits_of(family, 3, 900)
    lengths = torch.tensor([900, 500, 70], dtype=torch.int32)
    for topk in (1, 64, 100):
        found = index_topk(logits, lengths, topk)
        assert found.dtype is torch.int32
        assert found.tolist() == [expected(row[:n].tolist(), topk) for row, n in zip(logits, lengths, strict=True)]


@pytest.mark.parametrize("topk", [1, 64, 1000])
def test_lengths(topk: int) -> None:
    lengths = lengths_around(topk, 2100)
    logits = logits_of("integers", len(lengths), 2100)
    counts = [min(max(n, 0), 2100) for n in lengths.tolist()]
    found = index_topk(logits, lengths, topk)
    assert found.tolist() == [expected(row[:n].tolist(), topk) for row, n in zip(logits, counts, strict=True)]


@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_slots(page_size: int) -> None:
    logits, lengths = logits_of("normal", 6, 700), torch.tensor([700, 0, 50, 700, 699, 64], dtype=torch.int32)
    positions = index_topk(logits, lengths, 64)
    table = table_of(3, 650, page_size)
    slots = index_topk(logits, lengths, 64, block_table=table, page_size=page_size)
    for row, i in itertools.product(range(6), range(64)):
        position, slot = int(positions[row, i]), -1
        page = position // page_size
        if position >= 0 and page < table.shape[1] and int(table[row // 2, page]) >= 0:
            slot = int(table[row // 2, page]) * page_size + position % page_size
        assert slots[row, i] == (slot if slot < 2**31 else -1)


def test_starts_and_out() -> None:
    logits, out = logits_of("normal", 4, 500), torch.full((4, 3 * 16), 7, dtype=torch.int32)[:, ::1][:, 8:24]
    starts = torch.tensor([0, 100, -5, 600], dtype=torch.int32)
    lengths = torch.tensor([500, 300, 2**31 - 1, 5], dtype=torch.int32)
    assert index_topk(logits, lengths, 16, row_starts=starts, out=out) is out
    begins, ends = (0, 100, 0, 500), (500, 400, 500, 500)
    rows = zip(logits, begins, ends, strict=True)
    assert out.tolist() == [expected(row[begin:end].tolist(), 16) for row, begin, end in rows]


def test_no_rows_no_logits_no_pages() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    assert index_topk(torch.zeros(0, 9), none, 4).shape == (0, 4)
    assert index_topk(torch.zeros(2, 0), torch.ones(2, dtype=torch.int32), 4).tolist() == [[-1] * 4] * 2
    table = torch.zeros(1, 0, dtype=torch.int32)
    found = index_topk(torch.zeros(2, 9), torch.ones(2, dtype=torch.int32), 4, block_table=table, page_size=64)
    assert found.tolist() == [[-1] * 4] * 2
    empty = index_topk(torch.zeros(0, 9), none, 4, block_table=table[:0], page_size=64)
    assert empty.shape == (0, 4)


def plan(rows: int, width: int, num_sms: int = 132) -> TopkSpec:
    return TopkSpec.for_launch(rows, width, num_sms, has_table=True, has_starts=False)


def test_which_kernel_a_call_gets() -> None:
    assert [plan(1, width).cluster for width in (100, 8192, 8193, 32_768, 131_072, 2**20)] == [1, 1, 2, 4, 16, 16]
    assert [plan(rows, 131_072).cluster for rows in (4, 5, 16, 17, 33, 34, 66, 67)] == [16, 8, 8, 4, 4, 2, 2, 1]
    assert plan(1, 131_072).quads == SHORT_QUADS and plan(100, 131_072).quads == LONG_QUADS
    assert plan(1000, 600_000).cluster == 2, "one CTA cannot mark so many"
    assert plan(1, 2 * 10**6).cluster == 8, "sixteen CTAs of the long form may find no place"
    assert [plan(rows, 8192).held for rows in (132, 133)] == [1, 0] and plan(66, 32_768).held == 2
    for rows, width in itertools.product((1, 7, 64, 500), (1, 8192, 81_920, 81_917, 131_072, 10**6, MAX_WIDTH)):
        spec = plan(rows, width)
        assert spec.can_implement() == []
        assert -(-(width + 3) // 512) <= spec.cluster * spec.quads
    assert quads_for(81_917, 1) == SHORT_QUADS and quads_for(81_918, 1) == LONG_QUADS
