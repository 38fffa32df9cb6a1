"""What a row's bits cost where they do not depend on its batch: decoding with 1 and 4 splits beside the planned one.

On an SM90 GPU:  python -m bench.split_cost

Prints a line of Markdown a case: in-layer microseconds, median, of all three in turns. Inputs are rotated, or larger
than the L2 cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bench.in_layer import prepare, time_together
from cute_kernels import gqa_decode, mla_fp8_decode
from fp8_mla import TOKEN_BYTES
from tests.kit.gqa_cases import gqa_case
from tests.kit.latent_cases import latent_case
from tests.kit.mla_cases import dense_case, sparse_case

SPLITS = (None, 1, 4)
BATCHES = (1, 8, 64, 128)
ROTATED_BYTES = 128 << 20  # of inputs, at least: twice the L2 cache and more
MOST_SETS = 32
SLOTS = 1 << 18
USUAL: dict[str, Any] = {"invalid": False, "padded": False, "device": "cuda"}
Rows = Callable[[Sequence[int]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class SplitCase:
    """A decode over any of the requests that were made: `make(requests)` gives their arguments by row numbers."""

    name: str
    op: Callable[..., Any]
    batch: int
    bytes_per_request: int
    make: Callable[[int], Rows]

    def timed(self) -> dict[int | None, float]:
        """Microseconds by number of splits."""
        sets = max(1, min(MOST_SETS, -(-ROTATED_BYTES // (self.batch * self.bytes_per_request))))
        rows = self.make(self.batch * sets)
        inputs = [rows(range(i * self.batch, (i + 1) * self.batch)) for i in range(sets)]
        ways = {
            str(splits): prepare([functools.partial(self.op, **given, num_splits=splits) for given in inputs])
            for splits in SPLITS
        }
        found = time_together(ways, sustained=False)
        return {splits: found[str(splits)].us for splits in SPLITS}


def mla_rows(make: Callable[[int], Any], requests: int) -> Rows:
    case = make(requests)
    return lambda rows: case.rows(rows).arguments()


def gqa_rows(length: int, requests: int) -> Rows:
    case = gqa_case(
        seqlens=[length] * requests, h_q=32, h_kv=8, layout="paged_HND", page_size=64, padded=False, device="cuda"
    )  # fmt: skip

    def arguments(rows: Sequence[int]) -> dict[str, Any]:
        names = ("q", "cache_seqlens", "block_table")
        chosen: dict[str, Any] = {name: getattr(case, name)[list(rows)] for name in names}
        return dataclasses.replace(case, **chosen).arguments()

    return arguments


def sparse(h_q: int, requests: int) -> Any:
    return sparse_case(batch=requests, h_q=h_q, topk=2048, num_slots=SLOTS, **USUAL)


def dense(requests: int) -> Any:
    lengths = [512 + 977 * i % 7681 for i in range(requests)]
    return dense_case(seqlens=lengths, h_q=128, padded=False, device="cuda")


def two_caches(requests: int) -> Any:
    return latent_case(
        formats=("v4", "v4"), batch=requests, h_q=64, topk=128, extra_topk=1024, num_slots=SLOTS, **USUAL
    )  # fmt: skip


def cases() -> Iterator[SplitCase]:
    """The shapes of the record, small and large batches."""
    for batch in BATCHES:
        for h_q in (16, 64, 128):
            make = functools.partial(mla_rows, functools.partial(sparse, h_q))
            yield SplitCase(f"v3.2, topk 2048, {batch} x {h_q} heads", mla_fp8_decode, batch, 2048 * TOKEN_BYTES, make)
        name = f"v3.2, dense, 512 to 8192 keys, {batch} x 128 heads"
        yield SplitCase(name, mla_fp8_decode, batch, 4096 * TOKEN_BYTES, functools.partial(mla_rows, dense))
        name = f"v4, 128 + 1024 keys, {batch} x 64 heads"
        yield SplitCase(name, mla_fp8_decode, batch, 1152 * 584, functools.partial(mla_rows, two_caches))
        for length in (1024, 8192):
            name = f"gqa INT8, {length} tokens, {batch} x 32/8 heads"
            yield SplitCase(name, gqa_decode, batch, length * 8 * 264, functools.partial(gqa_rows, length))


def main() -> None:
    print("| case | planned: us | 1 split: us | 4 splits: us |\n| --- | ---: | ---: | ---: |")
    for case in cases():
        found = case.timed()
        planned = found[None]
        forced = [f"{found[n]:.1f} ({found[n] / planned:.2f} x)" for n in SPLITS if n is not None]
        print(f"| {case.name} | {planned:.1f} | {' | '.join(forced)} |", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
