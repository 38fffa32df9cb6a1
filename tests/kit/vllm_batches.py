"""Batches as vLLM builds them (packed tokens, block tables, slots), and attention over them in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_kernels.integrations.vllm.calls import CODES, FP8_SCALED, INT4, INT8, scaled_token_bytes
from tests.kit.draws import generator, normal

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
LIMITS = {"auto": 0.01, "fp8": 0.06, INT8: 0.02, FP8_SCALED: 0.06, INT4: 0.2}
"""Largest error of attention over each cache. The codes of N(0, 1) tokens account for 0.4 to 0.6 of it."""


@dataclass
class Batch:
    """Requests with all of their keys, and with queries for their last tokens.

    query                 (query tokens, HEADS, d)
    keys, values          (all tokens, KV_HEADS, d), of one request after the other
    starts                (requests + 1,) int32, of query tokens
    seq_lens              (requests,) int32
    block_table           (requests, pages of the longest) int32, random pages
    all_slots             (all tokens,) int64
    slots                 (query tokens,) int64
    pages                 number of pages of the cache
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    all_slots: torch.Tensor
    slots: torch.Tensor
    pages: int

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._one, self._one

    def __post_init__(self) -> None:
        self._one = torch.ones((), dtype=torch.float32, device=self.query.device)

    def to(self, device: str) -> Batch:
        tensors = {name: t.to(device) for name, t in vars(self).items() if isinstance(t, torch.Tensor)}
        del tensors["_one"]
        return Batch(**tensors, pages=self.pages)

    def expected(
        self, window: int | None, s_aux: torch.Tensor | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        out = torch.zeros(self.query.shape, dtype=torch.float64, device=self.query.device)
        first, starts = 0, self.starts.tolist()
        for request, length in enumerate(self.seq_lens.tolist()):
            begin, end = starts[request], starts[request + 1]
            k, v = (
                t[first : first + length].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
                for t in (self.keys, self.values)
            )
            scores = torch.einsum("qhd,khd->hqk", self.query[begin:end].double(), k) * 0.125
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            own = torch.arange(length - (end - begin), length, dtype=torch.int64, device=k.device).unsqueeze(1)
            key = torch.arange(length, dtype=torch.int64, device=k.device)
            seen = (key <= own) & (key > own - (window or length + 1))
            scores = scores.masked_fill(~seen, -torch.inf)
            if s_aux is not None:
                sink = s_aux.double().view(-1, 1, 1).expand(-1, end - begin, 1)
                scores = torch.cat([scores, sink], dim=-1)
            out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], v)
            first += length
        return out

    def error(
        self, out: torch.Tensor, window: int | None, s_aux: torch.Tensor | None = None, softcap: float | None = None
    ) -> float:
        """The relative error against float64."""
        expected = self.expected(window, s_aux, softcap)
        return float((out.double() - expected).norm() / expected.norm())


def draw_batch(lengths: list[int], queries: list[int], page_size: int, seed: int = 0) -> Batch:
    """Requests of these lengths and numbers of query tokens, over pages in random order."""
    gen = generator(seed)

    def draw(tokens: int, heads: int) -> torch.Tensor:
        return normal((tokens, heads, HEAD_DIM), gen).bfloat16()

    width = -(-max(lengths) // page_size)
    pages = len(lengths) * width + 1
    order = (
        torch.randperm(pages - 1, generator=gen, dtype=torch.int64, device="cpu").int() + 1
    )  # vLLM keeps page 0 unused
    block_table = order.view(len(lengths), width)
    all_slots, slots = [], []
    for row, length, count in zip(block_table.long(), lengths, queries, strict=True):
        position = torch.arange(length, dtype=torch.int64, device="cpu")
        request_slots = row[position // page_size] * page_size + position % page_size
        all_slots.append(request_slots)
        slots.append(request_slots[length - count :])
    starts = torch.tensor([0, *queries], dtype=torch.int32, device="cpu").cumsum(0).int()
    total = sum(lengths)
    return Batch(
        query=draw(sum(queries), HEADS),
        keys=draw(total, KV_HEADS),
        values=draw(total, KV_HEADS),
        starts=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device="cpu"),
        block_table=block_table,
        all_slots=torch.cat(all_slots),
        slots=torch.cat(slots),
        pages=pages,
    )


def stock_cache(
    pages: int, kv_heads: int, page_size: int, d: int, dtype: torch.dtype, order: str, device: str = "cpu",
    codes: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """VLLM's cache, (pages, kv_heads, page_size, 2 d), "HND" or "NHD" in memory, with `codes` or INT8 and scales."""
    codes = torch.int8 if dtype is torch.int8 else codes
    width = 2 * d if codes is None else scaled_token_bytes(d, codes)
    if order == "HND":
        return torch.zeros(pages, kv_heads, page_size, width, dtype=dtype, device=device)
    return torch.zeros(pages, page_size, kv_heads, width, dtype=dtype, device=device).transpose(1, 2)


def empty_cache(
    pages: int, page_size: int, kv_cache_dtype: str, device: str = "cpu", kv_heads: int = KV_HEADS, d: int = HEAD_DIM
) -> torch.Tensor:  # fmt: skip
    """The cache that vLLM allocates for a layer with our backend."""
    dtype = {"auto": torch.bfloat16, INT8: torch.int8}.get(kv_cache_dtype, torch.uint8)
    return stock_cache(pages, kv_heads, page_size, d, dtype, "NHD", device, CODES.get(kv_cache_dtype))
