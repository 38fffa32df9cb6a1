"""Ranks in one process on one GPU: the kernel that exchanges and merges partials, without symmetric memory.

Tests run it in a process of its own: a wait in vain ends in a trap, after which the process has no GPU.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any, Final, NamedTuple

import torch

from cute_kernels import merge_states
from cute_kernels.merge.peers_op import NUM_COUNTS, PeerMemory, buffer_bytes, merge_with_peers, needed_bytes
from cute_kernels.merge.peers_spec import CTAS, FLAG_BYTES
from tests.kit.draws import generator, normal, uniform

LIMIT_NS: Final = 20 * 10**9
START: Final = 2**31 - 302
"""Number of the first launch."""
WIDTHS: Final = [
    (512, torch.bfloat16), (128, torch.bfloat16), (72, torch.float16), (512, torch.float32), (8, torch.float16)
]  # fmt: skip
GROUPS: Final = [(1, (2, 1, 8)), (3, (2, 2, 12)), (4, (5, 7, 24)), (8, (1, 1, 128))]
"""Ranks, and (batch, s_q, heads), with fewer rows than CTAs and with up to seven rows per CTA."""
CASES: Final = {
    f"{world_size} ranks, {shape}, d {d}, {dtype}, sink {sink}, {heads}": (world_size, shape, d, dtype, sink, heads)
    for (world_size, shape), (d, dtype), sink, heads in itertools.product(
        GROUPS, WIDTHS, (False, True), ("gather", "scatter")
    )
}


class Partials(NamedTuple):
    """Partials of all ranks: outs (ranks, ..., heads, d), lses (ranks, ..., heads), and their merged result."""

    outs: torch.Tensor
    lses: torch.Tensor
    sink: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor


def partials(
    world_size: int, shape: tuple[int, ...], d: int, dtype: torch.dtype, has_sink: bool, seed: int
) -> Partials:
    """Partials that are equal on every rank. Some states and one whole row are empty, with outputs of NaN."""
    gen = generator(seed, "cuda")
    outs = normal((world_size, *shape, d), gen).to(dtype)
    lses = 3 * normal((world_size, *shape), gen)
    empty = uniform(lses.shape, gen) < 0.2
    empty[:, 0, 0, seed % shape[-1]] = True
    outs[empty] = torch.nan
    lses[empty] = -torch.inf
    sink = normal(shape[-1:], gen) if has_sink else None
    return Partials(outs, lses, sink, *merge_states(outs, lses, s_aux=sink))


def own_heads(given: Partials, rank: int, world_size: int, heads: str) -> slice:
    """The part of the partials with the heads that a rank gets."""
    own = given.lse.shape[-1] // world_size
    return slice(rank * own, (rank + 1) * own) if heads == "scatter" else slice(None)


class Result(NamedTuple):
    """Poisoned tensors that a rank writes, their expected values, and the sinks of its heads."""

    out: torch.Tensor
    lse: torch.Tensor
    right: torch.Tensor
    right_lse: torch.Tensor
    sink: torch.Tensor | None

    @classmethod
    def of(cls, given: Partials, rank: int, world_size: int, heads: str) -> Result:
        mine = own_heads(given, rank, world_size, heads)
        out, lse = given.out[..., mine, :], given.lse[..., mine]
        sink = None if given.sink is None else given.sink[mine].clone()
        return cls(torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan), out, lse, sink)

    def is_right(self) -> bool:
        return torch.equal(self.out, self.right) and torch.equal(self.lse, self.right_lse)


class Ranks:
    """Buffers of ranks that all live in this process."""

    def __init__(self, world_size: int, half_bytes: int) -> None:
        size = buffer_bytes(half_bytes)
        self.buffers = torch.full((world_size, size), 0x7F, dtype=torch.uint8, device="cuda")  # NaN, or close to it
        self.flags = self.buffers[:, :FLAG_BYTES].view(torch.int32).view(world_size, -1, CTAS)
        self.flags.zero_()
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        peers = torch.tensor(addresses, dtype=torch.int64, device="cuda")
        self.pinned = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self.counts = torch.zeros((world_size, NUM_COUNTS), dtype=torch.int32, device="cuda")
        self.memories = [
            PeerMemory(rank, peers, self.counts[rank], self.pinned.data_ptr(), half_bytes, LIMIT_NS)
            for rank in range(world_size)
        ]

    def launch(self, rank: int, rows: torch.Tensor, result: Result) -> None:
        merge_with_peers(rows, self.memories[rank], result.sink, result.out, result.lse)

    def failed(self) -> bool:
        return ctypes.c_int32.from_address(self.pinned.data_ptr()).value != 0


def packed(given: Partials, rank: int) -> torch.Tensor:
    """A rank's rows as they are sent. Padding is never read."""
    values = given.outs[rank].contiguous().view(torch.uint8)
    lse = given.lses[rank].unsqueeze(-1).contiguous().view(torch.uint8)
    padding = torch.full((*lse.shape[:-1], 12), 0x7F, dtype=torch.uint8, device="cuda")
    return torch.cat([values, lse, padding], dim=-1)


def one_after_the_other(
    world_size: int, shape: tuple[int, ...], d: int, dtype: torch.dtype, sink: bool, heads: str
) -> list[str]:
    """Problems if all flags are set beforehand, so that nobody waits. In the second round states are there, too."""
    given = partials(world_size, shape, d, dtype, sink, seed=d)
    rows = shape[0] * shape[1] * shape[2] // (1 if heads == "gather" else world_size)
    ranks = Ranks(world_size, needed_bytes(rows, d, dtype, world_size))
    ranks.flags[:, :world_size] = 2
    problems = []
    for _ in range(2):
        ranks.counts.zero_()
        found = [Result.of(given, rank, world_size, heads) for rank in range(world_size)]
        for rank, result in enumerate(found):
            ranks.launch(rank, packed(given, rank), result)
        if not (ranks.counts == 1).all():
            problems.append("launches were miscounted")
    problems += [f"rank {rank} has other bits" for rank, result in enumerate(found) if not result.is_right()]
    expected = torch.zeros_like(ranks.flags)
    expected[:, :world_size] = 2
    expected[:, :world_size, :rows] = 1  # CTAs without rows set no flag, and no rank sets one for itself
    each = torch.arange(world_size, dtype=torch.int64, device="cuda")
    expected[each, each] = 2
    if not torch.equal(ranks.flags, expected):
        problems.append("flags are wrong")
    if ranks.failed():
        problems.append("a wait was reported")
    return problems


def at_the_same_time(heads: str) -> list[str]:
    """Problems of two ranks on two streams of a graph, where each waits for the other in both halves.

    The number of the launch passes 2^31 on the way, which takes 8 days at 3000 launches a second.
    """
    inputs = [partials(2, (4, 1, 64), 512, torch.bfloat16, True, seed=seed) for seed in range(3)]
    ranks = Ranks(2, needed_bytes(256 if heads == "gather" else 128, 512, torch.bfloat16, 2))
    sent = [packed(inputs[0], rank) for rank in range(2)]
    made = [Result.of(inputs[0], rank, 2, heads) for rank in range(2)]
    # loading a kernel waits for all running work, so load it here, where no kernel waits for a flag
    ranks.flags[:, :2] = START + 1
    ranks.counts.fill_(START)
    for rank in range(2):
        ranks.launch(rank, sent[rank], made[rank])
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        for rank, stream in enumerate((main, side)):
            with torch.cuda.stream(stream):
                for _ in range(3):
                    ranks.launch(rank, sent[rank], made[rank])
        main.wait_stream(side)
    problems = []
    for i in range(200):
        given = inputs[i % 3]
        expected = [Result.of(given, rank, 2, heads) for rank in range(2)]
        for rank, (to, of) in enumerate(zip(made, expected, strict=True)):
            sent[rank].copy_(packed(given, rank))
            for tensor, other in ((to.out, of.out), (to.lse, of.lse), (to.sink, of.sink)):
                assert tensor is not None and other is not None
                tensor.copy_(other)
        graph.replay()
        pairs = zip(made, expected, strict=True)
        if not all(of._replace(out=to.out, lse=to.lse).is_right() for to, of in pairs):
            problems.append(f"replay {i} gave other bits")
    if not (ranks.counts == START + 1 + 3 * 200 - 2**32).all():
        problems.append("launches were miscounted")
    return problems


def kernel_alone(rank: int) -> list[tuple[str, Any]]:
    found = [(name, one_after_the_other(*case)) for name, case in CASES.items()]
    return found + [(f"two at a time, {heads}", at_the_same_time(heads)) for heads in ("gather", "scatter")]
