"""Two tensor-parallel ranks that both have all queries and index keys and choose independently."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from cute_kernels import index_decode, index_topk
from cute_kernels.indexer import decode_op, topk_op
from cute_kernels.runtime import memory
from tests.kit.index_cases import index_call, logits_of, on_gpu

WORLD = 2
CALLS = {"cpu": 2, "cuda": 10}
LENGTHS = {"cpu": [700, 65, 0], "cuda": [3000, 20_000, 130, 2049, 131_072]}
TOPK = {"cpu": 64, "cuda": 2048}


def differences(rank: int, device: str) -> Iterator[tuple[str, list[int]]]:
    """For each call, the ranks that chose differently. The last rank plans for a smaller card, which is kept busy."""
    torch.set_num_threads(1 + rank)
    busy = device == "cuda" and rank == WORLD - 1
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.cuda.set_stream(torch.cuda.Stream())
    if busy:
        known = memory.constants(torch.device("cuda", torch.cuda.current_device()))
        memory.constants = lambda device: known._replace(num_sms=78)
    for name, choose in _choices(device).items():
        for i in range(CALLS[device]):
            if busy:
                _load()
            chosen = choose().cpu()
            others = [torch.empty_like(chosen) for _ in range(WORLD)]
            dist.all_gather(others, chosen)
            yield f"{name}, call {i}", [n for n, other in enumerate(others) if not torch.equal(other, chosen)]
    assert not busy or (topk_op._prepared and decode_op._prepared), "the kernels ran"


def _load() -> None:
    """Some milliseconds of work on another stream."""
    with torch.cuda.stream(torch.cuda.Stream()):
        a = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
        for _ in range(20):
            a = a @ a


def _choices(device: str) -> dict[str, Any]:
    """Functions without arguments: exact sums with many ties, zeros, arbitrary sums, and logits of another source."""
    lengths, topk = LENGTHS[device], TOPK[device]
    exact = index_call(lengths, s_q=2, heads=16, exact=True)
    calls = {
        "ties": exact,
        "zeros": {**exact, "weights": torch.zeros_like(exact["weights"])},
        "any sums": index_call(lengths, s_q=4, heads=64),
    }
    if device == "cuda":
        calls = {name: on_gpu(call) for name, call in calls.items()}
    logits = logits_of("integers", 4, max(lengths)).to(device)
    counts = torch.tensor([max(lengths), topk, topk + 1, 0], dtype=torch.int32, device=device)
    return {
        "logits": lambda: index_topk(logits, counts, topk),
        **{name: functools.partial(index_decode, **call, topk=topk) for name, call in calls.items()},
    }
