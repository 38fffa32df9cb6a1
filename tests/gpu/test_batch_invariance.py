"""With a given number of splits, the bits of a row depend on that row alone, in batches of 2 to 256 rows.

A batch repeats a few requests of different lengths, so that caches stay small and each row has been computed alone.
Prompts have several queries. tests/cpu/test_batch_invariance.py tests the planners' choices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from cute_kernels import gqa_decode, merge_states, mla_fp8_decode, sink_attention
from cute_kernels.gqa.launch import decode_spec
from cute_kernels.gqa.request import DECODE
from cute_kernels.merge.spec import MergeSpec
from cute_kernels.mla.plan import plan_decode
from cute_kernels.sink.spec import SinkForwardSpec, SinkWorkListSpec
from tests.kit.gqa_cases import gqa_case
from tests.kit.graphs import capture
from tests.kit.mla_cases import DecodeCase, dense_case, generator, ragged_lengths, sparse_case

DEVICE = "cuda"
DISTINCT = 19
BATCHES = (2, 3, 16, 17, 64, 65, 128, 256)
SPLITS = (1, 4)
LONGEST = 1500
Result = tuple[torch.Tensor, torch.Tensor]
Decode = Callable[[Sequence[int]], Result]


def hold(decode: Decode, batches: Sequence[int] = BATCHES) -> Result:
    """Requires that each row has the same bits alone and in batches of every size; returns these bits.

    Args:
        decode: takes requests as numbers below `DISTINCT`, and returns out and lse of their batch.
        batches: sizes of batches.
    """
    each = [decode([i]) for i in range(DISTINCT)]
    out, lse = (torch.cat(parts) for parts in zip(*each, strict=True))
    assert torch.isfinite(out).all() and torch.isfinite(lse).any()
    for size in batches:
        rows = [i % DISTINCT for i in range(size)]
        require_rows(decode(rows), (out, lse), rows, f"a batch of {size}")
    return out, lse


def require_rows(got: Result, alone: Result, rows: Sequence[int], what: str) -> None:
    for name, values, expected in zip(("out", "lse"), got, alone, strict=True):
        differ = (values != expected[list(rows)]).flatten(1).any(1)
        assert not differ.any(), f"{name} of rows {differ.nonzero().flatten().tolist()[:8]} in {what}"


@pytest.fixture(autouse=True, scope="module")
def free_memory() -> Any:
    yield
    cached.cache_clear()
    torch.cuda.empty_cache()


@functools.cache
def cached(make: Callable[..., Any], **options: Any) -> Any:
    return make(**options, device=DEVICE)


# ---- mla_fp8_decode

LENGTHS = tuple(ragged_lengths(DISTINCT, LONGEST, 64, 0))
SPARSE = {
    "v3.2": functools.partial(cached, sparse_case, batch=DISTINCT, topk=2048),
    "v3.2, lengths": functools.partial(cached, sparse_case, batch=DISTINCT, topk=1024, lengths="query", seed=1),
    "v3.2, prompts": functools.partial(cached, sparse_case, batch=DISTINCT, topk=512, s_q=3, lengths="batch", seed=2),
    "v3.2_nope": functools.partial(cached, sparse_case, formats=("v3.2_nope",), batch=DISTINCT, topk=512),
    "v4": functools.partial(cached, sparse_case, formats=("v4",), batch=DISTINCT, topk=1152),
    "v4.1": functools.partial(
        cached, sparse_case, formats=("v4.1",), cache_layout="planar", batch=DISTINCT, topk=640, lengths="query"
    ),
    "v4 twice": functools.partial(
        cached, sparse_case, formats=("v4", "v4"), batch=DISTINCT, topk=128, extra_topk=1024, lengths="batch"
    ),
    "v4.1 and fp4": functools.partial(
        cached, sparse_case, formats=("v4.1", "v4.1_fp4"), cache_layout="planar", batch=DISTINCT, topk=128,
        extra_topk=1024, s_q=2,
    ),
}  # fmt: skip
DENSE = {
    "dense v3.2": functools.partial(cached, dense_case, seqlens=LENGTHS),
    "dense v3.2, prompts": functools.partial(cached, dense_case, seqlens=LENGTHS, s_q=4, seed=1),
    "dense v4": functools.partial(cached, dense_case, cache_format="v4", seqlens=LENGTHS),
}
MLA: dict[str, Callable[..., Any]] = {**SPARSE, **DENSE}
WAYS = [
    *({"h_q": h_q, "num_splits": splits} for h_q in (16, 64, 128) for splits in SPLITS),
    {"h_q": 40, "num_splits": 16},
]


def mla(case: DecodeCase, **forced: Any) -> Decode:
    def decode(rows: Sequence[int]) -> Result:
        out, lse = mla_fp8_decode(**case.rows(rows).arguments(), **forced, return_lse=True)
        return out, lse

    return decode


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", MLA)
def test_mla(name, way):
    hold(mla(MLA[name](h_q=way["h_q"]), num_splits=way["num_splits"]))


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("name", ["v3.2", "v3.2, lengths", "dense v3.2"])
def test_mla_with_every_exchange(name, num_splits):
    """The exchanges round differently, and no other row may change a result."""
    case = MLA[name](h_q=128)
    for exchange in ("none", "codes", "values"):
        hold(mla(case, num_splits=num_splits, exchange=exchange))


# ---- gqa_decode

GQA: dict[str, dict[str, Any]] = {
    "int8": {"h_q": 16, "h_kv": 2},
    "int8, prompts": {"h_q": 16, "h_kv": 2, "s_q": 4},
    "int8, contiguous": {"h_q": 8, "h_kv": 2, "layout": "BSNH"},
    "fp8, window": {"h_q": 16, "h_kv": 1, "kv_dtype": "fp8", "window": 300},
    "bfloat16, d 64": {"h_q": 32, "h_kv": 4, "d": 64, "kv_dtype": "bf16", "k_scales": None, "v_scales": None},
}


@functools.cache
def gqa_of(name: str, device: str = DEVICE, seqlens: tuple[int, ...] = LENGTHS) -> Any:
    return gqa_case(**{"seqlens": seqlens, "layout": "paged_HND", "sink": "finite", "device": device} | GQA[name])


def gqa_rows(case: Any, rows: Sequence[int]) -> Any:
    names = ["q", "cache_seqlens"]
    names += ["block_table"] if case.block_table is not None else ["k_cache", "v_cache", "k_scale", "v_scale"]
    return dataclasses.replace(case, **{name: getattr(case, name)[list(rows)] for name in names})


def gqa(case: Any, num_splits: int) -> Decode:
    def decode(rows: Sequence[int]) -> Result:
        out, lse = gqa_decode(**gqa_rows(case, rows).arguments(), num_splits=num_splits, return_lse=True)
        return out, lse

    return decode


@pytest.mark.parametrize("num_splits", [*SPLITS, 64])
@pytest.mark.parametrize("name", GQA)
def test_gqa(name, num_splits):
    hold(gqa(gqa_of(name), num_splits))


# ---- merge_states

STATES = [(n, d, dtype) for n in (2, 8, 16, 33) for d, dtype in ((512, torch.float32), (128, torch.bfloat16))]


@pytest.mark.parametrize(("num_states", "d", "dtype"), STATES, ids=str)
def test_merge_states(num_states, d, dtype):
    """With 16 heads, batches have 32 to 4096 rows, on both sides of every bound at which threads are laid out anew."""
    gen, shape = generator(0, DEVICE), (num_states, DISTINCT, 1, 16)
    outs = torch.randn((*shape, d), generator=gen, dtype=torch.float32, device=DEVICE).to(dtype)
    lses = 4 * torch.randn(shape, generator=gen, dtype=torch.float32, device=DEVICE)
    lses[0, ::5] = -torch.inf
    hold(lambda rows: merge_states(outs[:, list(rows)], lses[:, list(rows)]))


# ---- sink_attention

PREFILL = [(d, window) for d in (64, 128) for window in (None, 100, 600)]


def sinks_of(s_q: int, s_k: int, d: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k and v of `DISTINCT` sequences, 8 heads over 2, and sinks."""
    gen = generator(s_q + d, DEVICE)
    shapes = ((s_q, 8), (s_k, 2), (s_k, 2))
    tensors = [
        torch.randn((DISTINCT, *shape, d), generator=gen, dtype=torch.float32, device=DEVICE).bfloat16()
        for shape in shapes
    ]
    return tensors, torch.randn(8, generator=gen, dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize(("d", "window"), PREFILL)
def test_sinks_of_prompts(d, window):
    tensors, s_aux = sinks_of(70, 200, d)

    def attend(rows: Sequence[int]) -> Result:
        out, lse = sink_attention(*(t[list(rows)] for t in tensors), s_aux, window=window, return_lse=True)
        return out, lse

    hold(attend)


@pytest.mark.parametrize(("d", "window"), PREFILL)
def test_sinks_of_packed_prompts(d, window):
    """Windows hide nothing of a single short prompt, and much of all prompts together."""
    (q, k, v), s_aux = sinks_of(150, 150, d)
    lengths = [1 + 149 * i // (DISTINCT - 1) for i in range(DISTINCT)]

    def attend(rows: Sequence[int]) -> Result:
        starts = torch.tensor([0, *(lengths[i] for i in rows)], dtype=torch.int32, device=DEVICE).cumsum(0).int()
        packed = [torch.cat([t[i, : lengths[i]] for i in rows]) for t in (q, k, v)]
        found = sink_attention(
            *packed, s_aux, window=window, cu_seqlens_q=starts, cu_seqlens_k=starts, return_lse=True
        )  # fmt: skip
        out, lse = q.new_zeros((len(rows), *q.shape[1:])), s_aux.new_zeros((len(rows), *q.shape[1:3]))
        for place, i in enumerate(rows):
            own = slice(sum(lengths[j] for j in rows[:place]), sum(lengths[j] for j in rows[: place + 1]))
            out[place, : lengths[i]], lse[place, : lengths[i]] = (t[own] for t in found)
        return out, lse

    hold(attend, (2, 3, 17, 64))


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("s_q", [1, 8])
def test_sinks_where_few_tokens_are_decoded(s_q, num_splits):
    tensors, s_aux = sinks_of(s_q, LONGEST, 64)

    def attend(rows: Sequence[int]) -> Result:
        some = (t[list(rows)] for t in tensors)
        out, lse = sink_attention(*some, s_aux, num_splits=num_splits, return_lse=True)
        return out, lse

    hold(attend)


# ---- compiled, and in graphs

OPS: dict[str, Callable[[Sequence[int]], tuple[Any, dict[str, Any]]]] = {
    "mla": lambda rows: (mla_fp8_decode, MLA["v3.2"](h_q=64).rows(rows).arguments()),
    "mla, two caches": lambda rows: (mla_fp8_decode, MLA["v4 twice"](h_q=64).rows(rows).arguments()),
    "gqa": lambda rows: (gqa_decode, gqa_rows(gqa_of("int8"), rows).arguments()),
}


@pytest.mark.parametrize("name", OPS)
def test_compiled_and_in_a_graph(name):
    def alone(row: int) -> Result:
        op, arguments = OPS[name]([row])
        return op(**arguments, num_splits=4, return_lse=True)

    out, lse = (torch.cat(parts) for parts in zip(*map(alone, range(DISTINCT)), strict=True))
    rows = [i % DISTINCT for i in range(65)]
    op, arguments = OPS[name](rows)

    def decode() -> Result:
        return op(**arguments, num_splits=4, return_lse=True)

    require_rows(torch.compile(decode, backend="aot_eager", fullgraph=True)(), (out, lse), rows, "a compiled call")
    graph, captured = capture(decode)
    for t in captured:
        t.fill_(torch.nan)
    graph.replay()
    require_rows(captured, (out, lse), rows, "a graph")


def kernel_specs() -> list[Any]:
    specs: list[Any] = []
    formats: list[tuple[bool, str, str]] = [
        *((True, name, "") for name in ("v3.2_nope", "v4", "v4.1")), (True, "v4", "v4"), (True, "v4.1", "v4.1_fp4"),
        (False, "v4", ""),
    ]  # fmt: skip
    for sparse, first, second in formats:
        for way in WAYS:
            plan = plan_decode(
                sparse=sparse, batch=1, s_q=1, max_keys=LONGEST, num_sms=132, cache_format=first,
                extra_format=second, extra_keys=64 if second else 0, **way,
            )  # fmt: skip
            specs.append(plan.spec)
    for name in GQA:
        specs.append(decode_spec(DECODE.request(**gqa_of(name, "cpu", (70, 1)).arguments(), num_splits=1)))
    for rows in (16, 4096):
        for n, d, dtype in STATES:
            kind = str(dtype).removeprefix("torch.")
            specs.append(MergeSpec.for_launch(rows=rows, num_states=n, d=d, in_dtype=kind, out_dtype=kind))
    for d, window in PREFILL:
        for packed in (False, True):
            specs.append(SinkForwardSpec.for_launch("bfloat16", d, packed=packed, window=window, ratio=4))
    return list(dict.fromkeys([*specs, SinkWorkListSpec()]))
