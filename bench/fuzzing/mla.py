"""Calls of `mla_fp8_decode` and `mla_fp8_append`."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import torch

import fp8_mla
from bench.fuzzing.calls import Call, Mode
from bench.fuzzing.draws import INT32_MAX, INT32_MIN, MAX_SCRATCH, Draw, extreme_lengths, num_sms, problems_of
from bench.fuzzing.memory import Image, contiguous_stride, padded_stride
from bench.timing import bits
from cute_kernels.mla import append_spec, spec
from cute_kernels.mla.crossover import spec as crossover_spec
from cute_kernels.mla.latent import spec as latent_spec
from cute_kernels.mla.plan import EXCHANGES, plan_decode
from fp8_mla.formats import FORMATS, V3_2
from tests.kit.append_pages import FORMS, append_to
from tests.kit.compare import check_decode
from tests.kit.latent_cases import FORMS as LATENT_FORMS
from tests.kit.latent_cases import SIZE_KINDS, latent_case, latent_dense_case
from tests.kit.mla_cases import SCALE_KINDS, DecodeCase, dense_case, sparse_case
from tests.kit.values import refill

HEADS = (1, 2, 7, 8, 16, 17, 32, 33, 64, 65, 96, 100, 127, 128)
TOPKS = (1, 2, 63, 64, 65, 127, 128, 129, 200, 576)
LARGE_TOPKS = (2048, 4096, 16_384)
PAGE_SIZES = (1, 2, 16, 61, 64, 576)
SPLITS = (None, None, None, None, 1, 2, 3, 8, 32, 64, 128, 256)
SINKS = ("none", "finite", "inf")
LATENT_HEADS = (16, spec.WIDE)  # of a CTA: with more the list of kernels would double
DECODE_MODES = (
    Mode(("out", "lse"), ("out", "lse")),
    Mode(("out", "lse"), ("out",)),
    Mode(("out",), ("out",)),
    Mode(("out",), ("out", "lse")),
    Mode(("lse",), ("out",)),
    Mode((), ("out", "lse")),
    Mode((), ("out",)),
)


def kernel_specs() -> list[Any]:
    """Every kernel that these calls may take."""
    latent = [one for one in latent_spec.shipped_specs() if one.heads in LATENT_HEADS]
    return [*spec.shipped_specs(), *crossover_spec.shipped_specs(), *latent, *append_spec.shipped_specs()]


def decode_call(draw: Draw) -> Call:
    """A sparse or a dense decode over one cache, or a sparse one over two."""
    latent = draw.chance(0.35)
    formats, layout = draw.choice(LATENT_FORMS)
    sparse = draw.chance(0.55) or (latent and len(formats) > 1)
    if latent:
        case, forced = _latent_sparse(draw, formats, layout) if sparse else _latent_dense(draw, formats[0], layout)
    else:
        case, forced = _sparse(draw) if sparse else _dense(draw)
    if family := draw.family():
        case = refill(case, family, seed=draw.seed)
    case, changed = _vary(case, draw)
    batch, s_q, h_q, _ = case.q.shape
    index = case.indices if sparse else case.block_table
    assert index is not None
    width, page_size = index.shape[-1], case.kv_cache.shape[1]
    specs: tuple[Any, ...] = ()
    if (forced["num_splits"] or 1) * batch * s_q * h_q * spec.PARTIAL_FLOATS > MAX_SCRATCH:
        forced["num_splits"] = None
    sides = [(case.cache_format or "v3.2", width if sparse else width * page_size, case.kv_cache)]
    if case.extra_kv_cache is not None:
        assert case.extra_indices is not None and case.extra_cache_format is not None
        sides.append((case.extra_cache_format, case.extra_indices.shape[-1], case.extra_kv_cache))
    sides = [(name, keys, cache) for name, keys, cache in sides if keys and cache.shape[0]]
    if batch and sides:
        plan = plan_decode(
            sparse=sparse,
            batch=batch,
            s_q=s_q,
            h_q=h_q,
            max_keys=sides[0][1],
            num_sms=num_sms(draw.device),
            ragged=(case.topk_length if sparse else case.cache_seqlens) is not None,
            cache_format=sides[0][0],
            extra_format=sides[1][0] if len(sides) > 1 else "",
            extra_keys=sides[1][1] if len(sides) > 1 else 0,
            **forced,
        )
        specs = (plan.spec,)
    shape = (batch, s_q, h_q, fp8_mla.V_DIM)
    stride = padded_stride(shape, 8, draw.rng) if draw.chance(0.5) else contiguous_stride(shape)
    outputs = {
        "out": (torch.bfloat16, shape, stride, 16),
        "lse": (torch.float32, shape[:3], padded_stride(shape[:3], 1, draw.rng), 4),
    }
    rows = draw.rows(batch, 2 if draw.large else 3)

    def oracle(values: Mapping[str, torch.Tensor]) -> list[str]:
        if not rows:
            return []
        picked = {name: value[rows] for name, value in values.items()}
        some = case.rows(rows).arguments()
        return problems_of(check_decode(picked["out"], picked["lse"], **some))

    return Call(
        seed=draw.seed,
        op="mla_fp8_decode",
        arguments={**case.arguments(), **forced, "kv_cache": changed},
        image=Image.of_outputs(outputs, draw.device, draw.rng),
        modes=DECODE_MODES,
        oracle=oracle,
        specs=specs,
        shape=(
            "mla",
            sparse,
            batch,
            s_q,
            h_q,
            width,
            page_size,
            *forced.values(),
            case.topk_length is None,
            case.cache_format,
            case.extra_cache_format,
            case.cache_layout,
            family,
        ),
    )


def _sparse(draw: Draw) -> tuple[DecodeCase, dict[str, Any]]:
    batch, s_q, h_q = draw.batch(), draw.choice((1, 1, 1, 2, 3, 5)), draw.choice(HEADS)
    topk = draw.choice(TOPKS)
    if draw.large:
        topk = draw.choice(LARGE_TOPKS)
        batch = draw.choice((1, 16, 64, 148)) if topk < 16_384 else draw.choice((1, 8))
    elif batch * s_q > 16 or not draw.on_gpu:
        topk = min(topk, 200 if draw.on_gpu else 129)
    case = sparse_case(
        batch=batch,
        h_q=h_q,
        s_q=s_q,
        topk=topk,
        page_size=draw.choice(PAGE_SIZES),
        num_slots=20_000 if draw.large else 2000,
        scales=draw.choice(SCALE_KINDS),
        outliers=draw.chance(0.2),
        invalid=draw.chance(0.7),
        lengths=draw.choice(("none", "batch", "query")),
        sink=draw.choice(SINKS),
        padded=draw.chance(0.5),
        seed=draw.seed,
        device=draw.device,
    )
    if case.topk_length is not None:
        flat = case.topk_length.view(-1)
        for place in range(len(flat)):
            if draw.chance(0.05):
                # not where lists were cut: all of what a list holds may then be seen
                flat[place] = draw.choice((INT32_MIN, 0, -1))
        flat[flat >= topk] = draw.choice((topk, topk + 7, INT32_MAX))
    return case, _forced(draw)


def _dense(draw: Draw) -> tuple[DecodeCase, dict[str, Any]]:
    batch, page_size = draw.batch(), draw.choice(PAGE_SIZES)
    longest = draw.choice((1, 63, 64, 130, 576)) if draw.on_gpu else draw.choice((1, 63, 130))
    if draw.large:
        longest = draw.choice((2500, 8192, 65_536))
        batch = {2500: 74, 8192: 16, 65_536: 1}[longest]
    elif batch > 16:
        longest = min(longest, 130)
    seqlens = draw.lengths(batch, longest, page_size)
    seqlens[draw.rng.randrange(batch)] = longest
    case = dense_case(
        seqlens=seqlens,
        h_q=draw.choice(HEADS),
        s_q=draw.choice((1, 1, 2, 3, 4)),
        page_size=page_size,
        causal=draw.chance(0.7),
        scales=draw.choice(SCALE_KINDS),
        outliers=draw.chance(0.2),
        sink=draw.choice(SINKS),
        padded=draw.chance(0.5),
        seed=draw.seed,
        device=draw.device,
    )
    assert case.block_table is not None and case.cache_seqlens is not None
    table = case.block_table
    if longest % page_size == 0 and draw.chance(0.5):
        table = table[:, : longest // page_size]  # the longest sequence fills it
    lengths = extreme_lengths(case.cache_seqlens, table.shape[1] * page_size, draw)
    case = dataclasses.replace(case, block_table=table, cache_seqlens=lengths)
    return case, _forced(draw)


def _latent_sparse(draw: Draw, formats: tuple[str, ...], layout: str | None) -> tuple[DecodeCase, dict[str, Any]]:
    batch, s_q = draw.batch(), draw.choice((1, 1, 1, 2, 3, 5))
    topks = [draw.choice(LARGE_TOPKS[:1] if draw.large else TOPKS) for _ in range(2)]
    if not draw.large and (batch * s_q > 16 or not draw.on_gpu):
        topks = [min(topk, 200 if draw.on_gpu else 65) for topk in topks]
    case = latent_case(
        formats=formats,
        cache_layout=layout,
        batch=batch,
        h_q=draw.choice(HEADS),
        s_q=s_q,
        topk=topks[0],
        extra_topk=topks[1],
        page_size=draw.choice(PAGE_SIZES),
        extra_page_size=draw.choice(PAGE_SIZES),
        num_slots=10_000 if draw.large else 1000,
        sizes=draw.choice(SIZE_KINDS),
        invalid=draw.chance(0.7),
        lengths=draw.choice(("none", "batch", "query")),
        sink=draw.choice(SINKS),
        padded=draw.chance(0.5),
        seed=draw.seed,
        device=draw.device,
    )
    if draw.chance(0.1) and case.extra_indices is not None:
        case = dataclasses.replace(case, extra_indices=case.extra_indices[..., :0])
    return case, {"num_splits": draw.choice(SPLITS), "scores": None}


def _latent_dense(draw: Draw, cache_format: str, layout: str | None) -> tuple[DecodeCase, dict[str, Any]]:
    batch, page_size = draw.batch(), draw.choice(PAGE_SIZES)
    longest = draw.choice((1, 63, 64, 130, 576)) if draw.on_gpu and batch <= 16 else draw.choice((1, 63, 130))
    case = latent_dense_case(
        cache_format=cache_format,
        cache_layout=layout,
        seqlens=draw.lengths(batch, longest, page_size),
        h_q=draw.choice(HEADS),
        s_q=draw.choice((1, 1, 2, 3, 4)),
        page_size=page_size,
        causal=draw.chance(0.7),
        sizes=draw.choice(SIZE_KINDS),
        sink=draw.choice(SINKS),
        padded=draw.chance(0.5),
        seed=draw.seed,
        device=draw.device,
    )
    assert case.block_table is not None and case.cache_seqlens is not None
    lengths = extreme_lengths(case.cache_seqlens, case.block_table.shape[1] * page_size, draw)
    return dataclasses.replace(case, cache_seqlens=lengths), {"num_splits": draw.choice(SPLITS), "scores": None}


def _forced(draw: Draw) -> dict[str, Any]:
    """Choices that are left to the planner, or made."""
    exchange = draw.choice((None, None, *EXCHANGES))
    return {"num_splits": draw.choice(SPLITS), "exchange": exchange, "scores": draw.choice((None, "exact"))}


def _vary(case: DecodeCase, draw: Draw) -> tuple[DecodeCase, torch.Tensor]:
    """Other forms of the same arguments, sometimes none of something. The second result is the cache as it is given."""
    if draw.chance(0.02):
        case = case.rows([])
    elif draw.chance(0.02):
        case = dataclasses.replace(case, kv_cache=case.kv_cache[:0])
    elif draw.chance(0.02):
        if case.indices is not None:
            case = dataclasses.replace(case, indices=case.indices[..., :0])
        elif case.block_table is not None:
            case = dataclasses.replace(case, block_table=case.block_table[:, :0])
    if draw.chance(0.3):
        case = dataclasses.replace(case, softmax_scale=case.q.shape[-1] ** -0.5 * draw.choice((0.25, 0.5, 1.0)))
    cache = case.kv_cache
    if draw.chance(0.3):
        cache = cache.unsqueeze(2)
    if draw.chance(0.3):
        cache = cache.view(torch.float8_e4m3fn)
    return case, cache


# ---- append


def append_call(draw: Draw) -> Call:
    """New tokens for a cache of random bytes."""
    tokens = draw.choice((0, 1, 2, 7, 31, 64, 65, 200))
    if draw.large:
        tokens = draw.choice((1000, 5000))  # beyond 4224 a warp takes two
    page_size = draw.choice(PAGE_SIZES)
    num_pages = -(-(tokens + draw.choice((0, 1, 40))) // page_size)
    cache_format, cache_layout = draw.choice(((V3_2.name, None), *FORMS))
    token_format = FORMATS[cache_format]
    layout, width, size = token_format.page_layout(page_size, cache_layout), token_format.d_qk, token_format.token_bytes
    shape = (num_pages, page_size, size)
    stride = (-(-page_size * size // 16) * 16 + 16 * draw.choice((0, 1, size // 8)), size, 1)
    cache = torch.randint(256, shape, dtype=torch.uint8, generator=draw.gen, device=draw.device)
    kv = special_values(torch.randn((tokens, width), generator=draw.gen, device=draw.device), draw)
    if draw.chance(0.5):
        wide = kv.new_full((tokens, width + 8 * draw.choice((1, 3))), torch.nan)
        wide[:, :width] = kv
        kv = wide[:, :width]
    slots = slot_mapping(tokens, num_pages * page_size, draw)
    spread = torch.empty_strided(shape, stride, dtype=torch.uint8, device=draw.device)
    image = Image.of_tensors({"kv_cache": spread.copy_(cache)}, draw.rng)
    if draw.chance(0.3):
        place = image.places["kv_cache"]
        image.places["kv_cache"] = place._replace(dtype=torch.float8_e4m3fn)

    def oracle(values: Mapping[str, torch.Tensor]) -> list[str]:
        expected = cache.cpu().clone()
        append_to(expected.flatten(1), kv.cpu(), slots.cpu(), page_size, token_format, layout)
        differ = int((bits(values["kv_cache"]).cpu() != expected).sum())
        return [f"kv_cache: {differ} bytes are not those of fp8_mla.pack"] if differ else []

    return Call(
        seed=draw.seed,
        op="mla_fp8_append",
        arguments={"kv": kv, "slot_mapping": slots, "cache_format": cache_format, "cache_layout": cache_layout},
        image=image,
        modes=(Mode(("kv_cache",)),),
        oracle=oracle,
        specs=(append_spec.MlaAppendSpec.for_launch(tokens, cache_format),) if tokens and num_pages else (),
        shape=("mla append", cache_format, layout.cache_layout, tokens, num_pages, page_size),
    )


def special_values(x: torch.Tensor, draw: Draw, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Tokens, some of which are of another size, zero, or have NaN and infinities among them."""
    rng: random.Random = draw.rng
    for row in range(len(x)):
        if rng.random() < 0.1:
            x[row] *= rng.choice((0.0, 2.0**-30, 2.0**-12, 300.0, 2.0**14))
        elif rng.random() < 0.05:
            x[row].view(-1)[:: rng.choice((1, 7, 64))] = rng.choice((torch.nan, torch.inf, -torch.inf))
    return x.to(dtype)


def slot_mapping(tokens: int, num_slots: int, draw: Draw) -> torch.Tensor:
    """Different slots in random order; some tokens are skipped, by a slot below 0 or beyond the cache."""
    slots = torch.full((tokens,), -1, dtype=torch.int64)
    chosen = draw.rng.sample(range(num_slots), min(tokens, num_slots))
    slots[: len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
    skips = (-1, -(2**63), num_slots, 2**31, 2**40, -(2**32), 2**63 - 1)
    for place in range(tokens):
        if draw.chance(0.12):
            slots[place] = draw.choice(skips)
    slots = slots.to(draw.device)
    if num_slots < 2**31 and draw.chance(0.2):  # what int32 lacks is beyond the cache in both
        slots = slots.clamp(-(2**31), 2**31 - 1).to(torch.int32)
    return torch.stack([slots, slots.flip(0)], dim=1)[:, 0] if draw.chance(0.3) else slots
