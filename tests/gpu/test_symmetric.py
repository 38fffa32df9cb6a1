"""Context parallelism over memory that ranks share: several processes on one GPU, and the kernel alone."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.merge.peers_op import NUM_COUNTS, PeerMemory, buffer_bytes, merge_with_peers, needed_bytes
from cute_kernels.merge.peers_spec import CTAS, FLAG_BYTES, PeerMergeSpec
from cute_kernels.merge.spec import MergeSpec
from tests.support import context_workers, symmetric_workers
from tests.support.symmetric_workers import MLA, NAMES, SHAPES, Partials, partials

NAMES_OF = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
WIDTHS = [(512, torch.bfloat16), (128, torch.bfloat16), (72, torch.float16), (512, torch.float32), (8, torch.float16)]
LIMIT_NS = 20 * 10**9


def kernel_specs() -> list[Any]:
    """What the tests launch beyond what ships."""
    wanted = [(d, dtype, sink) for d, dtype in WIDTHS for sink in (False, True)]
    wanted += [(d, dtype, sink) for _, d, dtype, sink in SHAPES]
    specs: list[Any] = [PeerMergeSpec(d, NAMES_OF[dtype], sink) for d, dtype, sink in wanted]
    for (d, dtype, sink), rows in [(of, rows) for of in wanted for rows in (32, 1680)]:
        named = {"in_dtype": NAMES_OF[dtype], "out_dtype": NAMES_OF[dtype], "has_sink": sink}
        specs.append(MergeSpec.for_launch(rows=rows, num_states=4, d=d, **named))
    return specs


# ---- several processes


def reports(task: str, directory: Path, world_size: int, timeout: float) -> list[dict[str, Any]]:
    """What each rank reports; skips where torch finds that they cannot share memory."""
    found = context_workers.run(
        task, directory, world_size=world_size, wait_for=world_size, timeout=timeout, life=symmetric_workers.work
    )
    reason = found[0].get("none", "")
    if "RuntimeError: " in reason or "AcceleratorError: " in reason:  # of torch and CUDA; others are faults of ours
        pytest.skip(reason)
    assert not reason
    return [found[rank] for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_on_one_gpu_equal_one(world_size: int, tmp_path: Path) -> None:
    """Cases against the oracle, calls and graphs against `merge_states`, and what is chosen and refused."""
    assert sorted(case.name for case in MLA) == sorted(NAMES)
    found = reports("everything", tmp_path, world_size, timeout=60.0)
    names = set(found[0])
    assert len(names) == len(NAMES) + 4 * len(SHAPES) + 3, names  # and "done"
    for of_rank in found:
        assert set(of_rank) == names
        assert not {name: problems for name, problems in of_rank.items() if problems}


def test_a_rank_that_never_calls_ends_the_wait(tmp_path: Path) -> None:
    """A trap after the group's timeout; the next call says what happened."""
    first, _ = reports("a_rank_never_calls", tmp_path, 2, timeout=15.0)
    by_cuda, by_us = first["said"]
    assert "CUDA" in by_cuda or "launch" in by_cuda
    assert by_us.startswith("context_parallel_decode: rank 0 of 2 waited for rank 1 in vain")
    assert "timeout of 15 s" in by_us


# ---- the kernel, with memory of one process


class Ranks:
    """Buffers of ranks that are all in this process."""

    def __init__(self, world_size: int, half_bytes: int) -> None:
        size = buffer_bytes(half_bytes)
        self.buffers = torch.full((world_size, size), 0x7F, dtype=torch.uint8, device="cuda")  # large NaN
        self.flags = self.buffers[:, :FLAG_BYTES].view(torch.int32).view(world_size, -1, CTAS)
        self.flags.zero_()
        peers = torch.tensor([b.data_ptr() for b in self.buffers], dtype=torch.int64, device="cuda")
        self.pinned = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self.counts = torch.zeros((world_size, NUM_COUNTS), dtype=torch.int32, device="cuda")
        self.memories = [
            PeerMemory(rank, peers, self.counts[rank], self.pinned.data_ptr(), half_bytes, LIMIT_NS)
            for rank in range(world_size)
        ]

    def failed(self) -> bool:
        return ctypes.c_int32.from_address(self.pinned.data_ptr()).value != 0


def packed(given: Partials, rank: int) -> torch.Tensor:
    """A rank's rows as they are sent; what pads them is never read."""
    values = given.outs[rank].contiguous().view(torch.uint8)
    lse = given.lses[rank].unsqueeze(-1).contiguous().view(torch.uint8)
    padding = torch.full((*lse.shape[:-1], 12), 0x7F, dtype=torch.uint8, device="cuda")
    return torch.cat([values, lse, padding], dim=-1)


def results(given: Partials, rank: int, world_size: int, heads: str) -> tuple[Any, Any, Any, Any, Any]:
    """Poisoned out and lse of a rank, what they should be, and its sinks."""
    own = given.lse.shape[-1] // world_size
    mine = slice(rank * own, (rank + 1) * own) if heads == "scatter" else slice(None)
    out, lse = given.out[..., mine, :], given.lse[..., mine]
    sink = None if given.sink is None else given.sink[mine].clone()
    return torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan), out, lse, sink


@pytest.mark.parametrize("heads", ["gather", "scatter"])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("d, dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("world_size, shape", [(1, (2, 1, 8)), (3, (2, 2, 12)), (4, (5, 7, 24)), (8, (1, 1, 128))])
def test_ranks_one_after_the_other(
    world_size: int, shape: tuple[int, ...], d: int, dtype: torch.dtype, sink: bool, heads: str
) -> None:
    """Flags that are there from the beginning let nobody wait. In the second round all states are there as well."""
    given = partials(world_size, shape, d, dtype, sink, seed=d)
    rows = shape[0] * shape[1] * shape[2] // (1 if heads == "gather" else world_size)
    ranks = Ranks(world_size, needed_bytes(rows, d, dtype, world_size))
    theirs = torch.arange(world_size, device="cuda")
    ranks.flags[:, :world_size] = 5
    for _ in range(2):
        ranks.counts.zero_()
        found = []
        for rank in range(world_size):
            out, lse, right, right_lse, own_sink = results(given, rank, world_size, heads)
            merge_with_peers(packed(given, rank), ranks.memories[rank], own_sink, out, lse)
            found.append((out, lse, right, right_lse))
        assert (ranks.counts == 1).all()
    for out, lse, right, right_lse in found:
        assert torch.equal(out, right) and torch.equal(lse, right_lse)
    expected = torch.zeros_like(ranks.flags)
    expected[:, :world_size] = 5
    expected[:, :world_size, :rows] = 1  # CTAs without rows store no flag, and no rank one for itself
    expected[theirs, theirs] = 5
    assert torch.equal(ranks.flags, expected)
    assert not ranks.failed()


@pytest.mark.parametrize("heads", ["gather", "scatter"])
def test_two_ranks_at_the_same_time(heads: str) -> None:
    """On two streams of a graph: each waits for the other one, launch after launch, in both halves."""
    inputs = [partials(2, (4, 1, 64), 512, torch.bfloat16, True, seed=seed) for seed in range(3)]
    rows = 256 if heads == "gather" else 128
    ranks = Ranks(2, needed_bytes(rows, 512, torch.bfloat16, 2))
    sent = [packed(inputs[0], rank) for rank in range(2)]
    made = [results(inputs[0], rank, 2, heads) for rank in range(2)]
    # to load a kernel waits for all that runs, so it is loaded here, where the flags let nobody wait
    ranks.flags[:, :2] = 1
    for rank in range(2):
        merge_with_peers(sent[rank], ranks.memories[rank], made[rank][4], *made[rank][:2])
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        for rank, stream in enumerate((main, side)):
            with torch.cuda.stream(stream):
                for _ in range(3):
                    merge_with_peers(sent[rank], ranks.memories[rank], made[rank][4], *made[rank][:2])
        main.wait_stream(side)
    for i in range(200):
        given = inputs[i % 3]
        expected = [results(given, rank, 2, heads) for rank in range(2)]
        for rank in range(2):
            sent[rank].copy_(packed(given, rank))
            if made[rank][4] is not None:
                made[rank][4].copy_(expected[rank][4])
            for poisoned in made[rank][:2]:
                poisoned.fill_(torch.nan)
        graph.replay()
        for (out, lse, *_), (_, _, right, right_lse, _) in zip(made, expected, strict=True):
            assert torch.equal(out, right) and torch.equal(lse, right_lse), f"replay {i}"
    assert (ranks.counts == 1 + 3 * 200).all() and not ranks.failed()
