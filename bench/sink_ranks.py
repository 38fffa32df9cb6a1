"""Time of `context_parallel_sink_attention` over the GPUs of a host, beside `sink_attention` on one of them.

    torchrun --nproc-per-node 4 -m bench.sink_ranks [--tokens 131072]

Every rank times the whole sequence by itself first. A line has milliseconds of a forward and of a forward and backward,
the slowest rank's, and the speed per GPU: 1 would be linear.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from cute_kernels import sink_attention
from cute_kernels.distributed import context_parallel_sink_attention

CASES: Final[list[tuple[tuple[int, int, int], dict[str, Any]]]] = [
    ((64, 8, 64), {}),
    ((64, 8, 64), {"window": 128}),
    ((32, 8, 128), {}),
    ((64, 8, 64), {"comm": "a2a"}),
    ((64, 8, 64), {"comm": "a2a", "window": 128}),
]
"""(query heads, KV heads, head dimension), and options of the call."""
REPEATS: Final = 3


def timed(call: Callable[[], Any]) -> float:
    """Returns the milliseconds of a call on the slowest rank."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    begin.record()
    for _ in range(REPEATS):
        call()
    end.record()
    torch.cuda.synchronize()
    slowest = torch.tensor(begin.elapsed_time(end) / REPEATS, dtype=torch.float32, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def both(attend: Callable[..., torch.Tensor], tokens: int, heads: tuple[int, int, int]) -> tuple[float, float]:
    """Returns milliseconds of a forward, and of a forward and backward, over `tokens` tokens of N(0, 1) numbers."""
    h_q, h_kv, d = heads
    q, k, v, dout = (torch.randn(1, tokens, h, d, device="cuda").bfloat16() for h in (h_q, h_kv, h_kv, h_q))
    leaves = [t.requires_grad_() for t in (q, k, v, torch.zeros(h_q, dtype=torch.float32, device="cuda"))]
    passes = timed(lambda: torch.autograd.grad(attend(*leaves), leaves, dout))
    with torch.no_grad():
        return timed(lambda: attend(*leaves)), passes


def main() -> None:
    """Times all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072, help="of the sequence (131072)")
    tokens = parser.parse_args().tokens
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ranks, alone = dist.get_world_size(), dict[Any, tuple[float, float]]()
    for heads, options in CASES:
        window = options.get("window")
        if (heads, window) not in alone:
            alone[heads, window] = both(lambda *t, w=window: sink_attention(*t, window=w), tokens, heads)
        one = alone[heads, window]
        shared = both(lambda *t, o=options: context_parallel_sink_attention(*t, **o), tokens // ranks, heads)
        if dist.get_rank() == 0:
            speeds = [a / b / ranks for a, b in zip(one, shared, strict=True)]
            name = f"{heads[0]}/{heads[1]} x {heads[2]}, window {window}, {options.get('comm', 'all_gather')}"
            print(f"{name}: one GPU {one[0]:.2f} and {one[1]:.2f} ms; {ranks} GPUs {shared[0]:.2f} and {shared[1]:.2f}")
            print(f"    {speeds[0]:.3f} and {speeds[1]:.3f} of linear", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
