"""Bad input to `sink_attention` that tests/kit/bad_input_gqa.py lacks, and all of its tables with gradients.

With gradients a call reaches the checks in another way.
"""

from typing import Any

import pytest
import torch

from cute_kernels import sink_attention
from tests.kit.bad_input import ERROR, TABLES
from tests.kit.bad_input_gqa import H_Q, D, sink_call, sink_packed_call
from tests.kit.bad_tensors import numbers, zeros

NAMES = [name for name, table in TABLES.items() if table.function is sink_attention]
WRONG = [(name, label) for name in NAMES for label in TABLES[name].wrong("cpu")]


def want_gradients(arguments: dict[str, Any]) -> None:
    """Makes every tensor of a call that can have a gradient require one."""
    for t in (arguments.get(name) for name in ("q", "k", "v", "s_aux")):
        if isinstance(t, torch.Tensor) and t.is_floating_point() and t.is_leaf and t.itemsize > 1:
            t.requires_grad_()


def require_error(arguments: dict[str, Any], name: str) -> None:
    for gradients in (False, True):
        if gradients:
            want_gradients(arguments)
        with pytest.raises((TypeError, ValueError), match=ERROR.format(name)):
            sink_attention(**arguments)


@pytest.mark.parametrize(("name", "label"), WRONG, ids=[f"{name}: {label}" for name, label in WRONG])
def test_with_gradients_the_words_are_the_same(name, label):
    argument, arguments = TABLES[name].call(label, "cpu")
    want_gradients(arguments)
    with pytest.raises((TypeError, ValueError), match=ERROR.format(argument)) as error:
        sink_attention(**arguments)
    assert str(error.value) == str(TABLES[name].refusal(label, "cpu"))


@pytest.mark.parametrize("d", [0, 16, 32, 80, 96, 192, 256])
def test_head_dimensions(d):
    require_error(
        {
            **sink_call("cpu"),
            "q": zeros("cpu", 2, 3, 6, d),
            "k": zeros("cpu", 2, 5, 2, d),
            "v": zeros("cpu", 2, 5, 2, d),
        },
        "q",
    )


def test_more_tokens_than_32_bits_can_tell_apart():
    """The tensors are expanded, so that they take no memory."""
    long = zeros("cpu", 1, 1, 1, D).expand(1, 2**30, 1, D)
    one = zeros("cpu", 1, 1, 1, D)
    require_error({"q": long, "k": one, "v": one}, "q")
    require_error({"q": one, "k": long, "v": long}, "k")


def test_codes_are_sent_to_the_kernel_that_reads_them():
    codes = sink_call("cpu")["k"].to(torch.int8)
    with pytest.raises(TypeError, match=r"^k: got dtype torch.int8; needs torch.bfloat16.*no gradient.*gqa_decode"):
        sink_attention(sink_call("cpu")["q"].clone().requires_grad_(), codes, codes)


def test_lengths_that_change_are_looked_at_again():
    """Lengths are read once per change: a second call uses the same tensor, the third has it broken in place."""
    arguments = sink_packed_call("cpu")
    sink_attention(**arguments)
    sink_attention(**arguments)
    arguments["cu_seqlens_k"][1] = 8
    require_error(arguments, "cu_seqlens_k")
    arguments["cu_seqlens_k"][1] = 6
    sink_attention(**arguments)
    require_error({**arguments, "q": zeros("cpu", 6, H_Q, D)}, "cu_seqlens_q")


def test_lengths_are_looked_at_in_inference_mode():
    with torch.inference_mode():
        require_error({**sink_packed_call("cpu"), "cu_seqlens_q": numbers("cpu", 0, 4, 3, 7)}, "cu_seqlens_q")
        arguments = sink_packed_call("cpu")
        assert torch.equal(sink_attention(**arguments), sink_attention(**arguments))


def test_errors_of_compiled_calls_name_the_argument_too():
    compiled = torch.compile(sink_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=ERROR.removeprefix(r"(?s)^[\w, ]*").format("window")):
        compiled(**sink_call("cpu"), window=0)
    with pytest.raises(Exception, match=ERROR.removeprefix(r"(?s)^[\w, ]*").format("cu_seqlens_k")):
        compiled(**{**sink_packed_call("cpu"), "cu_seqlens_k": numbers("cpu", 0, 6, 5, 9)})
