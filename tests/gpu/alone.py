"""Tensors between unmapped memory, where any access outside a tensor is illegal.

Memory of torch's allocator would hide stray reads.
"""

from __future__ import annotations

from typing import Any

import torch


class _Memory:
    """Pages of the current device in a reserved range of addresses; the pages around them stay unmapped."""

    def __init__(self, size: int) -> None:
        from cuda.bindings import driver  # only tests on a GPU need it

        self.driver = driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = torch.cuda.current_device()
        smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        page = int(self._call(driver.cuMemGetAllocationGranularity, properties, smallest))
        self.size = -(-size // page) * page
        self.reserved = self.size + 2 * page
        self.base = int(self._call(driver.cuMemAddressReserve, self.reserved, 0, 0, 0))
        self.first = self.base + page
        self.pages = self._call(driver.cuMemCreate, self.size, properties, 0)
        self._call(driver.cuMemMap, self.first, self.size, 0, self.pages, 0)
        access = driver.CUmemAccessDesc()
        access.location = properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call(driver.cuMemSetAccess, self.first, self.size, [access], 1)

    def _call(self, function: Any, *arguments: Any) -> Any:
        error, *results = function(*arguments)
        if error != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function.__name__}: {error}")
        return results[0] if results else None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.first, False), "version": 3}

    def __del__(self) -> None:
        if not hasattr(self, "pages"):
            return
        self.driver.cuCtxSynchronize()  # a kernel may still be reading them
        self.driver.cuMemUnmap(self.first, self.size)
        self.driver.cuMemRelease(self.pages)
        self.driver.cuMemAddressFree(self.base, self.reserved)


def alone(t: torch.Tensor, *, last: bool) -> torch.Tensor:
    """A copy of a tensor, with its strides, in memory that begins with its first element or ends with its last.

    Args:
        t: a tensor on the current CUDA device. Without elements it is returned itself.
        last: whether memory ends with the tensor; otherwise memory begins with it.
    """
    if not t.numel():
        return t
    elements = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    size = elements * t.element_size()
    memory = torch.as_tensor(_Memory(size), device=t.device)
    memory = memory[memory.numel() - size :] if last else memory[:size]
    copy = memory.view(t.dtype).as_strided(t.shape, t.stride(), memory.storage_offset() // t.element_size())
    return copy.copy_(t)
