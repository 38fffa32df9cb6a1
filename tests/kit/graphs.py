"""What a CUDA graph consists of."""

from collections.abc import Callable
from typing import Any

import torch


def nodes(graph: torch.cuda.CUDAGraph) -> list[Any]:
    """Types of the nodes of a graph that was made with `keep_graph`."""
    from cuda.bindings import runtime

    raw = runtime.cudaGraph_t(graph.raw_cuda_graph())
    _, _, count = runtime.cudaGraphGetNodes(raw)
    _, found, count = runtime.cudaGraphGetNodes(raw, count)
    return [runtime.cudaGraphNodeGetType(node)[1] for node in found[:count]]


def launches(call: Callable[[], Any]) -> int:
    """Number of kernels that a call launches after a first run. The call must have no other graph nodes."""
    from cuda.bindings import runtime

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    found = nodes(graph)
    assert set(found) <= {runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel}, found
    return len(found)


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a call that has run once, and what the call returned during capture."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results
