"""Hypothesis strategies of calls: the cases of `tests.kit` with random sizes, options and values.

Facts that decide a kernel are drawn from lists whose kernels are compiled before: `kernel_specs`. A call whose plan
asks for another kernel is left out, see `rounds`. On a CPU sizes are small.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from hypothesis import strategies as st

from bench import kernels_run
from bench.fuzzing.calls import Call, Mode
from bench.fuzzing.memory import Image, contiguous_stride, padded_stride
from cute_kernels.gqa.append_spec import PER_TOKEN_HEAD, KvAppendSpec
from cute_kernels.gqa.blocks_plan import INDEX_BLOCKS
from cute_kernels.gqa.codes import INT8, KINDS, ROTATED_KINDS, values_of
from cute_kernels.gqa.layouts import LAYOUTS, ROTATED_DIMS, CacheSizes, Which, scale_shapes
from cute_kernels.gqa.reference import reference_append
from cute_kernels.gqa.spec import CLUSTERS, GqaDecodeSpec
from cute_kernels.merge.spec import MergeSpec
from cute_kernels.mla import spec as mla_spec
from cute_kernels.mla.plan import EXCHANGES
from cute_kernels.sink import backward_spec as sink_backward_spec
from cute_kernels.sink import spec as sink_spec
from fp8_mla.formats import FORMATS, V3_2
from tests.kit import covering
from tests.kit.append_pages import FORMS, append_to
from tests.kit.block_lists import listed_case
from tests.kit.compare import Comparison, bits, check_decode
from tests.kit.draws import generator, integers, normal, uniform
from tests.kit.gqa_cases import SCALE_NAMES, VALUES, GqaCase, check_gqa, gqa_case
from tests.kit.merging import merge_problems
from tests.kit.mla_cases import FORMS as LATENT_FORMS
from tests.kit.mla_cases import SCALE_KINDS, SIZE_KINDS, DecodeCase, dense_case, sparse_case
from tests.kit.sink_cases import SINKS as SINKS_OF_ATTENTION
from tests.kit.sink_cases import SinkCase, SinkExpectation, sink_case
from tests.kit.values import FAMILIES, refill

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
HEADS: Final = (1, 2, 7, 8, 16, 17, 32, 33, 64, 65, 96, 100, 127, 128)
TOPKS: Final = (1, 2, 63, 64, 65, 127, 128, 129, 200, 576)
LARGE_TOPKS: Final = (2048, 4096, 16_384)
PAGE_SIZES: Final = (1, 2, 16, 61, 64, 576)
SPLITS: Final = (None, None, None, None, 1, 2, 3, 8, 32, 64, 128, 256)
SINKS: Final = ("none", "finite", "inf")
WINDOWS: Final = (None, None, None, 1, 2, 63, 64, 65, 100, 1000, INT32_MAX)
BLOCK_PAGES: Final = (64, 128, 256)
LATENT_HEADS: Final = (16, 64)
"""Heads of a CTA: with more values the list of kernels would double."""
MERGES: Final = (
    (512, "float32", "bfloat16", True),
    (512, "float32", "bfloat16", False),
    (512, "bfloat16", "bfloat16", False),
    (512, "float32", "float32", True),
    (128, "bfloat16", "bfloat16", False),
    (128, "float16", "float16", True),
    (64, "float32", "float32", False),
    (72, "bfloat16", "bfloat16", True),
    (8, "float16", "float16", False),
)
"""(d, dtype of the states, dtype of the output, whether there are sinks)."""
MERGE_SIZES: Final = ((8, 2), (40, 20), (2048, 3))
"""(rows, states): each pair runs another variant of the kernel."""
MOST_PARTIALS: Final = 1 << 28
"""Float32 values of partial results of a call, 1 GB: 7 GB in each of seven threads and its graphs filled an H200."""
MAX_SCORES: Final = 1 << 21
"""Most scores of a sink attention call whose every gradient is compared; of larger calls only some rows are."""
DECODE_MODES: Final = (
    Mode(("out", "lse"), ("out", "lse")),
    Mode(("out", "lse"), ("out",)),
    Mode(("out",), ("out",)),
    Mode(("out",), ("out", "lse")),
    Mode(("lse",), ("out",)),
    Mode((), ("out", "lse")),
    Mode((), ("out",)),
)
MERGE_MODES: Final = tuple(Mode(given, ("out", "lse")) for given in (("out", "lse"), ("out",), ("lse",), ()))
GRADIENTS: Final = ("out", "dq", "dk", "dv", "ds_aux")
seeds = st.integers(0, 2**31)


def kernel_specs() -> list[Any]:
    """Returns every kernel that calls may launch. They are compiled first, so that no call waits for the compiler."""
    latent = [spec for spec in mla_spec.specs_of_formats() if spec.heads in LATENT_HEADS]
    merges = [
        MergeSpec.for_launch(rows=rows, num_states=n, d=d, in_dtype=inner, out_dtype=outer, has_sink=sink)
        for d, inner, outer, sink in MERGES
        for rows, n in MERGE_SIZES
    ]
    sinks = [*sink_spec.launched_specs("bfloat16"), *sink_backward_spec.launched_specs("bfloat16")]
    appends = [
        KvAppendSpec.for_launch(
            dtype="bfloat16",
            d=d,
            h_kv=1,
            k_scale=PER_TOKEN_HEAD,
            v_scale=PER_TOKEN_HEAD,
            scale_dtype="float32",
            kind=kind,
        )
        for d, kind in itertools.product((64, 128, 256), KINDS)
    ]
    chosen = [*kernels_run.shipped_specs(), *covering.all_specs(), *latent, *merges, *sinks, *appends, *_block_specs()]
    return list(dict.fromkeys(chosen))


def _block_specs() -> list[GqaDecodeSpec]:
    """Returns the kernels that decode the tables of `gqa_blocks`."""
    plain = GqaDecodeSpec("bfloat16", "bfloat16", 128, 16, layout="tokens_first", paged=True)
    scaled = dataclasses.replace(plain, kv_dtype="int8", k_scales="per_token", v_scales="per_token")
    return [
        dataclasses.replace(spec, box_rows=box_rows, cluster=cluster)
        for spec in (plain, scaled)
        for box_rows in sorted({min(rows, block) for rows in BLOCK_PAGES for block in INDEX_BLOCKS})
        for cluster in (1, *CLUSTERS)
    ]


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    """Draws one of the values; a value that is listed n times is n times as likely."""
    return st.sampled_from(values)


def chance(percent: int) -> st.SearchStrategy[bool]:
    """Draws True with this probability."""
    return st.integers(0, 99).map(lambda drawn: drawn >= 100 - percent)


def _batch(on_gpu: bool) -> st.SearchStrategy[int]:
    return one_of(*(1, 2, 3, 4, 5, 8) * 5, 17, 40, 74, 150) if on_gpu else one_of(1, 2, 3)


@st.composite
def _lengths(draw: st.DrawFn, batch: int, longest: int, unit: int) -> list[int]:
    """Draws a length for each sequence; 40% are at borders: 0, 1, 2, the longest, the end of a tile or page +- 1."""
    edges = [edge + step for edge in (64, 128, unit, 2 * unit) for step in (-1, 0, 1)]
    borders = [length for length in (0, 1, 2, longest, *edges) if 0 <= length <= longest]
    length = st.integers(0, 9).flatmap(lambda n: st.sampled_from(borders) if n < 4 else st.integers(0, longest))
    return draw(st.lists(length, min_size=batch, max_size=batch))


def _extreme(draw: st.DrawFn, lengths: torch.Tensor, capacity: int) -> torch.Tensor:
    """Makes lengths extreme without a change of meaning: 0 may become negative, the capacity any larger number."""
    beyond, below = draw(one_of(0, 1, 1000, INT32_MAX - capacity)), draw(one_of(0, -1, -5, INT32_MIN))
    lengths = torch.where(lengths == capacity, capacity + beyond, lengths)
    return torch.where(lengths == 0, below, lengths).int()


def _stride(draw: st.DrawFn, shape: Sequence[int], unit: int, percent: int = 50) -> tuple[int, ...]:
    if not draw(chance(percent)):
        return contiguous_stride(shape)
    gap = one_of(0, 0, 1, 3)
    return padded_stride(shape, unit, draw(st.lists(gap, min_size=len(shape), max_size=len(shape))))


def _spread(draw: st.DrawFn, values: torch.Tensor, unit: int) -> torch.Tensor:
    """Copies values, perhaps with gaps between rows."""
    stride = _stride(draw, values.shape, unit)
    return torch.empty_strided(values.shape, stride, dtype=values.dtype, device=values.device).copy_(values)


def _decode_image(draw: st.DrawFn, q: torch.Tensor, d: int) -> Image:
    shape, align = (*q.shape[:3], d), 16 if d == 512 else 8
    out = (q.dtype, shape, _stride(draw, shape, align // 2), align)
    return Image.of_outputs({"out": out, "lse": (torch.float32, shape[:3], _stride(draw, shape[:3], 1), 4)}, q.device)


def _problems(comparison: Comparison) -> list[str]:
    return [f"{comparison.name}: {problem}" for problem in comparison.problems]


def _rows(draw: st.DrawFn, batch: int) -> list[int]:
    """Draws the batch rows that the oracle checks."""
    return sorted(draw(st.sets(st.integers(0, batch - 1), min_size=1, max_size=3))) if batch else []


# ---- MLA


@st.composite
def mla_decode(draw: st.DrawFn, device: torch.device) -> Call:
    """Draws a decode over one latent cache, or over two in one softmax."""
    on_gpu = device.type == "cuda"
    formats, layout = draw(one_of(*[((V3_2.name,), None)] * 2 * len(LATENT_FORMS), *LATENT_FORMS))
    large = on_gpu and draw(chance(4))
    sparse = len(formats) > 1 or draw(st.booleans())
    make = _mla_sparse(formats, layout, large, device) if sparse else _mla_dense(formats[0], layout, large, device)
    case = draw(make)
    if draw(chance(30)):
        case = refill(case, draw(one_of(*FAMILIES)), seed=draw(seeds))
    case = _mla_varied(draw, case)
    given = case.kv_cache.unsqueeze(2) if draw(chance(30)) else case.kv_cache
    given = given.view(torch.float8_e4m3fn) if draw(chance(30)) else given
    forced = {"num_splits": draw(one_of(*SPLITS))}
    if formats == (V3_2.name,):
        forced["exchange"] = draw(one_of(None, None, *EXCHANGES))
    rows = _rows(draw, len(case.q))

    def oracle(values: Mapping[str, torch.Tensor]) -> list[str]:
        if not rows:
            return []
        return _problems(check_decode(values["out"][rows], values["lse"][rows], **case.rows(rows).arguments()))

    arguments = {**case.arguments(), **forced, "kv_cache": given}
    return Call("mla_fp8_decode", arguments, _decode_image(draw, case.q, 512), DECODE_MODES, oracle)


@st.composite
def _mla_sparse(
    draw: st.DrawFn, formats: tuple[str, ...], layout: str | None, large: bool, device: torch.device
) -> DecodeCase:
    batch, s_q = draw(_batch(device.type == "cuda")), draw(one_of(1, 1, 1, 2, 3, 5))
    topks = [draw(one_of(*TOPKS)) for _ in formats]
    if large:
        topks = [draw(one_of(*LARGE_TOPKS)) for _ in formats]
        batch = min(batch, 8) if max(topks) == LARGE_TOPKS[-1] else batch
    elif device.type != "cuda" or batch * s_q > 16:
        topks = [min(topk, 200 if device.type == "cuda" else 65) for topk in topks]
    options: dict[str, Any] = {
        "batch": batch,
        "h_q": draw(one_of(*HEADS)),
        "s_q": s_q,
        "topk": topks[0],
        "page_size": draw(one_of(*PAGE_SIZES)),
        "num_slots": 20_000 if large else 2000,
        "invalid": draw(chance(70)),
        "lengths": draw(one_of("none", "batch", "query")),
        "sink": draw(one_of(*SINKS)),
        "padded": draw(st.booleans()),
        "seed": draw(seeds),
        "device": device,
    }
    second = {"extra_topk": topks[-1], "extra_page_size": draw(one_of(*PAGE_SIZES))} if len(formats) > 1 else {}
    case = sparse_case(formats=formats, cache_layout=layout, **options, **second, **_scales(draw, formats))
    if case.topk_length is not None:
        case = dataclasses.replace(case, topk_length=_extreme(draw, case.topk_length, topks[0]))
    return case


@st.composite
def _mla_dense(draw: st.DrawFn, name: str, layout: str | None, large: bool, device: torch.device) -> DecodeCase:
    batch, page_size = draw(_batch(device.type == "cuda")), draw(one_of(*PAGE_SIZES))
    longest = draw(one_of(1, 63, 64, 130, *((576,) if device.type == "cuda" and batch <= 16 else ())))
    if large:
        batch, longest = draw(one_of((74, 2500), (16, 8192), (1, 65_536)))
    options: dict[str, Any] = {
        "seqlens": [longest, *draw(_lengths(batch - 1, longest, page_size))],
        "h_q": draw(one_of(*HEADS)),
        "s_q": draw(one_of(1, 1, 2, 3, 4)),
        "page_size": page_size,
        "causal": draw(chance(70)),
        "sink": draw(one_of(*SINKS)),
        "padded": draw(st.booleans()),
        "seed": draw(seeds),
        "device": device,
    }
    case = dense_case(cache_format=name, cache_layout=layout, **options, **_scales(draw, (name,)))
    table = case.block_table
    assert table is not None and case.cache_seqlens is not None
    if longest % page_size == 0 and draw(st.booleans()):
        table = table[:, : longest // page_size]  # the longest sequence fills the table
    lengths = _extreme(draw, case.cache_seqlens, table.shape[1] * page_size)
    return dataclasses.replace(case, block_table=table, cache_seqlens=lengths)


def _scales(draw: st.DrawFn, formats: tuple[str, ...]) -> dict[str, Any]:
    if formats == (V3_2.name,):
        return {"scales": draw(one_of(*SCALE_KINDS)), "outliers": draw(chance(20))}
    return {"scales": draw(one_of(*SIZE_KINDS))}


def _mla_varied(draw: st.DrawFn, case: DecodeCase) -> DecodeCase:
    """Sometimes drops an argument, sometimes changes the softmax scale."""
    index = "block_table" if case.indices is None else "indices"
    nothing = {
        "requests": lambda: case.rows([]),
        "pages": lambda: dataclasses.replace(case, kv_cache=case.kv_cache[:0]),
        "keys": lambda: dataclasses.replace(case, **{index: getattr(case, index)[..., :0]}),
    }
    if draw(chance(6)):
        case = nothing[draw(one_of(*nothing))]()
    if case.extra_indices is not None and draw(chance(10)):
        case = dataclasses.replace(case, extra_indices=case.extra_indices[..., :0])
    if draw(chance(30)):
        scale = case.q.shape[-1] ** -0.5 * draw(one_of(0.25, 0.5, 1.0))
        case = dataclasses.replace(case, softmax_scale=scale)
    return case


@st.composite
def mla_append(draw: st.DrawFn, device: torch.device) -> Call:
    """Draws new tokens for a cache of random bytes."""
    gen = generator(draw(seeds), device)
    tokens = draw(one_of(0, 1, 2, 7, 31, 64, 65, 200, *((5000,) if device.type == "cuda" else ())))
    page_size = draw(one_of(*PAGE_SIZES))
    pages = -(-(tokens + draw(one_of(0, 1, 40))) // page_size)
    cache_format, cache_layout = draw(one_of((V3_2.name, None), *FORMS))
    made = FORMATS[cache_format]
    layout, size = made.page_layout(page_size, cache_layout), made.token_bytes
    shape = (pages, page_size, size)
    cache = integers(0, 256, shape, gen, torch.uint8)
    stride = (-(-page_size * size // 16) * 16 + 16 * draw(one_of(0, 1, size // 8)), size, 1)
    kv = _special(draw, normal((tokens, made.d_qk), gen)).bfloat16()
    kv = _spread(draw, kv, 8)
    slots = _slots(draw, tokens, pages * page_size, device)
    spread = torch.empty_strided(shape, stride, dtype=torch.uint8, device=device).copy_(cache)
    image = Image.of_tensors({"kv_cache": spread})

    def oracle(values: Mapping[str, torch.Tensor]) -> list[str]:
        expected = cache.cpu().clone()
        append_to(expected.flatten(1), kv.cpu(), slots.cpu(), page_size, made, layout)
        differ = int((bits(values["kv_cache"]).cpu() != expected).sum())
        return [f"kv_cache: {differ} bytes are not those of fp8_mla.pack"] if differ else []

    arguments = {"kv": kv, "slot_mapping": slots, "cache_format": cache_format, "cache_layout": cache_layout}
    return Call("mla_fp8_append", arguments, image, (Mode(("kv_cache",)),), oracle)


def _special(draw: st.DrawFn, x: torch.Tensor) -> torch.Tensor:
    """Changes some tokens to another size or to zero, or puts NaN and infinities among them."""
    for row in draw(st.lists(st.integers(0, max(0, len(x) - 1)), max_size=6)) if len(x) else ():
        if draw(st.booleans()):
            x[row] *= draw(one_of(0.0, 2.0**-30, 2.0**-12, 300.0, 2.0**14))
        else:
            x[row].view(-1)[:: draw(one_of(1, 7, 64))] = draw(one_of(math.nan, math.inf, -math.inf))
    return x


def _slots(draw: st.DrawFn, tokens: int, num_slots: int, device: torch.device) -> torch.Tensor:
    """Draws different slots in random order; a slot below 0 or beyond the cache skips its token."""
    gen = generator(draw(seeds))
    slots = torch.full((tokens,), -1, dtype=torch.int64)
    chosen = torch.randperm(num_slots, generator=gen)[:tokens]
    slots[: len(chosen)] = chosen
    skips = torch.tensor((-1, -(2**63), num_slots, 2**31, 2**40, -(2**32), 2**63 - 1))
    skipped = uniform((tokens,), gen) < 0.12
    slots[skipped] = skips[integers(0, len(skips), (int(skipped.sum()),), gen)]
    if draw(chance(20)):  # a slot that int32 cannot hold is beyond the cache in both dtypes
        slots = slots.clamp(INT32_MIN, INT32_MAX).int()
    slots = slots.to(device)
    return torch.stack([slots, slots.flip(0)], dim=1)[:, 0] if draw(chance(30)) else slots


# ---- GQA


@st.composite
def gqa_decode(draw: st.DrawFn, device: torch.device) -> Call:
    """Draws a decode with the dtypes, layout, scales and heads of a row of the covering array."""
    on_gpu = device.type == "cuda"
    row = draw(one_of(*(covering.FOUR_BIT_ROWS if draw(chance(20)) else covering.GQA_ROWS)))
    batch, h_kv = draw(_batch(on_gpu)), draw(one_of(1, 2, 3, 8) if on_gpu else one_of(1, 2))
    longest = draw(one_of(1, 64, 130, 300, 700) if on_gpu else one_of(1, 40, 130))
    if on_gpu and draw(chance(4)):
        batch, longest = draw(one_of((2, 65_536), (16, 8192), (64, 1500)))
    whole = row.page_size == 0 and draw(chance(30))
    lengths = [longest] * batch if whole else [longest, *draw(_lengths(batch - 1, longest, row.page_size or 64))]
    case = gqa_case(
        **{
            **row.options(),
            "seqlens": lengths,
            "h_q": h_kv * row.ratio,
            "h_kv": h_kv,
            "values": draw(one_of(*VALUES)),
            "causal": draw(chance(70)),
            "window": draw(one_of(*WINDOWS)),
            "sink": draw(one_of(*SINKS)),
            "bad_entries": row.page_size > 0 and draw(chance(20)),
            "whole": whole,
            "padded": draw(st.booleans()),
            "seed": draw(seeds),
            "device": device,
        }
    )
    capacity = -1 if case.block_table is None else case.block_table.shape[1] * row.page_size
    if case.cache_seqlens is not None:
        case = dataclasses.replace(case, cache_seqlens=_extreme(draw, case.cache_seqlens, capacity))
    if case.softmax_scale is None and draw(chance(30)):
        case = dataclasses.replace(case, softmax_scale=row.d**-0.5 * draw(one_of(0.25, 0.5, 1.0)))
    return _gqa_call(draw, case)


def _gqa_call(draw: st.DrawFn, case: GqaCase) -> Call:
    rows = _rows(draw, len(case.q))

    def oracle(values: Mapping[str, torch.Tensor]) -> list[str]:
        return _problems(check_gqa(values["out"][rows], values["lse"][rows], gqa_rows(case, rows)))

    splits = draw(one_of(*SPLITS))
    if case.q.numel() * (splits or 1) > MOST_PARTIALS:
        splits = None
    arguments = {**case.arguments(), "num_splits": splits}
    return Call("gqa_decode", arguments, _decode_image(draw, case.q, case.q.shape[-1]), DECODE_MODES, oracle)


@st.composite
def gqa_blocks(draw: st.DrawFn, device: torch.device) -> Call:
    """Draws a decode of lists of blocks, over caches of two kinds."""
    on_gpu = device.type == "cuda"
    batch, h_kv, own = draw(_batch(on_gpu)), draw(one_of(1, 2, 4) if on_gpu else one_of(1, 2)), draw(chance(70))
    page_size, kv_dtype = draw(one_of(*BLOCK_PAGES)), draw(one_of("bf16", "int8"))
    longest = draw(one_of(1, 64, 130, 300, 700, 5000) if on_gpu else one_of(1, 130, 300))
    case = listed_case(
        seqlens=[longest, *draw(_lengths(batch - 1, longest, page_size))], h_q=16 * h_kv,
        h_kv=h_kv, s_q=draw(one_of(1, 1, 2, 5)), layout=draw(one_of("paged_NHD", "paged_HND")), page_size=page_size,
        kv_dtype=kv_dtype, values=draw(one_of(*VALUES)), causal=draw(chance(70)), bad_entries=draw(chance(20)),
        sink="none" if own else draw(one_of(*SINKS)), n=draw(one_of(1, 3, 16, 33, 80)), own=own,
        index_block=draw(one_of(*INDEX_BLOCKS)), seed=draw(seeds), device=device,
        padded=draw(st.booleans()) if kv_dtype == "bf16" else False,
    )  # fmt: skip
    assert case.block_table is not None and case.cache_seqlens is not None
    lengths = _extreme(draw, case.cache_seqlens, case.block_table.shape[1] * page_size)
    case = dataclasses.replace(case, cache_seqlens=lengths)
    return _gqa_call(draw, case)


def gqa_rows(case: GqaCase, rows: Sequence[int]) -> GqaCase:
    """Returns the call for some of its sequences."""
    names = ["q", "block_table", "cache_seqlens", "indices"]
    names += ["k_cache", "v_cache", "k_scale", "v_scale"] if case.block_table is None else []
    names += ["alibi_slopes"] if case.alibi_slopes is not None and case.alibi_slopes.dim() == 2 else []
    picked = {}
    for name in names:
        t = getattr(case, name)
        if t is not None and not ("scale" in name and t.dim() < 2):  # otherwise all sequences share the scale
            narrow = t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t  # torch cannot index FP8
            picked[name] = narrow[list(rows)].view(t.dtype)
    return dataclasses.replace(case, **picked)


@st.composite
def gqa_append(draw: st.DrawFn, device: torch.device) -> Call:
    """Draws an append of keys and values to caches of random codes, INT8 or one of the kinds."""
    gen = generator(draw(seeds), device)
    d, h_kv = draw(one_of(64, 128, 256, 512)), draw(one_of(1, 2, 3, 8, 64))
    dtype, scale_dtype = draw(one_of(torch.bfloat16, torch.float16)), draw(one_of(torch.float32, torch.float16))
    kinds: dict[Which, str] = {"k": draw(one_of(*SCALE_NAMES)), "v": draw(one_of(*SCALE_NAMES))}
    layout = draw(one_of(*LAYOUTS))
    stored = draw(one_of(*KINDS)) if draw(chance(40)) else INT8
    if stored in ROTATED_KINDS and (LAYOUTS[layout].x_packed or d not in ROTATED_DIMS):
        stored = INT8
    if stored != INT8:  # these scales have one granularity
        kinds, scale_dtype = dict.fromkeys(kinds, "per_token_head"), torch.float32
    page = draw(one_of(*(LAYOUTS[layout].page_sizes or (1, 16, 64, 128))))
    tokens = draw(one_of(0, 1, 7, 33, 130, *((2000,) if device.type == "cuda" else ())))
    sizes = CacheSizes(-(-(tokens + draw(one_of(2, 40))) // page), page, h_kv, d)
    tensors: dict[str, torch.Tensor] = {}
    which: Which
    for (which, kind), name in zip(kinds.items(), KINDS[stored], strict=True):
        shape = LAYOUTS[layout].shape(which, sizes, 1)
        shape = (*shape[:-1], shape[-1] // values_of(name))
        codes = integers(-128, 128, shape, gen, torch.int8)
        # some granularities are read, others written; all scales are positive and finite
        values = uniform(scale_shapes(LAYOUTS[layout], sizes)[SCALE_NAMES[kind]], gen)
        codes = codes.view(getattr(torch, name))
        tensors |= {f"{which}_cache": codes, f"{which}_scale": (0.002 + 0.03 * values).to(scale_dtype)}
    new = [normal((tokens, h_kv, d), gen) for _ in "kv"]
    k, v = (_special(draw, x).to(dtype) for x in new)
    slots = _slots(draw, tokens, sizes.outer * sizes.rows, device)

    def oracle(got: Mapping[str, torch.Tensor]) -> list[str]:
        expected = {name: t.cpu().clone() for name, t in tensors.items()}
        reference_append(k.cpu(), v.cpu(), **expected, slot_mapping=slots.cpu(), layout=layout, kind=stored)
        differ = {name: int((bits(got[name]).cpu() != bits(want)).sum()) for name, want in expected.items()}
        return [f"{name}: {count} are not those of reference_append" for name, count in differ.items() if count]

    arguments: dict[str, Any] = {"k": k, "v": v, "slot_mapping": slots, "layout": layout}
    if stored != INT8:
        arguments["kind"] = stored
    name = "kv_int8_append" if stored == INT8 else "kv_append"
    return Call(name, arguments, Image.of_tensors(tensors), (Mode(tuple(tensors)),), oracle)


# ---- merge


@st.composite
def merge(draw: st.DrawFn, device: torch.device) -> Call:
    """Draws a merge of states of disjoint sets of keys, some of them empty."""
    gen = generator(draw(seeds), device)
    d, inner, outer, has_sink = draw(one_of(*MERGES))
    leading, n = draw(
        one_of(
            *(((1, 1, 1), 1), ((2, 3, 7), 2), ((1, 7), 3), ((3, 7), 8), ((4, 1, 9), 5), ((2, 2, 2, 4), 4)),
            *(((2, 2, 8), 9), ((1, 1, 33), 64), ((2, 1, 20), 20), ((1, 40), 33), ((1, 1, 3), 200)),
            *(((16, 2, 64), 2), ((8, 1, 128), 8), ((5, 0, 4), 2)),
        )
    )
    in_dtype, out_dtype = getattr(torch, inner), getattr(torch, outer)
    outs = normal((n, *leading, d), gen).to(in_dtype)
    offset = draw(one_of(0.0, 0.0, 80.0, -1e4))
    lses = draw(one_of(1.0, 5.0, 60.0)) * normal((n, *leading), gen) + offset
    if draw(chance(70)):
        drop = uniform((n, *leading), gen) < 0.2
        drop.view(n, -1)[:, 1::11] = True
        lses[drop], outs[drop] = -torch.inf, torch.nan
    if len(leading) < 4:
        outs = _spread(draw, outs, max(16 // outs.element_size(), 1))
    sink = None
    if has_sink:
        sink = offset + 3 * normal(leading[-1:], gen)
        sink[1 :: draw(one_of(2, 5))] = draw(one_of(-math.inf, math.inf, 30.0))
    shape = (*leading, d)
    stride = _stride(draw, shape, 16 // out_dtype.itemsize, 50 if len(leading) < 4 else 0)
    outputs = {
        "out": (out_dtype, shape, stride, 16),
        "lse": (torch.float32, leading, contiguous_stride(leading), 4),
    }
    modes = MERGE_MODES if inner == outer else tuple(mode for mode in MERGE_MODES if "out" in mode.given)

    def oracle(values: Mapping[str, torch.Tensor]) -> list[str]:
        return merge_problems(values["out"], values["lse"], outs, lses, sink)

    arguments = {"outs": outs, "lses": lses, "s_aux": sink}
    return Call("merge_states", arguments, Image.of_outputs(outputs, device), modes, oracle)


# ---- sink attention


@st.composite
def sink_attention(draw: st.DrawFn, device: torch.device, differentiable: bool = False) -> Call:
    """Draws a forward, or a forward with its gradients."""
    on_gpu = device.type == "cuda"
    packed = draw(st.booleans())
    h_kv, ratio = draw(one_of(1, 2, 3)), draw(one_of(1, 2, 4, 8, 16) if on_gpu else one_of(1, 4))
    longest = draw(one_of(1, 63, 130, 300, 700) if on_gpu else one_of(1, 20, 65))
    length = st.integers(0, longest) if packed else st.integers(1, longest)
    pair = st.tuples(st.one_of(length, st.integers(1, 8)), st.one_of(length, st.just(longest + 100)))
    lengths = draw(st.lists(pair, min_size=1, max_size=5 if on_gpu else 2))
    case = sink_case(
        lengths if packed else lengths[:1] * len(lengths),
        h_kv * ratio,
        h_kv,
        draw(one_of(64, 128)),
        causal=draw(chance(75)),
        window=draw(one_of(None, None, 1, 2, 63, 70, 128, 300)),
        packed=packed,
        sinks=draw(one_of(*SINKS_OF_ATTENTION)),
        padded=draw(st.booleans()),
        seed=draw(seeds),
        device=device,
    )
    deterministic = draw(chance(70))
    gradients = GRADIENTS if case.s_aux is not None else GRADIENTS[:-1]
    forward_modes = (Mode((), ("out", "lse")), Mode((), ("out",)))
    return Call(
        "sink_attention",
        {**case.arguments(), "deterministic": deterministic},
        Image({}, torch.zeros(4, dtype=torch.int32, device=device)),
        (Mode((), gradients),) if differentiable else forward_modes,
        lambda values: sink_problems(case, values),
        d_out=case.d_out if differentiable else None,
        unstable=frozenset() if deterministic else frozenset({"dq"}),
        capturable=not differentiable,
    )


def sink_problems(case: SinkCase, values: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns differences from float64; for calls with many scores only elements that are not finite."""
    if sum(queries * keys for queries, keys in case.lengths) * case.q.shape[-2] > MAX_SCORES:
        return [f"{name}: not finite" for name, t in values.items() if name != "lse" and not t.isfinite().all()]
    expected = SinkExpectation.of(case)
    problems = _problems(expected.check_forward(values["out"], values.get("lse")))
    for name, measure in zip(GRADIENTS[1:], expected.gradients, strict=True):
        if name in values:
            got = values[name].unsqueeze(-1) if name == "ds_aux" else values[name]
            problems += _problems(measure.compare(got, name))
    return problems


MAKERS: Final[dict[str, tuple[Callable[..., st.SearchStrategy[Call]], int]]] = {
    "mla_decode": (mla_decode, 9),
    "gqa_decode": (gqa_decode, 9),
    "gqa_blocks": (gqa_blocks, 3),
    "mla_append": (mla_append, 2),
    "gqa_append": (gqa_append, 2),
    "merge": (merge, 2),
    "sink_attention": (sink_attention, 1),
    "sink_gradients": (functools.partial(sink_attention, differentiable=True), 1),
}
"""The makers of calls, each with its share of 29 calls; decodes are three in four."""


def calls(device: torch.device, only: str | None = None) -> st.SearchStrategy[Call]:
    """Draws a call of any operator, or only of one of `MAKERS`."""
    makers = [make for make, share in MAKERS.values() for _ in range(share)] if only is None else [MAKERS[only][0]]
    return one_of(*makers).flatmap(lambda make: make(device))
