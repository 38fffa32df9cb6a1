"""Keys of the indexer: the kernel stores the bytes of `fp8_mla.pack_index_keys`, and no others."""

import pytest
import torch

from cute_kernels import index_append
from fp8_mla import INDEX_KEY, pack_index_keys, read_pages
from tests.kit.graphs import capture
from tests.kit.index_cases import index_cache, index_keys

PAGES = 9


def whole(cache: torch.Tensor) -> torch.Tensor:
    """The bytes of the cache's whole memory, including what lies between pages."""
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())


@pytest.mark.parametrize("apart", [0, 512])
@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_bytes_are_those_of_pack(scale: str, dtype: torch.dtype, page_size: int, apart: int) -> None:
    tokens = min(PAGES * page_size, 300)
    k = index_keys(tokens, dtype)
    gap = -(-page_size * 132 // 16) * 16 + apart
    expected = index_cache(PAGES, page_size, gap)
    found = whole(expected).cuda().as_strided(expected.shape, expected.stride())
    slots = torch.randperm(PAGES * page_size, generator=torch.Generator().manual_seed(0))[:tokens]
    index_append(k, expected, slots, scale=scale)
    index_append(k.cuda(), found, slots.cuda(), scale=scale)
    assert torch.equal(whole(found).cpu(), whole(expected))
    assert torch.equal(read_pages(found, slots.cuda(), token_format=INDEX_KEY).cpu(), pack_index_keys(k, scale=scale))


def test_strided_keys_and_slots_that_are_not_there() -> None:
    k = index_keys(50, torch.bfloat16)
    wide = torch.full((50, 200), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, 64:192] = k.cuda()
    slots = torch.arange(50) * 2
    slots[::5] = torch.tensor([-1, PAGES * 64, 2**31, -(2**63), 2**40, 2**63 - 1, 2**32 + 1, -2, -64, 2**33])
    expected = index_cache(PAGES, 64, 8704)
    found = whole(expected).cuda().as_strided(expected.shape, expected.stride()).view(torch.float8_e4m3fn)
    index_append(k, expected, slots, scale="ue8m0")
    index_append(wide[:, 64:192], found.unsqueeze(2), slots.cuda(), scale="ue8m0")
    assert torch.equal(whole(found).cpu(), whole(expected))


def test_many_tokens_in_a_graph() -> None:
    k, slots = index_keys(20_000, torch.bfloat16).cuda(), torch.randperm(30_000).cuda()[:20_000]
    cache = torch.zeros(30_000 // 16 + 1, 16, 132, dtype=torch.uint8, device="cuda")
    graph, _ = capture(lambda: index_append(k, cache, slots))
    k.mul_(-3)
    cache.zero_()
    graph.replay()
    assert torch.equal(read_pages(cache, slots, token_format=INDEX_KEY), pack_index_keys(k))


def test_no_tokens() -> None:
    cache = torch.zeros(2, 16, 132, dtype=torch.uint8, device="cuda")
    index_append(torch.zeros(0, 128, device="cuda"), cache, torch.zeros(0, dtype=torch.int64, device="cuda"))
    index_append(torch.zeros(2, 128, device="cuda"), cache[:0], torch.zeros(2, dtype=torch.int64, device="cuda"))
    assert not cache.any()
