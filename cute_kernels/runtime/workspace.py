"""Scratch memory of launches: float32 values for partials, and counters that are 0 between launches.

- An eager launch uses the workspace of its thread and stream, since an allocation takes as long as a launch. Launches
  on one stream run one after another, so they can share values. Each thread has its own workspaces: a thread that grows
  one must not free memory that another thread is about to launch with.
- A launch under graph capture gets values from the graph's pool and counters of its own, since several graphs may be
  replayed at the same time, on any streams.

A workspace is freed with its thread, or after the thread has used `STREAMS` other streams. Its memory belongs to the
stream that it was made for, so freed memory is used again only after earlier launches on that stream.

A stream is known by its handle, which the driver may give to a later stream once this one is destroyed: the two then
share a workspace. torch destroys none of its streams. Whoever makes one otherwise (`torch.cuda.ExternalStream`) waits
for its work before destroying it. Asking the driver for a stream's unique number would take a call in every launch.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from cute_kernels.runtime.counters import CounterSlab, slab
from cute_kernels.runtime.memory import is_gpu_capturing, outside_pools

STEP = 1 << 24  # float32 values, 64 MiB
STREAMS = 32
"""Workspaces that a thread keeps per device, as many as torch has streams of one priority."""


class Need(NamedTuple):
    """The workspace that a prepared launch needs; made by `reserve`."""

    device: torch.device
    size: int  # float32 values
    num_counters: int
    counters: CounterSlab


class Workspace(NamedTuple):
    """Memory of one thread and stream."""

    values: torch.Tensor  # float32
    counters: torch.Tensor  # int32
    size: int  # len(values), because asking the tensor takes 1 us
    num_counters: int
    addresses: tuple[int, int]  # addresses of values and counters


class _ThreadWorkspaces(threading.local):
    """The workspaces of this thread, by device and stream; they are freed when the thread ends."""

    def __init__(self) -> None:
        self.workspaces: dict[tuple[int | None, int], Workspace] = {}


_this_thread = _ThreadWorkspaces()


def reserve(device: torch.device, size: int, num_counters: int) -> Need:
    """Describes the workspace of a launch, and fills counters for later graphs: under capture they cannot be filled.

    Args:
        device: the device of the launch, with an index.
        size: float32 values.
        num_counters: int32 counters; 0 if the launch uses none.
    """
    counters = slab(device)
    if num_counters:
        counters.refill(num_counters)
    return Need(device, size, num_counters, counters)


def addresses(need: Need) -> tuple[int, int]:
    """Returns addresses of float32 values and of zeroed counters for one launch; (0, 0) if it needs neither.

    A launch leaves its counters at 0.
    """
    if not (need.size or need.num_counters):
        return 0, 0
    index = need.device.index
    stream = torch._C._cuda_getCurrentRawStream(index)  # torch.cuda.current_stream() takes 5 us
    if stream and is_gpu_capturing(index):  # the default stream is 0 and never under capture
        return _graph_addresses(need)
    key = (index, stream)
    workspace = _this_thread.workspaces.get(key)
    if (
        workspace is None
        or workspace.size < need.size
        or workspace.num_counters < need.num_counters
        or need.counters.is_low
    ):
        workspace = _grow(need, key)
    return workspace.addresses


def kept() -> list[Workspace]:
    """Returns the workspaces of this thread, the oldest first."""
    return list(_this_thread.workspaces.values())


def _graph_addresses(need: Need) -> tuple[int, int]:
    values = torch.empty(need.size, dtype=torch.float32, device=need.device)  # from the graph's pool
    if not need.num_counters:
        return values.data_ptr(), 0
    counters = need.counters.borrow(need.num_counters)
    if counters is None:  # more launches than the slab has counters for: this one records a memset
        zeros = torch.zeros(need.num_counters, dtype=torch.int32, device=need.device)
        return values.data_ptr(), zeros.data_ptr()
    return values.data_ptr(), counters


def _rounded(n: int) -> int:
    """Rounds up to a power of two, so that growth is rare; large sizes to whole steps, else up to half is unused."""
    return -(-n // STEP) * STEP if n > STEP else 1 << max(0, n - 1).bit_length()


def _grow(need: Need, key: tuple[int | None, int]) -> Workspace:
    """Replaces the workspace by one that is large enough, and refills the counters of graphs."""
    if need.counters.is_low:
        need.counters.refill()
    workspaces = _this_thread.workspaces
    old = workspaces.get(key)
    sizes = (need.size, need.num_counters)
    if old is not None:
        sizes = max(sizes[0], old.size), max(sizes[1], old.num_counters)
        if sizes == (old.size, old.num_counters):
            return old
    size, num_counters = map(_rounded, sizes)
    device = need.device

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.empty(size, dtype=torch.float32, device=device)
        return values, torch.zeros(num_counters, dtype=torch.int32, device=device)

    values, counters = outside_pools(device, make)
    workspaces.pop(key, None)
    for oldest in [other for other in workspaces if other[0] == key[0]][: -(STREAMS - 1)]:
        del workspaces[oldest]
    pointers = (values.data_ptr(), counters.data_ptr())
    made = workspaces[key] = Workspace(values, counters, size, num_counters, pointers)
    return made
