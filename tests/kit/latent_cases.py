"""Decodes over the latent formats other than V3.2's 656 bytes, and over two caches: inputs as in `mla_cases`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from fp8_mla import FORMATS, pack, write_pages
from tests.kit.mla_cases import (
    POISON_BYTE,
    QUERY_SIZE,
    DecodeCase,
    dense_case,
    generator,
    index_lists,
    sink_logits,
    strided,
    strided_int,
)

FORMS: Final = (
    (("v3.2_nope",), None),
    (("v4",), None),
    (("v4.1",), "planar"),
    (("v4.1",), "interleaved"),
    (("v4.1_fp4",), "planar"),
    (("v4.1_fp4",), "interleaved"),
    (("v3.2", "v3.2"), None),
    (("v3.2_nope", "v3.2_nope"), None),
    (("v4", "v4"), None),
    (("v4.1", "v4.1"), "planar"),
    (("v4.1", "v4.1"), "interleaved"),
    (("v4.1", "v4.1_fp4"), "planar"),
    (("v4.1", "v4.1_fp4"), "interleaved"),
)
"""Formats of one cache or two, and `cache_layout`: all that `mla_fp8_decode` takes but one cache of V3.2."""

SIZE_KINDS: Final = ("alike", "mixed", "rare")
"""How large the quant tiles of a cache's tokens are:

alike   N(0,1) latents
mixed   columns of tiles differ by up to 2^12, and within a column some tokens are up to 2^8 smaller
rare    one token in 50 is 2^6 times the others, one in 50 is 2^-20 of them
"""
COLUMN_EXPONENTS: Final = (0, 6, -6, 3)


def tokens_of(n: int, name: str, gen: torch.Generator, sizes: str = "alike") -> torch.Tensor:
    """(n, bytes) uint8 random tokens, as `fp8_mla.pack` returns them, none of them poisoned."""
    token_format = FORMATS[name]
    latents = torch.randn((n, token_format.d_qk), generator=gen, dtype=torch.float32, device=gen.device)
    drawn = torch.rand((n, 1), generator=gen, dtype=torch.float32, device=gen.device)
    if sizes == "mixed":
        latents *= _columns(token_format.d_qk, gen.device) * torch.exp2(-(8 * drawn).floor())
    elif sizes == "rare":
        latents *= torch.where(drawn < 0.02, 64.0, torch.where(drawn > 0.98, 2.0**-20, torch.ones_like(drawn)))
    return pack(latents.bfloat16(), token_format=token_format)


def _columns(d_qk: int, device: torch.device | str) -> torch.Tensor:
    """(d_qk,): powers of two, each for 128 neighbouring elements."""
    exponents = torch.tensor(COLUMN_EXPONENTS, dtype=torch.float32, device=device)
    columns = torch.ones(d_qk, dtype=torch.float32, device=device)
    columns[:512] = torch.exp2(exponents).repeat_interleave(128)
    return columns


def latent_query(shape: tuple[int, ...], gen: torch.Generator, sizes: str, padded: bool) -> torch.Tensor:
    """A query whose logits over such tokens have a standard deviation of about 3."""
    q = QUERY_SIZE * torch.randn(shape, generator=gen, dtype=torch.float32, device=gen.device)
    if sizes == "mixed":
        q /= _columns(shape[-1], gen.device)
    if sizes == "rare":
        q /= 64  # logits of the large tokens, too: a probability below 2^-31 of the largest is 0 in float16
    return strided(q.bfloat16()) if padded else q.bfloat16()


def latent_pages(
    num_pages: int,
    page_size: int,
    used: torch.Tensor,
    name: str,
    layout: str | None,
    gen: torch.Generator,
    *,
    sizes: str = "alike",
    padded: bool = True,
) -> torch.Tensor:
    """(num_pages, page_size, bytes) with random tokens in the slots of `used` and poison everywhere else.

    Pages are as far apart as their bytes and 16-byte alignment ask for; padded, 48 bytes further.
    """
    size = FORMATS[name].token_bytes
    page_bytes = page_size * size
    stride = page_bytes + -page_bytes % 16 + (48 if padded else 0)
    memory = torch.full((num_pages, stride), POISON_BYTE, dtype=torch.uint8, device=gen.device)
    pages = memory[:, :page_bytes].view(num_pages, page_size, size)
    write_pages(pages, used, tokens_of(len(used), name, gen, sizes), token_format=name, cache_layout=layout)
    return pages


def latent_case(
    *,
    formats: Sequence[str],
    cache_layout: str | None = None,
    batch: int,
    h_q: int,
    s_q: int = 1,
    topk: int = 64,
    extra_topk: int = 0,
    page_size: int = 64,
    extra_page_size: int = 2,
    num_slots: int = 4096,
    sizes: str = "alike",
    invalid: bool = True,
    lengths: str = "none",
    sink: str = "none",
    padded: bool = True,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> DecodeCase:
    """A sparse decode over one cache or two. A quarter of the slots of each is poisoned.

    Args:
        formats: of the cache, or of both.
        cache_layout: of both.
        batch: requests.
        h_q: query heads.
        s_q: queries of each request.
        topk: entries of each query's list.
        extra_topk: those of its list for the second cache.
        page_size: tokens of a page.
        extra_page_size: those of the second cache.
        num_slots: tokens of each cache, rounded up to whole pages.
        sizes: one of `SIZE_KINDS`.
        invalid: as in `sparse_case`.
        lengths: as in `sparse_case`, for both lists.
        sink: as in `sparse_case`.
        padded: q and indices not contiguous, pages further apart than they need.
        seed: of the generator.
        device: of all tensors.
    """
    gen = generator(seed, device)
    given: dict[str, Any] = {}
    for prefix, name, width, tokens_of_page in zip(
        ("", "extra_"), formats, (topk, extra_topk), (page_size, extra_page_size), strict=False
    ):
        num_pages = max(1, -(-num_slots // tokens_of_page))
        slots = num_pages * tokens_of_page
        good = torch.randperm(slots, generator=gen, dtype=torch.int64, device=gen.device)[: max(1, slots * 3 // 4)]
        pages = latent_pages(num_pages, tokens_of_page, good, name, cache_layout, gen, sizes=sizes, padded=padded)
        indices, length = index_lists(good, slots, (batch, s_q, width), gen, invalid=invalid, lengths=lengths)
        given |= {
            f"{prefix}kv_cache": pages,
            f"{prefix}indices": strided_int(indices) if padded else indices,
            f"{prefix}topk_length": length,
            f"{prefix}cache_format": name,
        }
    shape = (batch, s_q, h_q, FORMATS[formats[0]].d_qk)
    return DecodeCase(
        q=latent_query(shape, gen, sizes, padded),
        s_aux=sink_logits(h_q, sink, gen),
        cache_layout=cache_layout,
        **given,
    )


def latent_dense_case(
    *,
    cache_format: str,
    cache_layout: str | None = None,
    seqlens: Sequence[int],
    h_q: int,
    s_q: int = 1,
    page_size: int = 64,
    causal: bool = True,
    sizes: str = "alike",
    sink: str = "none",
    padded: bool = True,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> DecodeCase:
    """A dense decode over one cache: the block table, lengths and poisoned slots of `dense_case`."""
    like = dense_case(
        seqlens=seqlens, h_q=h_q, s_q=s_q, page_size=page_size, causal=causal, sink=sink, padded=padded, seed=seed,
        device=device,
    )  # fmt: skip
    gen = generator(seed, device)
    num_pages = like.kv_cache.shape[0]
    used = (like.kv_cache != POISON_BYTE).any(dim=-1).flatten().nonzero().squeeze(1)
    return DecodeCase(
        q=latent_query((len(seqlens), s_q, h_q, FORMATS[cache_format].d_qk), gen, sizes, padded),
        kv_cache=latent_pages(num_pages, page_size, used, cache_format, cache_layout, gen, sizes=sizes, padded=padded),
        block_table=like.block_table,
        cache_seqlens=like.cache_seqlens,
        causal=causal,
        s_aux=like.s_aux,
        cache_format=cache_format,
        cache_layout=cache_layout,
    )
