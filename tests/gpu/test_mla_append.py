"""`mla_fp8_append` of every format writes the bytes of `fp8_mla.pack` on the CPU, and no other byte."""

from typing import Any

import pytest
import torch

from cute_kernels import mla_fp8_append
from fp8_mla.formats import FORMATS
from tests.kit.append_pages import (
    FORMS,
    AppendPages,
    every_magnitude_with_every_e4m3_scale,
    every_pattern,
    slots_for,
    special_rows,
)
from tests.kit.graphs import capture
from tests.kit.mla_cases import generator, strided

PAGE_SIZES = (1, 2, 3, 61, 64, 576)
PADDED_TO = {"v3.2": 656, "v3.2_nope": 528, "v4": 576, "v4.1": 512, "v4.1_fp4": 256}
forms = pytest.mark.parametrize(("cache_format", "cache_layout"), [("v3.2", None), *FORMS])


def new_tokens(tokens: int, seed: int, cache_format: str = "v4") -> torch.Tensor:
    return torch.randn((tokens, FORMATS[cache_format].d_qk), generator=generator(seed)).bfloat16()


def with_rope(kv: torch.Tensor, cache_format: str) -> torch.Tensor:
    """Rows of 512 elements, and for V3.2 a rope part with the same values."""
    return torch.cat([kv, kv[:, :64].flip(1)], dim=1) if cache_format == "v3.2" else kv


def names(pages: AppendPages) -> dict[str, Any]:
    """Arguments that tell an append the format. For V3.2 there are none: bytes and columns tell it."""
    return {} if pages.token_format.name == "v3.2" else pages.options


def check(pages: AppendPages, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """Compares an append to a copy of the pages with all bytes that the buffer must then have."""
    expected = pages.expected(kv, slots)
    mla_fp8_append(kv.cuda(), pages.view, slots.cuda(), **names(pages))
    got = pages.buffer.cpu()
    assert torch.equal(got, expected), f"{int((got != expected).sum())} bytes differ"


@forms
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 65, 1000, 5000])
def test_bytes_equal_pack(tokens, page_size, cache_format, cache_layout):
    shape = (-(-(tokens + 40) // page_size), page_size)
    pages = AppendPages.random(
        cache_format, cache_layout, shape, padded_to=PADDED_TO[cache_format] if tokens % 2 else 16
    )
    check(pages, new_tokens(tokens, tokens, cache_format), slots_for(tokens, pages.num_slots, tokens))


@forms
def test_no_tokens(cache_format, cache_layout):
    pages = AppendPages.random(cache_format, cache_layout, (4, 64))
    check(pages, new_tokens(0, 0, cache_format), torch.empty(0, dtype=torch.int64))


@forms
@pytest.mark.parametrize("copies", [1, 40])  # one token a warp, two
def test_special_values_equal_pack(copies, cache_format, cache_layout):
    kv = with_rope(special_rows(FORMATS[cache_format].quant_tile), cache_format).repeat(copies, 1)
    pages = AppendPages.random(cache_format, cache_layout, (-(-len(kv) // 64), 64))
    check(pages, kv, torch.randperm(pages.num_slots, generator=generator(1))[: len(kv)])


@forms
def test_every_bfloat16_bit_pattern(cache_format, cache_layout):
    pages = AppendPages.random(cache_format, cache_layout, (4, 64))
    check(pages, with_rope(every_pattern(), cache_format), torch.arange(256))


@pytest.mark.parametrize("cache_layout", ["planar", "interleaved"])
def test_fp4_codes_of_every_magnitude_with_every_scale(cache_layout):
    kv = every_magnitude_with_every_e4m3_scale()
    pages = AppendPages.random("v4.1_fp4", cache_layout, (-(-len(kv) // 64), 64))
    check(pages, kv, torch.randperm(pages.num_slots, generator=generator(1))[: len(kv)])


@forms
@pytest.mark.parametrize("tokens", [5, 3000, 20_000])
def test_strided_rows_slots_and_views(tokens, cache_format, cache_layout):
    kv = new_tokens(tokens, 3, cache_format)
    shape = (-(-(tokens + 100) // 61), 61)
    pages = AppendPages.random(cache_format, cache_layout, shape, padded_to=4096)
    slots = slots_for(tokens, pages.num_slots, seed=4)
    expected, before = pages.expected(kv, slots), pages.buffer.clone()
    spread = torch.empty((2 * tokens,), dtype=torch.int64, device="cuda")[::2]
    spread.copy_(slots)
    for view in (pages.view, pages.view.squeeze(2), pages.view.view(torch.float8_e4m3fn)):
        pages.buffer.copy_(before)
        mla_fp8_append(strided(kv.cuda()), view, spread, **names(pages))
        assert torch.equal(pages.buffer.cpu(), expected)


@pytest.mark.parametrize("tokens", [50, 5000])
def test_v32_without_rope_in_rows_of_656_bytes(tokens):
    """A cache of V3.2 tokens takes such rows, too, and the bytes of their rope parts stay."""
    pages = AppendPages.random("v3.2_nope", None, (-(-(tokens + 20) // 64), 64), token_stride=656)
    check(pages, new_tokens(tokens, 5), slots_for(tokens, pages.num_slots, 5))


@forms
def test_all_tokens_skipped(cache_format, cache_layout):
    pages = AppendPages.random(cache_format, cache_layout, (2, 64))
    check(pages, new_tokens(50, 1, cache_format), torch.full((50,), -1))


@forms
def test_one_kernel_for_page_sizes_that_alternate(cache_format, cache_layout):
    """Nothing of a layout may be kept from the previous call."""
    for page_size in (64, 3, 64, 576):
        pages = AppendPages.random(cache_format, cache_layout, (-(-100 // page_size), page_size), padded_to=1024)
        check(pages, new_tokens(80, page_size, cache_format), slots_for(80, pages.num_slots, page_size))


@forms
def test_pages_beyond_4_gib(cache_format, cache_layout):
    page_stride = 1 << 21
    pages = AppendPages.random(cache_format, cache_layout, (2049, 64), padded_to=page_stride)
    kv, slots = new_tokens(100, 6, cache_format), pages.num_slots - 1 - torch.arange(100)
    check(pages, kv, slots)


@forms
def test_captures_into_a_graph(cache_format, cache_layout):
    pages = AppendPages.random(cache_format, cache_layout, (4, 64))
    kv = new_tokens(64, 0, cache_format).cuda()
    slots = torch.full((64,), -1, dtype=torch.int64, device="cuda")
    graph, _ = capture(lambda: mla_fp8_append(kv, pages.view, slots, **names(pages)))
    for seed in (1, 2):
        new, where = new_tokens(64, seed, cache_format), slots_for(64, pages.num_slots, seed)
        expected = pages.expected(new, where)
        kv.copy_(new)
        slots.copy_(where)
        graph.replay()
        assert torch.equal(pages.buffer.cpu(), expected)
