"""Context parallelism on one GPU, by ranks in turn and by a group of one over NCCL; on several GPUs, by NCCL."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cute_kernels import gqa_decode, mla_fp8_decode
from cute_kernels.distributed import (
    context_parallel_decode,
    shard_block_table,
    shard_indices,
    shard_lengths,
    shard_slots,
)
from cute_kernels.distributed.positions import local_calls
from cute_kernels.gqa.launch import decode_spec
from cute_kernels.gqa.request import DECODE
from tests.kit import context_turns, context_workers, processes
from tests.kit.compare import check_decode
from tests.kit.context_workers import CASES, WORLD, Case
from tests.kit.gqa_cases import check_gqa, gqa_case
from tests.kit.graphs import capture
from tests.kit.mla_cases import dense_case, sparse_case


def kernel_specs() -> list[Any]:
    """Variants of the GQA kernel that ranks need; those of MLA ship."""
    specs = []
    for case in (case for case in CASES if case.op == "gqa"):
        for world_size, rank in ((2, 0), (WORLD, 0)):
            _, call, _ = context_workers.make(case, rank, world_size, "cpu")
            q = call["q"]
            for local in local_calls(call, q.shape[2], rank, world_size, case.interleave, None).calls:
                own = q[:, local.queries]
                own = own.flatten(0, 1).unsqueeze(1) if local.flat else own
                request = {**call, **local.arguments, "q": own, "s_aux": None}
                specs.append(decode_spec(DECODE.request(**request, num_splits=None)))
    return specs


several_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs or more of one host")


@pytest.mark.parametrize("world_size", [2, WORLD])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_shards_on_one_gpu_equal_the_whole(case: Case, world_size: int) -> None:
    """Local calls, rows, merge, sinks and both kinds of heads run here; only the collective does not."""
    assert context_turns.problems(case, world_size, "cuda") == []


# ---- a group of one over NCCL


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A group of this process alone."""
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("heads", ["gather", "scatter"])
@pytest.mark.parametrize("s_q", [1, 3])
def test_dense_mla_in_a_graph(heads: str, s_q: int, alone: None) -> None:
    """Lengths and queries change in place between replays. The replayed graph includes the collective."""
    case = dense_case(seqlens=[700, 3, 64, 300], h_q=64, s_q=s_q, sink="finite", padded=False, device="cuda")
    assert case.cache_seqlens is not None
    out, lse = case.outputs()

    def call() -> None:
        context_parallel_decode(
            mla_fp8_decode, None, **case.arguments(), heads=heads, out=out.tensor, lse=lse.tensor, return_lse=True
        )

    graph, _ = capture(call)
    lengths = case.cache_seqlens.clone()
    for change in (0, 1, 2):
        case.cache_seqlens.copy_((lengths - change).clamp(min=0))
        case.q.mul_(1 - 0.25 * change)
        out.poison()
        lse.poison()
        graph.replay()
        check_decode(out.tensor, lse.tensor, **case.arguments()).require()
        replayed = out.tensor.clone(), lse.tensor.clone()
        out.poison()
        call()
        assert torch.equal(out.tensor, replayed[0]) and torch.equal(lse.tensor, replayed[1])


def test_sparse_mla_in_a_graph(alone: None) -> None:
    """The graph itself deals out the lists."""
    case = sparse_case(
        batch=5, h_q=64, s_q=2, topk=200, num_slots=2048, lengths="query", sink="inf", padded=False, device="cuda"
    )
    assert case.indices is not None and case.topk_length is not None
    out, lse = case.outputs()

    def call() -> None:
        own, counts = shard_indices(case.indices, topk_length=case.topk_length, rank=0, world_size=1)
        given = {**case.arguments(), "indices": own, "topk_length": counts, "out": out.tensor, "lse": lse.tensor}
        context_parallel_decode(mla_fp8_decode, None, **given)

    graph, _ = capture(call)
    for _ in range(2):
        out.poison()
        lse.poison()
        graph.replay()
        check_decode(out.tensor, lse.tensor, **case.arguments()).require()
        for tensor in (case.indices.transpose(1, 2), case.topk_length):
            tensor.copy_(tensor.flip(-1))  # queries of a request swap their lists


def test_gqa_in_a_graph(alone: None) -> None:
    case = gqa_case(
        seqlens=[700, 3, 64, 300], h_q=8, h_kv=2, layout="paged_NHD", padded=False, sink="finite", device="cuda"
    )
    assert case.cache_seqlens is not None
    results: list[torch.Tensor] = []

    def call() -> None:
        results[:] = context_parallel_decode(gqa_decode, None, **case.arguments(), return_lse=True)

    graph, _ = capture(call)
    for _ in range(2):
        for tensor in results:
            tensor.fill_(float("nan"))
        graph.replay()
        check_gqa(results[0], results[1], case).require()
        case.cache_seqlens.sub_(1).clamp_(min=0)


# ---- who keeps what, captured


@pytest.mark.parametrize("interleave", [1, 4])
def test_shards_are_captured(interleave: int) -> None:
    """Replays must give what eager calls on the CPU give, for values that change in place."""
    gen = torch.Generator().manual_seed(interleave)
    share = {"rank": 1, "world_size": 2, "interleave": interleave}
    host = {
        "lengths": torch.randint(-5, 200, (6,), generator=gen, dtype=torch.int32),
        "table": torch.randint(-1, 50, (6, 30), generator=gen, dtype=torch.int32),
        "positions": torch.randint(-5, 300, (6, 7), generator=gen),
        "indices": torch.randint(-5, 300, (6, 2, 40), generator=gen, dtype=torch.int32),
        "topk_length": torch.randint(-2, 50, (6, 2), generator=gen, dtype=torch.int32),
    }

    def all_shards(of: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        pages = [shard_block_table(of["table"], 4, **share)] if interleave == 4 else []
        return [
            *pages,
            shard_lengths(of["lengths"], **share),
            shard_lengths(of["lengths"], **share, s_q=3),
            shard_slots(of["positions"], of["table"], 4, **share, num_pages=40),
            *shard_indices(of["indices"], of["table"], 4, **share, topk_length=of["topk_length"]),
            *shard_indices(of["indices"], **share),
        ]

    device = {name: tensor.cuda() for name, tensor in host.items()}
    results: list[torch.Tensor] = []

    def call() -> None:
        results[:] = all_shards(device)

    graph, _ = capture(call)
    for _ in range(3):
        graph.replay()
        for got, expected in zip(results, all_shards(host), strict=True):
            assert torch.equal(got.cpu(), expected)
        for name, tensor in host.items():
            tensor.add_(1)
            device[name].add_(1)


# ---- several GPUs


@several_gpus
def test_gpus_equal_one_process(tmp_path: Path) -> None:
    """All cases run over NCCL and over symmetric memory, with a process for each of two or four GPUs."""
    world_size = 4 if torch.cuda.device_count() >= 4 else 2
    found = processes.run(context_workers.all_cases, tmp_path, world_size, backend="nccl", timeout=500.0)
    wrong = {(rank, case.name): found[rank].get(case.name) for rank in range(world_size) for case in CASES}
    assert not {name: problems for name, problems in wrong.items() if problems != []}


@several_gpus
def test_the_same_bits_in_a_graph_on_several_gpus(tmp_path: Path) -> None:
    """Ten thousand replays must give the bits of the first call, over NCCL and symmetric memory."""
    found = processes.run(context_workers.replays, tmp_path, 2, backend="nccl", timeout=500.0)
    for combine in ("collective", "symmetric"):
        assert [found[rank][f"other bits: {combine}"] for rank in range(2)] == [0, 0]


@several_gpus
def test_compiled_calls_on_several_gpus(tmp_path: Path) -> None:
    found = processes.run(context_workers.compiled, tmp_path, 2, backend="nccl", timeout=200.0)
    names = [f"{name} {combine}" for name in context_workers.COMPILED for combine in ("collective", "symmetric")]
    assert [{name: found[rank].get(name) for name in names} for rank in range(2)] == [dict.fromkeys(names, [])] * 2
