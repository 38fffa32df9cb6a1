"""`mla_fp8_decode` over every latent cache format, and over two caches, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import fp8_mla
from cute_kernels import mla_fp8_decode
from fp8_mla.formats import FORMATS, PAIRS
from fp8_mla.pages import write_pages
from tests.kit.mla_cases import latent_tokens

pytestmark = pytest.mark.gpu

MAX_ERROR, MAX_LSE_ERROR = 2.2e-3, 2e-5
P_ROUNDING = 2.0**-11  # P is float16; its product with a scale that is no power of two is bfloat16
SINGLE = ("v3.2_nope", "v4", "v4.1", "v4.1_fp4")
BYTE_SCALES = ("v4", "v4.1", "v4.1_fp4")
FLOAT_SCALES = (("v3.2_nope", None), ("v3.2_nope", "v3.2_nope"), ("v3.2", "v3.2"))


@dataclasses.dataclass(frozen=True)
class Cache:
    """Pages of random tokens, `indices` into them, and lengths or None."""

    pages: torch.Tensor
    indices: torch.Tensor
    length: torch.Tensor | None


def make_pages(
    name: str, num_pages: int, page_size: int, generator: torch.Generator, layout: str | None = None, scale: Any = 1.0
) -> torch.Tensor:
    """A cache of random tokens in padded pages, with random bytes between the rows."""
    token_format = FORMATS[name]
    stride = -(-token_format.page_layout(page_size, layout).page_bytes // 16) * 16 + 32
    memory = torch.randint(0, 256, (num_pages, stride), dtype=torch.uint8, device="cuda", generator=generator)
    shape = (num_pages, page_size, token_format.token_bytes)
    pages = memory.as_strided(shape, (stride, token_format.token_bytes, 1))
    kv = torch.randn((num_pages * page_size, token_format.d_qk), device="cuda", generator=generator)
    slots = torch.arange(num_pages * page_size, device="cuda")
    tokens = fp8_mla.pack(kv.bfloat16(), token_format=token_format)
    write_pages(pages, slots, tokens, token_format=token_format, cache_layout=layout)
    return pages


def make_cache(
    name: str, batch: int, s_q: int, topk: int, page_size: int, ragged: bool, generator: torch.Generator, **options: Any
) -> Cache:
    """A cache and indices, some of which are invalid."""
    pages = make_pages(name, max(3, 2 * topk // page_size), page_size, generator, **options)
    slots = pages.shape[0] * page_size
    shape = (batch, s_q, topk)
    indices = torch.randint(-1, slots + 1, shape, dtype=torch.int32, device="cuda", generator=generator)
    length = None
    if ragged:
        length = torch.randint(-1, topk + 2, (batch, s_q), dtype=torch.int32, device="cuda", generator=generator)
    return Cache(pages, indices, length)


def magnitudes(
    q: torch.Tensor, caches: list[tuple[Cache, str]], lse: torch.Tensor, softmax_scale: float | None = None
) -> torch.Tensor:
    """Sums of probabilities times magnitudes of values, to which errors of P are relative."""
    total = torch.zeros((*q.shape[:3], 512), dtype=torch.float64, device="cuda")
    for cache, name in caches:
        assert cache.length is None
        num_slots = cache.pages.shape[0] * cache.pages.shape[1]
        seen = (cache.indices >= 0) & (cache.indices < num_slots)
        tokens = fp8_mla.read_pages(cache.pages, cache.indices.clamp(0, num_slots - 1), token_format=name)
        keys = fp8_mla.unpack(tokens, torch.float32, token_format=name).double()
        scores = torch.einsum("bshd,bskd->bshk", q.double(), keys) * (softmax_scale or q.shape[-1] ** -0.5)
        p = torch.exp(scores.masked_fill(~seen.unsqueeze(2), -torch.inf) - lse.double().unsqueeze(-1))
        values = torch.where(seen.unsqueeze(3), keys[..., :512], 0.0).abs()
        total += torch.einsum("bshk,bskd->bshd", p, values)
    return total


def check(
    q: torch.Tensor,
    main: Cache,
    name: str,
    extra: Cache | None = None,
    extra_name: str | None = None,
    by_element: float | None = None,
    limit: float = MAX_ERROR,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compares a call with the reference in float64; returns the call's results.

    With `by_element`, each element is compared with the error that rounding P x scale may cause, instead of the norm
    with `limit`. If one key outweighs all others, that error is equal in a whole row, not a mean of many.
    """
    given = dict(
        indices=main.indices, topk_length=main.length, cache_format=name, extra_cache_format=extra_name, **options
    )
    if extra is not None:
        given |= dict(extra_kv_cache=extra.pages, extra_indices=extra.indices, extra_topk_length=extra.length)
    reference = {key: value for key, value in given.items() if key != "num_splits"}
    expected, expected_lse = fp8_mla.reference_decode(q, main.pages, **reference)
    out, lse = (
        torch.full_like(t, torch.nan, dtype=dtype)
        for t, dtype in ((expected, torch.bfloat16), (expected_lse, torch.float32))
    )
    mla_fp8_decode(q, main.pages, out=out, lse=lse, **given)
    has_keys = expected_lse.isfinite()
    assert torch.equal(has_keys, lse.isfinite())
    assert (lse[~has_keys] == -torch.inf).all() and (out[~has_keys] == 0).all()
    if has_keys.any():
        error = out.double() - expected
        if by_element is not None:
            caches = [(main, name)] + ([(extra, extra_name)] if extra is not None and extra_name else [])
            sums = magnitudes(q, caches, expected_lse, options.get("softmax_scale"))
            assert (error.abs() <= (by_element + 2.0**-14) * sums + 2.0**-9 * 1.01 * expected.abs()).all()
        else:
            assert (error.norm() / expected.norm()).item() <= limit
        lse_error = (lse.double() - expected_lse)[has_keys].abs().max().item()
        assert lse_error <= MAX_LSE_ERROR + 1e-6 * expected_lse[has_keys].abs().max().item()
    return out, lse


def make_q(batch: int, s_q: int, heads: int, generator: torch.Generator, name: str = "v4") -> torch.Tensor:
    shape = (batch, s_q, heads, FORMATS[name].d_qk)
    return torch.randn(shape, device="cuda", generator=generator).bfloat16()


@pytest.mark.parametrize("heads", [1, 8, 12, 16, 24, 32, 64, 96, 128])
@pytest.mark.parametrize("name", SINGLE)
def test_one_cache(name: str, heads: int) -> None:
    generator = torch.Generator("cuda").manual_seed(heads)
    for topk, page_size in ((1, 1), (63, 3), (64, 64), (65, 64), (700, 5)):
        cache = make_cache(name, 2, 2, topk, page_size, topk == 700, generator)
        check(make_q(2, 2, heads, generator), cache, name, s_aux=torch.randn(heads, device="cuda", generator=generator))


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_two_caches(pair: tuple[str, str], heads: int) -> None:
    generator = torch.Generator("cuda").manual_seed(heads)
    for topk, extra_topk, ragged, splits in (
        (128, 65, False, None),
        (127, 512, True, None),
        (64, 130, False, 3),
        (1, 1, True, 2),
    ):
        main = make_cache(pair[0], 3, 2, topk, 64, ragged, generator)
        extra = make_cache(pair[1], 3, 2, extra_topk, 2, ragged, generator)
        sink = torch.randn(heads, device="cuda", generator=generator)
        q = make_q(3, 2, heads, generator, pair[0])
        check(q, main, pair[0], extra, pair[1], s_aux=sink, num_splits=splits)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("name", SINGLE)
def test_dense(name: str, heads: int) -> None:
    generator = torch.Generator("cuda").manual_seed(heads)
    for page_size, lengths in ((64, (0, 1, 64, 65)), (3, (7, 100, 128, 190))):
        pages = make_pages(name, 300, page_size, generator)
        table = torch.randint(-1, 301, (4, 200 // page_size + 1), dtype=torch.int32, device="cuda", generator=generator)
        given = dict(
            block_table=table,
            cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
            cache_format=name,
        )
        q = make_q(4, 3, heads, generator)
        expected, expected_lse = fp8_mla.reference_decode(q, pages, **given)
        out, lse = mla_fp8_decode(q, pages, return_lse=True, **given)
        has_keys = expected_lse.isfinite()
        assert torch.equal(has_keys, lse.isfinite())
        assert ((out.double() - expected).norm() / expected.norm()).item() <= MAX_ERROR
        assert (lse.double() - expected_lse)[has_keys].abs().max().item() <= MAX_LSE_ERROR


def test_interleaved_pages() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    main = make_cache("v4.1", 2, 1, 100, 7, False, generator, layout="interleaved")
    extra = make_cache("v4.1", 2, 1, 200, 64, True, generator, layout="interleaved")
    q = make_q(2, 1, 64, generator)
    check(q, main, "v4.1", extra, "v4.1", cache_layout="interleaved")


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("name", BYTE_SCALES)
def test_any_scale(name: str, heads: int) -> None:
    """Codes and scale bytes are random over every range, and keys must be exact."""
    generator = torch.Generator("cuda").manual_seed(heads)
    token_format, count = FORMATS[name], 192
    is_fp4 = token_format.codes.bits == 4
    for low, high in ((1, 0x63), (0x40, 0x7F)) if is_fp4 else ((3, 40), (90, 127), (100, 140), (150, 200)):
        pages = make_pages(name, 3, 64, generator)
        codes = torch.randint(0, 256, (count, token_format.codes.num_bytes), device="cuda", generator=generator)
        if not is_fp4:
            codes[(codes & 0x7F) == 0x7F] = 0x11
        scales = torch.randint(low, high, (count, token_format.scales.count), device="cuda", generator=generator)
        tokens = torch.zeros((count, token_format.token_bytes), dtype=torch.uint8, device="cuda")
        tokens[:, : codes.shape[1]] = codes.to(torch.uint8)
        start = token_format.start(token_format.scales)
        tokens[:, start : start + scales.shape[1]] = scales.to(torch.uint8)
        if token_format.rope is not None:
            rope = torch.randn((count, 64), device="cuda", generator=generator) * 2.0 ** (0.5 * (low + high) - 127 + 8)
            start = token_format.start(token_format.rope)
            tokens[:, start : start + 128] = rope.bfloat16().view(torch.uint8)
        write_pages(pages, torch.arange(count, device="cuda"), tokens, token_format=token_format)
        indices = torch.randint(0, count, (1, 1, 90), dtype=torch.int32, device="cuda", generator=generator)
        size = fp8_mla.unpack(tokens, torch.float32, token_format=token_format).abs().max().item()
        cache = Cache(pages, indices, None)
        # if one key outweighs all others, its P is rounded alike for a whole row, and the result once more
        check(make_q(1, 1, heads, generator), cache, name, limit=P_ROUNDING + 2.0**-9, softmax_scale=1.0 / (8 * size))


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("name", ["v4", "v4.1"])
@pytest.mark.parametrize("byte", [105, 112, 115, 116])
def test_small_codes_and_scales_keep_their_digits_in_partials(name: str, heads: int, byte: int) -> None:
    """Codes go up to 3 x 2^-9 with one scale: float16 sums of them without a block scale would lose up to 40%."""
    generator = torch.Generator("cuda").manual_seed(heads + byte)
    token_format, count = FORMATS[name], 192
    pages = make_pages(name, 3, 64, generator)
    tokens = torch.zeros((count, token_format.token_bytes), dtype=torch.uint8, device="cuda")
    shape = (count, token_format.codes.num_bytes)
    signs = 128 * torch.randint(0, 2, shape, device="cuda", generator=generator)
    tokens[:, : shape[1]] = (torch.randint(1, 4, shape, device="cuda", generator=generator) + signs).to(torch.uint8)
    start = token_format.start(token_format.scales)
    tokens[:, start : start + token_format.scales.count] = byte
    write_pages(pages, torch.arange(count, device="cuda"), tokens, token_format=token_format)
    indices = torch.randint(0, count, (1, 1, 180), dtype=torch.int32, device="cuda", generator=generator)
    for splits in (None, 2):
        check(make_q(1, 1, heads, generator), Cache(pages, indices, None), name, num_splits=splits)


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize(("name", "extra_name"), FLOAT_SCALES)
def test_float_scales_of_very_different_size(name: str, extra_name: str | None, heads: int) -> None:
    """A key tile has scales from 1e-30 to 1e30. Whatever float16 does not hold must take the slow paths."""
    generator = torch.Generator("cuda").manual_seed(heads)
    token_format, caches, size = FORMATS[name], [], 0.0
    for page_size in (64, 2) if extra_name else (64,):
        cache = make_cache(name, 2, 1, 90, page_size, False, generator)
        slots = torch.arange(cache.pages.shape[0] * page_size, device="cuda")
        tokens = latent_tokens(len(slots), generator, scales="mixed")[:, : token_format.token_bytes]
        scales = tokens[:, 512:528].contiguous().view(torch.float32)
        assert scales.max() > 1e29 and scales.min() < 1e-30
        write_pages(cache.pages, slots, tokens, token_format=token_format)
        size = max(size, fp8_mla.unpack(tokens, torch.float32, token_format=token_format).abs().max().item())
        caches.append(cache)
    q = make_q(2, 1, heads, generator, name)
    extra = caches[1] if extra_name else None
    for splits in (None, 2):
        # in a norm with values of 1e30, those of 1e-30 are nothing
        given = dict(by_element=P_ROUNDING + 2.0**-9, softmax_scale=1.0 / (8 * size), num_splits=splits)
        check(q, caches[0], name, extra, extra_name, **given)


@pytest.mark.parametrize("heads", [16, 64])
def test_the_rope_part_of_a_wider_token_is_not_read(heads: int) -> None:
    """Tokens of 656 bytes whose last 128 are NaN must give the bits of 528, alone and as both of two caches."""
    generator = torch.Generator("cuda").manual_seed(heads)
    narrow = make_cache("v3.2_nope", 2, 1, 200, 64, True, generator)
    num_pages, page_size, size = narrow.pages.shape
    pages = torch.full((num_pages, page_size, 656), 0xFF, dtype=torch.uint8, device="cuda")
    pages[..., :size] = narrow.pages
    wide = Cache(pages, narrow.indices, narrow.length)
    q = make_q(2, 1, heads, generator)
    for extras in ((None, None, None), (narrow, wide, "v3.2_nope")):
        out, lse = check(q, narrow, "v3.2_nope", extras[0], extras[2])
        wide_out, wide_lse = check(q, wide, "v3.2_nope", extras[1], extras[2])
        assert torch.equal(out, wide_out) and torch.equal(lse, wide_lse)


@pytest.mark.parametrize("name", SINGLE)
def test_nan(name: str) -> None:
    """A NaN code or scale of a live key must give NaN; those of other slots must change nothing."""
    generator = torch.Generator("cuda").manual_seed(1)
    for heads in (16, 64):
        cache = make_cache(name, 2, 1, 100, 64, False, generator)
        cache.indices[cache.indices == 0] = 1
        q = make_q(2, 1, heads, generator)
        clean, clean_lse = check(q, cache, name)
        data = FORMATS[name].page_layout(64)
        memory = cache.pages.as_strided((cache.pages.stride(0),), (1,))
        nan_scale = {"float32": (0, 0, 0xC0, 0x7F), "float8_e4m3fn": (0x7F,)}.get(FORMATS[name].scales.dtype, (0xFF,))
        nans = [(data.scale_offset, nan_scale)]
        if FORMATS[name].codes.bits == 8:  # e2m1 has no NaN
            nans += [(0, (0x7F,)), (300, (0xFF,))]
        for begin, value in nans:
            place = slice(begin, begin + len(value))
            before = memory[place].clone()
            memory[place] = torch.tensor(value, dtype=torch.uint8, device="cuda")  # in slot 0, which no query sees
            out, lse = mla_fp8_decode(q, cache.pages, indices=cache.indices, cache_format=name, return_lse=True)
            assert torch.equal(out, clean) and torch.equal(lse, clean_lse)
            seen = cache.indices.clone()
            seen[0, 0, 3] = 0
            out, lse = mla_fp8_decode(q, cache.pages, indices=seen, cache_format=name, return_lse=True)
            assert lse[0].isnan().all() and out[0].isnan().all(), (place, value)
            assert torch.equal(out[1], clean[1]) and torch.equal(lse[1], clean_lse[1])
            memory[place] = before


def test_same_bits() -> None:
    generator = torch.Generator("cuda").manual_seed(2)
    for heads, batch in ((16, 9), (128, 5)):
        main = make_cache("v4", batch, 2, 128, 64, True, generator)
        extra = make_cache("v4", batch, 2, 700, 2, True, generator)
        q = make_q(batch, 2, heads, generator)
        first = check(q, main, "v4", extra, "v4")
        for _ in range(20):
            out, lse = check(q, main, "v4", extra, "v4")
            assert torch.equal(out, first[0]) and torch.equal(lse, first[1])


def test_a_cache_without_pages_or_indices_counts_as_none() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    main, extra = (make_cache("v4", 2, 1, topk, 64, False, generator) for topk in (100, 200))
    q = make_q(2, 1, 64, generator)
    none = Cache(main.pages[:0], main.indices, None)
    check(q, none, "v4", extra, "v4")
    check(q, Cache(main.pages, main.indices[..., :0], None), "v4", extra, "v4")
    check(q, main, "v4", Cache(extra.pages[:0], extra.indices, None), "v4")
    out, lse = mla_fp8_decode(
        q, none.pages, indices=main.indices, extra_kv_cache=none.pages, extra_indices=main.indices, return_lse=True
    )
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("name", SINGLE)
def test_what_float16_drops_is_small(name: str, heads: int) -> None:
    """P is float16, relative to about the largest P: only probabilities below 2^-31 of it may become 0."""
    generator = torch.Generator("cuda").manual_seed(heads)
    cache = make_cache(name, 2, 1, 130, 64, False, generator)
    q = 20 * make_q(2, 1, heads, generator)
    given = dict(indices=cache.indices, cache_format=name)
    expected, expected_lse = fp8_mla.reference_decode(q, cache.pages, **given)
    out, lse = mla_fp8_decode(q, cache.pages, return_lse=True, **given)
    sums = magnitudes(q, [(cache, name)], expected_lse)
    num_slots = cache.pages.shape[0] * cache.pages.shape[1]
    tokens = fp8_mla.read_pages(cache.pages, torch.arange(num_slots, device="cuda"), token_format=name)
    largest = fp8_mla.unpack(tokens, torch.float32, token_format=name).abs().max().item()
    error = (out.double() - expected).abs()
    assert (error <= 2.0**-8 * expected.abs() + 2.0**-10 * sums + 130 * 2.0**-31 * largest).all()
    assert (lse.double() - expected_lse).abs().max().item() <= 2e-5 + 1e-6 * expected_lse.abs().max().item()
