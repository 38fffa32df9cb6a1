"""Which kernel answers a call of `sink_attention`: pure Python, from shapes alone.

One query token has no second query to share a tile of keys with, so a prefill kernel would walk over all keys of a head
in one CTA. `gqa_decode` divides the keys among all CTAs instead and merges their results. From some number of queries
on a tile of them is full, and prefill reads keys once for all of it.
"""

from __future__ import annotations

from typing import Final, Literal

Route = Literal["decode", "prefill"]

# What `gqa_decode` takes. A test holds these against its own limits.
DECODE_QUERIES: Final = 8
DECODE_HEADS: Final = 1024
DECODE_HEAD_DIMS: Final = (64, 128)
DECODE_DTYPES: Final = ("bfloat16", "float16")

# Where both kernels can serve. These three are assumptions: they are to be measured, and replaced by what is found.
FEW_QUERIES: Final = 8
"""Up to so many query tokens `gqa_decode` is taken to be faster."""
SHORT_KEYS: Final = 128
"""One tile of keys: there is nothing to divide among CTAs, ..."""
QUERIES_OF_SHORT_KEYS: Final = 1
"""... so with more query tokens than this prefill, which has a place for each in a tile, is taken to be faster."""


def decode_refusals(
    *, s_q: int, h_q: int, h_kv: int, d: int, dtype: str, packed: bool, differentiable: bool
) -> list[str]:
    """Reasons, in words, why `gqa_decode` cannot answer a call; empty where it can.

    Args:
        s_q: query tokens of each sequence.
        h_q: query heads.
        h_kv: heads of keys and values.
        d: head dimension.
        dtype: of q, k and v, without "torch.".
        packed: whether sequences are packed by cu_seqlens.
        differentiable: whether gradients will be asked for.
    """
    reasons = []
    if differentiable:
        reasons.append("gradients are wanted; decoding has none")
    if packed:
        reasons.append("sequences are packed; decoding has a dimension for the batch")
    if not 1 <= s_q <= DECODE_QUERIES:
        reasons.append(f"{s_q} query tokens; decoding takes 1 to {DECODE_QUERIES}")
    if d not in DECODE_HEAD_DIMS:
        reasons.append(f"d is {d}; it is {' or '.join(map(str, DECODE_HEAD_DIMS))}")
    if dtype not in DECODE_DTYPES:
        reasons.append(f"the dtype is {dtype}; it is {' or '.join(DECODE_DTYPES)}")
    if not 1 <= h_q <= DECODE_HEADS or h_kv < 1 or h_q % h_kv:
        reasons.append(f"{h_q} heads over {h_kv}; it is a multiple, at most {DECODE_HEADS}")
    return reasons


def route(
    *,
    s_q: int,
    s_k: int,
    h_q: int,
    h_kv: int,
    d: int,
    dtype: str,
    window: int | None = None,
    packed: bool = False,
    differentiable: bool = False,
) -> Route:
    """The kernel for one call.

    Args:
        s_q: query tokens of each sequence.
        s_k: key tokens of each sequence.
        h_q: query heads.
        h_kv: heads of keys and values.
        d: head dimension.
        dtype: of q, k and v, without "torch.".
        window: of the call: keys outside of every window are not read, so they do not count.
        packed: whether sequences are packed by cu_seqlens; their lengths are on the device and not known here.
        differentiable: whether gradients will be asked for.
    """
    if decode_refusals(
        s_q=s_q, h_q=h_q, h_kv=h_kv, d=d, dtype=dtype, packed=packed, differentiable=differentiable
    ):  # fmt: skip
        return "prefill"
    read = s_k if window is None else min(s_k, window + s_q - 1)
    if s_q > FEW_QUERIES or (read <= SHORT_KEYS and s_q > QUERIES_OF_SHORT_KEYS):
        return "prefill"
    return "decode"
