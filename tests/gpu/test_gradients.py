"""Operators without a backward refuse tensors that require gradients, by the checks of tests/cpu/test_gradients.py."""

from typing import Any

import pytest
import torch

from cute_kernels import sink_attention
from tests.kit import gradients, specs
from tests.kit.bad_input_gqa import sink_call

CANDIDATES = gradients.candidates("cpu")  # collection must work without a GPU
EVERY = pytest.mark.parametrize(("name", "argument"), CANDIDATES, ids=[", ".join(pair) for pair in CANDIDATES])


def kernel_specs() -> list[Any]:
    return specs.of_tables()


@EVERY
def test_refused_where_gradients_are_enabled(name, argument):
    gradients.require_refused(name, argument, "cuda")


@EVERY
def test_taken_where_they_are_not(name, argument):
    gradients.require_taken(name, argument, "cuda")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_loss_of_lse_alone_is_an_error_and_no_zero_gradient(backend):
    for attend in (sink_attention, torch.compile(sink_attention, fullgraph=True, backend=backend)):
        tensors = sink_call("cuda")
        tensors["q"].requires_grad_()
        out, lse = attend(**tensors, return_lse=True)
        assert out.requires_grad and not lse.requires_grad
        with pytest.raises(RuntimeError, match="does not require grad"):
            lse.sum().backward()
        out.float().sum().backward()
        assert tensors["q"].grad is not None
