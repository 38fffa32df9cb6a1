"""Time of `index_topk` beside `torch.topk` and the bytes of the logits over the bandwidth of the card.

    python -m bench.index_topk            a line a case; `--clusters` times every number of CTAs a row

Logits are in the L2 cache where they fit, as the kernel that makes them leaves them; "cold" ones are read from memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from bench.in_layer import prepare, time_together
from cute_kernels import index_topk
from cute_kernels.indexer import topk_op
from cute_kernels.indexer.reference import index_topk_reference
from cute_kernels.indexer.topk_spec import CLUSTERS, TopkSpec, quads_for

CASES = ((1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768), (8, 131072), (64, 8192), (64, 32768), (64, 131072),
         (128, 131072))  # fmt: skip
TOPK, PAGE_SIZE = 2048, 64
BYTES_A_US = 3.06e6
"""Read bandwidth of an H100."""
COLD_BYTES = 200e6


def call_with(logits: torch.Tensor, cluster: int | None = None) -> Callable[[], torch.Tensor]:
    """A call on these logits, of the planned kernel or one with another number of CTAs a row."""
    rows, width = logits.shape
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    table = torch.randperm(rows * width // PAGE_SIZE, device="cuda").int().view(rows, -1)
    out = torch.empty(rows, TOPK, dtype=torch.int32, device="cuda")
    if cluster is None:
        return lambda: index_topk(logits, lengths, TOPK, block_table=table, page_size=PAGE_SIZE, out=out)
    spec = TopkSpec(cluster, quads_for(width, cluster), has_table=True, held=min(cluster, 2))
    kernel = topk_op.get_kernel(spec)

    def call() -> torch.Tensor:
        kernel(logits, lengths, None, table, out, PAGE_SIZE, topk_op.NUM_SLOTS)
        return out

    return call


def time_case(rows: int, width: int, clusters: tuple[int | None, ...], families: dict[str, torch.Tensor]) -> None:
    """Prints times of all ways to choose from rows of one shape."""
    ways = {}
    for name, logits in families.items():
        for cluster in clusters:
            ways[f"{name}{'' if cluster is None else f' {cluster}'}"] = prepare([call_with(logits, cluster)])
    logits = families["warm"]
    ways["torch.topk"] = prepare([lambda: torch.topk(logits, TOPK, dim=1)])
    if 4 * logits.numel() < COLD_BYTES / 3:
        sets = [logits.roll(i, 1) for i in range(min(64, int(COLD_BYTES / 4 / logits.numel())))]
        ways["cold"] = prepare([call_with(rolled) for rolled in sets])
    times = time_together(ways, sustained=False)
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    exact = torch.equal(index_topk(logits, lengths, TOPK), index_topk_reference(logits, lengths, TOPK))
    bound = 4 * logits.numel() / BYTES_A_US
    found = ", ".join(f"{name} {timing.us:.1f} ({timing.us_back_to_back:.1f})" for name, timing in times.items())
    print(f"{rows} x {width}: bytes {bound:.1f}, {found}{'' if exact else ', WRONG'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", action="store_true")
    arguments = parser.parse_args()
    print("us in a layer (back to back):")
    for rows, width in CASES:
        logits = torch.randn(rows, width, device="cuda")
        families = {"warm": logits}
        if width >= 32768 and rows in (1, 64):
            families["zeros"] = (logits - 3).clamp(min=0.0)
            families["equal"] = torch.full_like(logits, 1.5)
            families["100 more"] = logits + 100
        clusters: tuple[int | None, ...] = (None,)
        if arguments.clusters:
            clusters = tuple(c for c in CLUSTERS if rows * c <= 264)
            families = {"warm": logits}
        time_case(rows, width, clusters, families)


if __name__ == "__main__":
    main()
