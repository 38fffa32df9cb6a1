"""Which kernels answer a call of `sink_attention`, and the order of their work: pure Python, from shapes alone.

One query token leaves a query tile of the prefill kernel nearly empty, and one CTA would read all keys of a head.
`gqa_decode` splits the keys among all CTAs instead and merges their partials. With enough queries a query tile is full,
and prefill reads keys once for all of it.
"""

from __future__ import annotations

from typing import Final, Literal

Route = Literal["decode", "prefill"]

# The limits of `gqa_decode`. A test compares them with its own limits.
DECODE_HEADS: Final = 1024
DECODE_HEAD_DIMS: Final = (64, 128)
DECODE_DTYPES: Final = ("bfloat16", "float16")

# Where both kernels can serve, measured on an H200 (its record; d 64, 64 heads over 8, 1 and 32 sequences, 1, 2,
# 4 and 8 query tokens, 64 to 8192 keys): decoding takes 0.1 to 0.9 of the time of prefill in 54 of 56 cases. Two,
# one sequence with 4 and 8 tokens over 256 keys, take 7.9 and 8.0 us instead of 6.9.
FEW_QUERIES: Final = 8
"""Most query tokens with which decoding is faster, which are as many as `gqa_decode` takes."""


def route(
    *,
    s_q: int,
    h_q: int,
    h_kv: int,
    d: int,
    dtype: str,
    packed: bool = False,
    differentiable: bool = False,
) -> Route:
    """Chooses the kernel for one call: `gqa_decode`'s if it takes the call and is faster.

    Args:
        s_q: query tokens of each sequence.
        h_q: query heads.
        h_kv: heads of keys and values.
        d: head dimension.
        dtype: dtype of q, k and v, without "torch.".
        packed: whether sequences are packed by cu_seqlens; their lengths are on the device and not known here.
        differentiable: whether gradients will be asked for.
    """
    has_kernel = d in DECODE_HEAD_DIMS and dtype in DECODE_DTYPES and not (packed or differentiable)
    shares_heads = 1 <= h_q <= DECODE_HEADS and h_kv >= 1 and h_q % h_kv == 0
    return "decode" if has_kernel and shares_heads and 1 <= s_q <= FEW_QUERIES else "prefill"


# ---- the order of work, by times of one H200 for 65,536 causal bfloat16 tokens

LONG_KEYS: Final = 8192
"""Lies between the measured lengths 4096 and 16384, between which the fastest order changes."""
PAIRS_TOGETHER: Final = 16
PAIRS_OF_LONG_KEYS: Final = {64: 16, 128: 4}
"""Most pairs of sequence and KV head that the backward works on together with long keys, by head dimension."""


def forward_section(*, batch: int, s_k: int, h_q: int, h_kv: int, d: int, window: int | None) -> int:
    """Returns the pairs of a sequence and a query head that CTAs of query-stationary kernels work on together.

    Fewer pairs find their keys in the 50 MB of L2; more give every CTA a long block before the short ones come.
    TFLOP/s, with all pairs at a time / those of one sequence / those of one KV head:

        64 and 8 heads of 64     s_k 16384                 499 / 508 / 508
                                 s_k 4096                  432 / 453 / 450
                                 s_k 16384, window 128     625 us / 626 us / 626 us
        32 and 8 heads of 128    s_k 16384                 596 / 632 / 656
                                 s_k 4096                  649 / 518 / 574
                                 s_k 16384, window 4096    596 / 620 / 601

    Args:
        batch: number of sequences.
        s_k: keys of each sequence.
        h_q: query heads.
        h_kv: heads of keys and values.
        d: head dimension.
        window: the call's window, if it hides a key.

    Returns:
        A divisor of batch x h_q.
    """
    if window is not None:
        return h_q
    if d == 128 and s_k < LONG_KEYS:
        return batch * h_q
    return h_q // h_kv


def backward_section(*, batch: int, s_k: int, h_kv: int, d: int, window: int | None) -> int:
    """Returns the pairs of a sequence and a KV head that CTAs of the key-stationary kernel work on together.

    One pair at a time reads its queries from L2, but then all CTAs add to the same sums of dq. Milliseconds with 128
    pairs at a time / 32 / 16 / 8 / 1 (16384 keys have 32 pairs), by blocks of 128 keys and no pairs of CTAs:

        64 and 8 heads of 64     s_k 16384                    -  / 54.3 / 52.5 / 49.6 /  -
                                 s_k 16384, separate             -  / 32.6 / 32.4 / 32.3 /  -
                                 s_k 16384, window 128        -  / 1.04 /  -   / 1.01 / 0.98
                                 s_k 4096                   15.8 / 13.3 / 12.6 / 13.1 / 13.3
                                 s_k 4096, separate            8.95 / 8.40 / 8.26 / 8.41 / 8.66
        32 and 8 heads of 128    s_k 16384                    -  / 45.1 / 44.3 / 44.2 /  -
                                 s_k 4096                   15.1 / 11.7 / 11.6 / 11.9 / 12.2

    By blocks of 256 keys, d 64 takes 52.4 / 45.5 / 45.7 / 46.9 ms with 32 / 16 / 8 / 4 of 16384 keys; by pairs of CTAs,
    d 128 takes 45.0 / 41.9 / 40.7 / 39.7.

    With a window of 4096, 32 and 8 heads of 128 reach 420 TFLOP/s with all pairs at a time, and 473 with one.

    Arguments are as in `forward_section`.

    Returns:
        A divisor of batch x h_kv.
    """
    if window is not None:
        return 1
    most = PAIRS_TOGETHER if s_k < LONG_KEYS else PAIRS_OF_LONG_KEYS[d]
    return max(n for n in range(1, most + 1) if batch * h_kv % n == 0)
