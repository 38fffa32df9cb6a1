"""Grouped-query decoding, quantization and appending in plain torch: the definition of what the kernels compute.

It is the oracle of the kernels (float64 over the dequantized cache), and calls on a CPU run it. Only the keys that a
query may see are gathered, and each query multiplies only its own keys: nothing is ever masked by adding to or
multiplying a score, so a NaN in any other slot cannot reach the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from einops import rearrange, reduce

from cute_kernels.gqa.codes import (
    E4M3_MAX,
    E4M3_MIN_SCALE,
    INT4_MAX,
    INT4_MIN_SCALE,
    INT8,
    ROTATED,
    ROTATED_KINDS,
    ROTATED_MAX,
    values_of,
)
from cute_kernels.gqa.layouts import (
    LAYOUTS,
    CacheLayout,
    CacheSizes,
    ScaleKind,
    Which,
    cache_sizes,
    scale_kind,
    token_major,
)
from cute_kernels.gqa.rotation_reference import rotate, unrotate

INT8_MAX: Final = 127
MIN_SCALE: Final = {torch.float32: 2.0**-126, torch.float16: 2.0**-14}
"""The smallest scale that quantization stores: the dtype's smallest normal number."""
ELEMENTS_PER_CHUNK: Final = 1 << 25
"""Elements of a cache that are dequantized at a time: 268 MB as float64, 8 heads of 32,768 keys of 128."""


def spread_scale(scale: torch.Tensor, kind: ScaleKind) -> torch.Tensor:
    """Gives a token-major scale the axes that it lacks, ready to multiply (..., h_kv, d).

    Args:
        scale: () or (1,), (h_kv,), (...), (..., h_kv) or (..., h_kv, d / group_size), by granularity.
        kind: granularity of the scale.
    """
    if kind.granularity == "per_tensor":
        return scale.reshape(1, 1)
    if kind.granularity == "per_group":
        return scale.repeat_interleave(kind.group_size, dim=-1)
    return scale[..., None, None] if kind.granularity == "per_token" else scale.unsqueeze(-1)


class ScaledCache:
    """k_cache or v_cache with its scale, whatever their layout and granularity.

    Args:
        codes: the cache in its layout, of any dtype.
        scale: scale of any granularity, or None for 1.
        layout: layout of both.
        which: "k" or "v", which differ in paged_vllm.
        sizes: sizes of the cache.
    """

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor | None, layout: CacheLayout, which: Which, sizes: CacheSizes
    ) -> None:
        self.which = which
        self.kind = None if scale is None else scale_kind(f"{which}_scale", tuple(scale.shape), layout, sizes)
        self.codes = codes.permute(token_major(layout.axes(which)))
        self.scale = scale
        if scale is not None and self.kind is not None and self.kind.granularity != "per_tensor":
            self.scale = scale.permute(token_major(layout.scale_axes(self.kind.granularity)))

    def take(self, outer: torch.Tensor, rows: torch.Tensor, heads: slice, dtype: torch.dtype) -> torch.Tensor:
        """Returns dequantized tokens (n, heads, d) from places (n,), all of them valid."""
        return dequantize_tokens(*self.parts(outer, rows, heads), self.kind, dtype)

    def parts(self, outer: torch.Tensor, rows: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns codes (n, heads, d) of tokens from places (n,), all of them valid, and their scales, token-major."""
        codes, scale = self.codes[:, :, heads], self.scale
        if codes.dtype == torch.float8_e4m3fn:  # not every device gathers it
            tokens = codes.view(torch.uint8)[outer, rows].view(torch.float8_e4m3fn)
        else:
            tokens = codes[outer, rows]
        if scale is not None and self.kind is not None:
            if self.kind.granularity == "per_head":
                scale = scale[heads]
            elif self.kind.granularity == "per_token":
                scale = scale[outer, rows]
            elif self.kind.granularity != "per_tensor":
                scale = scale[:, :, heads][outer, rows]
        return tokens.flatten(2), scale

    def put(self, outer: torch.Tensor, rows: torch.Tensor, codes: torch.Tensor) -> None:
        """Writes codes (n, h_kv, d) to places (n,)."""
        tokens = codes.view(len(codes), *self.codes.shape[2:])
        if codes.dtype == torch.float8_e4m3fn:
            self.codes.view(torch.uint8)[outer, rows] = tokens.view(torch.uint8)
        else:
            self.codes[outer, rows] = tokens

    def put_scale(self, outer: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor) -> None:
        """Writes token-major scales, leading size n, to places (n,); not for granularities that tokens share."""
        assert self.scale is not None
        self.scale[outer, rows] = scale


def dequantize_tokens(
    codes: torch.Tensor, scale: torch.Tensor | None, kind: ScaleKind | None, dtype: torch.dtype
) -> torch.Tensor:
    """Converts token-major codes to numbers. Products are exact in float64; for another dtype float32, rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if codes.dtype == torch.uint8:
        assert scale is not None
        return unrotate(dequantize_uint4(codes, scale, wide)).to(dtype)
    values = codes.to(wide)
    if scale is not None and kind is not None:
        values = values * spread_scale(scale.to(wide), kind)
    return values.to(dtype)


def dequantize_uint4(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns rotated vectors (..., d) from bytes (..., d / 2) and scales (...), whose low 4 bits are zero points."""
    numbers = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).to(dtype)
    words = scale.contiguous().view(torch.int32)
    zero_point = (words & 15).to(dtype)
    return (numbers - zero_point.unsqueeze(-1)) * (words & -16).view(torch.float32).to(dtype).unsqueeze(-1)


def dequantize(
    codes: torch.Tensor, scale: torch.Tensor | None, layout: str, which: Which, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Converts a whole cache to numbers.

    Args:
        codes: k_cache or v_cache.
        scale: its scale, of any granularity; None for 1.
        layout: name of the layout.
        which: "k" or "v".
        dtype: dtype of the result. The product is exact in float64, else taken in float32 and rounded.

    Returns:
        (sequences or pages, tokens, h_kv, d).
    """
    known = LAYOUTS[layout]
    axes = dict(zip(known.axes(which), codes.shape, strict=True))
    head_dim = (axes["d"] if "d" in axes else axes["c"] * axes["x"]) * codes_per_element(codes)
    sizes = CacheSizes(axes[known.outer], axes[known.rows], axes["h"], head_dim)
    cache = ScaledCache(codes, scale, known, which, sizes)
    return dequantize_tokens(cache.codes.flatten(3), cache.scale, cache.kind, dtype)


def codes_per_element(cache: torch.Tensor) -> int:
    """Returns how many numbers an element of a cache holds."""
    return values_of(str(cache.dtype).removeprefix("torch."))


def sizes_of(layout: CacheLayout, k_cache: torch.Tensor, v_cache: torch.Tensor) -> CacheSizes:
    """Returns the sizes that both caches agree on."""
    shapes = tuple(k_cache.shape), tuple(v_cache.shape)
    return cache_sizes(layout, *shapes, k_cache.element_size(), codes_per_element(k_cache), codes_per_element(v_cache))


class VisibleKeys(NamedTuple):
    """The keys that the queries of one sequence see.

    row        number of the sequence in the batch
    outer          (n,) int64, sequence or page of each key
    rows           (n,) int64, place of each key in its sequence or page
    positions      (n,) int64, position of each key in the sequence, ascending
    seen           for each query, which of the n keys it sees; with lists, only keys of its list
    own_positions  for each query, its own position; negative if the sequence is shorter than the queries
    listed         (s_q, 1 or h_kv, n), whether a query's list for a head has the block of each key; None without lists
    """

    row: int
    outer: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    seen: list[slice]
    own_positions: list[int]
    listed: torch.Tensor | None

    def head_chunks(self, h_kv: int, d: int) -> Iterator[slice]:
        """Yields heads of the cache to take at a time: one if heads have lists of their own.

        Otherwise it yields as many as keep dequantized keys within `ELEMENTS_PER_CHUNK`.
        """
        step = max(1, ELEMENTS_PER_CHUNK // max(1, len(self.positions) * d))
        if self.listed is not None and self.listed.shape[1] > 1:
            step = 1
        return (slice(start, min(start + step, h_kv)) for start in range(0, h_kv, step))

    def keys_seen(self, query: int, heads: slice) -> slice | torch.Tensor:
        """Returns which of the n keys a query sees with some heads of one chunk."""
        seen = self.seen[query]
        if self.listed is None:
            return seen
        lists = self.listed[query]
        own = lists[heads.start if len(lists) > 1 else 0, seen]
        return seen.start + own.nonzero().squeeze(-1)


def visible_keys(
    batch: int,
    s_q: int,
    sizes: CacheSizes,
    layout: CacheLayout,
    *,
    cache_seqlens: torch.Tensor | None,
    block_table: torch.Tensor | None,
    causal: bool,
    window: int | None,
    device: torch.device,
    cache_starts: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    index_block: int = 128,
) -> Iterator[VisibleKeys]:
    """Yields the visible keys of each sequence.

    Raises:
        ValueError: a block table or lengths are missing, or a block table is given to a layout without pages.
    """
    if layout.paged and (block_table is None or cache_seqlens is None):
        raise ValueError(f"block_table, cache_seqlens: got None; layout {layout.name!r} needs both")
    if not layout.paged and block_table is not None:
        raise ValueError(f"block_table: got a tensor; layout {layout.name!r} takes none")
    table = None if block_table is None else block_table.cpu().long()
    capacity = sizes.rows if table is None else sizes.rows * table.shape[1]
    lengths = [capacity] * batch if cache_seqlens is None else cache_seqlens.long().clamp(0, capacity).tolist()
    starts = [0] * batch if cache_starts is None else cache_starts.long().clamp_min(0).tolist()
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        own_positions = [length - s_q + query for query in range(s_q)]
        lowest = [0 if window is None else own - window + 1 for own in own_positions]
        begins = [min(max(key, start), length) for key in lowest]
        ends = [min(max(own + 1, 0), length) if causal else length for own in own_positions]
        positions = torch.arange(min(begins), max(ends), dtype=torch.int64, device="cpu")
        if table is None:
            outer, rows = torch.full_like(positions, row), positions
        else:
            pages = table[row, positions // sizes.rows]
            valid = (pages >= 0) & (pages < sizes.outer)
            positions, outer = positions[valid], pages[valid]
            rows = positions % sizes.rows
        borders = torch.searchsorted(positions, positions.new_tensor([begins, ends])).tolist()
        seen = [slice(begin, max(begin, end)) for begin, end in zip(*borders, strict=True)]
        listed = None
        if indices is not None:
            blocks, lists = positions // index_block, indices[row].cpu().long()
            listed = torch.stack([torch.isin(blocks, own) for own in lists.flatten(0, 1)])
            listed = listed.unflatten(0, lists.shape[:2]).to(device)
        places = outer.to(device), rows.to(device), positions.to(device)
        yield VisibleKeys(row, *places, seen, own_positions, listed)


def modify_scores(
    scores: torch.Tensor, distance: torch.Tensor, softcap: float | None, slopes: torch.Tensor | None
) -> torch.Tensor:
    """Applies softcap, then ALiBi.

    Args:
        scores: (heads, ratio, n), the softmax scale applied.
        distance: (n,), position of the key less the query's.
        softcap: limit of the scores' size, or None.
        slopes: (heads, ratio) or None.
    """
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores + slopes.unsqueeze(-1) * distance.to(scores.dtype)
    return scores


@torch.no_grad()
def reference_gqa_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    layout: str = "BNSH",
    cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    cache_starts: torch.Tensor | None = None,
    kind: str | None = None,
    indices: torch.Tensor | None = None,
    index_block: int = 128,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of a few queries over a quantized or 16-bit cache.

    Query j is at position ``cache_seqlens - s_q + j``. Keys that do not exist are left out, and the contents of their
    slots never matter. A NaN in a key that does exist makes NaN of the queries that see it.

    Args:
        q: as `cute_kernels.gqa_decode` takes it, of any floating-point dtype; `cute_kernels.gqa.request` describes the
            other arguments. Integers may be int64. Without scales codes are numbers.
        dtype: torch.float64 or torch.float32, of the computation and the results.

    Returns:
        out (batch, s_q, h_q, d) and lse (batch, s_q, h_q), both in `dtype`. The lse is in natural log and without the
        sink. A query that sees no key has out 0 and lse -inf.

    Raises:
        ValueError: a cache or scale does not have the layout's shape, or lengths or block table are missing.
    """
    known = LAYOUTS[layout]
    if (v_cache.dtype == torch.uint8) != (kind in ROTATED_KINDS):
        raise ValueError(f"kind: got {kind!r} with values of {v_cache.dtype}")
    sizes = sizes_of(known, k_cache, v_cache)
    keys_of = ScaledCache(k_cache, k_scale, known, "k", sizes)
    values_of = ScaledCache(v_cache, v_scale, known, "v", sizes)
    batch, s_q, h_q, d = q.shape
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    grouped = rearrange(q.to(dtype), "b s (h_kv ratio) d -> b s h_kv ratio d", h_kv=sizes.h_kv)
    slopes = None
    if alibi_slopes is not None:
        every = alibi_slopes.to(dtype).expand(batch, h_q)
        slopes = rearrange(every, "b (h_kv ratio) -> b h_kv ratio", h_kv=sizes.h_kv)
    out = torch.zeros_like(grouped)
    lse = grouped.new_full(grouped.shape[:-1], -torch.inf)
    for work in visible_keys(
        batch,
        s_q,
        sizes,
        known,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        causal=causal,
        window=window,
        device=q.device,
        cache_starts=cache_starts,
        indices=indices,
        index_block=index_block,
    ):
        for heads in work.head_chunks(sizes.h_kv, d):
            keys = rearrange(keys_of.take(work.outer, work.rows, heads, dtype), "n h d -> h d n")
            values = rearrange(values_of.take(work.outer, work.rows, heads, dtype), "n h d -> h n d")
            for query, own_position in enumerate(work.own_positions):
                seen = work.keys_seen(query, heads)
                distance = work.positions[seen] - own_position
                if not len(distance):
                    continue
                scores = grouped[work.row, query, heads] @ keys[..., seen] * scale
                row_slopes = None if slopes is None else slopes[work.row, heads]
                scores = modify_scores(scores, distance, softcap, row_slopes)
                row_max = scores.amax(dim=-1, keepdim=True)
                # A row whose scores are all -inf has no largest score: shift it by 0, and its sum is 0.
                shift = torch.where(row_max == -torch.inf, 0.0, row_max)
                weights = torch.exp(scores - shift)
                row_sum = weights.sum(dim=-1, keepdim=True)
                empty = row_sum == 0
                out[work.row, query, heads] = torch.where(empty, 0.0, weights @ values[:, seen] / row_sum)
                lse[work.row, query, heads] = torch.where(empty, -torch.inf, shift + row_sum.log()).squeeze(-1)
    out = rearrange(out, "b s h_kv ratio d -> b s (h_kv ratio) d")
    lse = rearrange(lse, "b s h_kv ratio -> b s (h_kv ratio)")
    if s_aux is not None:
        # exp(lse) / (exp(lse) + exp(s_aux)); a row without keys stays 0, where this may be NaN
        share = torch.sigmoid(lse - s_aux.to(dtype)).unsqueeze(-1)
        out = torch.where((lse == -torch.inf).unsqueeze(-1), out, out * share)
    return out, lse


@torch.no_grad()
def quantize(
    x: torch.Tensor, kind: ScaleKind, scale_dtype: torch.dtype = torch.float32, given_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes tokens to symmetric INT8.

    scale = absmax / 127 in float32, at least `MIN_SCALE` of its dtype and at most its largest number, rounded to its
    dtype; 1 if all elements are 0. code = x / scale, with the stored scale, an IEEE division in float32, rounded half
    to even and clamped to [-127, 127]. A NaN counts as 0, an infinity as the largest number of x's dtype.

    Args:
        x: (..., h_kv, d) floating point; leading axes are tokens.
        kind: granularity of the scale. per_tensor and per_head scales cover all tokens of x.
        scale_dtype: float32 or float16. Ignored with `given_scale`.
        given_scale: positive scales to use instead, in the shape that this function would return.

    Returns:
        codes (..., h_kv, d) int8, and the scale: (1,), (h_kv,), (...), (..., h_kv) or (..., h_kv, d / group_size).
    """
    values = torch.nan_to_num(x, nan=0.0).float()
    scale = given_scale
    if scale is None:
        size = values.abs()
        match kind.granularity:
            case "per_tensor":
                absmax = size.amax().reshape(1) if size.numel() else size.new_zeros(1)
            case "per_head":
                leading = tuple(range(x.ndim - 2))
                absmax = size.amax(dim=(*leading, -1)) if size.numel() else size.new_zeros(x.shape[-2])
            case "per_token":
                absmax = size.amax(dim=(-2, -1))
            case "per_token_head":
                absmax = size.amax(dim=-1)
            case _:
                absmax = reduce(size, "... (groups n) -> ... groups", "max", n=kind.group_size)
        limits = MIN_SCALE[scale_dtype], torch.finfo(scale_dtype).max
        scale = torch.where(absmax == 0, 1.0, (absmax / INT8_MAX).clamp(*limits)).to(scale_dtype)
    ratio = values / spread_scale(scale.float(), kind)
    return ratio.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


@torch.no_grad()
def quantize_rotated(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rotated tokens to 4-bit codes; each step is rounded to float32.

    A NaN counts as 0, and larger sizes than 2^118 as 2^118. y = H D x, sums of neighbours first
    (`gqa.rotation_reference`).
    scale = (high - low) / 15, at least 1e-6, where low and high are the least and largest of y and 0; zero point =
    -low / scale and code = y (1 / scale) + zero point, both rounded half up and clamped to [0, 15]. An element of y
    is (code - zero point) x scale. If y has both signs these are the bits of vLLM's `int4_per_token_head`; with one
    sign that clamps the zero point instead, which loses a vector whose first channel is much larger than all others.

    Args:
        x: (..., d) floating point, d a power of two.

    Returns:
        bytes (..., d / 2), the even element in the low bits, and float32 scales (...), whose lowest four bits are the
        zero point.
    """
    y = rotate(torch.nan_to_num(x.float(), nan=0.0).clamp(-ROTATED_MAX, ROTATED_MAX))
    low, high = y.amin(dim=-1).clamp_max(0), y.amax(dim=-1).clamp_min(0)
    scale = ((high - low) / INT4_MAX).clamp_min(INT4_MIN_SCALE)
    zero_point = (-low / scale).clamp_min(0).add(0.5).trunc().clamp_max(INT4_MAX)
    shifted = y * (1.0 / scale).unsqueeze(-1) + zero_point.unsqueeze(-1)
    codes = shifted.clamp_min(0).add(0.5).trunc().clamp_max(INT4_MAX).to(torch.uint8)
    words = (scale.view(torch.int32) & -16) | zero_point.to(torch.int32)
    return codes[..., ::2] | codes[..., 1::2] << 4, words.view(torch.float32)


@torch.no_grad()
def quantize_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes tokens to e4m3, a scale each, by vLLM's arithmetic for `fp8_per_token_head`, each step in float32.

    scale = absmax / 448, at least 1e-6; code = x (1 / scale), clamped to [-448, 448] and rounded half to even. A NaN
    counts as 0, an infinity as the largest number of x's dtype.

    Args:
        x: (..., d) floating point.

    Returns:
        codes (..., d) float8_e4m3fn, and float32 scales (...).
    """
    values = torch.nan_to_num(x, nan=0.0).float()
    scale = (values.abs().amax(dim=-1) / E4M3_MAX).clamp_min(E4M3_MIN_SCALE)
    ratio = values * (1.0 / scale).unsqueeze(-1)
    return ratio.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def quantize_as(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes to a type with a float32 scale for each token and head, like kinds of `kv_append` other than "int8".

    Args:
        name: "int8", "float8_e4m3fn" or "uint8".
        x: (..., d) floating point.
    """
    if name == INT8:
        return quantize(x, ScaleKind("per_token_head"))
    return quantize_rotated(x) if name in ROTATED else quantize_e4m3(x)


@torch.no_grad()
def reference_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: str,
    kind: str = "int8",
) -> None:
    """Quantizes tokens and writes codes and scales to their slots, in place; arguments of `cute_kernels.kv_append`.

    Kind "int8" uses `quantize`, "fp8_per_token_head" uses `quantize_e4m3`, and rotated codes use `quantize_rotated`.
    """
    known = LAYOUTS[layout]
    sizes = sizes_of(known, k_cache, v_cache)
    keep = (slot_mapping >= 0) & (slot_mapping < sizes.num_slots)
    outer, rows = sizes.place(slot_mapping[keep].long())
    given_both: dict[Which, tuple[torch.Tensor, ...]] = {"k": (k, k_cache, k_scale), "v": (v, v_cache, v_scale)}
    for which, (x, codes, scale) in given_both.items():
        cache = ScaledCache(codes, scale, known, which, sizes)
        assert cache.kind is not None
        given = scale if cache.kind.granularity in ("per_tensor", "per_head") else None
        if kind == INT8:
            new_codes, new_scale = quantize(x[keep], cache.kind, scale.dtype, given)
        else:
            new_codes, new_scale = quantize_as(str(codes.dtype).removeprefix("torch."), x[keep])
        cache.put(outer, rows, new_codes)
        if given is None:
            cache.put_scale(outer, rows, new_scale)
