"""Inputs for grouped-query decoding, ordinary and adversarial, and the tolerance rule for its results.

Everything is drawn from a `torch.Generator` on the device it is made for, so a seed and a device name an input exactly.
A slot that no query may see, past a sequence's end, before its window or in a page of nobody, has NaN scales and NaN
codes where the dtypes have NaN, and random codes where they do not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from cute_kernels.gqa.codes import KINDS, ROTATED_KINDS
from cute_kernels.gqa.layouts import ALIGNMENT, LAYOUTS, CacheLayout, CacheSizes, ScaleKind, Which, scale_shapes
from cute_kernels.gqa.reference import (
    ScaledCache,
    modify_scores,
    quantize,
    quantize_rotated,
    reference_gqa_decode,
    sizes_of,
    spread_scale,
    visible_keys,
)
from tests.kit.compare import (
    P_CUT,
    Comparison,
    Projections,
    Yardstick,
    default_width,
    finite_or_zero,
    rounding_noise,
    rounding_variance,
)
from tests.kit.draws import generator, integers, normal, uniform
from tests.kit.mla_cases import (
    OUTLIER_CHANNELS,
    OUTLIER_FACTOR,
    QUERY_SIZE,
    PoisonedOutput,
    block_table,
    sink_logits,
    strided,
    strided_int,
)

KV_DTYPES: Final = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
FOUR_BITS: Final = tuple(ROTATED_KINDS)
"""Kinds with rotated 4-bit codes: "int8_k_int4_v" and "int4"."""
SCALE_NAMES: Final = {
    "per_tensor": ScaleKind("per_tensor"),
    "per_head": ScaleKind("per_head"),
    "per_token": ScaleKind("per_token"),
    "per_token_head": ScaleKind("per_token_head"),
    "per_group_32": ScaleKind("per_group", 32),
    "per_group_64": ScaleKind("per_group", 64),
}
VALUES: Final = ("normal", "channels", "tokens", "wild")
"""What a cache holds:

normal    N(0,1), quantized with the scales that its absmax asks for
channels  like normal, with some channels times 20, as trained models have them in K
tokens    like normal, with one token in 50 times 20 in V and times 3 in K
wild      codes of the whole range, scales of random size: between heads from 1e-6 to 1e3 (1e-3 to 10 where q or the
          scales are float16), between groups of a head up to 1e6, between tokens up to 1e4 below that
"""
GROUP_DECADES: Final = 6.0
"""Queries shrink as scales grow, so that scores are of usual size. A row of Q is float16 in the kernel: with 10^9
between two groups of a row, the smaller numbers had so few bits that a log-sum-exp was off by 2e-4."""
OUTLIER_TOKEN_SHARE: Final = 1 / 50
FP8_MAX: Final = 448.0
ELEMENTS_PER_CHUNK: Final = 1 << 26
"""Number of elements of a cache that are made at a time: 268 MB as float32."""


@dataclass(frozen=True)
class GqaCase:
    """One call of `gqa_decode`. The tensors are those of its docstring."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    layout: str = "BNSH"
    cache_seqlens: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    s_aux: torch.Tensor | None = None
    softmax_scale: float | None = None
    cache_starts: torch.Tensor | None = None
    kind: str | None = None
    indices: torch.Tensor | None = None
    index_block: int = 128

    def arguments(self) -> dict[str, Any]:
        """Arguments by name, for the decode, the oracle and the emulation."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def outputs(self, *, padded: bool = False) -> tuple[PoisonedOutput, PoisonedOutput]:
        out = PoisonedOutput(tuple(self.q.shape), self.q.dtype, self.q.device, padded=padded)
        return out, PoisonedOutput(tuple(self.q.shape[:3]), torch.float32, self.q.device, padded=padded)


def gqa_case(
    *,
    seqlens: Sequence[int],
    starts: Sequence[int] | None = None,
    h_q: int,
    h_kv: int,
    d: int = 128,
    s_q: int = 1,
    layout: str = "BNSH",
    page_size: int = 64,
    kv_dtype: str = "int8",
    q_dtype: torch.dtype = torch.bfloat16,
    k_scales: str | None = "per_token_head",
    v_scales: str | None = "per_token_head",
    scale_dtype: torch.dtype = torch.float32,
    values: str = "normal",
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi: str = "none",
    sink: str = "none",
    bad_entries: bool = False,
    whole: bool = False,
    padded: bool = True,
    query_size: float = QUERY_SIZE,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> GqaCase:
    """A decode whose cache is poison wherever no query looks. Pages are those of a `block_table`.

    Args:
        seqlens: tokens of each sequence, 0 allowed; their number is the batch.
        starts: the first key of each sequence, which may be negative, or past its end.
        h_q: query heads, a multiple of `h_kv`.
        h_kv: heads of the cache.
        s_q: queries of each sequence.
        page_size: tokens of a page, for paged layouts.
        kv_dtype: one of `KV_DTYPES` or of `FOUR_BITS`; the latter have float32 scales per token and head.
        q_dtype: bfloat16 or float16; a 16-bit cache needs the same.
        k_scales, v_scales: one of `SCALE_NAMES`, ignored for 16-bit caches; both None for an FP8 cache without scales.
        scale_dtype: float32 or float16.
        values: one of `VALUES`.
        causal, window, softcap: as `gqa_decode` takes them.
        alibi: "none", or slopes per "head" or per "batch" row and head.
        sink: "none", "finite", or "inf": finite ones with some +inf and some -inf among them.
        bad_entries: whether a tenth of the block table's entries within the sequences is out of range.
        whole: whether a contiguous cache comes without cache_seqlens; then all `seqlens` must be equal.
        padded: whether q, caches, scales and block table are not contiguous.
        query_size: standard deviation of the logits; if keys differ in size, of the logits of large keys.
        seed: seed of the generator.
    """
    if values not in VALUES:
        raise ValueError(f"values: got {values!r}, needs one of {', '.join(VALUES)}")
    known, gen = LAYOUTS[layout], generator(seed, device)
    stored = _stored(kv_dtype, k_scales, v_scales)
    lengths = torch.tensor(list(seqlens), dtype=torch.int64, device="cpu")
    batch, longest = len(lengths), int(lengths.max()) if len(lengths) else 0
    table = None
    if known.paged:
        table, num_pages = block_table(lengths, page_size, gen, bad_entries=bad_entries)
        sizes = CacheSizes(num_pages, page_size, h_kv, d)
    else:
        sizes = CacheSizes(batch, longest if whole else longest + 3, h_kv, d)
    used_outer, used_rows = _used_slots(lengths, starts, sizes, known, table, s_q, window, gen.device)
    if table is not None:
        table = table.int().to(gen.device)
        table = strided_int(table) if padded else table

    narrow = torch.float16 in (q_dtype, scale_dtype, stored["k"][0])
    caches: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor | None] = {}
    for which, (dtype, kind) in stored.items():
        codes = caches[which] = _empty_cache(sizes, known, which, dtype, padded, gen)
        scale = scales[which] = None if kind is None else _empty_scale(sizes, known, kind, scale_dtype, padded, gen)
        base = _wild_base(h_kv, d, kind, narrow, gen) if values == "wild" else None
        _fill(ScaledCache(codes, scale, known, which, sizes), used_outer, used_rows, sizes, values, base, gen)
        if which == "k":
            ones = torch.ones((h_kv, d), dtype=torch.float32, device=gen.device)
            key_sizes = _key_sizes(ones, dtype, kind, values, base)

    # q stays near 1 in its largest channels whatever the size of keys; the softmax scale does the rest
    factor = key_sizes.reciprocal()
    largest = factor.amax()
    q = normal((batch, s_q, h_kv, h_q // h_kv, d), gen)
    wild = values == "wild"
    q = (q * (factor / largest if wild else factor * query_size).unsqueeze(1)).flatten(2, 3).to(q_dtype)
    return GqaCase(
        q=strided(q) if padded else q,
        k_cache=caches["k"],
        v_cache=caches["v"],
        k_scale=scales["k"],
        v_scale=scales["v"],
        layout=layout,
        cache_seqlens=None if whole else lengths.int().to(gen.device),
        block_table=table,
        causal=causal,
        window=window,
        softcap=softcap,
        alibi_slopes=_slopes(alibi, batch, h_q, gen),
        s_aux=sink_logits(h_q, sink, gen),
        softmax_scale=query_size * float(largest) / math.sqrt(d) if wild else None,
        cache_starts=None if starts is None else torch.tensor(list(starts), dtype=torch.int32, device=gen.device),
        kind=kv_dtype if kv_dtype in FOUR_BITS else None,
    )


def _stored(
    kv_dtype: str, k_scales: str | None, v_scales: str | None
) -> dict[Which, tuple[torch.dtype, ScaleKind | None]]:
    """Dtype of the codes and granularity of the scales of each cache; a 16-bit cache has no scales."""
    four_bits = kv_dtype in FOUR_BITS
    k, v = (getattr(torch, name) for name in KINDS[kv_dtype]) if four_bits else [KV_DTYPES[kv_dtype]] * 2
    plain = k.itemsize == 2
    kinds = [None if plain or name is None else SCALE_NAMES[name] for name in (k_scales, v_scales)]
    return {"k": (k, kinds[0]), "v": (v, kinds[1])}


def _key_sizes(
    ones: torch.Tensor, dtype: torch.dtype, kind: ScaleKind | None, values: str, base: torch.Tensor | None
) -> torch.Tensor:
    """How large keys are in each channel (h_kv, d); `ones` have that shape."""
    d = ones.shape[1]
    if base is not None:
        # codes of int8 have a standard deviation of 74, those of FP8 are made to have 64, and codes of 4 bits less
        # zero points one of 6.5 before they are rotated back
        size = 1 if dtype.itemsize == 2 else 6.5 / math.sqrt(d) if dtype == torch.uint8 else 70
        return size * (base if dtype.itemsize == 2 or kind else ones)
    if values == "channels":
        ones[:, _outlier_channels(d)] = OUTLIER_FACTOR
    return ones


def _slopes(alibi: str, batch: int, h_q: int, gen: torch.Generator) -> torch.Tensor | None:
    """Slopes of ALiBi per head, or per sequence and head; some of them are 0."""
    if alibi == "none":
        return None
    slopes = torch.exp2(-8 * torch.arange(1, h_q + 1, dtype=torch.float32, device=gen.device) / h_q)
    slopes[::5] = 0
    if alibi == "batch":
        slopes = slopes * (0.5 + uniform((batch, h_q), gen))
    return slopes


def _used_slots(
    lengths: torch.Tensor,
    starts: Sequence[int] | None,
    sizes: CacheSizes,
    layout: CacheLayout,
    table: torch.Tensor | None,
    s_q: int,
    window: int | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sequence or page, row in it) of every key that some query sees."""
    capacity = sizes.rows if table is None else table.shape[1] * sizes.rows
    positions = torch.arange(capacity, dtype=torch.int64, device="cpu")
    seen = positions < lengths.unsqueeze(1)
    if window is not None:
        seen &= positions > (lengths - s_q - window).unsqueeze(1)
    if starts is not None:
        seen &= positions >= torch.tensor(list(starts), dtype=torch.int64, device="cpu").unsqueeze(1)
    row, position = seen.nonzero(as_tuple=True)
    if table is None:
        return row.to(device), position.to(device)
    page = table[row, position // sizes.rows]
    valid = (page >= 0) & (page < sizes.outer)
    return page[valid].to(device), (position % sizes.rows)[valid].to(device)


def _apart(shape: tuple[int, ...], itemsize: int, padded: bool) -> tuple[int, tuple[int, ...]]:
    """Size and strides of a tensor. If padded, its outermost items lie 16 bytes further apart than needed."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if padded and len(shape) > 1:
        unit = ALIGNMENT // itemsize
        strides[0] = -(-strides[0] // unit) * unit + unit
    return shape[0] * strides[0] if shape else 1, tuple(strides)


def _empty_cache(
    sizes: CacheSizes, layout: CacheLayout, which: Which, dtype: torch.dtype, padded: bool, gen: torch.Generator
) -> torch.Tensor:
    """A cache full of poison: NaN, or random codes if the dtype has no NaN."""
    shape = layout.shape(which, sizes, dtype.itemsize)
    if dtype == torch.uint8:
        shape = (*shape[:-1], shape[-1] // 2)
    elements, strides = _apart(shape, dtype.itemsize, padded)
    if dtype in (torch.int8, torch.uint8):
        info = torch.iinfo(dtype)
        storage = integers(info.min, info.max + 1, (elements,), gen, dtype)
    else:
        # a byte of 0xFF is a NaN in each of these dtypes
        storage = torch.full((elements * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=gen.device).view(dtype)
    return storage.as_strided(shape, strides)


def _empty_scale(
    sizes: CacheSizes, layout: CacheLayout, kind: ScaleKind, dtype: torch.dtype, padded: bool, gen: torch.Generator
) -> torch.Tensor:
    """Scales of NaN. A per_tensor scale has shape () or (1,), chosen at random."""
    shape = scale_shapes(layout, sizes)[kind]
    if kind.granularity == "per_tensor" and uniform((), gen) < 0.5:
        shape = ()
    elements, strides = _apart(shape, dtype.itemsize, padded)
    return torch.full((elements,), math.nan, dtype=dtype, device=gen.device).as_strided(shape, strides)


def _wild_base(h_kv: int, d: int, kind: ScaleKind | None, narrow: bool, gen: torch.Generator) -> torch.Tensor:
    """The largest scale in each head or group, (h_kv, d). It is one number if the granularity has neither."""
    heads = h_kv if kind is None or kind.granularity in ("per_head", "per_token_head", "per_group") else 1
    groups = d // kind.group_size if kind is not None and kind.group_size else 1
    low, high = (-3.0, 1.0) if narrow else (-6.0, 3.0)

    def drawn(shape: tuple[int, int], decades: float) -> torch.Tensor:
        return decades * uniform(shape, gen)

    group_decades = min(high - low, GROUP_DECADES) if groups > 1 else 0.0
    exponent = low + drawn((heads, 1), high - low - group_decades) + drawn((heads, groups), group_decades)
    return torch.pow(10.0, exponent).repeat_interleave(d // groups, dim=1).expand(h_kv, d)


def _outlier_channels(d: int) -> list[int]:
    return sorted({channel % d for channel in OUTLIER_CHANNELS})


def _fill(
    cache: ScaledCache,
    outer: torch.Tensor,
    rows: torch.Tensor,
    sizes: CacheSizes,
    values: str,
    base: torch.Tensor | None,
    gen: torch.Generator,
) -> None:
    """Writes random tokens to slots. The first chunk of tokens determines a scale that all tokens share."""
    shared: torch.Tensor | None = None
    step = max(1, ELEMENTS_PER_CHUNK // (sizes.h_kv * sizes.d))
    for start in range(0, max(1, len(outer)), step):
        slots = outer[start : start + step], rows[start : start + step]
        shape = (len(slots[0]), sizes.h_kv, sizes.d)
        if base is None:
            codes, scale = _quantized(normal(shape, gen), cache, values, shared, gen)
        else:
            codes, scale = _wild_tokens(shape, cache, base, gen)
        cache.put(*slots, codes)
        if scale is None or cache.scale is None or cache.kind is None:
            continue
        if cache.kind.granularity in ("per_tensor", "per_head"):
            shared = scale
            cache.scale.copy_(scale.reshape(cache.scale.shape))
        else:
            cache.put_scale(*slots, scale)


def _quantized(
    x: torch.Tensor, cache: ScaledCache, values: str, shared: torch.Tensor | None, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and scale of N(0,1) tokens (n, h_kv, d) to which outliers are added."""
    if values == "channels":
        x[..., _outlier_channels(x.shape[-1])] *= OUTLIER_FACTOR
    elif values == "tokens":
        one = uniform((len(x), 1, 1), gen) < OUTLIER_TOKEN_SHARE
        x = torch.where(one, x * (OUTLIER_FACTOR if cache.which == "v" else 3.0), x)
    dtype = cache.codes.dtype
    if dtype == torch.uint8:
        return quantize_rotated(x)
    if cache.kind is None or cache.scale is None:
        return (x.clamp(-FP8_MAX, FP8_MAX) if dtype == torch.float8_e4m3fn else x).to(dtype), None
    if dtype == torch.int8:
        return quantize(x, cache.kind, cache.scale.dtype, shared)
    scale = shared
    if scale is None:
        # FP8 ends at 448, INT8 at 127
        scale = (quantize(x, cache.kind)[1] * (127 / FP8_MAX)).to(cache.scale.dtype)
    return (x / spread_scale(scale.float(), cache.kind)).clamp(-FP8_MAX, FP8_MAX).to(dtype), scale


def _wild_tokens(
    shape: tuple[int, int, int], cache: ScaledCache, base: torch.Tensor, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes of the whole range, and scales that do not depend on them."""
    kind, dtype, (n, h_kv, d) = cache.kind, cache.codes.dtype, shape
    if dtype == torch.uint8:
        shape = (n, h_kv, d // 2)
    if dtype in (torch.int8, torch.uint8):
        info = torch.iinfo(dtype)
        codes = integers(info.min, info.max + 1, shape, gen, dtype)
    else:
        codes = normal(shape, gen)
        codes = (codes * 64).clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == torch.float8_e4m3fn else codes
    # half of the tokens have full size, the others are up to four decades smaller
    own = (n, 1, 1) if kind is None or kind.granularity == "per_token" else (n, h_kv, 1)
    if kind is not None and kind.granularity == "per_group":
        own = (n, h_kv, d // kind.group_size)
    depth = 8 * (uniform(own, gen) - 0.5).clamp_min(0)
    jitter = 1 - 0.5 * uniform(own, gen)
    drop = torch.pow(10.0, -depth) * jitter  # no two factors are equal: bf16 would round equal ones alike
    if kind is None or cache.scale is None:
        if dtype == torch.float8_e4m3fn:
            return codes, None
        return (codes * drop * base).to(dtype), None
    match kind.granularity:
        case "per_tensor":
            scale = base[0, :1]
        case "per_head":
            scale = base[:, 0]
        case "per_token":
            scale = base[0, 0] * drop[:, 0, 0]
        case "per_token_head":
            scale = base[:, 0] * drop[..., 0]
        case _:
            scale = base[:, :: kind.group_size] * drop
    return codes, scale.to(cache.scale.dtype)


@torch.no_grad()
def gqa_yardstick(case: GqaCase) -> Yardstick:
    """The decode in plain arithmetic of q's dtype, which is also the output's dtype.

    Keys and values are dequantized to q's dtype. Probabilities, relative to the row's maximum, and the output are
    rounded to it. Scores and sums are float32, the noise float64.

    If tokens have their own value scales, codes stay as they are, and P times the scale is rounded. That product is
    bfloat16 even if q is float16, whose range does not hold it. Over other 8-bit caches P is float16, so smaller
    probabilities than `P_CUT` become 0.
    """
    q, s_aux, alibi_slopes = case.q, case.s_aux, case.alibi_slopes
    known = LAYOUTS[case.layout]
    batch, s_q, h_q, d = q.shape
    sizes = sizes_of(known, case.k_cache, case.v_cache)
    keys_of = ScaledCache(case.k_cache, case.k_scale, known, "k", sizes)
    values_of = ScaledCache(case.v_cache, case.v_scale, known, "v", sizes)
    scale = d**-0.5 if case.softmax_scale is None else case.softmax_scale
    queries = q.float().unflatten(2, (sizes.h_kv, -1))
    sinks = None if s_aux is None else s_aux.float().view(sizes.h_kv, -1, 1)
    slopes = None
    if alibi_slopes is not None:
        slopes = alibi_slopes.float().expand(batch, h_q).unflatten(1, (sizes.h_kv, -1))
    out = torch.zeros(queries.shape, dtype=q.dtype, device=q.device)
    lse = queries.new_full(queries.shape[:-1], -torch.inf)
    noise, shared = torch.zeros_like(queries, dtype=torch.float64), torch.zeros_like(lse, dtype=torch.float64)
    groups = value_groups(case.v_scale, known)
    width = d // groups if groups > 1 else default_width(d)
    token_scales = values_of.kind is not None and values_of.kind.granularity in TOKEN_SCALES
    operand = torch.bfloat16 if token_scales else q.dtype  # the dtype that P is rounded to
    least = 0.0 if token_scales or case.v_cache.element_size() > 1 else P_CUT
    for work in visible_keys(
        batch,
        s_q,
        sizes,
        known,
        cache_seqlens=case.cache_seqlens,
        block_table=case.block_table,
        causal=case.causal,
        window=case.window,
        device=q.device,
        cache_starts=case.cache_starts,
        indices=case.indices,
        index_block=case.index_block,
    ):
        key_errors = noise.new_zeros((sizes.h_kv, len(work.positions)))
        for heads in work.head_chunks(sizes.h_kv, d):
            keys = keys_of.take(work.outer, work.rows, heads, q.dtype).float().permute(1, 2, 0)
            dtype = None if token_scales else operand
            values, scales = _value_operands(values_of, work.outer, work.rows, heads, groups, dtype)
            exact = values.double() if scales is None else values.double() * spread_groups(scales.double(), d)
            for query, own_position in enumerate(work.own_positions):
                seen = work.keys_seen(query, heads)
                distance = work.positions[seen] - own_position
                if not len(distance):
                    continue
                place = work.row, query, heads
                row_slopes = None if slopes is None else slopes[work.row, heads]
                scores = queries[place] @ keys[..., seen] * scale
                scores = modify_scores(scores, distance, case.softcap, row_slopes)
                row_max = scores.amax(dim=-1, keepdim=True)
                weights = torch.exp(scores - row_max)
                row_sum = weights.sum(dim=-1, keepdim=True)
                own_lse = row_max + row_sum.log()
                share = row_sum.reciprocal()
                if sinks is not None:
                    share = share * torch.sigmoid(own_lse - sinks[heads])
                own_scales = None if scales is None else scales[:, seen]
                kept = torch.where(weights < least, 0.0, weights)
                result = _rounded_product(kept, values[:, seen], own_scales, operand) * share
                out[place], lse[place] = result.to(q.dtype), own_lse.squeeze(-1)
                p, own = weights.double() * share, exact[:, seen]
                noise[place] = (rounding_variance(weights.double(), operand) @ own.square()).sqrt() * share
                projections = Projections.of(
                    finite_or_zero(result.double()), finite_or_zero(noise[place]), q.dtype, width
                )
                key_errors[heads, seen] += rounding_noise(operand) * projections.of_keys(p, own).sum(dim=1)
        if values_of.kind is not None and values_of.kind.granularity == "per_token":
            key_errors = key_errors.sum(dim=0)  # one scale changes a P of 1 in all heads alike
        shared[work.row] = key_errors.square().sum() / shared[work.row].numel()
    return Yardstick(*(tensor.flatten(2, 3) for tensor in (out, lse, noise, shared)))


TOKEN_SCALES: Final = ("per_token", "per_token_head", "per_group")
"""Granularities of value scales that multiply P before the product with codes. Other scales multiply the result."""


def _value_operands(
    cache: ScaledCache,
    outer: torch.Tensor,
    rows: torch.Tensor,
    heads: slice,
    groups: int,
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values (heads, n, d) float32 rounded to `dtype`; without a dtype, codes and their scales (heads, n, groups)."""
    if dtype is not None:
        return cache.take(outer, rows, heads, dtype).float().transpose(0, 1), None
    codes, scale = cache.parts(outer, rows, heads)
    assert scale is not None and cache.kind is not None
    if codes.dtype == torch.uint8:  # the vector before its rotation: an error of P is the same in both
        own = (scale.contiguous().view(torch.int32) & -16).view(torch.float32).unsqueeze(-1)
        return (cache.take(outer, rows, heads, torch.float64) / own).float().transpose(0, 1), own.transpose(0, 1)
    spread = spread_scale(scale.float(), cache.kind).expand(*codes.shape[:2], -1)
    return codes.float().transpose(0, 1), spread[..., :: max(1, spread.shape[-1] // groups)].transpose(0, 1)


def spread_groups(scales: torch.Tensor, d: int) -> torch.Tensor:
    """Scales (..., groups), repeated to (..., d)."""
    return scales.repeat_interleave(d // scales.shape[-1], dim=-1)


def _rounded_product(
    weights: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None, operand: torch.dtype
) -> torch.Tensor:
    """P V, (heads, rows, d) float32. P, or P times the scale of each key and group, is rounded to `operand` first."""
    if scales is None:
        return weights.to(operand).float() @ values
    parts = values.chunk(scales.shape[-1], dim=-1)
    scaled = [(weights * scale.unsqueeze(-2)).to(operand).float() for scale in scales.unbind(-1)]
    return torch.cat([one @ part for one, part in zip(scaled, parts, strict=True)], dim=-1)


def value_groups(v_scale: torch.Tensor | None, layout: CacheLayout) -> int:
    """Number of groups of d that have their own value scales; 1 if there are none."""
    return v_scale.shape[layout.scale_axes("per_group").index("g")] if v_scale is not None and v_scale.ndim == 4 else 1


@dataclass(frozen=True)
class GqaExpectation:
    """The expected results of a call: the oracle's, and the allowed error.

    out        (batch, s_q, h_q, d) float64
    lse        (batch, s_q, h_q) float64
    yardstick  the same call in the arithmetic of its output's dtype
    groups     groups of d that have value scales of their own, 1 if none have
    """

    out: torch.Tensor
    lse: torch.Tensor
    yardstick: Yardstick
    groups: int = 1

    @classmethod
    def of(cls, case: GqaCase) -> GqaExpectation:
        groups = value_groups(case.v_scale, LAYOUTS[case.layout])
        return cls(*reference_gqa_decode(**case.arguments()), gqa_yardstick(case), groups)

    def check(self, out: torch.Tensor, lse: torch.Tensor | None, *, name: str = "gqa_decode") -> Comparison:
        """Compares results with the expectation; the arguments are those of `check_gqa`."""
        width = self.out.shape[-1] // self.groups if self.groups > 1 else None
        return self.yardstick.compare(out, self.out, width=width, lse=lse, expected_lse=self.lse, name=name)


def check_gqa(out: torch.Tensor, lse: torch.Tensor | None, case: GqaCase, *, name: str = "gqa_decode") -> Comparison:
    """Compares a decode's results with the float64 oracle.

    Where values have scales per group, the elements of a group are judged among themselves.

    Args:
        out: (batch, s_q, h_q, d), what the kernel wrote.
        lse: (batch, s_q, h_q) float32 or None.
        name: first word of the message.
    """
    return GqaExpectation.of(case).check(out, lse, name=name)
