"""Which kernel a call of `sink_attention` goes to."""

import inspect
from typing import Any

import pytest
import torch

from cute_kernels.gqa import checks as gqa_checks
from cute_kernels.gqa.spec import GqaDecodeSpec
from cute_kernels.sink import plan
from cute_kernels.sink.plan import route

ONE_TOKEN: dict[str, Any] = {"s_q": 1, "h_q": 64, "h_kv": 8, "d": 64, "dtype": "bfloat16"}


def test_few_tokens_are_decoded_and_many_prefilled():
    for s_q in (1, plan.FEW_QUERIES):
        assert route(**{**ONE_TOKEN, "s_q": s_q}) == "decode"
    for s_q in (plan.FEW_QUERIES + 1, 64, 4096):
        assert route(**{**ONE_TOKEN, "s_q": s_q}) == "prefill"


@pytest.mark.parametrize(
    "change",
    [
        {"differentiable": True},
        {"packed": True},
        {"s_q": 0},
        {"s_q": 9},
        {"d": 96},
        {"dtype": "float32"},
        {"dtype": "int8"},
        {"h_q": 12},
        {"h_q": 0},
        {"h_kv": 0},
        {"h_q": 2048},
    ],
    ids=str,
)
def test_what_decoding_cannot_do_is_prefilled(change):
    assert route(**{**ONE_TOKEN, **change}) == "prefill"


def test_limits_are_those_of_gqa_decode():
    assert plan.FEW_QUERIES <= gqa_checks.MAX_S_Q
    assert plan.DECODE_HEADS == gqa_checks.MAX_HEADS
    assert tuple(getattr(torch, name) for name in plan.DECODE_DTYPES) == gqa_checks.Q_DTYPES
    for d in plan.DECODE_HEAD_DIMS:
        for dtype in plan.DECODE_DTYPES:
            assert GqaDecodeSpec(dtype, dtype, d, 8, layout="tokens_first").can_implement() == []


def test_the_plan_needs_no_torch():
    assert "import torch" not in inspect.getsource(plan)
