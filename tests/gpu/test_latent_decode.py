"""Decodes of every latent format and of two caches on the GPU, under the tolerance rule of `tests.kit.compare`.

Cases have every pair of values of two factors, lengths at every boundary of a tile, poisoned slots and padded pages.
Cases by hand are in test_mla_formats.py.
"""

import dataclasses
from typing import Any

import pytest
import torch

from cute_kernels import mla_fp8_decode
from cute_kernels.compat.flash_mla import flash_mla_with_kvcache
from cute_kernels.mla.plan import plan_decode
from fp8_mla import FORMATS, row_views
from tests.kit.mla_cases import (
    FORMS,
    SIZE_KINDS,
    covering_cases,
    dense_case,
    generator,
    paged,
    ragged_lengths,
    sparse_case,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("free_memory")
SPARSE = covering_cases(
    {
        "form": FORMS,
        "h_q": (1, 8, 12, 16, 24, 32, 64, 96, 128),
        "s_q": (1, 2, 3),
        "batch": (1, 4, 74, 150),
        "page_size": (1, 2, 61, 64, 576),
        "extra_page_size": (1, 2, 64),
        "topk": (0, 1, 63, 64, 65, 128),
        "extra_topk": (0, 1, 64, 65, 512, 1024),
        "scales": SIZE_KINDS,
        "lengths": ("none", "batch", "query"),
        "sink": ("none", "finite", "inf"),
        "padded": (True, False),
        "num_splits": (None, 1, 3),
    }
)
DENSE = covering_cases(
    {
        "form": [form for form in FORMS if len(form[0]) == 1],
        "h_q": (1, 16, 32, 64, 128),
        "s_q": (1, 2, 3),
        "batch": (1, 4, 74),
        "page_size": (1, 2, 61, 64),
        "longest": (130, 700),
        "scales": SIZE_KINDS,
        "causal": (True, False),
        "sink": ("none", "finite"),
        "padded": (True, False),
    }
)


def kernel_specs() -> list[Any]:
    """Kernels of these cases, as the planner chooses them."""
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    specs = []
    for sizes in SPARSE:
        keys = [(name, sizes[topk]) for name, topk in zip(sizes["form"][0], ("topk", "extra_topk"), strict=False)]
        read = [(name, topk) for name, topk in keys if topk]
        if read:
            (first, topk), (extra, extra_topk) = read[0], read[1] if len(read) > 1 else ("", 0)
            given = {"max_keys": topk, "extra_format": extra, "extra_keys": extra_topk, "cache_format": first}
            shape = {name: sizes[name] for name in ("batch", "s_q", "h_q", "num_splits")}
            ragged = sizes["lengths"] != "none"
            plan = plan_decode(sparse=True, num_sms=num_sms, ragged=ragged, **shape, **given)
            specs.append(plan.spec)
    for sizes in DENSE:
        shape = {name: sizes[name] for name in ("batch", "s_q", "h_q")}
        keys = -(-sizes["longest"] // sizes["page_size"]) * sizes["page_size"]
        format_name = sizes["form"][0][0]
        plan = plan_decode(sparse=False, num_sms=num_sms, ragged=True, max_keys=keys, cache_format=format_name, **shape)
        specs.append(plan.spec)
    return list(dict.fromkeys(specs))


def label(sizes: dict[str, Any]) -> str:
    return "-".join("+".join(value[0]) if name == "form" else f"{name}{value}" for name, value in sizes.items())


@pytest.mark.parametrize("sizes", SPARSE, ids=label)
def test_sparse(run_decode, sizes):
    seed, sizes = SPARSE.index(sizes), dict(sizes)
    (formats, layout), num_splits = sizes.pop("form"), sizes.pop("num_splits")
    case = sparse_case(formats=formats, cache_layout=layout, num_slots=10_000, seed=seed, device="cuda", **sizes)
    run_decode(case, padded=sizes["padded"], num_splits=num_splits)


@pytest.mark.parametrize("sizes", DENSE, ids=label)
def test_dense(run_decode, sizes):
    seed, sizes = DENSE.index(sizes), dict(sizes)
    formats, layout = sizes.pop("form")
    seqlens = ragged_lengths(sizes.pop("batch"), sizes.pop("longest"), sizes["page_size"], seed)
    case = dense_case(cache_format=formats[0], cache_layout=layout, seqlens=seqlens, seed=seed, device="cuda", **sizes)
    run_decode(case, padded=sizes["padded"])


@pytest.mark.parametrize(("formats", "layout"), FORMS, ids=str)
def test_lengths_around_every_boundary(run_decode, formats, layout):
    """Each request has another length in both caches, from 0 to past two tiles."""
    lengths = [0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 200]
    case: Any = sparse_case(
        formats=formats, cache_layout=layout, batch=len(lengths), h_q=16, topk=200, extra_topk=200, lengths="batch",
        invalid=False, device="cuda",
    )  # fmt: skip
    for shift in range(0, len(lengths), 3):
        case.topk_length.copy_(torch.tensor(lengths))
        if case.extra_topk_length is not None:
            case.extra_topk_length.copy_(torch.tensor(lengths).roll(shift))
        # lists hold poisoned slots past the lengths that they were made for
        for name in ("indices", "extra_indices"):
            indices = getattr(case, name)
            if indices is not None:
                indices.copy_(torch.where(indices < 0, -1, _good_slots(case, name)))
        run_decode(case)


def _good_slots(case: Any, name: str) -> torch.Tensor:
    """Slots without poison, in the shape of the indices."""
    cache = case.kv_cache if name == "indices" else case.extra_kv_cache
    cache_format = case.cache_format if name == "indices" else case.extra_cache_format
    rows = row_views(cache, FORMATS[cache_format], case.cache_layout)
    good = (rows[0] != 0xFF).any(dim=-1).flatten().nonzero().squeeze(1).int()
    shape = getattr(case, name).shape
    return good[torch.randint(len(good), shape, generator=generator(0, "cuda"), device="cuda")]


@pytest.mark.parametrize(("formats", "layout"), FORMS, ids=str)
def test_a_row_does_not_depend_on_its_batch(formats, layout):
    """VLLM needs it for `enable_batch_invariant`: the bits are the same alone and among others."""
    case: Any = sparse_case(
        formats=formats, cache_layout=layout, batch=7, h_q=64, topk=300, extra_topk=500, invalid=False, padded=False,
        device="cuda",
    )  # fmt: skip
    kv_format = formats[0] if layout != "interleaved" else "V41_NEW"

    def decode(case: Any) -> Any:
        return flash_mla_with_kvcache(
            case.q, case.kv_cache.unsqueeze(2), None, None, 512, None, is_fp8_kvcache=True, indices=case.indices,
            extra_k_cache=case.extra_kv_cache, extra_indices_in_kvcache=case.extra_indices,
            enable_batch_invariant=True, kv_format=kv_format,
        )  # fmt: skip

    whole = decode(case)
    for row in (0, 3, 6):
        alone = decode(case.rows([row]))
        assert torch.equal(alone[0][0], whole[0][row]) and torch.equal(alone[1][0], whole[1][row])


@pytest.mark.parametrize(("formats", "layout"), [form for form in FORMS if form[1] == "planar"], ids=str)
def test_pages_that_came_too_close_after_a_call_are_refused(formats, layout):
    """A prepared launch must not assume that the next cache of these shapes has room for its scale rows."""
    case: Any = sparse_case(formats=formats, cache_layout=layout, batch=2, h_q=16, extra_topk=64, device="cuda")
    mla_fp8_decode(case.q, case.kv_cache, **case.options())
    names = ("kv_cache", "extra_kv_cache") if len(formats) > 1 else ("kv_cache",)
    for name in names:
        cache = getattr(case, name)
        page_bytes = cache.shape[1] * cache.shape[2]
        short = page_bytes - page_bytes % 16 - 16
        memory = torch.zeros(len(cache) * page_bytes, dtype=torch.uint8, device="cuda")
        close = memory.as_strided(cache.shape, (short, *cache.stride()[1:]))
        call = {**case.arguments(), name: close}
        with pytest.raises(ValueError, match=rf"^{name}: got pages {short} bytes apart"):
            mla_fp8_decode(**call)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "v3.2"])
def test_a_cache_beyond_four_gib(run_decode, name):
    """Addresses of pages, data rows and scale rows need 64 bits."""
    token_format = FORMATS[name]
    num_pages = (2**32 + 2**28) // (64 * token_format.token_bytes)
    memory = torch.full((num_pages, 64 * token_format.token_bytes), 0xFF, dtype=torch.uint8, device="cuda")
    cache = memory.view(num_pages, 64, token_format.token_bytes)
    ends = torch.tensor([0, 1, num_pages // 2, num_pages - 1], device="cuda")
    gen = generator(1, "cuda")
    small = paged(4, 64, torch.arange(256, device="cuda"), tokens_of(256, name, gen), name, None, padded=False)
    memory[ends] = small.flatten(1)
    case: Any = sparse_case(formats=(name,), batch=2, h_q=16, topk=128, num_slots=256, invalid=False, device="cuda")
    slots = (ends.repeat_interleave(64) * 64 + torch.arange(64, device="cuda").repeat(4)).int()
    pick = torch.randint(256, (2, 1, 128), generator=gen, device="cuda")
    run_decode(dataclasses.replace(case, kv_cache=cache, indices=slots[pick], topk_length=None))
