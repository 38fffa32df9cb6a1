"""No gradient vanishes: operators without a backward refuse tensors that require gradients, eager and compiled."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_kernels import gqa_decode, merge_states, sink_attention
from tests.kit import gradients
from tests.kit.bad_input import TABLES
from tests.kit.bad_input_gqa import sink_call, sink_packed_call

CANDIDATES = gradients.candidates("cpu")
EVERY = pytest.mark.parametrize(("name", "argument"), CANDIDATES, ids=[", ".join(pair) for pair in CANDIDATES])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@EVERY
def test_refused_where_gradients_are_enabled(name: str, argument: str) -> None:
    gradients.require_refused(name, argument, "cpu")


@EVERY
def test_taken_where_they_are_not(name: str, argument: str) -> None:
    gradients.require_taken(name, argument, "cpu")


def test_every_operator_without_a_backward_is_looked_at() -> None:
    seen: dict[str, set[str]] = {}
    for name, argument in CANDIDATES:
        seen.setdefault(name.partition(",")[0], set()).add(argument)
    assert {"q", "s_aux", "out", "lse"} <= seen["mla_fp8_decode"]
    assert {"q", "k_scale", "v_scale", "alibi_slopes", "s_aux", "out", "lse"} <= seen["gqa_decode"]
    assert {"outs", "lses", "s_aux", "out", "lse"} <= seen["merge_states"]
    assert "kv" in seen["mla_fp8_append"]
    assert {"k", "v", "k_scale", "v_scale"} <= seen["kv_int8_append"]
    assert {"q", "attn_sink", "out"} <= seen["flash_mla_with_kvcache"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("argument", ["k_cache", "v_cache"])
def test_caches_of_floating_point_numbers_as_well(argument: str, dtype: torch.dtype) -> None:
    from tests.kit.bad_input_gqa import gqa_call

    call = gqa_call("cpu", dtype=dtype)
    call[argument].requires_grad_()
    with pytest.raises(ValueError, match=f"^{argument}: got a tensor that requires gradients; needs .*gqa_decode has"):
        gqa_decode(**call)


ONE_TABLE_EACH = list({TABLES[name].function: name for name in gradients.NAMES}.values())


@pytest.mark.parametrize(
    ("name", "fullgraph"),
    [*((name, True) for name in gradients.NAMES), *((name, False) for name in ONE_TABLE_EACH)],
)
def test_refused_where_a_graph_is_traced(name: str, fullgraph: bool) -> None:
    """The tensor is made by traced code. A gradient that is detached there would be detached in the graph."""
    argument = next(argument for table, argument in CANDIDATES if table == name)
    compiled = torch.compile(
        lambda **call: _with_parameter(name, argument, call), fullgraph=fullgraph, backend="aot_eager"
    )
    call, factor = TABLES[name].right("cpu"), torch.ones((), dtype=torch.float32, requires_grad=True)
    with pytest.raises(Exception) as error:
        compiled(**call, factor=factor)
    assert gradients.expected_words(name, argument) in str(error.value)
    with torch.no_grad():
        compiled(**call, factor=factor)


def _with_parameter(name: str, argument: str, call: dict[str, Any]) -> Any:
    factor = call["factor"]
    value = call[argument]
    others = {key: t for key, t in call.items() if key != "factor"}
    return TABLES[name].function(**others | {argument: (value * factor).to(value.dtype)})


def test_results_never_require_gradients() -> None:
    """Covers eager and compiled calls. merge_states on a CPU is plain torch, which autograd would record."""
    outs, lses = torch.randn(2, 3, 4, 64, requires_grad=True), torch.randn(2, 3, 4)
    compiled = torch.compile(merge_states, fullgraph=True, backend="aot_eager")
    for merge in (merge_states, compiled):
        with torch.no_grad():
            out, lse = merge(outs, lses)
        assert not out.requires_grad and not lse.requires_grad
        with pytest.raises(Exception, match="outs: got a tensor that requires gradients"):
            merge(outs, lses)


# ---- sink_attention has a backward, its log-sum-exp has none


def attention(compiles: bool) -> Any:
    return torch.compile(sink_attention, fullgraph=True, backend="aot_eager") if compiles else sink_attention


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("call", [sink_call, sink_packed_call])
def test_a_loss_of_lse_alone_is_an_error_and_no_zero_gradient(call: Any, compiles: bool) -> None:
    tensors = call("cpu")
    tensors["q"].requires_grad_()
    out, lse = attention(compiles)(**tensors, return_lse=True)
    assert out.requires_grad and not lse.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        lse.sum().backward()
    assert tensors["q"].grad is None


@pytest.mark.parametrize("compiles", [False, True])
def test_lse_is_a_constant_in_a_loss_of_both(compiles: bool) -> None:
    gradient = []
    for factor in (0.0, 1.0):
        tensors = sink_call("cpu")
        tensors["k"].normal_(generator=torch.Generator().manual_seed(0))
        tensors["v"].normal_(generator=torch.Generator().manual_seed(1))
        tensors["q"].requires_grad_()
        out, lse = attention(compiles)(**tensors, return_lse=True)
        (out.float().square().sum() + factor * lse.sum()).backward()
        gradient.append(tensors["q"].grad)
    assert gradient[0].abs().max() > 0
    assert torch.equal(*gradient)
