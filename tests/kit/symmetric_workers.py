"""Processes that decode together over symmetric memory on one GPU, which they take turns on.

Torch lets two ranks share memory on one device where an environment variable allows it, and NCCL does not: the group is
one of gloo. A wait for another rank ends when the GPU has given that one its turn, some milliseconds.
"""

from __future__ import annotations

import os
from typing import Any, Final

import torch
import torch.distributed as dist

from cute_kernels.distributed import context_parallel_decode, symmetric
from tests.kit import context_workers, processes
from tests.kit.context_workers import CASES, same_bits
from tests.kit.peer_ranks import Partials, own_heads, partials

NAMES: Final = ("dense-only-the-first-rank", "dense-no-token", "dense-not-causal", "sparse-batch-i4-seed11")
"""Cases in which ranks have no key, with and without sinks and with several queries."""
MLA: Final = [case for case in CASES if case.name in NAMES]
CALLS: Final = 200
REPLAYS: Final = 20
INPUTS: Final = 3
"""Number of inputs that take turns, so that leftovers of an earlier call show. It is no multiple of both halves."""
SHAPES: Final = [((2, 1, 16), 512, torch.bfloat16, True), ((3, 70, 8), 128, torch.float16, False)]
"""(batch, s_q, heads), d, dtype, sink. One shape has fewer rows than CTAs, the other 13 rows per CTA."""


# ---- tasks of ranks


def everything(rank: int) -> list[tuple[str, Any]]:
    """Problems by name, or "none" with the reason why ranks share no memory."""
    try:
        _decode(rank, partials(dist.get_world_size(), *SHAPES[0], seed=0))
    except RuntimeError as error:
        if "ranks share no memory: " not in str(error):
            raise
        return [("none", str(error))]
    found = context_workers.problems_of(MLA, rank, "cuda", gathers_q=False, combine="symmetric")
    for shape in SHAPES:
        for heads in ("gather", "scatter"):
            calls = CALLS if shape is SHAPES[0] and heads == "gather" else CALLS // 5
            found.append((f"calls {shape} {heads}", _calls(rank, shape, heads, calls)))
            found.append((f"replays {shape} {heads}", _replays(rank, shape, heads)))
    found.append(("compiled", context_workers.compiled_call(MLA[0], rank, "cuda", "symmetric")))
    found.append(("what is chosen", _choices(rank)))
    found.append(("a group without buffers", _capture_without_buffers(rank)))
    dist.barrier()
    return found


def a_rank_never_calls(rank: int) -> list[tuple[str, Any]]:
    """The last rank leaves after a first call. Reports what CUDA and the next call say on the others."""
    given = partials(dist.get_world_size(), *SHAPES[0], seed=0)
    try:
        _decode(rank, given)
    except RuntimeError as error:
        if "ranks share no memory: " not in str(error):
            raise
        return [("none", str(error))]
    torch.cuda.synchronize()
    dist.barrier()
    if rank == dist.get_world_size() - 1:
        return []
    said = []
    for _ in range(2):
        try:
            _decode(rank, given)
            torch.cuda.synchronize()
            said.append("no error")
        except RuntimeError as error:
            said.append(str(error))
    return [("said", said)]


def work(rank: int, *arguments: Any) -> None:
    """Does what `processes.work` does, with all ranks on the first GPU."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # multicast objects cannot contain a device twice
    torch.cuda.set_device(0)
    processes.work(rank, *arguments)


# ---- parts of them


def _decode(rank: int, given: Partials, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One call with this rank's states."""
    options = {"combine": "symmetric", "heads": "gather", **options}
    found = context_parallel_decode(
        lambda: (given.outs[rank], given.lses[rank]), None, s_aux=given.sink, return_lse=True, **options
    )
    assert isinstance(found, tuple)
    return found


def _expected(given: Partials, rank: int, heads: str) -> tuple[torch.Tensor, torch.Tensor]:
    mine = own_heads(given, rank, dist.get_world_size(), heads)
    return given.out[..., mine, :], given.lse[..., mine]


def _calls(rank: int, shape: Any, heads: str, calls: int) -> list[str]:
    """Which of several calls differ in bits from `merge_states` over the states of all ranks."""
    inputs = [partials(dist.get_world_size(), *shape, seed=seed) for seed in range(INPUTS)]
    expected = [_expected(given, rank, heads) for given in inputs]
    wrong = torch.zeros(calls, dtype=torch.bool, device="cuda")
    for i in range(calls):
        got = _decode(rank, inputs[i % INPUTS], heads=heads)
        for one, right in zip(got, expected[i % INPUTS], strict=True):
            wrong[i] |= (one != right).any()
    return [f"call {i} gave other bits" for i in wrong.nonzero().flatten().tolist()]


def _replays(rank: int, shape: Any, heads: str) -> list[str]:
    """Which replays of a graph of two calls, or eager calls after each, differ in bits. Inputs change in between."""
    inputs = [partials(dist.get_world_size(), *shape, seed=seed) for seed in range(INPUTS)]
    static = Partials(*(t if t is None else t.clone() for t in inputs[0]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [_decode(rank, static, heads=heads) for _ in range(2)]
    problems = []
    for i in range(REPLAYS):
        given = inputs[i % INPUTS]
        for to, of in zip(static, given, strict=True):
            if to is not None and of is not None:
                to.copy_(of)
        graph.replay()
        got = [*results, _decode(rank, given, heads=heads)]
        expected = _expected(given, rank, heads)
        if not all(same_bits(*pair) for one in got for pair in zip(one, expected, strict=True)):
            problems.append(f"replay {i} gave other bits")
    return problems


def _choices(rank: int) -> list[str]:
    """What `combine=None` chooses: symmetric memory if partials fit. Buffers grow on request."""
    problems = []
    small, world_size = partials(dist.get_world_size(), *SHAPES[0], seed=1), dist.get_world_size()
    (shared,) = symmetric._shared[dist.group.WORLD].values()
    before = shared.buffers[-1].memory.counts.clone()
    got = _decode(rank, small, combine=None)
    if not torch.equal(shared.buffers[-1].memory.counts, before + 1):
        problems.append("None did not take symmetric memory")
    if not all(map(same_bits, got, (small.out, small.lse))):
        problems.append("None gave other bits")
    rows = symmetric.HALF_BYTES // (world_size * (512 * 2 + 16)) + 1
    large = partials(world_size, (1, -(-rows // 8), 8), 512, torch.bfloat16, False, seed=2)
    got = _decode(rank, large)
    if len(shared.buffers) != 2 or not all(map(same_bits, got, (large.out, large.lse))):
        problems.append("a larger buffer was not made, or gave other bits")
    return problems


def _capture_without_buffers(rank: int) -> list[str]:
    """A new group refuses a call during capture with an error."""
    group = dist.new_group(backend="gloo")
    dist.barrier()  # another rank may still be joining when this one is done
    given = partials(dist.get_world_size(), *SHAPES[0], seed=0)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            context_parallel_decode(lambda: (given.outs[rank], given.lses[rank]), group, combine="symmetric")
    except RuntimeError as error:
        return [] if str(error).startswith("combine: got 'symmetric' under graph capture") else [str(error)]
    return ["captured"]
