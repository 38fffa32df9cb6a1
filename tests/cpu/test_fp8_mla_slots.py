"""Conversion of positions to slots, and which of them are invalid."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_mla import INVALID_SLOT, slots_from_block_table, slots_from_positions, valid_slots


def slot_of(position: int, table: list[int], page_size: int, seqlen: int | None, num_pages: int | None) -> int:
    """The slot of one position, by one rule at a time."""
    if position < 0 or position >= len(table) * page_size or (seqlen is not None and position >= seqlen):
        return -1
    page = table[position // page_size]
    if page < 0 or (num_pages is not None and page >= num_pages):
        return -1
    return page * page_size + position % page_size


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_translation_against_a_loop(data):
    batch, max_pages = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4))
    page_size = data.draw(st.sampled_from([1, 2, 3, 61, 64]))
    num_pages = data.draw(st.sampled_from([None, 0, 1, 5]))
    entries = st.one_of(st.integers(-2, 7), st.sampled_from([-(2**31), 2**31 - 1]))
    table = [data.draw(st.lists(entries, min_size=max_pages, max_size=max_pages)) for _ in range(batch)]
    lengths = st.one_of(st.integers(-3, max_pages * page_size + 3), st.just(2**31 - 1))
    seqlens = data.draw(st.one_of(st.none(), st.lists(lengths, min_size=batch, max_size=batch)))
    near = st.integers(-2, max_pages * page_size + 2)
    positions = [
        data.draw(st.lists(st.one_of(near, st.sampled_from([-(2**31), 2**31 - 1])), min_size=6, max_size=6))
        for _ in range(batch)
    ]
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    table_tensor = torch.tensor(table, dtype=dtype).view(batch, max_pages)
    seqlens_tensor = None if seqlens is None else torch.tensor(seqlens, dtype=dtype)
    slots = slots_from_positions(
        torch.tensor(positions, dtype=dtype).view(batch, 2, 3),
        table_tensor,
        page_size,
        cache_seqlens=seqlens_tensor,
        num_pages=num_pages,
    )
    expected = [
        [slot_of(p, table[b], page_size, None if seqlens is None else seqlens[b], num_pages) for p in positions[b]]
        for b in range(batch)
    ]
    assert slots.dtype == torch.int64 and slots.shape == (batch, 2, 3)
    assert slots.view(batch, 6).tolist() == expected
    if seqlens_tensor is not None:
        listed = slots_from_block_table(table_tensor, seqlens_tensor, page_size, num_pages=num_pages)
        assert listed.tolist() == [
            [slot_of(p, table[b], page_size, seqlens[b], num_pages) for p in range(max_pages * page_size)]
            for b in range(batch)
        ]


def test_example():
    table = torch.tensor([[7, 2, 9], [4, -1, 0]], dtype=torch.int32)
    seqlens = torch.tensor([5, 6], dtype=torch.int32)
    assert slots_from_block_table(table, seqlens, 2, num_pages=9).tolist() == [
        [14, 15, 4, 5, -1, -1],  # position 4 is on page 9, which a cache of 9 pages does not have
        [8, 9, -1, -1, 0, 1],
    ]
    assert slots_from_block_table(table, seqlens, 2, max_tokens=8).tolist() == [
        [14, 15, 4, 5, 18, -1, -1, -1],
        [8, 9, -1, -1, 0, 1, -1, -1],
    ]
    assert slots_from_block_table(table, seqlens, 2, max_tokens=1).tolist() == [[14], [8]]
    assert slots_from_block_table(table, seqlens, 2, max_tokens=0).shape == (2, 0)


def test_slots_beyond_31_bits():
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    assert slots_from_positions(torch.tensor([[63]]), table, 64).item() == (2**31 - 1) * 64 + 63


def test_valid_slots():
    slots = torch.tensor([[-(2**31), -1, 0], [11, 12, 2**31 - 1]], dtype=torch.int32)
    assert valid_slots(slots, 12).tolist() == [[False, False, True], [True, False, False]]
    assert not valid_slots(slots, 0).any()
    assert INVALID_SLOT == -1


def test_refusals():
    table, seqlens = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    positions = torch.zeros(2, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="page_size: got 0; needs"):
        slots_from_positions(positions, table, 0)
    with pytest.raises(TypeError, match="positions: got .*float32.*; needs"):
        slots_from_positions(positions.float(), table, 4)
    with pytest.raises(ValueError, match=r"positions: got \(3, 5\).*; needs \(2, "):
        slots_from_positions(torch.zeros(3, 5, dtype=torch.int32), table, 4)
    with pytest.raises(TypeError, match="block_table: got .*int16.*; needs"):
        slots_from_block_table(table.short(), seqlens, 4)
    with pytest.raises(ValueError, match=r"block_table: got \(2,\).*; needs shape \(any, any\)"):
        slots_from_block_table(seqlens, seqlens, 4)
    with pytest.raises(ValueError, match=r"cache_seqlens: got \(3,\).*; needs shape \(2,\)"):
        slots_from_block_table(table, torch.zeros(3, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="max_tokens: got -1; needs"):
        slots_from_block_table(table, seqlens, 4, max_tokens=-1)
