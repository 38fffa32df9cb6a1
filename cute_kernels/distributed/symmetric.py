"""The memory that ranks share, over torch's symmetric memory: all ranks allocate it together, before any capture."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import math
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from cute_kernels.distributed.exchange import Member, Rows, Target
from cute_kernels.merge.peers_op import (
    NUM_COUNTS,
    PeerMemory,
    buffer_bytes,
    merge_with_peers,
    needed_bytes,
    unsupported,
)
from cute_kernels.runtime.checks import require
from cute_kernels.runtime.memory import for_all_streams, is_capturing

HALF_BYTES = 32 << 20
"""Bytes of half a buffer, unless one call needs more; larger sizes are powers of two as well. It holds 4032 rows of 512
bfloat16 from each of 8 ranks, or 31 query tokens of 128 heads. Larger calls are bound by the link, where a collective
is as fast."""
_DEFAULT_TIMEOUT = datetime.timedelta(minutes=10)
COMBINE = (None, "collective", "symmetric")


class _Order:
    """Orders eager launches of a rank over one buffer one after the other, on whatever streams they are.

    Two at a time would count as one. Graphs order the launches that they captured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._last: tuple[int, int] | None = None
        self._launched: torch.cuda.Event | None = None  # after the last launch; its stream may be gone by now

    @contextlib.contextmanager
    def next(self) -> Iterator[None]:
        """Orders a launch on the current stream: makes it wait for the last launch, if that was on another stream."""
        if is_capturing(self._device):
            yield
            return
        # the default stream of each thread has the same handle
        stream = torch._C._cuda_getCurrentRawStream(self._device.index), threading.get_ident()
        with self._lock:  # held during the launch too: another thread's launch comes before the wait or after the event
            current = torch.cuda.current_stream(self._device)
            if self._launched is None:
                self._launched = torch.cuda.Event()
            elif self._last != stream:
                current.wait_event(self._launched)
            yield
            self._launched.record(current)
            self._last = stream


class _Buffer:
    """This rank's buffer, and how the kernel reaches the buffers of all ranks."""

    def __init__(self, member: Member, device: torch.device, half_bytes: int) -> None:
        """Allocates the buffer; it can be used after `meet`.

        Raises:
            Exception: torch's error if it has no such memory.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        size = buffer_bytes(half_bytes)

        def make() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            # filled before the rendezvous: no rank stores a flag before all have passed it
            return (
                symmetric_memory.empty(size, dtype=torch.uint8, device=device).zero_(),
                torch.zeros(NUM_COUNTS, dtype=torch.int32, device=device),
                torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True),
            )

        self._own, self._counts, self._pinned = for_all_streams(device, make)
        self._half_bytes, self._device = half_bytes, device
        self.order = _Order(device)

    def meet(self, member: Member) -> None:
        """Finds the other ranks' buffers; all ranks of the group call it at the same time, once all have allocated.

        Raises:
            Exception: torch's error if ranks do not reach each other's memory.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        group, device, size = _group_of(member), self._device, buffer_bytes(self._half_bytes)
        self._handle = symmetric_memory.rendezvous(self._own, group)
        remote = [self._handle.get_remote_tensor(r, (size,), torch.uint8) for r in range(member.world_size)]
        addresses = [tensor.data_ptr() for tensor in remote]
        if addresses[member.rank] != self._own.data_ptr():
            raise AssertionError("torch maps this rank's own buffer to another address")
        peers = for_all_streams(device, lambda: torch.tensor(addresses, dtype=torch.int64, device=device))
        self._member = member._replace(group=None)  # this member must not keep its group alive
        self._limit = _timeout(group, device)
        self._report = ctypes.c_int32.from_address(self._pinned.data_ptr())
        limit_ns = int(self._limit.total_seconds() * 1e9)
        self.memory = PeerMemory(member.rank, peers, self._counts, self._pinned.data_ptr(), self._half_bytes, limit_ns)
        _buffers.add(self)

    def failure(self) -> str:
        """Returns in words which rank did not answer in time; empty if none."""
        waited_for, member = self._report.value - 1, self._member
        if waited_for < 0:
            return ""
        return (
            f"rank {member.rank} of {member.world_size} waited for rank {waited_for} in vain; that one has failed, or "
            f"has not made the same call within the group's timeout of {self._limit.total_seconds():g} s. The wait "
            f"ended in a trap: CUDA reports an error of the launch, and this process cannot use the GPU any more"
        )


class _Shared:
    """The buffers of a group on a device. `reason`: in words, why its ranks share no more memory."""

    def __init__(self) -> None:
        self.buffers: list[_Buffer] = []  # all are kept: graphs hold their addresses
        self.reason = ""
        self.making = threading.RLock()  # held while ranks wait for each other, so each group has one

    def largest(self) -> int:
        """Returns the bytes of half the last buffer."""
        return self.buffers[-1].memory.half_bytes if self.buffers else 0


_buffers: weakref.WeakSet[_Buffer] = weakref.WeakSet()
_shared: weakref.WeakKeyDictionary[Any, dict[torch.device, _Shared]] = weakref.WeakKeyDictionary()
_making = threading.RLock()


def peer_buffer(how: str | None, member: Member, rows: Rows, target: Target) -> _Buffer | None:
    """Returns the buffer that a call is combined over; None for a collective.

    The first call of a group makes it, and so does a call that asks for "symmetric" memory and needs more: ranks then
    wait for each other on the host. Under graph capture nothing is made.

    Raises:
        ValueError: how is "symmetric", and tensors or shapes do not allow it.
        RuntimeError: how is "symmetric", and ranks cannot share memory, or the call is under graph capture and its
            buffer does not exist yet.
    """
    device = rows.bytes.device
    forced = how == "symmetric"
    if how == "collective" or not (forced or (device.type == "cuda" and member.world_size > 1)):
        return None
    heads = rows.lse.shape[-1] if target.heads == "gather" else rows.lse.shape[-1] // member.world_size
    shape = (*rows.lse.shape[:-1], heads, rows.out.shape[-1])
    if forced:
        require(device.type == "cuda", "combine", f"'symmetric' for tensors on {device}", "CUDA tensors")
    reason = unsupported(shape, rows.out.dtype, member.world_size)
    if reason:
        require(not forced, "combine", "'symmetric'", f"'collective', since {reason}")
        return None
    needed = needed_bytes(math.prod(shape[:-1]), shape[-1], rows.out.dtype, member.world_size)
    if not needed:
        return None  # no row: nothing is exchanged
    shared = _shared_of(member, device)
    if shared.largest() < needed and not shared.reason and (forced or needed <= HALF_BYTES):
        if is_capturing(device):
            if forced:
                raise RuntimeError(
                    f"combine: got 'symmetric' under graph capture with buffers of {shared.largest()} bytes; needs "
                    f"{needed} bytes, made by one call with these shapes on every rank before the capture"
                )
            return None
        # Sizes are powers of two: all buffers kept for graphs together are less than twice the largest.
        _make(shared, member, device, max(1 << (needed - 1).bit_length(), HALF_BYTES))
    if shared.largest() >= needed:
        return shared.buffers[-1]
    if shared.reason and forced:
        share = f"no more than {shared.largest()} bytes" if shared.buffers else "no memory"
        raise RuntimeError(
            f"combine: got 'symmetric', which needs {needed} bytes, but ranks share {share}: {shared.reason}"
        )
    return None


def raise_if_failed(member: Member) -> None:
    """Raises RuntimeError if an earlier launch over the group's buffers gave up waiting: the GPU is lost then."""
    if not _buffers:
        return
    for shared in _shared.get(_group_of(member), {}).values():
        for buffer in shared.buffers:
            if failure := buffer.failure():
                raise RuntimeError(f"context_parallel_decode: {failure}")


def combine_with_peers(rows: Rows, buffer: _Buffer, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what `exchange.combine` does, in one launch."""
    *leading, heads = rows.lse.shape
    if target.heads == "scatter":
        heads //= buffer.memory.peers.shape[0]
    out, lse = target.out, target.lse
    if out is None:
        out = rows.out.new_empty((*leading, heads, rows.out.shape[-1]))
    if lse is None:
        lse = rows.lse.new_empty((*leading, heads))
    with buffer.order.next():
        merge_with_peers(rows.bytes, buffer.memory, target.s_aux, out, lse)
    return out, lse


def _shared_of(member: Member, device: torch.device) -> _Shared:
    group = _group_of(member)
    by_device = _shared.get(group)
    if by_device is None or device not in by_device:
        with _making:
            by_device = _shared.setdefault(group, {})
            by_device.setdefault(device, _Shared())
    return by_device[device]


def _make(shared: _Shared, member: Member, device: torch.device, half_bytes: int) -> None:
    """Adds a buffer, or the reason why there is none, on all ranks alike: they call this at the same time.

    After each step that may fail on a single rank, all ranks agree: none enters the next step without the others.
    """
    with shared.making, torch.cuda.device(device):
        if shared.reason or shared.largest() >= half_bytes:
            return  # another thread has made it meanwhile
        made: list[_Buffer] = []
        steps: tuple[Callable[[], str | None], ...] = (
            lambda: _obstacle(member, device),
            lambda: made.append(_Buffer(member, device, half_bytes)),
            lambda: made[0].meet(member),
        )
        for step in steps:
            try:
                reason = step() or ""
            except Exception as error:  # torch raises errors of many kinds
                reason = f"{type(error).__name__}: {error}"
            if reason := _agree(member, reason):
                shared.reason = reason
                return
        shared.buffers += made


def _agree(member: Member, reason: str) -> str:
    """Returns the first rank's reason that is not empty."""
    reasons = _gathered(member, reason)
    return next((f"rank {rank}: {own}" for rank, own in enumerate(reasons) if own), "")


def _obstacle(member: Member, device: torch.device) -> str:
    """Returns an obstacle that is known without a try: ranks on several hosts, or GPUs without access to each other."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    ranks = _gathered(member, (socket.gethostname(), uuid))
    hosts = sorted({host for host, _ in ranks})
    if len(hosts) > 1:
        return f"they are on several hosts, {', '.join(hosts)}"
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for rank, (_, uuid) in enumerate(ranks):
        peer = visible.get(uuid, device.index)
        if peer != device.index and not torch.cuda.can_device_access_peer(device.index, peer):
            return f"GPU {device.index} has no access to GPU {peer} of rank {rank}"
    return ""


def _gathered(member: Member, mine: Any) -> list[Any]:
    theirs: list[Any] = [None] * member.world_size
    dist.all_gather_object(theirs, mine, group=member.group)
    return theirs


def _group_of(member: Member) -> Any:
    return member.group if member.group is not None else dist.group.WORLD


def _timeout(group: Any, device: torch.device) -> datetime.timedelta:
    """Returns how long ranks of a group wait for each other; NCCL's default if the backend does not say."""
    try:
        found = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT
    return found if isinstance(found, datetime.timedelta) and found else _DEFAULT_TIMEOUT


@atexit.register
def _explain() -> None:
    """Warns about the failed launch: CUDA's own message does not mention ranks, and usually ends the program."""
    for buffer in list(_buffers):
        if failure := buffer.failure():
            print(f"context_parallel_decode: {failure}", file=sys.stderr)
