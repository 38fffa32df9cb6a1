"""FlashMLA's interface on the GPU: the decode kernel itself writes +inf for empty rows and orders lse."""

from typing import Any

import pytest
import torch

from cute_kernels import mla_fp8_decode
from cute_kernels.compat.flash_mla import flash_mla_with_kvcache
from tests.kit import empty_rows
from tests.kit.bits import require_same_bits
from tests.kit.empty_rows import CALLS, flash_mla_call, require_inf_of_empty_rows
from tests.kit.graphs import capture, launches


def kernel_specs() -> list[Any]:
    """Kernels that write +inf."""
    return empty_rows.kernel_specs()


@pytest.mark.parametrize("name", CALLS)
def test_empty_rows_have_inf_and_the_others_the_same_bits(name):
    require_inf_of_empty_rows(CALLS[name], "cuda")


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if not call.forced])
def test_the_interface_gives_flash_mlas_lse(name):
    case = CALLS[name].case("cuda")
    out, lse = flash_mla_with_kvcache(**flash_mla_call(case))
    expected, expected_lse = mla_fp8_decode(**case.arguments(), return_lse=True)
    require_same_bits(out, expected)
    assert lse.is_contiguous()
    require_same_bits(lse, torch.where(expected_lse == -torch.inf, torch.inf, expected_lse).transpose(1, 2))


@pytest.mark.parametrize("name", ["sparse, shares", "dense, shares", "v4 twice, shares"])
def test_torch_launches_nothing_around_the_kernel(name):
    case = CALLS[name].case("cuda")
    call = flash_mla_call(case)
    alone = launches(lambda: mla_fp8_decode(**case.arguments(), return_lse=True))
    assert launches(lambda: flash_mla_with_kvcache(**call)) == alone

    def with_inf() -> None:
        _, lse = flash_mla_with_kvcache(**call)
        lse.masked_fill_(lse == -torch.inf, torch.inf)

    assert launches(with_inf) == alone + 2, "what such a call had before is seen"


def test_a_graph_follows_lengths_from_empty_to_full_and_back():
    case: Any = CALLS["sparse, shares"].case("cuda")
    call = flash_mla_call(case)
    graph, (out, lse) = capture(lambda: flash_mla_with_kvcache(**call))
    lengths = case.topk_length.clone()
    for length in (torch.zeros_like(lengths), lengths, torch.zeros_like(lengths)):
        case.topk_length.copy_(length)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        expected, expected_lse = mla_fp8_decode(**case.arguments(), return_lse=True)
        require_same_bits(out, expected)
        require_same_bits(lse, torch.where(expected_lse == -torch.inf, torch.inf, expected_lse).transpose(1, 2))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["sparse, shares", "v4 twice, shares", "no index"])
def test_torch_compile_without_a_graph_break(name, backend):
    call = flash_mla_call(CALLS[name].case("cuda"))

    def attend(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flash_mla_with_kvcache(**{**call, "q": q * 1.0})
        return out * 2, lse + 1

    torch._dynamo.reset()
    expected = attend(call["q"])
    assert (expected[1] == torch.inf).any() and not (expected[1] == -torch.inf).any()
    got = torch.compile(attend, fullgraph=True, backend=backend)(call["q"])
    for one, want in zip(got, expected, strict=True):
        require_same_bits(one, want)
