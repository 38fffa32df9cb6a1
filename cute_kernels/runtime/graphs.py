"""The lifetime of a CUDA graph: memory that a launch under capture borrows returns when the graph is destroyed."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_SEMAPHORE_BYTES = 64  # sem_t has 32 on x86-64
_NO_DESTRUCTOR_SYNC = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, the only flag that exists
_MOVE = 1  # CU_GRAPH_USER_OBJECT_MOVE: the graph takes over the one reference


class GraphLife:
    """Tells whether a graph and every executable instance of it are destroyed and have finished.

    A CUDA user object then posts a semaphore. Its callback is `sem_post` of libc, so no Python runs in a thread of the
    driver, not even when a graph outlives the interpreter. For the same reason the semaphore is memory from malloc,
    freed only after it is posted.
    """

    def __init__(self, graph: int) -> None:
        """Ties this object to a graph under capture.

        Raises:
            OSError: the driver refused; the message has its error number.
        """
        libc, cuda = _libc(), _cuda()
        semaphore = libc.malloc(_SEMAPHORE_BYTES)
        if not semaphore or libc.sem_init(semaphore, 0, 0):
            raise OSError("no memory for a semaphore")
        user_object = ctypes.c_void_p()
        post = ctypes.cast(libc.sem_post, ctypes.c_void_p)
        _require(cuda.cuUserObjectCreate(ctypes.byref(user_object), semaphore, post, 1, _NO_DESTRUCTOR_SYNC))
        _require(cuda.cuGraphRetainUserObject(graph, user_object, 1, _MOVE))
        self._semaphore = semaphore

    def has_ended(self) -> bool:
        """Returns True once; this frees the semaphore, so the method must not be called again."""
        if _libc().sem_trywait(self._semaphore):
            return False
        _libc().free(self._semaphore)
        return True


def graph_under_capture(device: torch.device) -> tuple[int, int]:
    """Returns (number of the capture, unique in this process; handle of the graph) of the current stream.

    Raises:
        OSError: there is no driver, it refused, or no graph is under capture.
    """
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    _require(
        _cuda().cuStreamGetCaptureInfo_v2(
            stream, ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None
        )
    )
    if graph.value is None:
        raise OSError("no graph is captured")
    return number.value, graph.value


def _require(error: int) -> None:
    if error:
        raise OSError(f"CUDA driver error {error}")


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.restype = None
    libc.free.argtypes = libc.sem_trywait.argtypes = [ctypes.c_void_p]
    libc.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    return libc


@functools.cache
def _cuda() -> Any:
    """Returns the driver, with the argument types of the functions used here; version 12.0 has all of them."""
    cuda = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    cuda.cuStreamGetCaptureInfo_v2.argtypes = [pointer] * 6
    cuda.cuUserObjectCreate.argtypes = [pointer, pointer, pointer, number, number]
    cuda.cuGraphRetainUserObject.argtypes = [pointer, pointer, number, number]
    return cuda
