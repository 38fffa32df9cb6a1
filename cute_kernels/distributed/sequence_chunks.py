"""Which chunks of each sequence a rank trains on, and which ranks have the keys that its queries see.

A sequence is cut into equal chunks. In order "zigzag" a rank has two: rank r of n has chunks r and 2 n - 1 - r, so that
all ranks have the same number of visible (query, key) pairs. In order "contiguous" rank r has chunk r. A rank's tokens
are its chunks' tokens, sequence after sequence.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from cute_kernels.runtime.checks import check_tensor, fail, require

ORDERS: Final = {"zigzag": 2, "contiguous": 1}
"""Chunks of a sequence that a rank has, by order."""
KEY_TILE: Final = 128
"""Keys of a chunk's window begin at a multiple of this, so that kernels see the same tiles as in a whole sequence."""


class Place(NamedTuple):
    """A rank among the ranks that share sequences."""

    rank: int
    world_size: int
    order: str

    @property
    def chunks(self) -> list[int]:
        """Numbers of the chunks of each sequence that this rank has, in its order of tokens."""
        return [self.rank, 2 * self.world_size - 1 - self.rank] if self.order == "zigzag" else [self.rank]

    @property
    def parts(self) -> int:
        """Number of chunks of a sequence."""
        return self.world_size * ORDERS[self.order]

    def owner(self, chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rank of each chunk, and the chunk's number on that rank."""
        if self.order == "contiguous":
            return chunk, torch.zeros_like(chunk)
        second = chunk >= self.world_size
        return torch.where(second, self.parts - 1 - chunk, chunk), second.to(chunk.dtype)


class Keys(NamedTuple):
    """The keys that a rank's queries see, in one packed call of all its chunks.

    sent          (n,) int64: this rank's tokens that other ranks get; None: all of them
    rows          (keys,) int64: the row of each key among the tokens `sent` by rank after rank; unless `sent` is None,
                  this rank's own tokens come before them
    cu_seqlens_q  (chunks + 1,) int32: borders of this rank's chunks
    cu_seqlens_k  (chunks + 1,) int32: borders of their keys. The last query of a chunk sees the last key
    """

    sent: torch.Tensor | None
    rows: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor


@functools.lru_cache(maxsize=32)
def keys_of(lengths: tuple[int, ...], tokens: int, place: Place, window: int | None, device: torch.device) -> Keys:
    """Finds the keys of a rank's chunks; all layers of a step share the result.

    Args:
        lengths: tokens of each chunk, by sequence.
        tokens: tokens of this rank; those past all chunks are padding.
        place: place of this rank.
        window: most keys that a query sees.
        device: device of all tensors.
    """
    count, owned = len(lengths), place.chunks
    earlier = None if window is None else _before(lengths, window)
    starts = [len(owned) * start for start in accumulate(lengths, initial=0)][:count]
    segments = [
        (start + slot * n, start, n, chunk, max(0, chunk * n - (chunk * n if earlier is None else earlier)))
        for start, n in zip(starts, lengths, strict=True)
        for slot, chunk in enumerate(owned)
    ]
    first, start, size, chunk, begin = torch.tensor(segments, dtype=torch.int64, device=device).view(-1, 5).T
    counts = [(chunk + 1) * n - begin for _, _, n, chunk, begin in segments]
    total = sum(counts)
    of = torch.arange(len(segments), dtype=torch.int64, device=device).repeat_interleave(
        _numbers(counts, torch.int64, device), output_size=total
    )
    offset = _numbers(list(accumulate(counts, initial=0)), torch.int64, device)
    position = torch.arange(total, dtype=torch.int64, device=device) - offset[of] + begin[of]
    there, local = position // size[of], position % size[of]
    rank, slot = place.owner(there)
    sent = None
    if earlier is not None and all(earlier <= n for n in lengths):
        tail = torch.arange(earlier, dtype=torch.int64, device=device)
        sent = (first + size - earlier).unsqueeze(1).add(tail).flatten()
        segment = (of // len(owned)) * len(owned) + slot
        halo = tokens + rank * len(sent) + segment * earlier + local - (size[of] - earlier)
        rows = torch.where(there == chunk[of], first[of] + local, halo)
    else:
        rows = rank * tokens + start[of] + slot * size[of] + local
    queries = [n for _, _, n, _, _ in segments]
    borders = (_numbers(list(accumulate(n, initial=0)), torch.int32, device) for n in (queries, counts))
    return Keys(sent, rows, *borders)


@functools.lru_cache(maxsize=32)
def whole_sequences(
    lengths: tuple[int, ...], tokens: int, place: Place, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns where whole sequences' tokens lie in all ranks' tokens, (tokens,) int64, and the sequences' borders."""
    sizes = [n * place.parts for n in lengths]
    total = sum(sizes)
    of = torch.arange(len(sizes), dtype=torch.int64, device=device).repeat_interleave(
        _numbers(sizes, torch.int64, device), output_size=total
    )
    borders = list(accumulate(sizes, initial=0))
    begin, size = _numbers(borders, torch.int64, device), _numbers(list(lengths), torch.int64, device)
    position = torch.arange(total, dtype=torch.int64, device=device) - begin[of]
    rank, slot = place.owner(position // size[of])
    rows = rank * tokens + begin[of] // place.world_size + slot * size[of] + position % size[of]
    return rows, _numbers(borders, torch.int32, device)


def _before(lengths: tuple[int, ...], window: int) -> int:
    """Returns the keys before a chunk that its queries see, rounded up to key tiles if chunks are whole tiles."""
    if any(n % KEY_TILE for n in lengths):
        return window - 1
    return -(-(window - 1) // KEY_TILE) * KEY_TILE


def _numbers(values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The version of each tensor of borders when it was read, and its contents."""


def chunk_lengths(q: torch.Tensor, cu_seqlens: torch.Tensor | None, place: Place) -> tuple[int, ...]:
    """Returns the chunk length of each sequence. The host reads borders once for each tensor and each change of it.

    Raises:
        TypeError, ValueError: a sequence cannot be cut into equal chunks, or the borders are invalid.
    """
    slots, parts = ORDERS[place.order], place.parts
    if cu_seqlens is None:
        needs = f"a multiple of {slots}: pad sequences to a multiple of {parts}, the chunks that they are cut into"
        require(q.shape[1] % slots == 0, "q", f"{q.shape[1]} tokens of each sequence on this rank", needs)
        return (q.shape[1] // slots,) * q.shape[0]
    check_tensor("cu_seqlens", cu_seqlens, dtype=torch.int32, ndim=1, device=q.device, unit_last_stride=True)
    version = None if cu_seqlens.is_inference() else cu_seqlens._version
    known = _read.get(cu_seqlens)
    if version is None or known is None or known[0] != version:
        known = _read[cu_seqlens] = version, cu_seqlens.tolist()
    borders: list[int] = known[1]
    tokens = q.shape[0] * place.world_size
    needs = f"0 first, no decrease, and at most {tokens} last, the tokens of all ranks"
    require(bool(borders) and borders[0] == 0, "cu_seqlens", f"{borders[:1]} first", needs)
    require(borders[-1] <= tokens, "cu_seqlens", f"{borders[-1]} last", needs)
    sizes = [after - before for before, after in zip(borders, borders[1:], strict=False)]
    for i, n in enumerate(sizes):
        if n < 0:
            fail("cu_seqlens", f"{borders[i + 1]} after {borders[i]} at index {i + 1}", needs)
        if n % parts:
            needs = f"multiples of {parts}: pad sequences to that, the chunks that they are cut into"
            fail("cu_seqlens", f"a sequence of {n} tokens at index {i}", needs)
    return tuple(n // parts for n in sizes)
