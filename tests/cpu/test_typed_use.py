"""What type checkers see of the public names. `make lint` checks these types; the test checks that they are true."""

import torch
from typing_extensions import assert_type

import cute_kernels
import cute_kernels.warm
from cute_kernels import gqa_decode, mla_fp8_decode, sink_attention
from cute_kernels.warm import MlaShape, WarmReport

Both = tuple[torch.Tensor, torch.Tensor]


def test_results_have_the_type_that_return_lse_says() -> None:
    q, k = torch.zeros(1, 1, 8, 64).bfloat16(), torch.zeros(1, 16, 8, 64).bfloat16()
    latent, cache = torch.zeros(1, 1, 8, 576).bfloat16(), torch.zeros(1, 16, 656, dtype=torch.uint8)
    indices = torch.zeros(1, 1, 3, dtype=torch.int32)
    one = assert_type(gqa_decode(q, k, k, layout="BSNH"), torch.Tensor)
    both = assert_type(gqa_decode(q, k, k, layout="BSNH", return_lse=True), Both)
    assert torch.equal(one, both[0])
    one = assert_type(mla_fp8_decode(latent, cache, indices=indices, return_lse=False), torch.Tensor)
    both = assert_type(mla_fp8_decode(latent, cache, indices=indices, return_lse=True), Both)
    assert torch.equal(one, both[0])
    one = assert_type(sink_attention(q, k, k), torch.Tensor)
    both = assert_type(sink_attention(q, k, k, return_lse=True), Both)
    assert torch.equal(one, both[0])
    for wanted in (False, True):
        either = assert_type(sink_attention(q, k, k, return_lse=wanted), torch.Tensor | Both)
        assert isinstance(either, tuple) == wanted


def test_a_module_that_is_called_has_its_names() -> None:
    shape = cute_kernels.warm.MlaShape(heads=128)
    assert_type(shape, MlaShape)
    specs = cute_kernels.warm.kernel_specs(shape, batch_sizes=(1,))
    assert specs

    def report() -> float:  # it would compile
        return assert_type(cute_kernels.warm(shape), WarmReport).seconds

    assert callable(report)
