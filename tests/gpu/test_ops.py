"""Operators in torch: streams, CUDA graphs, torch.compile, caller-owned outputs, host time, warm start."""

import dataclasses
import functools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.timing import host_medians
from cute_kernels import gqa_decode, kv_int8_append, merge_states, mla_fp8_append, mla_fp8_decode
from cute_kernels.gqa.append_spec import KvAppendSpec
from cute_kernels.gqa.launch import decode_spec
from cute_kernels.gqa.request import DECODE
from fp8_mla import QK_DIM, TOKEN_BYTES, pack
from tests.kit.bits import require_same_bits
from tests.kit.compare import check_decode
from tests.kit.gqa_cases import GqaCase, check_gqa, gqa_case
from tests.kit.graphs import capture
from tests.kit.kernel_place import printed
from tests.kit.mla_cases import DecodeCase, dense_case, generator, sparse_case

HOST_US = 15.0
"""Host microseconds that an eager call with a cached plan may take, on a host where `torch.sum` takes `SUM_US`."""
SUM_US = 5.5
"""Measured on hosts of H200s: 5.5 to 9 us. Calls and sums slow down by the same factor."""


def decode_case(case: DecodeCase, **options: Any) -> Any:
    return mla_fp8_decode(case.q, case.kv_cache, **{**case.options(), **options})


def usual_gqa(**options: Any) -> Any:
    """A call of the kernel variants that test_gqa_decode.py runs."""
    usual = {"seqlens": [700, 3, 64, 300], "h_q": 8, "h_kv": 2, "layout": "paged_NHD", "padded": False}
    return gqa_case(**{"device": "cuda", **usual, **options})


def decode_gqa(case: GqaCase, **options: Any) -> Any:
    return gqa_decode(**{**case.arguments(), **options})


def kernel_specs() -> list[Any]:
    flat: dict[str, Any] = {"layout": "BNSH", "device": "cpu"}
    cases = [usual_gqa(device="cpu"), usual_gqa(**flat), usual_gqa(**flat, kv_dtype="bf16")]
    scales = dict.fromkeys(("k_scale", "v_scale"), "per_token_head")
    requests = [DECODE.request(**case.arguments(), num_splits=num_splits) for case in cases for num_splits in (None, 1)]
    decoding = [decode_spec(request) for request in requests]
    return [*decoding, KvAppendSpec.for_launch(dtype="bfloat16", d=128, h_kv=2, **scales, scale_dtype="float32")]


@pytest.mark.parametrize("num_splits", [None, 1, 4])
def test_graph_replays_with_other_sequences(num_splits):
    """Lengths, tables and queries change in place between replays, so the plan was made for other values."""
    case: Any = dense_case(seqlens=[700, 3, 64, 300], h_q=64, s_q=2, padded=False, device="cuda")
    out, lse = case.outputs()

    def decode() -> None:
        decode_case(case, num_splits=num_splits, out=out.tensor, lse=lse.tensor)

    graph, _ = capture(decode)
    original = case.cache_seqlens.clone()
    for step, lengths in enumerate(([700, 3, 64, 300], [0, 0, 0, 0], [1, 2, 63, 299], [650, 0, 1, 128])):
        case.cache_seqlens.copy_(torch.minimum(torch.tensor(lengths, device="cuda").int(), original))
        case.q.copy_(torch.randn(case.q.shape, generator=generator(step, "cuda"), device="cuda") * 0.5)
        out.poison()
        lse.poison()
        graph.replay()
        check_decode(out.tensor, lse.tensor, name=f"replay {step}", **case.arguments()).require()


def test_graph_replays_with_other_indices():
    first = sparse_case(batch=4, h_q=128, s_q=2, topk=300, lengths="query", padded=False, device="cuda")
    out, lse = first.outputs()

    def decode() -> None:
        decode_case(first, out=out.tensor, lse=lse.tensor)

    graph, _ = capture(decode)
    for seed in (1, 2, 3):
        other = sparse_case(batch=4, h_q=128, s_q=2, topk=300, lengths="query", padded=False, seed=seed, device="cuda")
        for name in ("q", "kv_cache", "indices", "topk_length"):
            getattr(first, name).copy_(getattr(other, name))
        out.poison()
        lse.poison()
        graph.replay()
        check_decode(out.tensor, lse.tensor, name=f"replay {seed}", **first.arguments()).require()


@pytest.mark.parametrize("layout", ["BNSH", "paged_NHD"])
def test_gqa_graph_replays_append_and_decode(layout):
    """One graph stores a token of each sequence and decodes. Tokens, slots and lengths change between replays."""
    case = usual_gqa(layout=layout, values="normal")
    fresh, reach = torch.zeros((2, 4, 2, 128), dtype=torch.bfloat16, device="cuda"), case.cache_seqlens.clone()
    slots = torch.full((4,), -1, dtype=torch.int64, device="cuda")
    out, lse = case.outputs()
    stores = (case.k_cache, case.v_cache, case.k_scale, case.v_scale)

    def step() -> None:
        kv_int8_append(fresh[0], fresh[1], *stores, slots, layout=layout)
        decode_gqa(case, out=out.tensor, lse=lse.tensor)

    graph, _ = capture(step)
    rows, capacity = torch.arange(4, device="cuda"), case.k_cache.shape[2]
    for seed, lengths in enumerate(([700, 3, 64, 300], [1, 2, 63, 299], [650, 1, 1, 129])):
        fresh.copy_(torch.randn(fresh.shape, generator=generator(seed, "cuda"), device="cuda"))
        case.cache_seqlens.copy_(torch.minimum(torch.tensor(lengths, device="cuda").int(), reach))
        last = case.cache_seqlens.long() - 1
        if layout == "BNSH":
            slots.copy_(rows * capacity + last)
        else:
            slots.copy_(case.block_table[rows, last // 64] * 64 + last % 64)
        originals = [tensor.clone() for tensor in stores]
        out.poison()
        lse.poison()
        graph.replay()
        check_gqa(out.tensor, lse.tensor, case, name=f"replay {seed}").require()
        kv_int8_append(fresh[0], fresh[1], *originals, slots, layout=layout)
        require_same_bits(stores, originals)


def test_gqa_calls_on_several_streams_do_not_share_partial_results():
    cases = [usual_gqa(seqlens=[3000, 1, 700], seed=seed) for seed in range(3)]
    expected = [decode_gqa(case, num_splits=8) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        for case, stream, want in zip(cases, streams, expected, strict=True):
            with torch.cuda.stream(stream):
                wrong += (decode_gqa(case, num_splits=8).view(torch.int16) != want.view(torch.int16)).any()
    torch.cuda.synchronize()
    assert wrong.item() == 0


def test_caller_owned_outputs_are_used_and_returned():
    case = sparse_case(batch=2, h_q=16, topk=100, device="cuda")
    out, lse = case.outputs(padded=True)
    got = decode_case(case, out=out.tensor, lse=lse.tensor, return_lse=True)
    assert got[0] is out.tensor
    assert got[1] is lse.tensor
    assert torch.equal(decode_case(case), out.tensor)
    given_alone = decode_case(case, out=out.tensor)
    assert given_alone is out.tensor


@pytest.mark.parametrize("num_splits", [None, 1, 4])
def test_out_may_be_q_over_grouped_keys(num_splits):
    """torch.compile makes such calls. Each row is read before it is written, also with splits."""
    case = usual_gqa()
    expected = decode_gqa(case, num_splits=num_splits)
    for _ in range(20):
        q = case.q.clone()
        got = decode_gqa(dataclasses.replace(case, q=q), num_splits=num_splits, out=q)
        assert got is q and torch.equal(got, expected)


@pytest.mark.parametrize("num_splits", [None, 1, 4])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_out_may_be_q_of_512_columns(heads, num_splits):
    q = torch.randn((8, 2, heads, 512), generator=generator(0, "cuda"), device="cuda").bfloat16()
    cache = torch.zeros((32, 64, 584), dtype=torch.uint8, device="cuda")
    tokens = torch.randn((2048, 512), generator=generator(1, "cuda"), device="cuda").bfloat16()
    mla_fp8_append(tokens, cache, torch.arange(2048, device="cuda"), cache_format="v4")
    indices = torch.randint(2048, (8, 2, 640), generator=generator(2, "cuda"), device="cuda", dtype=torch.int32)
    expected = mla_fp8_decode(q, cache, indices=indices, num_splits=num_splits)
    for _ in range(20):
        out = q.clone()
        got = mla_fp8_decode(out, cache, indices=indices, num_splits=num_splits, out=out)
        assert got is out and torch.equal(got, expected)


def test_int32_slots_are_widened_in_eager_calls_and_in_graphs():
    kv = torch.randn((3, QK_DIM), generator=generator(0, "cuda"), device="cuda").bfloat16()
    caches = torch.zeros((2, 4, 64, TOKEN_BYTES), dtype=torch.uint8, device="cuda")
    k, v = torch.randn((2, 3, 2, 128), generator=generator(1, "cuda"), device="cuda").bfloat16()
    codes = torch.zeros((2, 2, 4, 64, 2, 128), dtype=torch.int8, device="cuda")
    scales = torch.ones((2, 2, 4, 64, 2), dtype=torch.float32, device="cuda")
    slots = torch.tensor([5, -1, 200], dtype=torch.int32, device="cuda")

    def append(n: int, slots: torch.Tensor) -> None:
        mla_fp8_append(kv, caches[n], slots)
        kv_int8_append(k, v, codes[n, 0], codes[n, 1], scales[n, 0], scales[n, 1], slots, layout="paged_NHD")

    append(0, slots)
    append(1, slots.long())
    assert caches.any() and torch.equal(caches[0], caches[1])
    assert torch.equal(codes[0], codes[1]) and torch.equal(scales[0], scales[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(0, slots)
    slots += 7
    graph.replay()
    append(1, slots.long())
    torch.cuda.synchronize()
    assert torch.equal(caches[0], caches[1]) and torch.equal(codes[0], codes[1])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_without_a_graph_break(backend):
    case: Any = sparse_case(batch=2, h_q=64, topk=300, lengths="batch", sink="finite", padded=False, device="cuda")

    def attend(
        kv: torch.Tensor,
        slots: torch.Tensor,
        q: torch.Tensor,
        cache: torch.Tensor,
        indices: torch.Tensor,
        topk_length: torch.Tensor,
        s_aux: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mla_fp8_append(kv, cache, slots)
        out, lse = mla_fp8_decode(
            q * 0.5, cache, indices=indices, topk_length=topk_length, s_aux=s_aux, return_lse=True
        )
        return merge_states(torch.stack([out, out]), torch.stack([lse, lse]))

    kv = torch.randn((10, QK_DIM), generator=generator(1, "cuda"), device="cuda").bfloat16()
    # the appended tokens land in slots that the decode reads
    slots = case.indices[0, 0][case.indices[0, 0] >= 0].unique()[:10].long()
    rest = (case.indices, case.topk_length, case.s_aux)
    caches = case.kv_cache.clone(), case.kv_cache.clone()
    expected = attend(kv, slots, case.q, caches[0], *rest)
    got = torch.compile(attend, fullgraph=True, backend=backend)(kv, slots, case.q, caches[1], *rest)
    assert torch.equal(caches[0], caches[1])
    assert not torch.equal(caches[0], case.kv_cache)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("name", ["mla", "mla split", "mla shares", "gqa"])
def test_a_call_reads_what_the_one_before_it_has_written(name):
    """A launch may begin before the previous one ends. Here, a call's results are the next call's queries."""
    if name == "gqa":
        gqa = usual_gqa(seqlens=[700, 3, 64, 300] * 16)
        queries = [gqa.q.clone() for _ in range(2)]
        results = queries

        def call(q: torch.Tensor, out: torch.Tensor) -> None:
            decode_gqa(dataclasses.replace(gqa, q=q), out=out)
    else:
        lengths = [64 * (n % 40) + n for n in range(80)]
        shares = dense_case(seqlens=lengths, h_q=128, padded=False, device="cuda")
        case = shares if name == "mla shares" else sparse_case(batch=80, h_q=128, topk=700, padded=False, device="cuda")
        queries = [case.q.clone() for _ in range(2)]
        results = [q[..., :512] for q in queries]

        def call(q: torch.Tensor, out: torch.Tensor) -> None:
            num_splits = {"mla": 1, "mla split": 3, "mla shares": None}[name]
            decode_case(dataclasses.replace(case, q=q), num_splits=num_splits, out=out)

    first = [q.clone() for q in queries]

    def chain(wait: bool) -> list[torch.Tensor]:
        for q, start in zip(queries, first, strict=True):
            q.copy_(start)
        for n in range(6):
            call(queries[n % 2], results[1 - n % 2])
            if wait:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return [q.clone() for q in queries]

    expected = chain(wait=True)
    assert not torch.equal(expected[0], first[0])
    for _ in range(20):
        require_same_bits(chain(wait=False), expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("layout", ["BNSH", "paged_NHD"])
def test_torch_compile_of_gqa_without_a_graph_break(layout, backend):
    case = usual_gqa(layout=layout, sink="finite")
    lengths, table, s_aux = case.cache_seqlens, case.block_table, case.s_aux
    k, v = torch.randn((2, 3, 2, 128), generator=generator(1, "cuda"), device="cuda").bfloat16()
    slots = torch.arange(3, device="cuda")
    if layout == "paged_NHD":
        slots += 64 * case.block_table[0, 1]

    def attend(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, q: torch.Tensor, *stores: torch.Tensor) -> Any:
        kv_int8_append(k, v, *stores, slots, layout=layout)
        return gqa_decode(
            q * 0.5,
            *stores,
            layout=layout,
            cache_seqlens=lengths,
            block_table=table,
            s_aux=s_aux,
            return_lse=True,
        )

    original = (case.k_cache, case.v_cache, case.k_scale, case.v_scale)
    first, second = [[tensor.clone() for tensor in original] for _ in range(2)]
    expected = attend(k, v, slots, case.q, *first)
    got = torch.compile(attend, fullgraph=True, backend=backend)(k, v, slots, case.q, *second)
    assert not torch.equal(first[0], original[0])
    require_same_bits((*second, *got), (*first, *expected))


@pytest.mark.alone
@pytest.mark.parametrize(
    "name",
    ["sparse", "sparse split", "dense", "append", "merge", "gqa", "gqa split", "gqa pages", "gqa bf16", "gqa append"],
)
def test_host_time(name, record_property):
    sparse = sparse_case(batch=2, h_q=64, topk=64, padded=False, device="cuda")
    dense = dense_case(seqlens=[64, 64], h_q=64, padded=False, device="cuda")
    buffers = tuple(output.tensor for output in sparse.outputs())
    kv = torch.zeros((2, QK_DIM), dtype=torch.bfloat16, device="cuda")
    cache = torch.zeros((1, 64, TOKEN_BYTES), dtype=torch.uint8, device="cuda")
    slots = torch.arange(2, device="cuda")
    outs, lses = torch.zeros((2, 2, 1, 64, 512), device="cuda"), torch.zeros((2, 2, 1, 64), device="cuda")

    def decode(case: DecodeCase, num_splits: int) -> Callable[[], Any]:
        arguments = {**case.arguments(), "num_splits": num_splits, "out": buffers[0], "lse": buffers[1]}
        return functools.partial(mla_fp8_decode, **{name: t for name, t in arguments.items() if t is not None})

    flat, pages = usual_gqa(layout="BNSH", seqlens=[300, 300]), usual_gqa(seqlens=[300, 300])
    words = usual_gqa(layout="BNSH", seqlens=[300, 300], kv_dtype="bf16")
    own = dict(zip(("out", "lse"), (output.tensor for output in flat.outputs()), strict=True))
    k, v = torch.zeros((2, 2, 2, 128), dtype=torch.bfloat16, device="cuda")
    stores = (flat.k_cache, flat.v_cache, flat.k_scale, flat.v_scale)

    def gqa(case: GqaCase, num_splits: int | None = None) -> Callable[[], Any]:
        arguments = {name: t for name, t in case.arguments().items() if t is not None}
        return functools.partial(gqa_decode, **arguments, num_splits=num_splits, **own)

    call = {
        "sparse": decode(sparse, 1),
        "sparse split": decode(sparse, 2),
        "dense": decode(dense, 1),
        "append": functools.partial(mla_fp8_append, kv, cache, slots),
        "merge": functools.partial(merge_states, outs, lses, out=buffers[0], lse=buffers[1]),
        "gqa": gqa(flat),
        "gqa split": gqa(flat, 2),
        "gqa pages": gqa(pages),
        "gqa bf16": gqa(words),
        "gqa append": functools.partial(kv_int8_append, k, v, *stores, slots, layout="BNSH"),
    }[name]
    one = torch.zeros(64, dtype=torch.float32, device="cuda")
    with torch.inference_mode():  # called as by a serving stack, and in turns, because a host's speed varies
        rounds = [host_medians(call, lambda: torch.add(one, one, out=one)) for _ in range(3)]
    us, plain = min(rounds, key=lambda found: found[0] / max(found[1], SUM_US))
    print(f"{name}: {us:.1f} us of host time a call, a sum of torch's {plain:.1f} us")
    record_property("host_us", us)
    assert us <= HOST_US * max(1.0, plain / SUM_US), f"{us:.1f} us, where a sum of torch's takes {plain:.1f} us"


WARM_START = """
import sys, torch, fp8_mla, cute_kernels
stores = [torch.zeros(1, 2, 64, 128).to(torch.int8).cuda() for _ in "kv"] + [torch.ones(1, 2, 64).cuda() for _ in "kv"]
cute_kernels.gqa_decode(torch.zeros(1, 1, 8, 128).bfloat16().cuda(), *stores)
kv = torch.zeros(2, 1, 2, 128).bfloat16().cuda()
cute_kernels.kv_int8_append(*kv, *stores, torch.zeros(1).long().cuda(), layout="BNSH")
cache = fp8_mla.pack(torch.randn(64, 576)).view(1, 64, 656).cuda()
q = torch.randn(1, 1, 16, 576).bfloat16().cuda()
indices = torch.arange(64).int().view(1, 1, 64).cuda()
cute_kernels.mla_fp8_decode(q, cache, indices=indices)
cute_kernels.mla_fp8_append(torch.randn(2, 576).bfloat16().cuda(), cache, torch.arange(2).cuda())
torch.cuda.synchronize()
assert "cutlass" not in sys.modules, "something was compiled"
"""


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="kernels are linked by a C compiler")
def test_warm_start_compiles_nothing():
    tokens = torch.randn((64, QK_DIM), generator=generator(0))
    cache = pack(tokens).view(1, 64, TOKEN_BYTES).cuda()
    q = torch.randn((1, 1, 16, QK_DIM), generator=generator(1)).bfloat16().cuda()
    mla_fp8_decode(q, cache, indices=torch.arange(64).int().view(1, 1, 64).cuda())
    mla_fp8_append(tokens[:2].bfloat16().cuda(), cache, torch.arange(2).cuda())
    usual = usual_gqa(layout="BNSH", seqlens=[64])
    decode_gqa(usual)
    stores = (usual.k_cache, usual.v_cache, usual.k_scale, usual.v_scale)
    kv_int8_append(*torch.zeros(2, 1, 2, 128).bfloat16().cuda(), *stores, torch.zeros(1).long().cuda(), layout="BNSH")
    printed(WARM_START)


def test_merging_ctas_of_several_streams_do_not_wait_for_each_other():
    """The card does not hold all CTAs of the three streams. Merge CTAs spin and must not starve decoding CTAs."""
    cases = [
        sparse_case(batch=batch, h_q=128, topk=2048, num_slots=8192, padded=False, seed=batch, device="cuda")
        for batch in (1, 8, 16)
    ]

    def decode(case: DecodeCase) -> torch.Tensor:
        out: Any = mla_fp8_decode(case.q, case.kv_cache, indices=case.indices, num_splits=8)
        return out.view(torch.int16)

    expected = [decode(case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(500):
        for case, stream, want in zip(cases, streams, expected, strict=True):
            with torch.cuda.stream(stream):
                wrong += (decode(case) != want).any()
    torch.cuda.synchronize()
    assert wrong.item() == 0
