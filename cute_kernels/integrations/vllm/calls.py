"""Translates vLLM's tensors to arguments of our operators. Imports no vLLM, so that it is tested without.

A page of INT8, FP8 or INT4 with a scale for each token and head has, one head after the other, [K codes | V codes | K
scales | V scales], (tokens, d) codes and (tokens,) scales each. Page and head have the size of vLLM's own
int8_per_token_head, fp8_per_token_head and int4_per_token_head, which put a scale after each token's codes, in rows of
d + 4 or d / 2 + 4 bytes that TMA cannot read. So code that moves pages, or cuts them by head, works on both. Other
caches keep vLLM's page, keys and values of a head next to each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cute_kernels.gqa.append_op import kv_append
from cute_kernels.gqa.op import gqa_decode
from cute_kernels.gqa.plan import MAX_S_Q
from cute_kernels.mla.op import mla_fp8_decode
from cute_kernels.sink.op import sink_attention
from cute_kernels.warm.shapes import GqaShape, PrefillShape, PromptShape, Shape

INT8, FP8_SCALED, INT4 = (f"{name}_per_token_head" for name in ("int8", "fp8", "int4"))
FP8 = ("fp8", "fp8_e4m3")
SCALED = {INT8: "int8", FP8_SCALED: "fp8_per_token_head", INT4: "int4"}
"""Caches with a scale for each token and head: vLLM's name, and the kind of `kv_append`."""
CODES = {INT8: torch.int8, FP8_SCALED: torch.float8_e4m3fn, INT4: torch.uint8}
"""Dtypes of codes by cache. INT4 has two codes in a byte, of a vector that is rotated."""
SCALE_BYTES = 4
HEAD_DIMS, PREFILL_HEAD_DIMS = (64, 128, 256, 512), (64, 128)
MAX_QUERIES = MAX_S_Q
"""Most query tokens of a request that count as decoding."""
FP8_MAX = 448.0
COPY_BYTES = 256 << 20
"""Most bytes of prompts' keys and values as 16-bit numbers at one time: 65,536 tokens of 8 heads of 128."""
FLASH_ATTENTION, FLASH_DIM = 3, 256
"""The FlashAttention version that prompts run on, made for Hopper, and its largest head dimension."""


class CacheViews(NamedTuple):
    """A layer's cache in the form of `gqa_decode`: pages of `layout`; scales of tokens, or one scale of FP8."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    layout: str

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k.shape[1 if self.layout == "paged_NHD" else 2]

    def tokens_first(self) -> tuple[torch.Tensor, ...]:
        """Codes (pages, tokens, kv_heads, d or d / 2), scales (pages, tokens, kv_heads), as in vLLM's Triton."""
        given = [t for t in (self.k, self.v, self.k_scale, self.v_scale) if t is not None]
        return tuple(given if self.layout == "paged_NHD" else (t.transpose(1, 2) for t in given))


def runs_prompts(version: int | None, head_dim: int) -> bool:
    """Whether prompts run on a version of FlashAttention; others run on the class that our layer extends."""
    return version == FLASH_ATTENTION and head_dim <= FLASH_DIM


def code_bytes(head_dim: int, codes: torch.dtype) -> int:
    """Returns the bytes of a token and head's codes, of K or of V."""
    return head_dim // 2 if codes is torch.uint8 else head_dim


def scaled_token_bytes(head_dim: int, codes: torch.dtype = torch.int8) -> int:
    """Returns the bytes of a token and head with scales of its own: codes and scales of K and V."""
    return 2 * (code_bytes(head_dim, codes) + SCALE_BYTES)


def scaled_views(kv_cache: torch.Tensor, head_dim: int, codes: torch.dtype = torch.int8) -> CacheViews:
    """Views a cache with scales per token and head, (pages, kv_heads, tokens, 2 (d + 4)) bytes, pages at any stride.

    With two codes in a byte, uint8, a token has 2 (d / 2 + 4) bytes.

    A page's heads lie one after the other, even if vLLM orders a page by tokens ("NHD") and its strides say otherwise:
    it then copies whole pages. If it orders them by heads ("HND"), heads of other layers may lie between.

    Raises:
        ValueError: another shape, or bytes of a head and of a page that are not contiguous.
    """
    token, row = scaled_token_bytes(head_dim, codes), code_bytes(head_dim, codes)
    if kv_cache.dim() != 4 or kv_cache.shape[3] != token or not kv_cache.shape[2]:
        needs = f"(pages, kv_heads, tokens, {token})"
        raise ValueError(f"kv_cache: got shape {tuple(kv_cache.shape)}; needs {needs}")
    pages, kv_heads, tokens, _ = kv_cache.shape
    page_stride, head_stride, token_stride, byte_stride = kv_cache.stride()
    if head_stride == token and token_stride == kv_heads * token:
        head_stride, token_stride = tokens * token, token
    elif kv_heads == 1:
        head_stride = tokens * token
    if token_stride != token or byte_stride != 1:
        needs = "pages ordered by heads or by tokens, without gaps"
        raise ValueError(f"kv_cache: got strides {kv_cache.stride()}; needs {needs}")
    rows = kv_cache.as_strided((pages, kv_heads, tokens * token), (page_stride, head_stride, 1))
    k, v, scales = rows.split([tokens * row, tokens * row, 2 * tokens * SCALE_BYTES], dim=2)
    k, v = (t.unflatten(2, (tokens, row)).view(codes) for t in (k, v))
    k_scale, v_scale = scales.view(torch.float32).split(tokens, dim=2)
    return CacheViews(k, v, k_scale, v_scale, "paged_HND")


def stock_views(kv_cache: torch.Tensor, head_dim: int, fp8: bool) -> CacheViews:
    """Views vLLM's cache of 16-bit or FP8 numbers: (pages, kv_heads, tokens, 2 d) in any order of memory."""
    if fp8 and kv_cache.dtype is not torch.float8_e4m3fn:
        kv_cache = kv_cache.view(torch.float8_e4m3fn)  # vLLM keeps it as uint8
    k, v = kv_cache.transpose(1, 2).split(head_dim, dim=-1)
    return CacheViews(k, v, None, None, "paged_NHD")


@dataclass
class GqaCalls:
    """The attention of one layer: the facts that stay the same in all of its calls.

    heads, kv_heads, head_dim  of one GPU
    scale                      factor of the scores
    cache_dtype                vLLM's name: "auto", "bfloat16", "float16", "fp8", "fp8_e4m3", or one of SCALED
    window                     tokens that a query sees, its own included; None: all
    softcap, alibi_slopes      None: none; slopes (heads,) float32
    s_aux                      (heads,) float32, the sinks; None: none
    shares_cache               the cache belongs to another layer, so this one has no keys of its own
    flash                      vLLM's `flash_attn_varlen_func` for prompts, if it has version 3 for this layer
    max_tokens                 most tokens of a request
    num_splits                 splits of a request's keys; None: planned over the batch, which its bits depend on then
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    cache_dtype: str
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    s_aux: torch.Tensor | None = None
    shares_cache: bool = False
    flash: Callable[..., Any] | None = None
    max_tokens: int = 0
    num_splits: int | None = None

    def __post_init__(self) -> None:
        self._known: tuple[Any, CacheViews] | None = None

    @staticmethod
    def refusal(cache_dtype: str | None, dtype: torch.dtype, head_dim: int) -> str | None:
        """Returns in words why queries of `dtype` and this head size cannot have a cache; None if they can."""
        if cache_dtype in ("bfloat16", "float16") and cache_dtype != str(dtype).removeprefix("torch."):
            return f"a {cache_dtype} KV cache with queries of {dtype}: gqa_decode needs one dtype"
        if cache_dtype == INT4 and head_dim > FLASH_DIM:
            return f"an {INT4} KV cache with heads of {head_dim}: gqa_decode needs {FLASH_DIM} or fewer"
        return None

    @property
    def kind(self) -> str | None:
        """The kind of `kv_append` for our page; None if the page is vLLM's."""
        return SCALED.get(self.cache_dtype)

    @property
    def rotated_kind(self) -> str | None:
        """The kind of 4-bit codes, which `gqa_decode` must be told; else None."""
        return self.kind if self.cache_dtype == INT4 else None

    @property
    def quantized(self) -> bool:
        """Whether the cache's dtype differs from the queries'."""
        return self.kind is not None or self.cache_dtype in FP8

    @property
    def copies_pages(self) -> bool:
        """Whether prompts with tokens in the cache get copies of its pages."""
        return self.flash is not None and self.quantized

    @property
    def copied_tokens(self) -> int:
        """Most tokens whose keys and values exist as 16-bit numbers at one time."""
        return COPY_BYTES // (2 * 2 * self.kv_heads * self.head_dim)

    def views(
        self, kv_cache: torch.Tensor, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None
    ) -> CacheViews:
        """Returns views of the layer's cache, made once: each slice costs the host a microsecond or two.

        Args:
            kv_cache: cache that vLLM hands to the layer.
            k_scale: factor of an FP8 cache.
            v_scale: likewise.
        """
        fp8 = self.cache_dtype in FP8
        key = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride(), fp8 and (id(k_scale), id(v_scale)))
        if self._known is None or self._known[0] != key:
            if self.kind is not None:
                views = scaled_views(kv_cache, self.head_dim, CODES[self.cache_dtype])
            else:
                views = stock_views(kv_cache, self.head_dim, fp8)
            self._known = key, views._replace(k_scale=k_scale, v_scale=v_scale) if fp8 else views
        return self._known[1]

    def forget_views(self) -> None:
        """Drops the views, which keep the cache alive."""
        self._known = None

    def append_scaled(
        self, key: torch.Tensor, value: torch.Tensor, views: CacheViews, slot_mapping: torch.Tensor
    ) -> None:
        """Quantizes and stores the tokens that have slots; key and value (tokens or more, kv_heads, d)."""
        tokens = slot_mapping.shape[0]
        assert self.kind is not None and views.k_scale is not None and views.v_scale is not None
        kv_append(
            key[:tokens], value[:tokens], views.k, views.v, views.k_scale, views.v_scale,
            slot_mapping.to(torch.int64), layout=views.layout, kind=self.kind,
        )  # fmt: skip

    def append_plain(
        self, key: torch.Tensor, value: torch.Tensor, views: CacheViews, slot_mapping: torch.Tensor
    ) -> None:
        """Stores 16-bit or FP8 tokens in plain torch: for a CPU, where vLLM's kernel does not run."""
        tokens = slot_mapping.shape[0]
        valid = slot_mapping >= 0
        page, row = slot_mapping[valid] // views.k.shape[1], slot_mapping[valid] % views.k.shape[1]
        for new, cache, scale in ((key, views.k, views.k_scale), (value, views.v, views.v_scale)):
            new = new[:tokens][valid]
            if scale is not None:
                new = (new.float() / scale.to(new.device)).clamp(-FP8_MAX, FP8_MAX)
                new, cache = new.to(cache.dtype).view(torch.uint8), cache.view(torch.uint8)
            cache[page, row] = new

    def decode(
        self, query: torch.Tensor, views: CacheViews, seq_lens: torch.Tensor, block_table: torch.Tensor,
        output: torch.Tensor,
    ) -> None:  # fmt: skip
        """Computes attention of the last `tokens / requests` tokens of each request, into `output`.

        Args:
            query: (tokens, heads, d), the same number of tokens of each request, at most `MAX_QUERIES`.
            views: views of the layer's cache.
            seq_lens: (requests,) int32, tokens in the cache, those of the queries included.
            block_table: (requests, pages) int32.
            output: (tokens, heads, d).
        """
        requests = seq_lens.shape[0]
        gqa_decode(
            query.unflatten(0, (requests, -1)), views.k, views.v, views.k_scale, views.v_scale, layout=views.layout,
            cache_seqlens=seq_lens, block_table=block_table, window=self.window, softcap=self.softcap,
            alibi_slopes=self.alibi_slopes, s_aux=self.s_aux, softmax_scale=self.scale, num_splits=self.num_splits,
            kind=self.rotated_kind, out=output.unflatten(0, (requests, -1)),
        )  # fmt: skip

    def part(
        self, query: torch.Tensor, views: CacheViews, lengths: torch.Tensor, block_table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes attention of queries to some keys of their requests that all of them see, without sinks.

        Args:
            query: (batch, s_q, any number of heads, d), s_q at most `MAX_QUERIES`.
            views: views of the layer's cache.
            lengths: (batch,) int32, number of keys.
            block_table: (batch, pages) int32.

        Returns:
            out (batch, s_q, heads, d) and lse (batch, s_q, heads) float32.
        """
        return gqa_decode(
            query, views.k, views.v, views.k_scale, views.v_scale, layout=views.layout, cache_seqlens=lengths,
            block_table=block_table, causal=False, softmax_scale=self.scale, num_splits=self.num_splits,
            kind=self.rotated_kind, return_lse=True,
        )  # fmt: skip

    def prefills_fresh_tokens(self) -> bool:
        """Whether `prefill_fresh` supports this layer."""
        return not self.shares_cache and (self.is_plain or self.flash is not None)

    @property
    def is_plain(self) -> bool:
        """Whether `sink_attention` supports this layer."""
        return self.softcap is None and self.alibi_slopes is None and self.head_dim in PREFILL_HEAD_DIMS

    def prefill_fresh(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_start_loc: torch.Tensor,
        max_query_len: int, output: torch.Tensor,
    ) -> None:  # fmt: skip
        """Computes attention of whole prompts, packed, over their given keys: none of them is in the cache yet.

        Args:
            query: (tokens, heads, d).
            key: (tokens, kv_heads, d).
            value: likewise.
            query_start_loc: (requests + 1,) int32.
            max_query_len: tokens of the longest prompt; vLLM may pass a NumPy number.
            output: (tokens, heads, d).

        On an H200 `sink_attention` takes 0.90 to 0.97 of FlashAttention's time up to 8,192 tokens, 1.02 at 32,768.
        """
        max_query_len = int(max_query_len)
        if not self.is_plain:
            self.flash_attend(
                query, key, value, output, cu_seqlens_q=query_start_loc, cu_seqlens_k=query_start_loc,
                max_seqlen_q=max_query_len, max_seqlen_k=max_query_len, causal=True,
            )  # fmt: skip
            return
        out = sink_attention(
            query, key, value, self.s_aux, window=self.window, softmax_scale=self.scale,
            cu_seqlens_q=query_start_loc, cu_seqlens_k=query_start_loc, max_seqlen_q=max_query_len,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        output.copy_(out)

    def flash_attend(
        self, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, *, is_part: bool = False,
        **sequences: Any,
    ) -> torch.Tensor | None:  # fmt: skip
        """Computes attention by vLLM's FlashAttention 3, over `sequences` in its own arguments, into `output`.

        A part that is to be merged leaves out sinks, and returns its log-sum-exps (tokens, heads).
        """
        assert self.flash is not None
        sinks = None if self.s_aux is None or is_part else self.s_aux.to(torch.bfloat16)
        found = self.flash(
            q=query, k=k, v=v, out=output, softmax_scale=self.scale, softcap=self.softcap or 0.0, s_aux=sinks,
            window_size=(-1, -1) if self.window is None else (self.window - 1, 0), return_softmax_lse=is_part,
            fa_version=FLASH_ATTENTION, num_splits=self.num_splits or 0, **sequences,
        )  # fmt: skip
        return found[1].transpose(0, 1) if is_part else None

    def prefill_in_pieces(
        self, query: torch.Tensor, views: CacheViews, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
        block_table: torch.Tensor, output: torch.Tensor,
    ) -> None:  # fmt: skip
        """Computes attention of any number of tokens of each request over the cache, a few at a time: for a CPU."""
        starts = query_start_loc.tolist()
        for request, (first, last) in enumerate(zip(starts, starts[1:], strict=False)):
            row = slice(request, request + 1)
            for begin in range(first, last, MAX_QUERIES):
                end = min(begin + MAX_QUERIES, last)
                lengths = seq_lens[row] - (last - end)
                self.decode(query[begin:end], views, lengths, block_table[row], output[begin:end])

    def shapes(self, dtype: torch.dtype, page_size: int, max_tokens: int) -> list[Shape]:
        """Returns the shapes for `cute_kernels.warm`; `dtype` is that of the queries."""
        name = str(dtype).removeprefix("torch.")
        kv_dtype = self.kind or ("float8_e4m3fn" if self.cache_dtype in FP8 else name)
        shapes: list[Shape] = [
            GqaShape(
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                dtype=name,
                kv_dtype=kv_dtype,
                scales="per_token_head" if self.kind else "per_tensor",
                layout="paged_HND" if self.kind else "paged_NHD",
                page_size=page_size,
                max_tokens=max_tokens,
                softcap=self.softcap is not None,
                alibi=self.alibi_slopes is not None,
            )
        ]
        if self.copies_pages:
            merged = max_tokens > self.copied_tokens
            shapes.append(PromptShape(self.heads, self.head_dim, name, kv_dtype, self.s_aux is not None, merged))
        if self.is_plain and not self.shares_cache:
            shapes.append(PrefillShape(self.heads, self.kv_heads, self.head_dim, name, (self.window,), packed=True))
        return shapes


def sparse_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    s_aux: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs sparse MLA with the arguments of vLLM's FlashMLA call.

    vLLM passes few heads as one sequence of all tokens; here the tokens are a batch, whose plan uses the whole GPU.

    Args:
        q: (batch, s_q, heads, 576) bfloat16.
        kv_cache: (pages, page_size, 656), one byte an element.
        indices: (batch, s_q, topk) int32, slots of the cache, -1 for none.
        softmax_scale: factor of the scores.
        s_aux: (heads,) float32, a logit that joins the denominator alone.

    Returns:
        out (batch, s_q, heads, 512) bfloat16, and lse (batch, heads, s_q) float32, natural log, without the sink.
    """
    one_sequence = q.shape[0] == 1 and q.shape[1] > 1
    if one_sequence:
        q, indices = q.transpose(0, 1), indices.transpose(0, 1)
    out, lse = mla_fp8_decode(
        q, kv_cache.view(torch.uint8), indices=indices, softmax_scale=softmax_scale, s_aux=s_aux, return_lse=True
    )
    if one_sequence:
        out, lse = out.transpose(0, 1), lse.transpose(0, 1)
    return out, lse.transpose(1, 2)
