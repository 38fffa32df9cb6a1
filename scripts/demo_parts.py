"""Helpers of the demo's pages: embedded text, paged caches, errors, times and tables."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

import fp8_mla
from cute_kernels import mla_fp8_append

EXACT_LIMIT = 2e-5
"""Limit for float32 sums of up to 512 x 128 products: a wrong absorption is off by the order of 1."""


def byte_tables(hidden: int, generator: torch.Generator) -> torch.Tensor:
    """Makes the tables of `embed`, (4, 256, hidden).

    A token is its byte and the three before it, so that the same letter has different keys at different places.
    """
    return torch.randn(4, 256, hidden, generator=generator) / 2


def embed(text: bytes, tables: torch.Tensor) -> torch.Tensor:
    """Returns (1, len(text), hidden): a vector for each byte of a text and the three before it."""
    tokens = torch.tensor(list(text), device=tables.device)
    history = torch.nn.functional.pad(tokens, (len(tables) - 1, 0)).unfold(0, len(tables), 1)
    return torch.stack([table[column] for table, column in zip(tables, history.T, strict=True)]).sum(0).unsqueeze(0)


@contextmanager
def outputs_of(module: torch.nn.Module, *names: str) -> Iterator[dict[str, Any]]:
    """Collects the outputs of the named submodules while the context is open."""
    seen: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, _args, output: seen.update({name: output})

    handles = [module.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class PagedCache:
    """Sequences in a shuffled paged cache. Unused slots hold 0xFF, as a careless server's might."""

    pages: torch.Tensor
    block_table: torch.Tensor
    seqlens: torch.Tensor

    @classmethod
    def of(
        cls,
        sequences: list[torch.Tensor],
        page_size: int,
        appended: int,
        token_format: fp8_mla.TokenFormat = fp8_mla.V3_2,
    ) -> PagedCache:
        """Packs sequences of (s, d_qk) latents; the last `appended` tokens of each go through `mla_fp8_append`."""
        device = sequences[0].device
        lengths = [len(latents) for latents in sequences]
        page_counts = [-(-length // page_size) for length in lengths]
        shuffled = torch.randperm(sum(page_counts), generator=torch.Generator().manual_seed(0))
        block_table = torch.full((len(lengths), max(page_counts)), fp8_mla.INVALID_SLOT, dtype=torch.int32)
        for row, own in enumerate(shuffled.split(page_counts)):
            block_table[row, : len(own)] = own
        cache = cls(
            pages=torch.full(
                (sum(page_counts), page_size, token_format.token_bytes), 0xFF, dtype=torch.uint8, device=device
            ),
            block_table=block_table.to(device),
            seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
        )
        slots = fp8_mla.slots_from_block_table(cache.block_table, cache.seqlens, page_size)
        for row, latents in enumerate(sequences):
            prompt, new = latents.bfloat16().tensor_split([len(latents) - appended])
            own = slots[row, : len(latents)]
            packed = fp8_mla.pack(prompt, token_format=token_format)
            fp8_mla.write_pages(cache.pages, own[: len(prompt)], packed, token_format=token_format)
            mla_fp8_append(new, cache.pages, own[len(prompt) :], cache_format=token_format.name)
        return cache

    def slots_of(self, picked_by_row: list[torch.Tensor]) -> torch.Tensor:
        """Returns slots (batch, n, topk) int32 of the positions (n, topk) picked for each row's last n tokens.

        If there are fewer tokens to choose from than it must pick, it also names later tokens: those become -1.
        """
        # Transposed, because padding goes to the first dimension.
        picked = pad_sequence([row.T for row in picked_by_row], True, fp8_mla.INVALID_SLOT).mT
        newest = (
            self.seqlens.view(-1, 1, 1) - picked.shape[1] + torch.arange(picked.shape[1], device=picked.device)[:, None]
        )
        return self.slots_at(torch.where(picked <= newest, picked, fp8_mla.INVALID_SLOT))

    def slots_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns slots (batch, n, any) int32 of positions of the same shape; -1 where there is no token."""
        slots = fp8_mla.slots_from_positions(
            positions, self.block_table, self.pages.shape[1], cache_seqlens=self.seqlens, num_pages=len(self.pages)
        )
        return slots.int()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the norm of the difference over the norm of `want`."""
    return float((got - want).norm() / want.norm())


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Returns the time of one call: on a GPU the mean of 20 in a row after 3 others, on a CPU the best of 3."""
    if device.type == "cuda":
        for _ in range(3):
            call()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 20
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


class Cell(NamedTuple):
    """A way to attend: relative norm of its error at the layer's output, and its time."""

    error: float
    ms: float


@dataclass(frozen=True)
class Report:
    """Ways to attend to the same keys, from exact to quantized.

    exact      plain torch over float32 keys: shows that queries and keys equal the layer's
    bf16       plain torch over bfloat16 keys and queries: the loss without any FP8
    reference  by format, `fp8_mla.reference_decode` of float32 queries over the cache: the loss by quantization alone
    decode     by format, `mla_fp8_decode` over the cache
    """

    exact: Cell
    bf16: Cell
    reference: dict[str, Cell] = field(default_factory=dict)
    decode: dict[str, Cell] = field(default_factory=dict)

    def failures(self, name: str) -> list[str]:
        """Returns in words what is wrong; empty when all is well."""
        found = []
        if not self.exact.error <= EXACT_LIMIT:
            found.append(f"{name}: keys miss the layer's output by {self.exact.error:.1e}, over {EXACT_LIMIT:.0e}")
        for kept_as, cell in self.decode.items():
            # Roundings are independent, so their squares add up; a tenth is left for chance.
            limit = 1.1 * math.hypot(self.bf16.error, self.reference[kept_as].error)
            if not cell.error <= limit:
                found.append(
                    f"{name}, {kept_as}: mla_fp8_decode is off by {cell.error:.1e}, over {limit:.1e} of roundings"
                )
        return found

    def show(self, title: str) -> None:
        """Prints the table."""
        rows = {"float32 (exact)": self.exact, "bfloat16": self.bf16}
        rows |= {f"{name}, reference": cell for name, cell in self.reference.items()}
        rows |= {f"{name}, mla_fp8_decode": cell for name, cell in self.decode.items()}
        width = max(map(len, rows))
        print(f"{title}\n{'keys kept as':{width}}  {'error':>7}  {'ms':>8}")
        for name, cell in rows.items():
            print(f"{name:{width}}  {cell.error:7.1e}  {cell.ms:8.2f}")
        print()


def batch_of(text: bytes, total: int, sequences: int) -> list[bytes]:
    """Cuts sequences from a text: different beginnings and ragged lengths, as in a server's batch."""
    text *= -(-2 * total // len(text))
    return [text[31 * row : 25 * row + total] for row in range(sequences)]
