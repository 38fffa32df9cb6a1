"""Values of any size that only the device knows: lengths, indices, tables, slots, borders of packed sequences.

A result must have the bits of a call with clamped values. Lengths and borders change between replays of a graph, when
no check reads them again.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cute_kernels import gqa_decode, kv_int8_append, mla_fp8_append, mla_fp8_decode
from cute_kernels.gqa.spec import CLUSTERS, GqaDecodeSpec, shipped_specs
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.sink import op
from cute_kernels.sink.spec import SinkWorkListSpec
from fp8_mla import QK_DIM, TOKEN_BYTES
from tests.gpu.alone import alone
from tests.kit.bits import require_same_bits
from tests.kit.gqa_cases import GqaExpectation, check_gqa, gqa_case
from tests.kit.graphs import capture
from tests.kit.mla_cases import DecodeCase, generator, latent_tokens
from tests.kit.sink_calls import change_results
from tests.kit.sink_cases import SinkCase, SinkExpectation, sink_case

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
PAGE, CAPACITY = 64, 320
LENGTHS = [INT32_MIN, INT32_MIN + 1, -(2**30), -1, 0, 1, 65, CAPACITY - 1, CAPACITY, CAPACITY + 1, 2**30, INT32_MAX]
EMPTY = 5  # the first of them
OUTSIDE = [INT32_MIN, INT32_MIN + 1, -(2**30), -1, 2**30, INT32_MAX]
LISTED = SinkWorkListSpec(), SinkWorkListSpec(keys=True)


def kernel_specs() -> list[GqaDecodeSpec]:
    """Kernels with clusters, which do not ship."""
    paged = [spec for spec in shipped_specs() if spec.paged and spec.box_rows == 64]
    words = [spec for spec in shipped_specs() if spec.kv_dtype == spec.q_dtype and spec.d == 128]
    return [dataclasses.replace(spec, cluster=CLUSTERS[0]) for spec in (*paged, *words)]


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


# ---- mla_fp8_decode

WAYS: list[dict[str, Any]] = [
    *({"h_q": h_q, "num_splits": splits} for h_q in (8, 16, 32, 64, 128) for splits in (None, 1, 3)),
    *({"h_q": 128, "num_splits": splits, "exchange": way} for way in ("codes", "values") for splits in (1, 3)),
]
"""Balanced shares if there are lengths but no splits; equal parts of each query; heads as rows."""


def mla_case(h_q: int, s_q: int, batch: int) -> Any:
    """A case in which the block table of every request has all pages of the cache."""
    cache = latent_tokens(CAPACITY, generator(3, "cuda")).view(-1, PAGE, TOKEN_BYTES)
    q = torch.randn((batch, s_q, h_q, QK_DIM), generator=generator(s_q, "cuda"), device="cuda").bfloat16() * 3
    table = torch.arange(CAPACITY // PAGE, device="cuda").int().repeat(batch, 1)
    return DecodeCase(q, cache, block_table=table, cache_seqlens=int32(LENGTHS[:batch]))


def mla(case: DecodeCase, **options: Any) -> list[torch.Tensor]:
    out, lse = case.outputs()
    mla_fp8_decode(case.q, case.kv_cache, **{**case.options(), **options}, out=out.tensor, lse=lse.tensor)
    return [out.tensor, lse.tensor]


@pytest.mark.parametrize("s_q", [1, 2, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_mla_lengths(run_decode, s_q, causal):
    for options in WAYS:
        forced = dict(options)
        case = dataclasses.replace(mla_case(forced.pop("h_q"), s_q, len(LENGTHS)), causal=causal)
        got = mla(case, **forced)
        require_same_bits(got, mla(case, **forced, cache_seqlens=case.cache_seqlens.clamp(0, CAPACITY)))
        assert (got[0][:EMPTY] == 0).all() and (got[1][:EMPTY] == -math.inf).all()
        assert got[1][-3:].isfinite().all()
        if forced == {"num_splits": None}:
            run_decode(case, **forced)


def test_mla_lengths_that_change_between_replays():
    case = mla_case(128, 2, len(LENGTHS))
    case = dataclasses.replace(case, cache_seqlens=torch.full_like(case.cache_seqlens, CAPACITY))
    out, lse = case.outputs()

    def call() -> None:
        mla_fp8_decode(case.q, case.kv_cache, **case.options(), out=out.tensor, lse=lse.tensor)

    graph, _ = capture(call)
    for shift in range(3):
        lengths = int32(LENGTHS).roll(shift)
        case.cache_seqlens.copy_(lengths)
        graph.replay()
        require_same_bits([out.tensor, lse.tensor], mla(case, cache_seqlens=lengths.clamp(0, CAPACITY)))


@pytest.mark.parametrize("per_query", [False, True])
def test_mla_topk_lengths_and_indices(run_decode, per_query):
    s_q, topk = 2, CAPACITY
    for options in WAYS:
        forced = dict(options)
        paged = mla_case(forced.pop("h_q"), s_q, len(LENGTHS))
        indices = torch.arange(topk, device="cuda").int().repeat(len(LENGTHS), s_q, 1)
        indices[..., 1 : 1 + len(OUTSIDE)] = int32(OUTSIDE)
        indices[..., -1] = CAPACITY
        lengths = int32(LENGTHS)
        if per_query:
            lengths = torch.stack([lengths, lengths.flip(0)], 1)
        case: Any = DecodeCase(paged.q, paged.kv_cache, indices=indices, topk_length=lengths)
        masked = torch.where((indices >= 0) & (indices < CAPACITY), indices, -1)
        got = mla(case, **forced)
        require_same_bits(got, mla(case, **forced, indices=masked, topk_length=lengths.clamp(0, topk)))
        if forced == {"num_splits": None}:
            run_decode(case, **forced)


def test_mla_table_entries(run_decode):
    """A page that does not exist hides its keys. The product of a page number of 2^30 with the page size would wrap."""
    for options in WAYS:
        forced = dict(options)
        case = mla_case(forced.pop("h_q"), 2, len(OUTSIDE))
        table = case.block_table.clone()
        table[:, 1] = int32(OUTSIDE)
        case = dataclasses.replace(case, block_table=table, cache_seqlens=torch.full_like(table[:, 0], CAPACITY))
        hidden = table.clone()
        hidden[:, 1] = -1
        require_same_bits(mla(case, **forced), mla(case, **forced, block_table=hidden))
        if forced == {"num_splits": None}:
            run_decode(case, **forced)


# ---- gqa_decode


def variant(name: str, s_q: int, batch: int, **options: Any) -> Any:
    """A call of a shipped kernel or of its cluster variant. Every sequence fills its cache or its pages."""
    token = {"scale_dtype": torch.float16}
    kinds: dict[str, dict[str, Any]] = {
        "tokens": {"layout": "BNSH", "h_q": 1, "h_kv": 1, **token},
        "pages": {"layout": "paged_NHD", "h_q": 1, "h_kv": 1, **token},
        "words": {"layout": "BNSH", "h_q": 1, "h_kv": 1, "kv_dtype": "bf16"},
        "line": {
            "layout": "BNSH", "h_q": 16, "h_kv": 1, "k_scales": "per_head", "v_scales": "per_head",
            "q_dtype": torch.float16, "alibi": "head", "softcap": 20.0,
        },
    }  # fmt: skip
    settings = {"seqlens": [CAPACITY] * batch, "whole": True, "page_size": PAGE, "device": "cuda", **kinds[name]}
    case: Any = gqa_case(**settings, s_q=s_q)
    if case.block_table is not None:
        case = dataclasses.replace(case, block_table=case.block_table[:, : CAPACITY // PAGE].contiguous())
    return dataclasses.replace(case, **options)


def gqa(case: Any, **options: Any) -> list[torch.Tensor]:
    out, lse = case.outputs()
    gqa_decode(**{**case.arguments(), **options}, out=out.tensor, lse=lse.tensor)
    return [out.tensor, lse.tensor]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("s_q", [1, 2, 8])
@pytest.mark.parametrize("name", ["tokens", "pages", "words", "line"])
def test_gqa_lengths(name, s_q, causal):
    """Covers ranges of the whole batch, parts of each sequence, and clusters if splits are not given."""
    for window in (None, 1, 100, INT32_MAX):
        case = variant(name, s_q, len(LENGTHS), cache_seqlens=int32(LENGTHS), causal=causal, window=window)
        expectation = GqaExpectation.of(case)
        for splits in (1, 3) if name == "line" else (None, 1, 3):
            got = gqa(case, num_splits=splits)
            require_same_bits(got, gqa(case, num_splits=splits, cache_seqlens=int32(LENGTHS).clamp(0, CAPACITY)))
            assert (got[0][:EMPTY] == 0).all() and (got[1][:EMPTY] == -math.inf).all()
            expectation.check(*got, name=f"window {window}, num_splits {splits}").require()


@pytest.mark.parametrize("name", ["tokens", "pages"])
def test_gqa_lengths_of_many_sequences(name):
    """The batch is too large for one cluster per sequence, so all tiles together are cut into ranges."""
    lengths = int32(LENGTHS * 4)
    case = variant(name, 2, len(lengths), cache_seqlens=lengths)
    got = gqa(case)
    require_same_bits(got, gqa(case, cache_seqlens=lengths.clamp(0, CAPACITY)))
    check_gqa(*got, case).require()


def test_gqa_table_entries():
    case = variant("pages", 2, len(OUTSIDE), cache_seqlens=int32([CAPACITY] * len(OUTSIDE)))
    table = case.block_table.clone()
    table[:, 1] = int32(OUTSIDE)
    case = dataclasses.replace(case, block_table=table)
    hidden = table.clone()
    hidden[:, 1] = -1
    for splits in (None, 1, 3):
        got = gqa(case, num_splits=splits)
        require_same_bits(got, gqa(case, num_splits=splits, block_table=hidden))
        check_gqa(*got, case).require()


# ---- appends

SLOTS = [-(2**63), -(2**32) + 1, INT32_MIN, -1, 2, 2**31 + 3, 2**32 + 1, 2**40, 2**63 - 1]
"""One of these numbers is a valid slot. The low 32 bits of some others are one, too."""


def test_slots_of_appends():
    slots = torch.tensor(SLOTS, device="cuda")
    kv = torch.randn((len(SLOTS), QK_DIM), generator=generator(2, "cuda"), device="cuda").bfloat16()
    cache = torch.zeros((3, 4, TOKEN_BYTES), dtype=torch.uint8, device="cuda")
    mla_fp8_append(kv, cache, slots)
    assert cache.view(12, -1).any(1).nonzero().tolist() == [[2]]
    k, v = torch.randn((2, len(SLOTS), 8, 128), generator=generator(3, "cuda"), device="cuda").bfloat16()
    caches = [torch.zeros((3, 4, 8, 128), dtype=torch.int8, device="cuda") for _ in range(2)]
    scales = [torch.zeros((3, 4, 8), device="cuda") for _ in range(2)]
    kv_int8_append(k, v, *caches, *scales, slots, layout="paged_NHD")
    for tensor in (*caches, *scales):
        assert tensor.view(12, -1).any(1).nonzero().tolist() == [[2]]


# ---- borders of packed sequences

TOKENS = [(130, 200), (64, 65), (0, 0), (191, 300), (7, 9)]
TOTAL = tuple(sum(pair[side] for pair in TOKENS) for side in range(2))
SAME: dict[str, Callable[[list[int], int], list[int]]] = {
    "beyond the end": lambda ends, total: [*ends[:3], *[INT32_MAX, 2**30, total + 1]],
    "before the beginning": lambda ends, total: [INT32_MIN, -1, -(2**30), *ends[3:]],
    "zeros at the end": lambda ends, total: [*ends[:3], total, 0, INT32_MIN],
}
"""Borders and their clamped values. A sequence that ends before it begins is empty."""
OVERLAPPING: dict[str, list[int]] = {
    "up and down": [0, INT32_MAX, 0, INT32_MAX, INT32_MIN, INT32_MAX],
    "one more": [0, 100, 99, 200, 250, INT32_MAX],
    "descending": [INT32_MAX, 300, 200, 100, -1, INT32_MIN],
    "wild": [-7, 2**30, INT32_MIN + 1, 17, 2**31 - 5, 3],
}


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disables the check of borders, as in a replay."""
    monkeypatch.setattr(op, "_check_lengths", lambda *a: None)
    yield
    torch.cuda.synchronize()


def packed(d: int, window: int | None) -> SinkCase:
    return sink_case(TOKENS, 4, 2, d, window=window, packed=True, padded=False)


def call_operators(case: SinkCase, deterministic: bool) -> tuple[torch.Tensor, ...]:
    tensors = (case.q, case.k, case.v, case.s_aux, case.cu_seqlens_q, case.cu_seqlens_k)
    numbers = (case.causal, case.window, case.softmax_scale, deterministic)
    out, lse = torch.ops.cute_kernels.sink_attention(*tensors, *numbers, True)
    backward = torch.ops.cute_kernels.sink_attention_backward
    return out, lse, *backward(case.d_out, out, lse, *tensors, *numbers, None)


def clamped(ends: list[int], total: int) -> list[int]:
    """Borders that never decrease. Sequences that do not overlap keep their lengths."""
    clamped_ends = [min(max(end, 0), total) for end in ends]
    return [max(clamped_ends[: i + 1]) for i in range(len(clamped_ends))]


def set_borders(case: SinkCase, q_borders: list[int], k_borders: list[int]) -> None:
    assert case.cu_seqlens_q is not None and case.cu_seqlens_k is not None
    case.cu_seqlens_q.copy_(torch.tensor(q_borders))
    case.cu_seqlens_k.copy_(torch.tensor(k_borders))


def ends_of(side: int) -> list[int]:
    return [sum(pair[side] for pair in TOKENS[:i]) for i in range(len(TOKENS) + 1)]


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("borders", [*SAME, *OVERLAPPING])
def test_work_list_of_any_borders(borders, keys):
    """The list has all blocks, or none if sequences overlap, and nothing is written past its last entry."""
    rows, total = 64, TOTAL[int(keys)]
    given = SAME[borders](ends_of(int(keys)), total) if borders in SAME else OVERLAPPING[borders]
    lists = [int32(given), int32([0] * len(given))]
    room = torch.full((total // rows + len(TOKENS) + 1 + 8, 2), -7, dtype=torch.int32, device="cuda")
    work = room[:-8]
    cu_q, cu_k = lists[::-1] if keys else lists
    get_kernel(LISTED[int(keys)])(cu_q, cu_k, work, rows, 2**30, 1, total, TOTAL[1 - int(keys)], *(0,) * 7)
    clamped_ends = [min(max(end, 0), total) for end in given]
    spans = [max(end - begin, 0) for begin, end in zip(clamped_ends, clamped_ends[1:], strict=False)]
    blocks = [(b, i) for b, n in enumerate(spans) for i in range(-(-n // rows))] if sum(spans) <= total else []
    count, *listed = work.tolist()
    assert count == [len(blocks), 0]
    assert sorted(map(tuple, listed[: len(blocks)])) == blocks
    assert (room[1 + len(blocks) :] == -7).all()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("d", [64, 128])
def test_borders_that_a_replay_finds(d, window, deterministic):
    """Results must be those of clamped borders. Overlapping sequences must not harm other memory or the next replay."""
    case = packed(d, window)
    right = [ends_of(0), ends_of(1)]
    with torch.no_grad():
        graph, results = capture(lambda: call_operators(case, deterministic))
        for change in SAME.values():
            wrong = [change(ends, total) for ends, total in zip(right, TOTAL, strict=True)]
            replays = []
            for borders in (wrong, [clamped(ends, total) for ends, total in zip(wrong, TOTAL, strict=True)]):
                set_borders(case, *borders)
                for t in results:
                    t.fill_(math.nan)
                graph.replay()
                replays.append([t.clone() for t in results])
            out, lse, dq, *others = zip(*replays, strict=True)
            for pair in (out, lse, *others, *([dq] if deterministic or window else [])):
                require_same_bits(*([t] for t in pair))
            assert not any(t.isnan().any() for t in replays[0]), "rows of the tensors are rows of a sequence"
        for q_borders in OVERLAPPING.values():
            for k_borders in (*OVERLAPPING.values(), right[1]):
                set_borders(case, q_borders, k_borders)
                graph.replay()
        set_borders(case, *right)
        graph.replay()
        expected = SinkExpectation.of(case)
        expected.check_forward(results[0], results[1]).require()
        expected.require_gradients(*results[2:])


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("deterministic", [True, False])
def test_no_borders_reach_beyond_the_tensors(deterministic, last, unchecked, monkeypatch):
    """Each tensor lies alone in memory, so that an access before or after it is a fault."""
    change_results(monkeypatch, lambda t: alone(t, last=last))
    for d, window in ((64, None), (64, 100), (128, None), (128, 100)):
        case = packed(d, window)
        for name in ("q", "k", "v", "d_out", "cu_seqlens_q", "cu_seqlens_k"):
            setattr(case, name, alone(getattr(case, name), last=last))
        with torch.no_grad():
            for ends in OVERLAPPING.values():
                for borders in ((ends, ends), (ends, ends_of(1)), (ends_of(0), ends)):
                    set_borders(case, *borders)
                    call_operators(case, deterministic)
        torch.cuda.synchronize()
