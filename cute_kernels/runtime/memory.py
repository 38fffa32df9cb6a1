"""Memory that is kept between calls: allocated outside of every private pool, and never under graph capture.

torch can send the allocations of a thread to a private pool: `torch.cuda.use_mem_pool` does, and `torch.compile` with
mode "reduce-overhead" during warm-up. Such a pool belongs to somebody else: CUDA-graph trees fail when a tensor in it
outlives the call. The pool is a property of the thread, so this package allocates what it keeps in a new thread.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from cute_kernels.runtime.threads import in_new_thread

Made = TypeVar("Made")


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream is under graph capture; False on a CPU."""
    return device.type == "cuda" and is_gpu_capturing(device.index)


def is_gpu_capturing(index: int | None) -> bool:
    """Whether a GPU, by its index or the current one, is under capture: reading a device's type would take 0.3 us."""
    if index is None or torch._C._cuda_getDevice() == index:
        return torch._C._cuda_isCurrentStreamCapturing()
    with torch.cuda.device(index):
        return torch._C._cuda_isCurrentStreamCapturing()


def outside_pools(device: torch.device, make: Callable[[], Made]) -> Made:
    """Returns the result of `make`, whose tensors are allocated for the caller's stream, outside of every private pool.

    `make` runs in a new thread, so other settings of the caller's thread do not apply either: inference mode, a default
    device, dispatch modes.

    Args:
        device: the device of the tensors, with an index. Its current stream is not under graph capture.
        make: allocates tensors, and may fill them: later work on the caller's stream sees the values.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def run() -> Made:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return make()

    return in_new_thread(run)


def for_all_streams(device: torch.device, make: Callable[[], Made]) -> Made:
    """Returns the result of `make` like `outside_pools`, once it is filled: every stream may read it immediately."""
    made = outside_pools(device, make)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return made


def once_per_device(make: Callable[[torch.device], Made]) -> Callable[[torch.device], Made]:
    """Returns a function that calls `make` once per device, in whichever thread asks first, and keeps the result.

    `functools.cache` would let two threads make one each, and a graph may already use the result that is dropped.
    """
    made: dict[torch.device, Made] = {}
    making = threading.RLock()

    @functools.wraps(make)
    def get(device: torch.device) -> Made:
        if device not in made:
            with making:
                if device not in made:
                    made[device] = make(device)
        return made[device]

    return get


class Constants(NamedTuple):
    """Constants of a device that launches need: a number, and small tensors that replace absent arguments.

    num_sms     streaming multiprocessors
    no_sink     (1024,) float32, -inf: sink logits that change nothing
    no_length   (1,) int32, the largest: a length that hides no key
    """

    num_sms: int
    no_sink: torch.Tensor
    no_length: torch.Tensor


MAX_HEADS = 1024
"""Number of elements of `Constants.no_sink`."""


@once_per_device
def constants(device: torch.device) -> Constants:
    """Returns the constants of a CUDA device, made once and kept as long as the process: graphs hold their addresses.

    Raises:
        RuntimeError: the first call is under graph capture.
    """
    require_not_capturing(device)

    def make() -> Constants:
        return Constants(
            torch.cuda.get_device_properties(device).multi_processor_count,
            torch.full((MAX_HEADS,), -torch.inf, dtype=torch.float32, device=device),
            torch.full((1,), torch.iinfo(torch.int32).max, dtype=torch.int32, device=device),
        )

    return for_all_streams(device, make)


def template(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor of this shape on one element of memory (four bytes at most), for `empty_like` to copy.

    `torch.empty` takes 2.4 us with a dtype and a device, and longer if a program has set a default device; an
    addition takes 2.7 us on the same host.
    """
    return constants(device).no_sink[:1].view(dtype)[0].expand(shape)


def empty_like(known: torch.Tensor) -> torch.Tensor:
    """Returns a new contiguous tensor of the shape of another one, or of a template; 1.1 us."""
    return torch.empty_like(known, memory_format=torch.contiguous_format)


def require_not_capturing(device: torch.device) -> None:
    """Raises RuntimeError under graph capture, where memory that outlives the graph cannot be allocated."""
    if is_capturing(device):
        raise RuntimeError("call the op once, with these shapes, before it is captured into a CUDA graph")


class _Unread:
    """One buffer per device for results that nobody reads. It grows; smaller buffers from before are kept.

    A captured graph writes to its buffer at each replay, so none may ever be freed. Sizes double, so all together are
    less than twice the largest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[torch.device, list[torch.Tensor]] = {}

    def get(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        size = math.prod(shape)
        with self._lock:
            buffers = self._buffers.setdefault(device, [])
            if not buffers or buffers[-1].numel() < size:
                if is_capturing(device):
                    return torch.empty(shape, dtype=torch.float32, device=device)
                elements = 1 << max(16, (size - 1).bit_length())
                empty = functools.partial(torch.empty, elements, dtype=torch.float32, device=device)
                # every stream may write it and none reads it: no order between streams is needed
                buffers.append(outside_pools(device, empty))
            return buffers[-1][:size].view(shape)


_unread = _Unread()


def unread(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns a float32 tensor that kernels may write and nobody reads, kept as long as the process.

    Under graph capture, if the buffer is too small, it is a tensor of the graph instead.
    """
    return _unread.get(shape, device)
