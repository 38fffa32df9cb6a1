"""Counters that are 0 between launches, for launches under graph capture: each graph borrows its own counters.

Filling counters under capture would record a memset before each launch, and the launch could then not overlap with the
one before. So counters come from a slab that is filled outside of capture. Every launch leaves its counters at 0, and
they return to the slab when the graph is destroyed.
"""

from __future__ import annotations

import functools
import threading

import torch

from cute_kernels.runtime.graphs import GraphLife, graph_under_capture
from cute_kernels.runtime.memory import for_all_streams, is_capturing, once_per_device

LAUNCHES = 128
"""Launches of one kind that a graph has counters for: DeepSeek-V3.2 has 61 layers, Llama-3.1-405B 126."""
SLAB_COUNTERS = 1 << 18  # 1 MiB
_SMALLEST = 32  # counters, 128 bytes: no two launches share an L2 cache line
_ITEMSIZE = 4


class _Borrowed:
    """The blocks that one graph holds, for ever if `life` is None: the driver cannot report the graph's end."""

    def __init__(self, life: GraphLife | None) -> None:
        self.life = life
        self.blocks: list[tuple[int, int]] = []  # counters, address


class CounterSlab:
    """Counters of one device, in blocks of powers of two. A returned block is lent again for the same size."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_low = False
        """Whether `refill` has something to do. It is a plain attribute because eager calls read it."""
        self._lock = threading.Lock()
        self._slabs: list[torch.Tensor] = []  # kept alive: graphs hold addresses
        self._next = self._end = 0  # addresses of the unused rest of the last slab
        self._free: dict[int, list[int]] = {}
        self._graphs: dict[int, _Borrowed] = {}
        self._largest = _SMALLEST  # the largest block that was requested

    def refill(self, num_counters: int = 0) -> None:
        """Makes room for `LAUNCHES` blocks of `num_counters` or of the largest size so far; nothing under capture."""
        if is_capturing(self.device):
            return
        with self._lock:
            self._collect()
            self._largest = max(self._largest, _block_size(num_counters))
            if self._room() < LAUNCHES:
                self._retire()
                size = max(SLAB_COUNTERS, LAUNCHES * self._largest)
                zeros = functools.partial(torch.zeros, size, dtype=torch.int32, device=self.device)
                self._slabs.append(for_all_streams(self.device, zeros))
                self._next = self._slabs[-1].data_ptr()
                self._end = self._next + size * _ITEMSIZE
            self.is_low = False

    def borrow(self, num_counters: int) -> int | None:
        """Returns the address of counters for one launch of the graph under capture; None if none are left."""
        size = _block_size(num_counters)
        with self._lock:
            graph = self._graph()
            address = self._take(size)
            self._largest = max(self._largest, size)
            self.is_low = self._room() < LAUNCHES
            if address is not None:
                graph.blocks.append((size, address))
            return address

    def borrowed(self) -> int:
        """Returns the number of counters that living graphs hold."""
        with self._lock:
            self._collect()
            return sum(size for graph in self._graphs.values() for size, _ in graph.blocks)

    def _graph(self) -> _Borrowed:
        try:
            number, handle = graph_under_capture(self.device)
            if number not in self._graphs:
                self._collect()
                self._graphs[number] = _Borrowed(GraphLife(handle))
            return self._graphs[number]
        except (OSError, AttributeError):  # no driver of version 12: counters are lent for good
            return self._graphs.setdefault(-1, _Borrowed(None))

    def _take(self, size: int) -> int | None:
        if free := self._free.get(size):
            return free.pop()
        if self._left() < size:
            return None
        address = self._next
        self._next += size * _ITEMSIZE
        return address

    def _collect(self) -> None:
        """Takes back the blocks of graphs that have ended."""
        ended = [number for number, graph in self._graphs.items() if graph.life is not None and graph.life.has_ended()]
        for number in ended:
            for size, address in self._graphs.pop(number).blocks:
                self._free.setdefault(size, []).append(address)

    def _retire(self) -> None:
        """Splits the unused rest of a slab into free blocks."""
        while (left := self._left()) >= _SMALLEST:
            size = 1 << (left.bit_length() - 1)
            self._free.setdefault(size, []).append(self._next)
            self._next += size * _ITEMSIZE

    def _room(self) -> int:
        """Returns the number of free blocks of the largest size so far."""
        return self._left() // self._largest + len(self._free.get(self._largest, ()))

    def _left(self) -> int:
        """Returns the number of counters of the last slab that were never lent."""
        return (self._end - self._next) // _ITEMSIZE


def _block_size(num_counters: int) -> int:
    return max(_SMALLEST, 1 << max(0, num_counters - 1).bit_length())


@once_per_device
def slab(device: torch.device) -> CounterSlab:
    """Returns the slab of a device, which lives as long as the process."""
    return CounterSlab(device)
