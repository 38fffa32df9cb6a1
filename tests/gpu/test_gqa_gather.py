"""Pages of a quantized cache as 16-bit numbers: the kernel gives the bits of the CPU."""

import pytest
import torch

from cute_kernels.gqa.codes import ROTATED_KINDS
from cute_kernels.gqa.gather_op import gather_pages
from cute_kernels.gqa.layouts import HEAD_DIMS, ROTATED_DIMS
from tests.kit.gather_pages import KINDS, gather_cache
from tests.kit.graphs import capture

ODD_PAGES = [4, 0, 3, 3, 7, -2, 1]  # two of them name no page


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
@pytest.mark.parametrize(
    ("kind", "d"), [(kind, d) for kind in KINDS for d in (ROTATED_DIMS if kind in ROTATED_KINDS else HEAD_DIMS)]
)
def test_copies_are_those_of_a_cpu(kind: str, layout: str, d: int, dtype: torch.dtype) -> None:
    cache = gather_cache(kind, layout, d)
    pages = torch.tensor(ODD_PAGES, dtype=torch.int32, device="cpu")
    found = gather_pages(*cache.to("cuda"), pages.cuda(), dtype)
    for copies, exact in zip(found, gather_pages(*cache, pages, dtype), strict=True):
        assert torch.equal(copies.cpu(), exact)


def test_copies_in_a_graph() -> None:
    cache = gather_cache("int8", "interleaved", 128)
    on_gpu, pages = cache.to("cuda"), torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    graph, (k, v) = capture(lambda: gather_pages(*on_gpu, pages, torch.bfloat16))
    pages.copy_(torch.tensor([3, 2], dtype=torch.int32, device="cpu"))
    graph.replay()
    exact = gather_pages(*cache, torch.tensor([3, 2], dtype=torch.int32, device="cpu"), torch.bfloat16)
    assert torch.equal(k.cpu(), exact[0]) and torch.equal(v.cpu(), exact[1])


def test_no_page_is_no_launch() -> None:
    cache = gather_cache("fp8", "NHD", 64).to("cuda")
    k, v = gather_pages(*cache, torch.zeros(0, dtype=torch.int32, device="cuda"), torch.bfloat16)
    assert k.shape == v.shape == (0, 16, 3, 64)
