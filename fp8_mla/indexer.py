"""The indexer of sparse attention in plain torch: its key cache, its logits, and the keys with the highest ones.

    logit[t] = scale[t] * sum over h of weights[h] * max(q[h] . codes[t], 0)

A key is 128 e4m3 codes and one float32 scale. A page has the codes of all its keys, then their scales: 132 bytes a key.
"""

from __future__ import annotations

from typing import Final

import torch

from fp8_mla.formats import INDEX_KEY, MIN_INDEX_ABSMAX
from fp8_mla.layout import check_same_device, describe
from fp8_mla.packing import _BF16_MAX, _PACK_DTYPES, _divide, _e4m3_codes, _power_of_two_scales, unpack
from fp8_mla.pages import gather, row_views
from fp8_mla.slots import check_index_tensor, slots_from_block_table, slots_from_positions

SCALE_RULES: Final = ("float32", "ue8m0")
"""The rules by which `pack_index_keys` may choose a scale: SGLang's and vLLM's."""


def pack_index_keys(k: torch.Tensor, *, scale: str = "float32") -> torch.Tensor:
    """Quantize keys of the indexer, after norm, rotary encoding and Hadamard transform, if any.

    A largest magnitude below 1e-4 counts as 1e-4. The scale is

    - "float32": the largest magnitude over 448; codes are elements times its float32 reciprocal (SGLang);
    - "ue8m0": the least power of two that is not below that quotient, at least 2**-22 (vLLM), also stored as float32.

    Codes are rounded to nearest even and saturate at 448. A NaN does not count for the scale and becomes code 0x7F. A
    magnitude above the largest finite bfloat16 counts as that number.

    Args:
        k: (..., 128) bfloat16 or float32, any strides.
        scale: "float32" or "ue8m0".

    Returns:
        (..., 132) uint8 on the same device, contiguous: 128 codes, then the scale. `fp8_mla.write_pages` with
        ``token_format=fp8_mla.INDEX_KEY`` puts them where a page has them.

    Raises:
        TypeError: `k` is not a tensor of one of these dtypes.
        ValueError: its last dimension is not 128, or there is no such rule.
    """
    if not isinstance(k, torch.Tensor) or k.is_nested or k.dtype not in _PACK_DTYPES:
        raise TypeError(f"k: got {describe(k)}; needs a tensor of bfloat16 or float32")
    if k.ndim == 0 or k.shape[-1] != INDEX_KEY.d_qk:
        raise ValueError(f"k: got {describe(k)}; needs {INDEX_KEY.d_qk} elements in the last dimension")
    check_scale_rule(scale)
    values = k.detach().float()
    if scale == "ue8m0":
        codes, exponents = _power_of_two_scales(values)
        scales = (exponents.int() << 23).view(torch.float32)
    else:
        absmax = values.abs().nan_to_num(nan=0.0).amax(dim=-1, keepdim=True).clamp(MIN_INDEX_ABSMAX, _BF16_MAX)
        scales = _divide(absmax, 448.0)
        codes = _e4m3_codes(values * scales.reciprocal(), values)
    return torch.cat([codes, scales.view(torch.uint8)], dim=-1)


def check_scale_rule(scale: object) -> None:
    """Raises ValueError unless `scale` is one of `SCALE_RULES`."""
    if not isinstance(scale, str) or scale not in SCALE_RULES:
        raise ValueError(f"scale: got {scale!r}; needs 'float32' or 'ue8m0'")


def unpack_index_keys(packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Read keys of the indexer back: code times scale, exact in float64, else rounded as `fp8_mla.unpack` does.

    Args:
        packed: (..., 132) uint8 or float8_e4m3fn, as `pack_index_keys` returns them.
        dtype: bfloat16, float32 or float64.

    Returns:
        (..., 128) in `dtype` on the same device, contiguous.

    Raises:
        TypeError, ValueError: as `fp8_mla.unpack`.
    """
    return unpack(packed, dtype, token_format=INDEX_KEY)


def reference_index_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
) -> torch.Tensor:
    """Logits of all keys that each query sees: sums in float64, rounded to float32 once.

    A product q . k that is NaN counts as 0, as fmaxf has it. The result is canonical: no -0.0, and -inf for NaN.

    Args:
        q: (batch, s_q, heads, 128) float8_e4m3fn.
        weights: (batch, s_q, heads) float32 of any sign, the scale of q and all other factors included.
        k_cache: (num_pages, page_size, 132) or (num_pages, page_size, 1, 132), uint8 or float8_e4m3fn, planar pages.
        block_table: (batch, max_pages) int32 or int64. A page that the cache lacks has no keys.
        cache_seqlens: (batch,) int32 or int64: query j sees the first ``cache_seqlens - s_q + 1 + j`` keys; or
            (batch, s_q): number of keys that each query sees.

    Returns:
        (batch, s_q, max_pages * page_size) float32, -inf where a query sees no key.

    Raises:
        TypeError: an argument is no tensor, or of another dtype.
        ValueError: a shape or device does not fit.
    """
    return _logits(q, weights, k_cache, block_table, cache_seqlens)[0]


def _logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits, and (batch, s_q) lengths within the table."""
    if not isinstance(q, torch.Tensor) or q.dtype is not torch.float8_e4m3fn:
        raise TypeError(f"q: got {describe(q)}; needs a tensor of float8_e4m3fn")
    if q.ndim != 4 or q.shape[-1] != INDEX_KEY.d_qk:
        raise ValueError(f"q: got {describe(q)}; needs (batch, s_q, heads, {INDEX_KEY.d_qk})")
    if not isinstance(weights, torch.Tensor) or weights.dtype is not torch.float32:
        raise TypeError(f"weights: got {describe(weights)}; needs a tensor of float32")
    if weights.shape != q.shape[:-1]:
        raise ValueError(f"weights: got {describe(weights)}; needs {tuple(q.shape[:-1])}")
    rows = row_views(k_cache, INDEX_KEY, name="k_cache")
    batch, s_q = q.shape[:2]
    check_index_tensor("block_table", block_table, (batch, None))
    others = {"weights": weights, "k_cache": k_cache, "block_table": block_table, "cache_seqlens": cache_seqlens}
    for name, tensor in others.items():
        check_same_device(name, tensor, q.device)
    num_pages, page_size = rows[0].shape[:2]
    width = block_table.shape[1] * page_size
    lengths = _lengths(cache_seqlens, batch, s_q, width)
    full = torch.full((batch,), width, dtype=torch.int64, device=q.device)
    slots = slots_from_block_table(block_table, full, page_size, num_pages=num_pages)
    positions = torch.arange(width, dtype=torch.int64, device=q.device)
    present = (slots >= 0)[:, None] & (positions < lengths[..., None])
    logits = torch.full((batch, s_q, width), -torch.inf, dtype=torch.float32, device=q.device)
    for b in range(batch):
        seen = torch.nonzero(present[b].any(0)).squeeze(1)
        tokens = gather(rows, slots[b, seen])
        codes, scales = tokens[:, :128].view(torch.float8_e4m3fn).double(), tokens[:, 128:].clone().view(torch.float32)
        products = torch.einsum("qhd,td->qht", q[b].double(), codes)
        sums = torch.einsum("qh,qht->qt", weights[b].double(), products.fmax(torch.zeros_like(products)))
        logits[b][:, seen] = canonical((sums * scales[:, 0].double()).float())
    return logits.masked_fill(~present, -torch.inf), lengths


def _lengths(cache_seqlens: torch.Tensor, batch: int, s_q: int, width: int) -> torch.Tensor:
    """Returns (batch, s_q) int64: number of keys that each query sees, from 0 to width."""
    if isinstance(cache_seqlens, torch.Tensor) and cache_seqlens.ndim == 1:
        check_index_tensor("cache_seqlens", cache_seqlens, (batch,))
        whole = cache_seqlens.long().clamp(0, width)
        causal = torch.arange(s_q, dtype=torch.int64, device=cache_seqlens.device) - (s_q - 1)
        return (whole[:, None] + causal).clamp(0)
    check_index_tensor("cache_seqlens", cache_seqlens, (batch, s_q))
    return cache_seqlens.long().clamp(0, width)


def canonical(logits: torch.Tensor) -> torch.Tensor:
    """Returns logits in the form in which they are compared: -0.0 becomes 0.0, NaN becomes -inf."""
    return logits.masked_fill(logits.isnan(), -torch.inf) + 0.0


def highest(logits: torch.Tensor, topk: int) -> torch.Tensor:
    """Returns positions of the `topk` highest of (n,) canonical logits, ascending; of equal ones the lower positions.

    It returns all positions if there are no more than `topk`.
    """
    if logits.shape[0] <= topk:
        return torch.arange(logits.shape[0], dtype=torch.int64, device=logits.device)
    return logits.sort(descending=True, stable=True).indices[:topk].sort().values


def reference_index_decode(
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    topk: int = 2048,
    slot_table: torch.Tensor | None = None,
    slot_page_size: int | None = None,
    first: int = 0,
    last: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Finds the keys with the highest logits of each query, by position, which sparse attention reads.

    A key in a page that the cache lacks has the logit -inf; if it is chosen for lack of others, its slot is -1.

    Args:
        q: as `reference_index_logits` takes it, and so are `weights`, `k_cache`, `block_table` and `cache_seqlens`.
        weights: as `reference_index_logits` takes it.
        k_cache: as `reference_index_logits` takes it.
        block_table: as `reference_index_logits` takes it.
        cache_seqlens: as `reference_index_logits` takes it.
        topk: number of keys to choose; a query that sees no more gets all of them.
        slot_table: (batch, pages) int32 or int64, pages of the cache that slots are wanted for; None: `block_table`.
        slot_page_size: tokens of that cache's pages; None: page size of `k_cache`.
        first: number of first keys whose logits count as +inf.
        last: number of last keys, of those that the query sees, whose logits count as +inf.

    Returns:
        slots (batch, s_q, topk) int32, ascending by position, -1 after the last; positions likewise; and their logits,
        float32, -inf after the last.

    Raises:
        TypeError, ValueError: as `reference_index_logits`; or `topk`, `first` or `last` is out of range.
    """
    if first < 0 or last < 0 or not 1 <= topk or first + last > topk:
        raise ValueError(f"topk: got {topk} with first {first} and last {last}; needs first + last of 0 to topk")
    logits, lengths = _logits(q, weights, k_cache, block_table, cache_seqlens)
    if (slot_table is None) != (slot_page_size is None):
        raise ValueError(f"slot_page_size: got {slot_page_size}; needs one with slot_table, and None without")
    batch, s_q, _ = logits.shape
    positions = torch.full((batch, s_q, topk), -1, dtype=torch.int32, device=q.device)
    scores = torch.full((batch, s_q, topk), -torch.inf, dtype=torch.float32, device=q.device)
    for b in range(batch):
        for j in range(s_q):
            length = int(lengths[b, j])
            seen = logits[b, j, :length]
            seen[:first], seen[max(length - last, 0) :] = torch.inf, torch.inf
            chosen = highest(seen, topk)
            positions[b, j, : len(chosen)] = chosen.int()
            scores[b, j, : len(chosen)] = seen[chosen]
    if slot_table is not None and slot_page_size is not None:
        return slots_from_positions(positions, slot_table, slot_page_size).int(), positions, scores
    num_pages, page_size = k_cache.shape[:2]
    return slots_from_positions(positions, block_table, page_size, num_pages=num_pages).int(), positions, scores
