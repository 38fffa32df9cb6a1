"""Scratch memory of launches: float32 values for partial results, and counters that are 0 between launches."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

GRAPHS = 16  # captures of one call that find counters which are 0; later ones record a memset


class Need(NamedTuple):
    """What the launches of one prepared call need; made by `reserve`."""

    device: torch.device
    size: int  # float32 values
    num_counters: int
    unused_counters: list[torch.Tensor]  # for graphs under capture


class _Workspace(NamedTuple):
    size: int
    num_counters: int
    addresses: tuple[int, int]
    tensors: tuple[torch.Tensor, torch.Tensor]  # values and counters, kept alive


_workspaces: dict[tuple[int, int, int], _Workspace] = {}  # by device, stream and thread
_counters_of_graphs: list[torch.Tensor] = []  # a graph names them by address


def reserve(device: torch.device, size: int, num_counters: int, graphs: int = GRAPHS) -> Need:
    """Says what a call will need, and makes the counters of graphs to come: one may not be filled under capture.

    Args:
        device: of the call.
        size: float32 values.
        num_counters: int32 counters; 0 where a launch leaves them alone.
        graphs: captures for which there are counters.
    """
    unused = list(torch.zeros((graphs, num_counters), dtype=torch.int32, device=device)) if num_counters else []
    return Need(device, size, num_counters, unused)


def addresses(need: Need) -> tuple[int, int]:
    """Addresses of room for the partial results of one launch, and of counters that are 0; (0, 0) where it needs none.

    Allocating takes as long as a launch, so every stream and thread has one workspace: a launch there writes it after
    all launches before have read it. A graph under capture gets memory of its own, since it may be replayed on any
    stream. A launch leaves its counters at 0.
    """
    if not (need.size or need.num_counters):
        return 0, 0
    if torch._C._cuda_isCurrentStreamCapturing():
        values = torch.empty(need.size, device=need.device)  # of the graph's pool
        if need.unused_counters:
            counters = need.unused_counters.pop()
            _counters_of_graphs.append(counters)
        else:
            counters = torch.zeros(need.num_counters, dtype=torch.int32, device=need.device)
        return values.data_ptr(), counters.data_ptr()
    # torch.cuda.current_stream() takes 5 us
    index = need.device.index
    key = (index, torch._C._cuda_getCurrentRawStream(index), threading.get_ident())
    workspace = _workspaces.get(key)
    if workspace is None or workspace.size < need.size or workspace.num_counters < need.num_counters:
        # powers of two: it seldom grows
        size, num_counters = (1 << (n - 1).bit_length() for n in (need.size, need.num_counters))
        if workspace is not None:
            size, num_counters = max(size, workspace.size), max(num_counters, workspace.num_counters)
        values = torch.empty(size, device=need.device)
        counters = torch.zeros(num_counters, dtype=torch.int32, device=need.device)
        workspace = _Workspace(size, num_counters, (values.data_ptr(), counters.data_ptr()), (values, counters))
        _workspaces[key] = workspace
    return workspace.addresses
