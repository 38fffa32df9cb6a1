"""`kv_append` on the GPU: codes and scales equal the CPU reference bit for bit; no other byte changes."""

import itertools
import math
from typing import Any

import pytest
import torch

from cute_kernels import gqa_decode, kv_append
from cute_kernels.gqa.append_spec import PER_TOKEN_HEAD, KvAppendSpec
from cute_kernels.gqa.codes import KINDS, ROTATED_KINDS, values_of
from cute_kernels.gqa.layouts import HEAD_DIMS, LAYOUTS, ROTATED_DIMS, CacheSizes, ScaleKind, scale_shapes
from cute_kernels.gqa.reference import reference_append
from tests.gpu.test_gqa_append import DTYPES, random_tokens, sizes_for, slots_for
from tests.kit.gqa_cases import GqaCase, check_gqa
from tests.kit.mla_cases import generator

NEW_KINDS = [kind for kind in KINDS if kind != "int8"]
CASES = [
    (kind, layout)
    for kind, layout in itertools.product(NEW_KINDS, LAYOUTS)
    if not (kind in ROTATED_KINDS and LAYOUTS[layout].x_packed)
]


def dims_of(kind: str) -> tuple[int, ...]:
    return ROTATED_DIMS if kind in ROTATED_KINDS else HEAD_DIMS


def kernel_specs() -> list[KvAppendSpec]:
    scales = {"k_scale": PER_TOKEN_HEAD, "v_scale": PER_TOKEN_HEAD, "scale_dtype": "float32"}
    return [
        KvAppendSpec.for_launch(dtype=dtype, d=d, h_kv=2, kind=kind, x_packed=x_packed, **scales)
        for kind, d, dtype in itertools.product(NEW_KINDS, HEAD_DIMS, ("bfloat16", "float16"))
        for x_packed in (False, True)
        if d in dims_of(kind) and not (kind in ROTATED_KINDS and x_packed)
    ]


def make_caches(kind: str, layout: str, sizes: CacheSizes) -> dict[str, torch.Tensor]:
    gen, known, caches = generator(3), LAYOUTS[layout], {}
    for which, name in zip(("k", "v"), KINDS[kind], strict=True):
        shape, dtype = known.shape(which, sizes, 1), getattr(torch, name)
        shape = (*shape[:-1], shape[-1] // values_of(name))
        caches[f"{which}_cache"] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=gen).view(dtype)
        caches[f"{which}_scale"] = torch.rand(scale_shapes(known, sizes)[ScaleKind("per_token_head")], generator=gen)
    return caches


def check(kind: str, layout: str, sizes: CacheSizes, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    expected = make_caches(kind, layout, sizes)
    got = {name: tensor.cuda() for name, tensor in expected.items()}
    reference_append(k, v, **expected, slot_mapping=slots, layout=layout, kind=kind)
    kv_append(k.cuda(), v.cuda(), **got, slot_mapping=slots.cuda(), layout=layout, kind=kind)
    for name, want in expected.items():
        wrong = got[name].cpu().view(torch.uint8) != want.view(torch.uint8)
        assert not wrong.any(), f"{name}: {int(wrong.sum())} bytes of {wrong.numel()}, first at {wrong.nonzero()[0]}"


@pytest.mark.parametrize(("kind", "layout", "d"), [(*case, d) for case in CASES for d in dims_of(case[0])])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_bytes_are_those_of_the_reference(kind, layout, d, dtype):
    for h_kv, rows, tokens in ((1, 1, 7), (3, 61, 515), (8, 64, 130), (2, 16, 2000)):
        sizes = sizes_for(layout, rows, tokens, h_kv, d)
        k, v = random_tokens(tokens, h_kv, d, DTYPES[dtype], seed=rows)
        check(kind, layout, sizes, k, v, slots_for(tokens, sizes.num_slots, seed=tokens))


@pytest.mark.parametrize("kind", NEW_KINDS)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_hostile_values(kind, dtype):
    limits = torch.finfo(DTYPES[dtype])
    rows = [
        [0.0], [-0.0], [1.0], [-3.0], [math.nan], [math.inf], [-math.inf], [math.nan, 1.0], [math.inf, 1.0],
        [limits.max], [-limits.max, limits.max], [limits.tiny], [limits.smallest_normal / 2], [1e-6, -1e-6],
        [math.inf, -math.inf, math.nan, 0.5],
    ]  # fmt: skip
    for d in dims_of(kind):
        x = torch.stack([torch.tensor(row, dtype=torch.float32).repeat(d)[:d] for row in rows])
        spikes = torch.zeros(2 * d, d)
        spikes[:d] = torch.eye(d) * torch.logspace(-9, 4, d).unsqueeze(1)
        spikes[d:] = torch.randn(d, d, generator=generator(1)) - 100 * torch.eye(d)
        powers = torch.randn(300, d, generator=generator(2)) * torch.logspace(-35, 35, 300).unsqueeze(1)
        x = torch.cat([x, spikes, powers]).to(DTYPES[dtype]).unsqueeze(1).repeat(1, 2, 1)
        sizes = CacheSizes(1, len(x), 2, d)
        check(kind, "BSNH", sizes, x, x.flip(0), torch.arange(len(x)))


@pytest.mark.parametrize("kind", NEW_KINDS)
def test_ties_of_rounding(kind):
    """Codes lie halfway between two, where a fused product and sum would round differently."""
    gen = generator(5)
    k = torch.randint(-60, 61, (4000, 2, 128), generator=gen).to(torch.bfloat16)
    k[::2, :, 0] = 448
    check(kind, "BSNH", CacheSizes(4, 1000, 2, 128), k, k / 4, torch.arange(4000))


@pytest.mark.parametrize("kind", NEW_KINDS)
def test_decoding_what_was_appended(kind):
    """Attention over the original vectors must be within the loss of quantization."""
    sizes, h_q = CacheSizes(3, 300, 2, 128), 8
    caches = {name: tensor.cuda() for name, tensor in make_caches(kind, "BSNH", sizes).items()}
    k, v = (torch.randn(900, 2, 128, generator=generator(seed)).bfloat16().cuda() for seed in (1, 2))
    kv_append(k, v, **caches, slot_mapping=torch.arange(900, device="cuda"), layout="BSNH", kind=kind)
    q = torch.randn(3, 2, h_q, 128, generator=generator(3)).bfloat16().cuda()
    options: dict[str, Any] = {"layout": "BSNH", "cache_seqlens": torch.tensor([300, 17, 250]).int().cuda()}
    own = {"kind": kind} if kind in ROTATED_KINDS else {}
    out, lse = gqa_decode(q, **caches, **options, **own, return_lse=True)
    check_gqa(out, lse, GqaCase(q, **caches, **options, **own)).require()
    plain = gqa_decode(q, k.view(3, 300, 2, 128), v.view(3, 300, 2, 128), **options)
    lost = 0.16 if kind == "int4" else 0.12  # for N(0,1) data; 4-bit keys also change the weights
    assert (out.float() - plain.float()).norm() / plain.float().norm() < lost


@pytest.mark.parametrize("kind", list(ROTATED_KINDS))
def test_a_graph_and_no_tokens(kind):
    sizes = CacheSizes(2, 64, 2, 128)
    caches = {name: tensor.cuda() for name, tensor in make_caches(kind, "BNSH", sizes).items()}
    k, v = (torch.randn(5, 2, 128, device="cuda").bfloat16() for _ in range(2))
    slots = torch.tensor([3, 99, -1, 127, 64], device="cuda")
    options: dict[str, Any] = {"layout": "BNSH", "kind": kind}
    kv_append(k[:0], v[:0], **caches, slot_mapping=slots[:0], **options)
    kv_append(k, v, **caches, slot_mapping=slots, **options)
    expected = {name: tensor.clone() for name, tensor in caches.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv_append(k, v, **caches, slot_mapping=slots, **options)
    for tensor in caches.values():
        tensor.zero_()
    graph.replay()
    for name, tensor in caches.items():
        assert torch.equal(tensor[0, :, 3], expected[name][0, :, 3])
        assert not tensor[1, :, 5].any()
