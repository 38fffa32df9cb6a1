"""Calls of DeepSeek-V4's layers: queries padded to 64 or 128 heads, a window's cache and a compressed one."""

from __future__ import annotations

import dataclasses

import torch

from fp8_mla import reference_decode
from tests.kit.mla_cases import DecodeCase, sparse_case

REAL_HEADS = (8, 16, 64, 128)
TOKENS = 5


@dataclasses.dataclass
class V4Call:
    """A decode of `TOKENS` tokens.

    heads   number of real heads
    case    the call over padded heads; queries and sinks that no kernel may read are NaN
    """

    heads: int
    case: DecodeCase

    @property
    def q(self) -> torch.Tensor:
        """Queries (tokens, padded heads, 512)."""
        return self.case.q[:, 0]

    def output(self) -> torch.Tensor:
        """A buffer (tokens, padded heads, 512) to write to."""
        return torch.full(self.q.shape, torch.nan, dtype=torch.bfloat16, device=self.q.device)

    def real(self) -> DecodeCase:
        """The call over real heads only."""
        assert self.case.s_aux is not None
        return dataclasses.replace(self.case, q=self.case.q[:, :, : self.heads], s_aux=self.case.s_aux[: self.heads])

    def check(self, output: torch.Tensor) -> None:
        """Requires that the real heads of `output` are those of the reference."""
        expected, _ = reference_decode(**self.real().arguments())
        torch.testing.assert_close(output[:, : self.heads].double(), expected[:, 0], rtol=2**-7, atol=2**-7)


def v4_call(heads: int, extra: bool = True, plain: bool = False, device: str = "cpu") -> V4Call:
    """A call over pages of 64 tokens and of 2, as layers that compress by 128 have them.

    Args:
        heads: number of real heads.
        extra: whether there is a compressed cache.
        plain: whether lists have valid slots and no lengths, and padded heads are zeros, as FlashMLA needs.
    """
    padded = 64 if heads <= 64 else 128
    formats = ("v4", "v4") if extra else ("v4",)
    case = sparse_case(
        formats=formats, batch=TOKENS, h_q=padded, topk=64, extra_topk=128, num_slots=512, sink="finite",
        invalid=not plain, lengths="none" if plain else "batch", padded=False, device=device,
    )  # fmt: skip
    assert case.s_aux is not None
    case.q[:, :, heads:] = 0.0 if plain else torch.nan
    case.s_aux[heads:] = -torch.inf if plain else torch.nan
    caches = {"kv_cache": spaced(case.kv_cache)}
    if case.extra_kv_cache is not None:
        caches["extra_kv_cache"] = spaced(case.extra_kv_cache)
    return V4Call(heads, dataclasses.replace(case, softmax_scale=0.05, **caches))


def spaced(pages: torch.Tensor) -> torch.Tensor:
    """The pages with the page stride of vLLM and SGLang, a multiple of 576 bytes."""
    size = pages[0].numel()
    memory = torch.zeros(len(pages), -(-size // 576) * 576, dtype=torch.uint8, device=pages.device)
    view = memory[:, :size].view(pages.shape)
    view.copy_(pages)
    return view
