"""Launches of the append kernels: which one a format has, and what it is told about pages."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cute_kernels.mla.append_spec import MlaAppendSpec
from cute_kernels.runtime.compile import get_kernel
from fp8_mla.formats import V3_2, PageLayout, TokenFormat

AppendLaunch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes kv, pages and slots as `launch_append` does."""


def prepare_append(tokens: int, token_format: TokenFormat, page_layout: PageLayout) -> AppendLaunch:
    """The launch of an append of `tokens` tokens, 1 at least, to pages of one layout; compiled where it has to be.

    It holds for other numbers of tokens as well, where it may be slower.

    Raises:
        RuntimeError: the DSL is not installed, or was imported for another target.
    """
    kernel = get_kernel(MlaAppendSpec.for_launch(tokens, token_format.name))
    if token_format == V3_2:
        return kernel  # rows are what the strides of `pages` say
    rows = (page_layout.data_stride, page_layout.scale_offset, page_layout.scale_stride)

    def launch(kv: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        kernel(kv, pages, slots, *rows)

    return launch


def launch_append(
    kv: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, token_format: TokenFormat, page_layout: PageLayout
) -> None:
    """Quantizes new tokens and stores each in its slot, in one launch on torch's current stream.

    The kernel checks dtypes, sizes, alignment and devices of the tensors. It does not check that the rows of
    `page_layout` lie in a page, that their strides are multiples of 16 bytes (8 for the scale rows of V4), or that
    there are fewer than 2^31 slots.

    Args:
        kv: (tokens, d_qk) bfloat16, at least one token; rows contiguous, at multiples of 16 bytes.
        pages: (num_pages, page_size, any) uint8, at least one page, pages at multiples of 16 bytes. For V3.2 the
            last dimension is 656 and the strides are those of its tokens; for other formats only the first stride
            counts, and `page_layout` says where rows are.
        slots: (tokens,) int64, ``page * page_size + offset``; a token without a slot in the cache is skipped.
        token_format: what a token's bytes are.
        page_layout: where a page has the rows of its tokens.

    Raises:
        ValueError, TypeError: the kernel refuses a tensor.
        RuntimeError: as `prepare_append`.
    """
    prepare_append(kv.shape[0], token_format, page_layout)(kv, pages, slots)
