"""`merge_with_peers` exchanges states with the GPUs of a group and merges them, in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_kernels.merge.op import DTYPES
from cute_kernels.merge.peers_spec import CTAS, FLAG_BYTES, MAX_RANKS, PeerMergeSpec
from cute_kernels.merge.spec import VECTOR_BYTES
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import require
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import PreparedLaunches, do_nothing

NUM_COUNTS = CTAS
_MAX_DIMS = 4  # dimensions of out: batch, s, heads, d
_prepared: PreparedLaunches[tuple[Any, ...], Callable[..., None]] = PreparedLaunches()


class PeerMemory(NamedTuple):
    """Memory that the ranks of a group share, as one rank sees it.

    rank        number of this rank
    peers       (ranks,) int64: addresses of all ranks' buffers, `buffer_bytes` long; flags are 0 at first
    counts      (NUM_COUNTS,) int32: launches so far, in memory of this GPU; 0 at first
    report      address of an int32 in pinned memory: 0, or 1 + the rank that did not answer in time
    half_bytes  bytes of a buffer for one launch
    limit_ns    nanoseconds to wait for a peer
    """

    rank: int
    peers: torch.Tensor
    counts: torch.Tensor
    report: int
    half_bytes: int
    limit_ns: int


def buffer_bytes(half_bytes: int) -> int:
    """Returns the bytes of a rank's buffer: flags, and a half for odd launches and one for even ones."""
    return FLAG_BYTES + 2 * half_bytes


def needed_bytes(rows: int, d: int, dtype: torch.dtype, world_size: int) -> int:
    """Returns the bytes of half a buffer for a result of `rows` rows, rounded up to keep both halves aligned."""
    return -(-world_size * rows * (d * dtype.itemsize + VECTOR_BYTES) // 128) * 128


def unsupported(shape: tuple[int, ...], dtype: torch.dtype, world_size: int) -> str:
    """Returns in words why a result (..., heads, d) cannot be merged this way; empty if it can."""
    if len(shape) > _MAX_DIMS:
        return f"the result has {len(shape)} dimensions; {_MAX_DIMS} are the most"
    if world_size > MAX_RANKS:
        return f"there are {world_size} ranks; {MAX_RANKS} are the most"
    return "; ".join(_spec(shape[-1], dtype, None).can_implement())


def merge_with_peers(
    rows: torch.Tensor, memory: PeerMemory, s_aux: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Stores this rank's states to all ranks, waits for theirs, and merges them in the order of ranks.

    All ranks of the group call it with the same shapes, in the same order, and on one stream of each rank or on streams
    that wait for each other. Graphs may capture it.

    Args:
        rows: (..., all heads, row bytes) uint8, contiguous: d values, then the float32 log-sum-exp, padded to 16 bytes.
        memory: shared memory of the ranks, whose halves have `needed_bytes` or more.
        s_aux: (heads,) float32, or None.
        out: (..., heads, d): all heads, or part number `rank` if the ranks share the heads equally.
        lse: (..., heads) float32.

    Raises:
        ValueError: the GPU is not an SM90, or `unsupported` refuses the shapes, or they need larger halves.
    """
    key = (out.get_device(), out.shape, out.dtype, s_aux is None, memory.half_bytes, memory.peers.shape)
    kernel = _prepared.get(key) or _prepare(key, memory, s_aux, out)
    heads, all_heads = lse.shape[-1], rows.shape[-2]
    for _ in range(out.dim(), _MAX_DIMS):
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
    kernel(
        s_aux,
        out,
        lse,
        rows.data_ptr(),
        memory.peers.data_ptr(),
        memory.counts.data_ptr(),
        memory.report,
        memory.half_bytes,
        memory.limit_ns,
        memory.peers.shape[0],
        memory.rank,
        all_heads,
        heads if heads != all_heads else 0,
    )


def _prepare(
    key: tuple[Any, ...], memory: PeerMemory, s_aux: torch.Tensor | None, out: torch.Tensor
) -> Callable[..., None]:
    shape, d, world_size = tuple(out.shape), out.shape[-1], memory.peers.shape[0]
    reason = unsupported(shape, out.dtype, world_size)
    require(not reason, "out", reason, "a result that ranks can merge")
    require_sm90("out", out.device)
    rows = out.numel() // d
    if not rows:
        return do_nothing
    needed = needed_bytes(rows, d, out.dtype, world_size)
    require(needed <= memory.half_bytes, "memory", f"halves of {memory.half_bytes} bytes", f"{needed} bytes")
    return _prepared.keep(key, get_kernel(_spec(d, out.dtype, s_aux)), out.device)


def _spec(d: int, dtype: torch.dtype, s_aux: torch.Tensor | None) -> PeerMergeSpec:
    return PeerMergeSpec(d, DTYPES.get(dtype, str(dtype)), has_sink=s_aux is not None)
