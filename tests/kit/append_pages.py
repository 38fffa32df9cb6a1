"""Pages of a latent cache of any format, padded or strided, full of random bytes, and their bytes after an append."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fp8_mla import pack
from fp8_mla.formats import FORMATS, PageLayout, TokenFormat
from tests.kit.draws import generator, integers, normal

FORMS = (
    ("v3.2_nope", None),
    ("v4", None),
    ("v4.1", "planar"),
    ("v4.1", "interleaved"),
    ("v4.1_fp4", "planar"),
    ("v4.1_fp4", "interleaved"),
)
"""Formats of 512 elements, each with every layout of its pages."""


@dataclass(frozen=True)
class AppendPages:
    """Pages in a buffer of bytes.

    token_format  format of the tokens
    layout        layout of a page
    shape         (num_pages, page_size)
    page_stride   bytes from page to page
    buffer        (num_pages * page_stride + 32,) uint8, all of it random: the first page starts at byte 16
    """

    token_format: TokenFormat
    layout: PageLayout
    shape: tuple[int, int]
    page_stride: int
    buffer: torch.Tensor

    @classmethod
    def random(
        cls,
        cache_format: str,
        cache_layout: str | None,
        shape: tuple[int, int],
        *,
        padded_to: int = 16,
        token_stride: int | None = None,
        device: str = "cuda",
        seed: int = 0,
    ) -> AppendPages:
        """Pages whose stride is the next multiple of `padded_to`, itself a multiple of 16."""
        token_format = FORMATS[cache_format]
        layout = token_format.page_layout(shape[1], cache_layout, token_stride=token_stride)
        page_stride = -(-layout.page_bytes // padded_to) * padded_to
        gen = generator(seed, device)
        size = shape[0] * page_stride + 32
        buffer = integers(0, 256, (size,), gen, torch.uint8)
        return cls(token_format, layout, shape, page_stride, buffer)

    def cuda(self) -> AppendPages:
        """The pages in memory of the GPU."""
        return dataclasses.replace(self, buffer=self.buffer.cuda())

    @property
    def num_slots(self) -> int:
        """Number of tokens that all pages hold."""
        return self.shape[0] * self.shape[1]

    @property
    def view(self) -> torch.Tensor:
        """The pages as serving stacks pass them, (num_pages, page_size, 1, token_bytes) uint8; planar rows differ."""
        size = self.token_format.token_bytes
        token_stride = size if self.layout.cache_layout == "planar" else self.layout.data_stride
        return self.buffer.as_strided((*self.shape, 1, size), (self.page_stride, token_stride, size, 1), 16)

    @property
    def options(self) -> dict[str, Any]:
        """The options by which an append is told the format and the layout of these pages."""
        return {"cache_format": self.token_format.name, "cache_layout": self.layout.cache_layout}

    def expected(self, kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The whole buffer after an append, on the CPU. The bytes of a token are those of `fp8_mla.pack`."""
        result = self.buffer.cpu().clone()
        pages = result[16:-16].view(-1, self.page_stride)
        append_to(pages, kv.cpu(), slots.cpu(), self.shape[1], self.token_format, self.layout)
        return result


def append_to(
    pages: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    page_size: int,
    token_format: TokenFormat,
    layout: PageLayout,
) -> None:
    """Writes the rows that `fp8_mla.pack` makes of new tokens, on the CPU; pages (num_pages, page bytes or more)."""
    keep = (slots >= 0) & (slots < len(pages) * page_size)
    packed = pack(kv[keep], token_format=token_format)
    page, offset = (slots[keep] // page_size).unsqueeze(1), (slots[keep] % page_size).unsqueeze(1)
    starts = [offset * layout.data_stride]
    if len(token_format.row_bytes) == 2:
        starts.append(layout.scale_offset - token_format.scales.offset + offset * layout.scale_stride)
    for start, row in zip(starts, packed.split(token_format.row_bytes, dim=-1), strict=True):
        pages[page, start + torch.arange(row.shape[1], dtype=torch.int64, device="cpu")] = row


def slots_for(tokens: int, num_slots: int, seed: int) -> torch.Tensor:
    """Distinct slots in random order. Every seventh token is skipped: its slot is negative or beyond the cache."""
    slots = torch.randperm(num_slots, generator=generator(seed), dtype=torch.int64, device="cpu")[:tokens]
    skip = torch.tensor([-1, -(2**63), num_slots, 2**40, -(2**32), 2**63 - 1], dtype=torch.int64, device="cpu")
    slots[::7] = skip[torch.arange(len(slots[::7]), dtype=torch.int64, device="cpu") % len(skip)]
    return slots


def special_rows(tile: int) -> torch.Tensor:
    """Tokens that meet every rule of a quantization with tiles of `tile` elements, (n, 512) bfloat16."""
    gen, largest = generator(11), torch.finfo(torch.bfloat16).max
    rows = [torch.full((512,), value, dtype=torch.float32, device="cpu") for value in (0.0, -0.0, largest, 2.0**-133)]

    def drawn() -> torch.Tensor:
        return normal((512,), gen)

    for exponent in range(-140, 128, 3):  # from below the smallest scale to the top, subnormals in between
        rows.append(drawn() * 2.0 ** min(exponent, 124))
    for value in (math.nan, -math.nan, math.inf, -math.inf):
        one, whole, mixed = drawn(), drawn(), drawn()
        one[[0, tile - 1, tile, 130, 300, 447, 448, 511]] = value
        whole[tile : 2 * tile] = value
        mixed[0], mixed[1] = value, math.nan
        mixed[tile], mixed[tile + 1] = math.inf, math.nan
        rows += [one, whole, mixed, torch.full_like(one, value)]
    jumps = drawn()
    jumps[tile : 2 * tile] = 0
    jumps[2 * tile] = largest
    jumps[3 * tile : 4 * tile] *= 2.0**-60
    rows.append(jumps)
    # ties between codes: the scale is 1 if the largest magnitude is 448 or 6
    codes = torch.arange(127, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
    ties = torch.cat([(codes[:-1] + codes[1:]) / 2, codes.new_tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])])
    for peak in (448.0, 6.0):
        flat = _rows_of(F.pad(_rows_of(ties[ties <= peak], tile - 1), (1, 0), value=peak))
        rows += [*flat, *-flat]
    # both sides of every step of a scale that is a power of two: 448 x 2^k and the next larger number
    powers = 2.0 ** torch.arange(512 // tile, dtype=torch.float32, device="cpu")
    for peak in (448.0, 450.0):
        steps = torch.zeros_like(jumps)
        steps[::tile] = peak * powers
        rows += [steps, steps * 2.0**-30]
    return torch.stack(rows).bfloat16()


def _rows_of(values: torch.Tensor, width: int = 512) -> torch.Tensor:
    """Rows that hold the values in order; the last row is padded with zeros."""
    return F.pad(values.flatten(), (0, -values.numel() % width)).view(-1, width)


def every_pattern() -> torch.Tensor:
    """All 65,536 bit patterns as (256, 512) bfloat16, first in tiles of almost equal exponents, then in mixed tiles."""
    patterns = torch.arange(65536, dtype=torch.int32, device="cpu").short().view(torch.bfloat16)
    shuffled = patterns[torch.randperm(65536, generator=generator(2), dtype=torch.int64, device="cpu")]
    return torch.cat([patterns.view(128, 512), shuffled.view(128, 512)])


def every_magnitude_with_every_e4m3_scale() -> torch.Tensor:
    """(n, 512) bfloat16 with tiles of 16 elements that get each e4m3 scale in turn.

    Each tile of a scale holds 6 times that scale, and one tile also has every magnitude from 1/64 of the scale up.
    """
    scales = torch.arange(1, 127, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
    bits = torch.arange(0x7F80, dtype=torch.int32, device="cpu").short().view(torch.bfloat16).float()
    tiles = []
    for scale in scales.tolist():
        inside = bits[(bits <= 6 * scale) & (bits >= scale / 64)]
        inside[1::2] *= -1
        tiles.append(F.pad(_rows_of(inside, 15), (0, 1), value=6 * scale))
    return _rows_of(torch.cat(tiles)).bfloat16()
