"""Block-sparse `gqa_decode` against the float64 oracle; see test_gqa_decode.py, and tests/cpu/test_gqa_blocks.py."""

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch

from cute_kernels.gqa.block_table_spec import BlockTableSpec
from cute_kernels.gqa.launch import decode_spec
from cute_kernels.gqa.request import DECODE
from cute_kernels.runtime.compile import get_kernel
from tests.gpu.test_gqa_decode import decode, hold
from tests.kit.bits import require_same_bits_each_time
from tests.kit.block_lists import INT32_MAX, INT32_MIN, listed_case, table_of_lists
from tests.kit.gqa_cases import GqaCase
from tests.kit.graphs import capture
from tests.kit.mla_cases import generator, ragged_lengths, strided

pytestmark = pytest.mark.usefixtures("free_memory")
INF = math.inf
LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 300, 511, 512, 700]

CACHES: dict[str, dict[str, Any]] = {
    "M3": {"h_q": 32, "layout": "paged_HND", "page_size": 128, "kv_dtype": "bf16", "index_block": 128},
    "M3, int8": {"h_q": 32, "layout": "paged_HND", "page_size": 128, "index_block": 128},
    "pages of half a block": {"layout": "paged_NHD", "page_size": 64, "index_block": 128},
    "blocks of half a page": {"layout": "paged_HND", "page_size": 128, "kv_dtype": "int8_k_int4_v"},
    "4-bit keys and values": {"h_q": 32, "layout": "paged_NHD", "page_size": 128, "kv_dtype": "int4",
                              "index_block": 128},
    "pages of a token": {"layout": "paged_NHD", "page_size": 1, "kv_dtype": "bf16", "d": 64, "bad_entries": True},
    "fp8 in large pages": {"layout": "paged_NHD", "page_size": 512, "kv_dtype": "fp8", "d": 256,
                           "k_scales": "per_tensor", "v_scales": "per_tensor", "padded": True},
    "packed": {"layout": "paged_vllm", "page_size": 16, "k_scales": "per_group_32", "bad_entries": True},
    "shared lists": {"own": False, "layout": "paged_HND", "page_size": 64, "k_scales": "per_head",
                     "v_scales": "per_token", "sink": "inf", "softcap": 5.0},
    "no pages": {"layout": "BNSH", "d": 64, "whole": True},
    "no pages, shared lists": {"own": False, "layout": "BSNH", "kv_dtype": "bf16", "whole": True, "sink": "finite"},
}  # fmt: skip
"""Options of `listed`, each of which has its own kernels."""


def listed(device: str = "cuda", **options: Any) -> GqaCase:
    lengths = {"seqlens": [512] * 5 if options.get("whole") else LENGTHS}
    return listed_case(**{"h_q": 8, "h_kv": 2, "n": 4, **lengths, "device": device, **options})


def kernel_specs() -> list[Any]:
    specs: dict[Any, None] = {}
    for options in CACHES.values():
        spec = decode_spec(DECODE.request(**listed("cpu", **options).arguments(), num_splits=1))
        specs |= {spec: None, dataclasses.replace(spec, cluster=8 if spec.warps == 8 else 1): None}
    return list(specs)


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES.keys())
@pytest.mark.parametrize(("s_q", "causal"), [(1, True), (3, True), (8, False)])
def test_caches_of_all_kinds(options: dict[str, Any], s_q: int, causal: bool) -> None:
    """Lists have few or many blocks, and q has any strides."""
    for n in (1, 4, 40):
        case = listed(**options, s_q=s_q, causal=causal, n=n, seed=n)
        hold(dataclasses.replace(case, q=strided(case.q)), padded=n == 4)


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES.keys())
def test_contiguous_outputs_and_q_itself(options: dict[str, Any]) -> None:
    case = listed(**options, s_q=2)
    out, lse = decode(case, return_lse=True)
    for call in (case, dataclasses.replace(case, q=strided(case.q))):
        q = call.q.clone() if call is case else strided(call.q)
        written = decode(dataclasses.replace(call, q=q), out=q, return_lse=True)
        assert written[0] is q and torch.equal(q, out) and torch.equal(written[1], lse)
        assert torch.equal(decode(call), out)


@pytest.mark.parametrize("name", ["M3", "M3, int8", "shared lists"])
def test_many_sequences(name: str) -> None:
    """Lengths are ragged up to 9,000 tokens, with 16 blocks a list; one request has 100,000 tokens."""
    case = functools.partial(listed, **CACHES[name], n=16)
    hold(case(seqlens=ragged_lengths(64, 9000, 64, seed=3)))
    hold(case(seqlens=[100_003], s_q=2), splits=(None, 1, 5))


def test_a_list_of_all_blocks_is_the_dense_call() -> None:
    case = listed(**CACHES["M3"])
    lists = torch.tensor([5, 4, 3, 3, 2, 1, 0, -1, INT32_MIN, INT32_MAX], dtype=torch.int32, device="cuda")
    every = dataclasses.replace(case, indices=lists.expand(len(LENGTHS), 1, 2, -1))
    for t in (case.k_cache, case.v_cache):
        t.nan_to_num_()
    hold(every)
    dense = decode(dataclasses.replace(case, indices=None), return_lse=True)
    for got, expected in zip(decode(every, return_lse=True), dense, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


# ---- the tables


@pytest.mark.parametrize("page_size", [1, 16, 64, 128, 512])
@pytest.mark.parametrize("index_block", [64, 128])
def test_tables_of_lists(page_size: int, index_block: int) -> None:
    """The tables must match in every number, for lists of all lengths around a warp's, and nothing else is written."""
    for n in (1, 31, 32, 33, 100):
        for s_q, causal in ((1, 1), (4, 1), (2, 0)):
            require_table(page_size, index_block, n, s_q, causal)


def test_tables_without_pages() -> None:
    for n in (1, 5, 33):
        require_table(0, 64, n, 2, 1)


def require_table(page_size: int, index_block: int, n: int, s_q: int, causal: int) -> None:
    gen = generator(n)
    batch, heads, num_pages, capacity = 7, 3, 50, 64 * 128
    rows = min(page_size or index_block, index_block)
    shifts = [size.bit_length() - 1 for size in (index_block, rows, page_size or capacity)]
    numbers = (capacity, causal, *shifts, num_pages if page_size else batch, 24, 3, 1)
    indices = torch.randint(-2, capacity // index_block + 2, (batch, s_q, heads, n + 1), generator=gen).int()[..., :n]
    indices[2] = INT32_MAX
    indices[3, ..., -1:] = (3001 - 1) // index_block
    lengths = torch.tensor([0, 1, 3000, 3001, capacity, INT32_MAX, INT32_MIN], dtype=torch.int32)
    pages = None
    if page_size:
        pages = torch.randint(-3, num_pages + 3, (batch, capacity // page_size), generator=gen).int()
    table = torch.full((batch * s_q * heads, n * index_block // rows), -9, dtype=torch.int32)
    made = [(table.clone(), table[:, 0].clone()) for _ in range(2)]
    table_of_lists(indices, pages, lengths, *made[0], *numbers)
    on_gpu: list[Any] = [None if t is None else t.cuda() for t in (indices, pages, lengths, *made[1])]
    get_kernel(BlockTableSpec(paged=page_size > 0))(*on_gpu, *numbers)
    assert torch.equal(on_gpu[4].cpu(), made[0][1])
    assert torch.equal(on_gpu[3].cpu(), made[0][0])


# ---- graphs and bits


def test_lists_lengths_and_tables_change_between_replays() -> None:
    for name in ("M3", "M3, int8", "shared lists"):
        case = listed(**CACHES[name], s_q=2, seqlens=[300, 700, 64], seed=1)
        assert case.indices is not None and case.cache_seqlens is not None and case.block_table is not None
        graph, (out, lse) = capture(lambda case=case: decode(case, return_lse=True))
        moved = dataclasses.replace(
            case, indices=case.indices.flip(0).contiguous(), cache_seqlens=case.cache_seqlens.flip(0),
            block_table=case.block_table.flip(0).contiguous(),
        )  # fmt: skip
        expected = decode(moved, return_lse=True)
        for name_of in ("indices", "cache_seqlens", "block_table"):
            getattr(case, name_of).copy_(getattr(moved, name_of))
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize(
    "name", ["M3", "M3, int8", "blocks of half a page", "4-bit keys and values", "fp8 in large pages"]
)
def test_the_same_bits_each_time_and_in_any_batch(name: str) -> None:
    """With a given number of splits, the bits of a sequence must depend on it alone."""
    case = listed(**CACHES[name], seqlens=ragged_lengths(20, 3000, 64, seed=4), n=16)
    require_same_bits_each_time(case, functools.partial(decode, case))
    out, lse = decode(case, num_splits=3, return_lse=True)
    for row in (0, 7, 19):
        names = ("q", "cache_seqlens", "block_table", "indices")
        alone = dataclasses.replace(case, **{n: getattr(case, n)[row : row + 1] for n in names})
        own = decode(alone, num_splits=3, return_lse=True)
        assert torch.equal(own[0][0], out[row]) and torch.equal(own[1][0], lse[row])
