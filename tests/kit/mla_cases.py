"""Inputs for tests and benchmarks: caches, index lists, block tables and outputs, ordinary and adversarial.

Everything is drawn from a `torch.Generator` on the device it is made for, so a seed and a device name an input exactly.
Whatever no query may see is poisoned: bytes 0xFF, which is a NaN as an e4m3 code, as a float32 scale and as a bfloat16
rope element.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import torch

from fp8_mla import (
    FORMATS,
    FP8_MAX,
    NOPE_DIM,
    NUM_SCALES,
    QK_DIM,
    QUANT_TILE,
    ROPE_OFFSET,
    SCALE_OFFSET,
    TOKEN_BYTES,
    V_DIM,
    pack,
    write_pages,
)
from tests.kit.draws import generator, integers, normal, uniform

POISON_BYTE: Final = 0xFF
TOKENS_PER_CHUNK: Final = 1 << 18
"""Number of tokens made at a time: 600 MB of float32 latents."""
INT32_MAX: Final = 2**31 - 1
OUTLIER_CHANNELS: Final = (3, 77, 200, 301, 500)
OUTLIER_FACTOR: Final = 20.0

V3_2: Final = ("v3.2",)
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
"""Formats of one or two caches, and `cache_layout`: all that `mla_fp8_decode` takes, except one cache of V3.2."""
SCALE_KINDS: Final = ("absmax", "power_of_two", "arbitrary", "mixed", "rare")
"""How the scales of one cache of V3.2 are chosen:

absmax         N(0,1) latents quantized by `fp8_mla.pack`
power_of_two   like absmax, with every scale rounded up to a power of two: dequantization to bf16 is exact
arbitrary      like absmax, with every scale made larger by a random factor in [1, 2)
mixed          scales from 1e-30 to 1e30, between the four tiles of a token and between tokens within one tile column
rare           absmax, but one token in 97 has scales far above or below the others and one in 89 a huge rope part
"""
MIXED_DECADES: Final = (30.0, -30.0, 0.0, 12.0)
SIZE_KINDS: Final = ("absmax", "mixed", "rare")
"""How large the quant tiles are in the caches of `FORMS`, whose scales are those of `fp8_mla.pack`:

absmax  N(0,1) latents
mixed   columns of tiles differ by up to 2^12, and within a column some tokens are up to 2^8 smaller
rare    one token in 50 is 2^6 times the others, one in 50 is 2^-20 of them
"""
MIXED_EXPONENTS: Final = (0, 6, -6, 3)
QUERY_SIZE: Final = 3.0
"""Standard deviation of the logits that a query is drawn for. At this value the softmax is as peaked as in trained
models. A kernel must score exact keys to hold a log-sum-exp within 2e-5 here: scores summed in float32 are off by at
most 8e-6 for every kind of scale, keys rounded to bf16 by 2e-2 to 1e-1 (except for power_of_two)."""


def encode(tiles: torch.Tensor, scale: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Tokens with given scales, whereas `fp8_mla.pack` chooses scales itself.

    Args:
        tiles: (n, 4, 128) float32, the values *divided* by their scale; rounded to e4m3, saturating at 448.
        scale: (n, 4) float32.
        rope: (n, 64), rounded to bfloat16.

    Returns:
        (n, 656) uint8.
    """
    tokens = torch.empty((tiles.shape[0], TOKEN_BYTES), dtype=torch.uint8, device=tiles.device)
    codes = tiles.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    tokens[:, :SCALE_OFFSET] = codes.view(torch.uint8).flatten(1)
    tokens[:, SCALE_OFFSET:ROPE_OFFSET] = scale.float().contiguous().view(torch.uint8)
    tokens[:, ROPE_OFFSET:] = rope.bfloat16().contiguous().view(torch.uint8)
    return tokens


def latent_tokens(n: int, gen: torch.Generator, *, scales: str = "absmax", outliers: bool = False) -> torch.Tensor:
    """(n, 656) uint8 random tokens, none of them poisoned.

    Args:
        scales: one of `SCALE_KINDS`.
        outliers: multiply five channels by 20, as trained models have them. Not with "mixed".
    """
    if scales not in SCALE_KINDS:
        raise ValueError(f"scales: got {scales!r}, needs one of {', '.join(SCALE_KINDS)}")
    tokens = torch.empty((n, TOKEN_BYTES), dtype=torch.uint8, device=gen.device)
    for start in range(0, n, TOKENS_PER_CHUNK):
        part = tokens[start : start + TOKENS_PER_CHUNK]
        part.copy_(_chunk_of_tokens(len(part), gen, scales, outliers))
    return tokens


def _chunk_of_tokens(n: int, gen: torch.Generator, scales: str, outliers: bool) -> torch.Tensor:
    latents = normal((n, QK_DIM), gen)
    tiles, rope = latents[:, :NOPE_DIM].view(n, NUM_SCALES, QUANT_TILE), latents[:, NOPE_DIM:]
    if scales == "mixed":
        return encode(tiles * 64, _mixed_scales(n, gen), rope)
    if outliers:
        latents[:, list(OUTLIER_CHANNELS)] *= OUTLIER_FACTOR
    absmax = tiles.abs().amax(dim=-1) / FP8_MAX
    if scales == "power_of_two":
        # rounds up to a power of two in the bits, which is exact on every device
        scale = ((absmax.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    elif scales == "arbitrary":
        scale = absmax * (1 + uniform(absmax.shape, gen))
    elif scales == "rare":
        # scales stay below 200 or above 400: e4m3's smallest codes, 2^-30 to 2^-29, would leave float16's range
        far = uniform(absmax.shape, gen) + 1
        above = uniform((n, 1), gen) < 0.5
        factor = torch.where(above, 200.0, torch.full_like(far[:, :1], 2.0**-30))
        scale = torch.where(uniform((n, 1), gen) < 1 / 97, far * factor, absmax)
        rope = torch.where(uniform((n, 1), gen) < 1 / 89, rope * 2.0**17, rope)
    else:
        return pack(latents)
    return encode(tiles / scale.unsqueeze(-1), scale, rope)


def _mixed_scales(n: int, gen: torch.Generator) -> torch.Tensor:
    """(n, 4): a base size for each tile column, and tokens that are a few decades or up to 60 decades smaller."""
    base = torch.tensor(MIXED_DECADES, dtype=torch.float32, device=gen.device)
    kind, depth = uniform((n, NUM_SCALES), gen), uniform((n, NUM_SCALES), gen)
    drop = torch.where(kind < 0.5, 0.0, torch.where(kind < 0.8, 4 * depth, 60 * depth))
    mantissa = 1 + uniform((n, NUM_SCALES), gen)
    return torch.pow(10.0, (base - drop).clamp_min(-36.0)) * mantissa


def query_factor(scales: str, device: torch.device | str = "cpu", *, size: float = QUERY_SIZE) -> torch.Tensor:
    """(576,) float32. N(0,1) times these factors is a query whose logits have the standard deviation `size`.

    Args:
        scales: one of `SCALE_KINDS`.
        size: standard deviation of the logits.
    """
    factor = torch.full((QK_DIM,), size, dtype=torch.float32, device=device)
    if scales == "mixed":
        sizes = [64 * 10.0**decade for decade in MIXED_DECADES]
        largest = torch.tensor(sizes, dtype=torch.float32, device=device)
        factor[:NOPE_DIM] /= largest.repeat_interleave(QUANT_TILE)
    if scales == "rare":
        factor[NOPE_DIM:] *= 2.0**-17
        factor[:NOPE_DIM] /= 2.0  # tokens with scales around 300 hold e4m3's coarsest values, around +-1
    return factor


def tokens_of(n: int, name: str, gen: torch.Generator, sizes: str = "absmax") -> torch.Tensor:
    """(n, bytes) uint8 random tokens of a format, as `fp8_mla.pack` returns them; `sizes` is one of `SIZE_KINDS`."""
    latents = normal((n, FORMATS[name].d_qk), gen)
    drawn = uniform((n, 1), gen)
    if sizes == "mixed":
        latents *= _columns(latents.shape[1], gen.device) * torch.exp2(-(8 * drawn).floor())
    elif sizes == "rare":
        latents *= torch.where(drawn < 0.02, 64.0, torch.where(drawn > 0.98, 2.0**-20, torch.ones_like(drawn)))
    return pack(latents.bfloat16(), token_format=name)


def _columns(d_qk: int, device: torch.device | str) -> torch.Tensor:
    """(d_qk,): a power of two for each 128 neighbouring elements."""
    exponents = torch.tensor(MIXED_EXPONENTS, dtype=torch.float32, device=device)
    columns = torch.ones(d_qk, dtype=torch.float32, device=device)
    columns[:512] = torch.exp2(exponents).repeat_interleave(128)
    return columns


def strided(values: torch.Tensor, fill: float = float("nan")) -> torch.Tensor:
    """The values in a larger buffer full of `fill`: not contiguous, last stride 1, rows aligned to 16 bytes."""
    shape = values.shape
    buffer = values.new_full((shape[0] + 1, *(size + 2 for size in shape[1:-1]), shape[-1] + 64), fill)
    window = [slice(1, None), *(slice(1, 1 + size) for size in shape[1:-1]), slice(0, shape[-1])]
    view = buffer[tuple(window)]
    view.copy_(values)
    return view


class PoisonedOutput:
    """An output buffer full of NaN that keeps a copy of itself, so that it can find stray writes.

    tensor   the view to pass as `out=` or `lse=`; not contiguous when `padded`, its rows at multiples of 16 bytes
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, *, padded: bool) -> None:
        clean = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.tensor = strided(clean) if padded else clean
        self._storage = torch.empty(0, dtype=torch.uint8, device=device).set_(self.tensor.untyped_storage())
        self._before = self._storage.clone()

    def poison(self) -> None:
        """Fills the buffer with NaN again, for a second call."""
        self._storage.copy_(self._before)

    def require_no_stray_writes(self) -> None:
        """Raises AssertionError if a byte outside the view changed."""
        kept = self.tensor.clone()
        self.tensor.fill_(float("nan"))
        changed = int((self._storage != self._before).sum())
        self.tensor.copy_(kept)
        if changed:
            raise AssertionError(f"{changed} bytes around an output of {tuple(self.tensor.shape)} were overwritten")


@dataclass(frozen=True)
class DecodeCase:
    """One call of `mla_fp8_decode`. The tensors are those of its docstring."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    indices: torch.Tensor | None = None
    topk_length: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    cache_seqlens: torch.Tensor | None = None
    causal: bool = True
    softmax_scale: float | None = None
    s_aux: torch.Tensor | None = None
    cache_format: str | None = None
    cache_layout: str | None = None
    extra_kv_cache: torch.Tensor | None = None
    extra_indices: torch.Tensor | None = None
    extra_topk_length: torch.Tensor | None = None
    extra_cache_format: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Arguments by name, as the decode, the oracle and the emulation take them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def options(self) -> dict[str, Any]:
        """The keyword arguments: those other than q and kv_cache."""
        return {name: value for name, value in self.arguments().items() if name not in ("q", "kv_cache")}

    def rows(self, rows: Sequence[int]) -> DecodeCase:
        """The call for some of the batch rows only, over the whole cache."""
        pick = torch.tensor(list(rows), dtype=torch.long, device=self.q.device)
        per_row = (
            "q", "indices", "topk_length", "block_table", "cache_seqlens", "extra_indices", "extra_topk_length",
        )  # fmt: skip
        chosen = {name: getattr(self, name)[pick] for name in per_row if getattr(self, name) is not None}
        return dataclasses.replace(self, **chosen)

    def outputs(self, *, padded: bool = False) -> tuple[PoisonedOutput, PoisonedOutput]:
        shape = self.q.shape[:3]
        out = PoisonedOutput((*shape, V_DIM), torch.bfloat16, self.q.device, padded=padded)
        return out, PoisonedOutput(tuple(shape), torch.float32, self.q.device, padded=padded)


def sparse_case(
    *,
    formats: Sequence[str] = V3_2,
    cache_layout: str | None = None,
    batch: int,
    h_q: int,
    s_q: int = 1,
    topk: int = 64,
    extra_topk: int = 0,
    page_size: int = 64,
    extra_page_size: int = 2,
    num_slots: int = 4096,
    scales: str = "absmax",
    outliers: bool = False,
    invalid: bool = True,
    lengths: str = "none",
    sink: str = "none",
    padded: bool = True,
    query_size: float = QUERY_SIZE,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> DecodeCase:
    """A sparse decode over one or two caches, whose index lists hold everything that the contract allows.

    A quarter of the slots is poisoned. Lists are drawn with repetition from the others. With `invalid`, a tenth of the
    entries is out of range (negative, at the cache's end, the extremes of int32) and every seventh query has no valid
    entry at all. Entries past `topk_length` point at poisoned slots.

    Args:
        formats: format of the cache, or formats of both caches.
        cache_layout: layout of their pages.
        s_q: queries of each request.
        topk: entries of each query's list.
        extra_topk: entries of its list for the second cache.
        extra_page_size: tokens of a page of the second cache.
        num_slots: tokens of each cache, rounded up to whole pages.
        scales: one of `SCALE_KINDS` for a single V3.2 cache, otherwise one of `SIZE_KINDS`.
        outliers: as in `latent_tokens`, for a single V3.2 cache only.
        invalid: whether lists have invalid entries.
        lengths: "none", or a `topk_length` per "batch" row or per "query": 0, 1, topk, more, negative, random.
        sink: "none", "finite", or "inf": finite ones with some +inf and some -inf among them.
        padded: whether q, indices and the caches' pages are not contiguous.
        query_size: approximate standard deviation of the logits.
    """
    gen = generator(seed, device)
    given: dict[str, Any] = {}
    sizes = zip(("", "extra_"), formats, (topk, extra_topk), (page_size, extra_page_size), strict=False)
    for prefix, name, width, tokens in sizes:
        num_pages = max(1, -(-num_slots // tokens))
        slots = num_pages * tokens
        good = torch.randperm(slots, generator=gen, dtype=torch.int64, device=gen.device)[: max(1, slots * 3 // 4)]
        packed = _tokens(len(good), name, formats, gen, scales, outliers)
        indices, length = index_lists(good, slots, (batch, s_q, width), gen, invalid=invalid, lengths=lengths)
        given |= {
            f"{prefix}kv_cache": paged(num_pages, tokens, good, packed, name, cache_layout, padded=padded),
            f"{prefix}indices": strided_int(indices) if padded else indices,
            f"{prefix}topk_length": length,
            **_named(formats, f"{prefix}cache_format", name),
        }
    return DecodeCase(
        q=_query((batch, s_q, h_q), formats, gen, scales, query_size, padded),
        s_aux=sink_logits(h_q, sink, gen),
        cache_layout=cache_layout,
        **given,
    )


def _named(formats: Sequence[str], argument: str, name: str) -> dict[str, str]:
    """The `cache_format` argument, which a call over one cache of V3.2 does not need."""
    return {} if tuple(formats) == V3_2 else {argument: name}


def index_lists(
    good: torch.Tensor,
    num_slots: int,
    shape: tuple[int, int, int],
    gen: torch.Generator,
    *,
    invalid: bool,
    lengths: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Indices (batch, s_q, topk), and `topk_length` or None, as `sparse_case` says; `good` slots hold no poison."""
    batch, s_q, topk = shape
    indices = good[integers(0, len(good), (batch, s_q, topk), gen)].int()
    if invalid:
        beyond = [-1, -(2**31), num_slots, num_slots + 1, INT32_MAX]
        out_of_range = torch.tensor(beyond, dtype=torch.int64, device=gen.device).int()
        choice = integers(0, len(out_of_range), indices.shape, gen)
        drop = uniform(indices.shape, gen) < 0.1
        drop.view(batch * s_q, topk)[3::7] = True
        indices = torch.where(drop, out_of_range[choice], indices)
    topk_length = None
    if lengths != "none":
        rows = {"batch": (batch,), "query": (batch, s_q)}[lengths]
        topk_length = integers(0, topk + 1, rows, gen).int()
        boundaries = torch.tensor([topk, 0, 1, topk + 5, -3, topk - 1], dtype=torch.int32, device=gen.device)
        flat = topk_length.view(-1)
        flat[: len(boundaries)] = boundaries[: len(flat)]
        limit = topk_length.view(batch, -1, 1)
        bad = _complement(good, num_slots)
        if len(bad):
            is_past_end = torch.arange(topk, dtype=torch.int64, device=gen.device) >= limit
            lure = bad[integers(0, len(bad), indices.shape, gen)].int()
            indices = torch.where(is_past_end, lure, indices)
    return indices, topk_length


def dense_case(
    *,
    cache_format: str = "v3.2",
    cache_layout: str | None = None,
    seqlens: Sequence[int],
    h_q: int,
    s_q: int = 1,
    page_size: int = 64,
    causal: bool = True,
    scales: str = "absmax",
    outliers: bool = False,
    sink: str = "none",
    padded: bool = True,
    query_size: float = QUERY_SIZE,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> DecodeCase:
    """A dense decode over the pages of a `block_table`.

    Slots that no sequence uses are poisoned, also those at the end of its last page.

    Args:
        cache_format: format of the cache.
        cache_layout: layout of its pages.
        seqlens: tokens of each sequence, 0 allowed; their number is the batch.
        s_q: queries of each request.
        causal: as the decode takes it.
        scales, outliers, sink, query_size: as in `sparse_case`.
        padded: whether q, block table and the cache's pages are not contiguous.
    """
    gen, formats = generator(seed, device), (cache_format,)
    batch, lengths = len(seqlens), torch.tensor(list(seqlens), dtype=torch.int64, device="cpu")
    table, num_pages = block_table(lengths, page_size, gen)
    offsets = torch.arange(table.shape[1] * page_size, dtype=torch.int64, device="cpu")
    slots = table.repeat_interleave(page_size, dim=1) * page_size + offsets % page_size
    used = slots[offsets < lengths.unsqueeze(1)].to(gen.device)
    table, lengths = table.int().to(gen.device), lengths.int().to(gen.device)
    packed = _tokens(len(used), cache_format, formats, gen, scales, outliers)
    return DecodeCase(
        q=_query((batch, s_q, h_q), formats, gen, scales, query_size, padded),
        kv_cache=paged(num_pages, page_size, used, packed, cache_format, cache_layout, padded=padded),
        block_table=strided_int(table) if padded else table,
        cache_seqlens=lengths,
        causal=causal,
        s_aux=sink_logits(h_q, sink, gen),
        cache_layout=cache_layout,
        **_named(formats, "cache_format", cache_format),
    )


def block_table(
    lengths: torch.Tensor, page_size: int, gen: torch.Generator, *, bad_entries: bool = False
) -> tuple[torch.Tensor, int]:
    """A table of shuffled pages, (batch, width) int64 on the CPU, and the number of pages.

    It is two entries wider than the longest sequence needs. Entries past a sequence's end are garbage: out of range, or
    another sequence's page, or one that no sequence has. With `bad_entries`, a tenth of the others is out of range.
    """
    pages_of = -(-lengths // page_size)
    needed, spare = int(pages_of.sum()), 3
    num_pages, width = needed + spare, (int(pages_of.max()) if len(lengths) else 0) + 2
    shuffled = torch.randperm(num_pages, generator=gen, dtype=torch.int64, device=gen.device).cpu()
    out_of_range = torch.tensor([-1, -(2**31), num_pages, num_pages + 1, INT32_MAX], dtype=torch.int64, device="cpu")
    garbage = torch.cat([out_of_range, shuffled[[0, -1]]])

    def choice(entries: torch.Tensor) -> torch.Tensor:
        places = integers(0, len(entries), (len(lengths), width), gen)
        return entries[places.cpu()]

    table = choice(garbage)
    table[torch.arange(width, dtype=torch.int64, device="cpu") < pages_of.unsqueeze(1)] = shuffled[:needed]
    if bad_entries:
        bad = uniform(table.shape, gen).cpu() < 0.1
        table = torch.where(bad, choice(out_of_range), table)
    return table, num_pages


def sink_logits(h_q: int, kind: str, gen: torch.Generator) -> torch.Tensor | None:
    """(h_q,) float32 sinks: None for "none", the size of a log-sum-exp for "finite", with infinities for "inf"."""
    if kind == "none":
        return None
    sinks = 3 * normal((h_q,), gen) + 3
    if kind == "inf":
        sinks[::3] = -torch.inf
        sinks[1::3] = torch.inf
    return sinks


def ragged_lengths(batch: int, longest: int, page_size: int, seed: int) -> list[int]:
    """Sequence lengths up to `longest`: 0, lengths around every border (tiles of 64 keys, pages), and random ones."""
    boundaries = {0, 1, 2, longest}
    for unit in (64, 128, page_size, 2 * page_size):
        boundaries |= {unit - 1, unit, unit + 1}
    fixed = sorted(length for length in boundaries if 0 <= length <= longest)
    rng = random.Random(seed)
    rng.shuffle(fixed)
    return fixed[:batch] + [rng.randint(0, longest) for _ in range(batch - len(fixed))]


def covering_cases(factors: Mapping[str, Sequence[Hashable]], seed: int = 0) -> list[dict[str, Any]]:
    """Few combinations in which every *pair* of values of two factors occurs at least once.

    Greedy and seeded: the same arguments give the same list. A full product of seven factors has hundreds of thousands
    of combinations; the pairs need about as many cases as the two longest factors multiply to.
    """
    rng = random.Random(seed)
    names = list(factors)
    todo = {
        ((a, left), (b, right)): None for a, b in combinations(names, 2) for left in factors[a] for right in factors[b]
    }
    cases = []
    while todo:
        (a, left), (b, right) = next(iter(todo))
        candidates = []
        for _ in range(40):
            case = {name: rng.choice(list(values)) for name, values in factors.items()}
            case.update({a: left, b: right})
            candidates.append(case)
        best = max(candidates, key=lambda case: sum(pair in todo for pair in combinations(case.items(), 2)))
        for pair in combinations(best.items(), 2):
            todo.pop(pair, None)
        cases.append(best)
    return cases


def paged(
    num_pages: int,
    page_size: int,
    used: torch.Tensor,
    packed: torch.Tensor,
    name: str,
    cache_layout: str | None,
    *,
    padded: bool = True,
) -> torch.Tensor:
    """(num_pages, page_size, bytes) with tokens of a format in the slots of `used` and poison in all others.

    Pages are as far apart as their bytes and 16-byte alignment need; if padded, 48 bytes further.
    """
    size = FORMATS[name].token_bytes
    page_bytes = page_size * size
    stride = page_bytes + -page_bytes % 16 + (48 if padded else 0)
    memory = torch.full((num_pages, stride), POISON_BYTE, dtype=torch.uint8, device=packed.device)
    pages = memory[:, :page_bytes].view(num_pages, page_size, size)
    write_pages(pages, used, packed, token_format=name, cache_layout=cache_layout)
    return pages


def _tokens(
    n: int, name: str, formats: Sequence[str], gen: torch.Generator, scales: str, outliers: bool
) -> torch.Tensor:
    if tuple(formats) == V3_2:
        return latent_tokens(n, gen, scales=scales, outliers=outliers)
    if outliers:
        raise ValueError(f"outliers: got True, needs False for {' and '.join(formats)}")
    return tokens_of(n, name, gen, scales)


def _query(
    shape: tuple[int, ...], formats: Sequence[str], gen: torch.Generator, scales: str, query_size: float, padded: bool
) -> torch.Tensor:
    """(*shape, d_qk) queries whose logits have a standard deviation of about `query_size`."""
    d_qk = FORMATS[formats[0]].d_qk
    q = normal((*shape, d_qk), gen)
    if tuple(formats) == V3_2:
        q *= query_factor(scales, gen.device, size=query_size)
    else:
        # this counts large tokens, too: a probability below 2^-31 of the largest is 0 in float16
        q *= query_size / 64 if scales == "rare" else query_size
        q /= _columns(d_qk, gen.device) if scales == "mixed" else 1
    return strided(q.bfloat16()) if padded else q.bfloat16()


def _complement(chosen: torch.Tensor, size: int) -> torch.Tensor:
    rest = torch.ones(size, dtype=torch.bool, device=chosen.device)
    rest[chosen] = False
    return rest.nonzero().squeeze(1)


def strided_int(values: torch.Tensor) -> torch.Tensor:
    """The int32 values with a larger row stride; between the rows are numbers that would be wild slots."""
    wide = values.new_full((*values.shape[:-1], values.shape[-1] + 3), INT32_MAX)
    view = wide[..., : values.shape[-1]]
    view.copy_(values)
    return view
