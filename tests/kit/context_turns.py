"""Ranks that take turns in one process: what each rank sends in one round, all ranks receive in the next.

The whole of a call runs on one device, all but the collective itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cute_kernels.distributed.exchange import Member


class Turns:
    """A group of `world_size` ranks without processes."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._rank, self._number = 0, 0
        self._sent: list[dict[int, torch.Tensor]] = []
        self._before: list[dict[int, torch.Tensor]] = []

    def run(self, call: Callable[[int], Any], collectives: int = 1) -> list[Any]:
        """The results of `call(rank)` for each rank. A call with n collectives needs n + 1 rounds."""
        results: list[Any] = []
        self._sent = [{} for _ in range(self.world_size)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Member, "of", lambda group: Member(group, self._rank, self.world_size))
            patch.setattr(Member, "exchange", self._exchange)
            patch.setattr(Member, "require_same_call", lambda *arguments: None)
            for _ in range(collectives + 1):
                self._before, self._sent = self._sent, [{} for _ in range(self.world_size)]
                results = []
                for rank in range(self.world_size):
                    self._rank, self._number = rank, 0
                    results.append(call(rank))
        return results

    def _exchange(
        self, what: str, collective: Callable[..., object], received: torch.Tensor, sent: torch.Tensor
    ) -> None:
        """Returns what all ranks sent in the previous round, or zeros if they sent nothing."""
        number, self._number = self._number, self._number + 1
        self._sent[self._rank][number] = sent.detach().clone()
        parts = received.view(self.world_size, -1)
        for rank, theirs in enumerate(self._before):
            if number not in theirs:
                parts[rank] = 0
            elif collective is dist.all_to_all_single:
                parts[rank] = theirs[number].view(self.world_size, -1)[self._rank]
            else:
                parts[rank] = theirs[number].view(-1)


def problems(case: Any, world_size: int, device: str) -> list[str]:
    """Problems of a case of `context_workers` whose ranks take turns on one device."""
    from tests.kit import context_workers as workers

    made = [workers.make(case, rank, world_size, device) for rank in range(world_size)]
    turns = Turns(world_size)

    def results(collectives: int = 1, own_q: bool = False, **options: Any) -> list[Any]:
        if case.op != "prefill":
            options["combine"] = "collective"  # ranks of one process share no memory

        def call(rank: int) -> Any:
            _, arguments, op = made[rank]
            if own_q:
                own = arguments["q"].shape[2] // world_size
                arguments = {**arguments, "q": arguments["q"][:, :, rank * own : (rank + 1) * own]}
            return workers.call(op, arguments, case, **options)

        return turns.run(call, collectives)

    gathered, scattered = results(heads="gather"), results(heads="scatter")
    out, lse = gathered[0]
    found = list(made[0][0](out, lse))
    if not all(workers.same_bits(out, other) and workers.same_bits(lse, of_it) for other, of_it in gathered):
        found.append("ranks have different results")
    joined = [torch.cat(tensors, dim=dim) for tensors, dim in zip(zip(*scattered, strict=True), (-2, -1), strict=True)]
    if not all(map(workers.same_bits, joined, (out, lse))):
        found.append("what ranks get by scatter is not what they get by gather")
    if case.op != "prefill":
        for heads, expected in (("gather", gathered), ("scatter", scattered)):
            queried = results(2, own_q=True, heads=heads, gather_q=True)
            pairs = zip(queried, expected, strict=True)
            if not all(workers.same_bits(a, b) for one, two in pairs for a, b in zip(one, two, strict=True)):
                found.append(f"{heads} with gathered queries gave other bits")
    return found
