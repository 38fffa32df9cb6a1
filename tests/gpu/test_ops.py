"""How the operators sit in torch: streams, CUDA graphs, torch.compile, caller-owned outputs, host time, warm start."""

import dataclasses
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

from cute_kernels import merge_states, mla_fp8_append, mla_fp8_decode
from cute_kernels.testing.compare import check_decode
from cute_kernels.testing.inputs import DecodeCase, dense_case, generator, sparse_case
from cute_kernels.testing.timing import host_time
from fp8_mla import QK_DIM, TOKEN_BYTES, pack

HOST_US = 15.0
"""What one eager call with a cached plan may take on the host."""


def decode_case(case: DecodeCase, **options: Any) -> Any:
    return mla_fp8_decode(case.q, case.kv_cache, **{**case.options(), **options})


@pytest.mark.parametrize("num_splits", [None, 1, 4])
def test_graph_replays_with_other_sequences(num_splits):
    """Lengths, tables and queries change in place between replays; the plan was made for other ones."""
    case: Any = dense_case(seqlens=[700, 3, 64, 300], h_q=64, s_q=2, padded=False, device="cuda")
    out, lse = case.outputs()

    def decode() -> None:
        decode_case(case, num_splits=num_splits, out=out.tensor, lse=lse.tensor)

    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
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

    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    for seed in (1, 2, 3):
        other = sparse_case(batch=4, h_q=128, s_q=2, topk=300, lengths="query", padded=False, seed=seed, device="cuda")
        for name in ("q", "kv_cache", "indices", "topk_length"):
            getattr(first, name).copy_(getattr(other, name))
        out.poison()
        lse.poison()
        graph.replay()
        check_decode(out.tensor, lse.tensor, name=f"replay {seed}", **first.arguments()).require()


def test_runs_on_the_current_stream():
    """The query arrives late on a side stream; a launch on any other stream would read the NaNs before it."""
    case = sparse_case(batch=4, h_q=64, topk=300, padded=False, device="cuda")
    expected = decode_case(case, num_splits=3)
    late = torch.full_like(case.q, float("nan"))
    out, lse = case.outputs()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        late.copy_(case.q)
        decode_case(dataclasses.replace(case, q=late), num_splits=3, out=out.tensor, lse=lse.tensor)
    stream.synchronize()
    assert torch.equal(out.tensor, expected)


def test_caller_owned_outputs_are_used_and_returned():
    case = sparse_case(batch=2, h_q=16, topk=100, device="cuda")
    out, lse = case.outputs(padded=True)
    got = decode_case(case, out=out.tensor, lse=lse.tensor, return_lse=True)
    assert got[0] is out.tensor
    assert got[1] is lse.tensor
    assert torch.equal(decode_case(case), out.tensor)
    given_alone = decode_case(case, out=out.tensor)
    assert given_alone is out.tensor


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


@pytest.mark.parametrize("name", ["sparse", "sparse split", "dense", "append", "merge"])
def test_host_time(name, record_property):
    sparse = sparse_case(batch=2, h_q=64, topk=64, padded=False, device="cuda")
    dense = dense_case(seqlens=[64, 64], h_q=64, padded=False, device="cuda")
    buffers = tuple(output.tensor for output in sparse.outputs())
    kv = torch.zeros((2, QK_DIM), dtype=torch.bfloat16, device="cuda")
    cache = torch.zeros((1, 64, TOKEN_BYTES), dtype=torch.uint8, device="cuda")
    slots = torch.arange(2, device="cuda")
    outs, lses = torch.zeros((2, 2, 1, 64, 512), device="cuda"), torch.zeros((2, 2, 1, 64), device="cuda")

    def decode(case: DecodeCase, num_splits: int) -> None:
        mla_fp8_decode(
            case.q,
            case.kv_cache,
            indices=case.indices,
            block_table=case.block_table,
            cache_seqlens=case.cache_seqlens,
            num_splits=num_splits,
            out=buffers[0],
            lse=buffers[1],
        )

    call = {
        "sparse": lambda: decode(sparse, 1),
        "sparse split": lambda: decode(sparse, 2),
        "dense": lambda: decode(dense, 1),
        "append": lambda: mla_fp8_append(kv, cache, slots),
        "merge": lambda: merge_states(outs, lses, out=buffers[0], lse=buffers[1]),
    }[name]
    us = host_time(call)
    print(f"{name}: {us:.1f} us of host time a call")
    record_property("host_us", us)
    assert us <= HOST_US


WARM_START = """
import sys, torch, fp8_mla, cute_kernels
cache = fp8_mla.pack(torch.randn(64, 576)).view(1, 64, 656).cuda()
q = torch.randn(1, 1, 16, 576).bfloat16().cuda()
indices = torch.arange(64).int().view(1, 1, 64).cuda()
cute_kernels.mla_fp8_decode(q, cache, indices=indices)
cute_kernels.mla_fp8_append(torch.randn(2, 576).bfloat16().cuda(), cache, torch.arange(2).cuda())
torch.cuda.synchronize()
assert "cutlass" not in sys.modules, "something was compiled"
"""


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="kernels are linked by a C compiler")
def test_warm_start_compiles_nothing(root):
    tokens = torch.randn((64, QK_DIM), generator=generator(0))
    cache = pack(tokens).view(1, 64, TOKEN_BYTES).cuda()
    q = torch.randn((1, 1, 16, QK_DIM), generator=generator(1)).bfloat16().cuda()
    mla_fp8_decode(q, cache, indices=torch.arange(64).int().view(1, 1, 64).cuda())
    mla_fp8_append(tokens[:2].bfloat16().cuda(), cache, torch.arange(2).cuda())
    done = subprocess.run([sys.executable, "-c", WARM_START], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_merging_ctas_of_several_streams_do_not_wait_for_each_other():
    """More CTAs than the card holds, on three streams: merging ones spin, and none may starve a decoding one."""
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
