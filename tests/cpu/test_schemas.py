"""Operators write exactly what their schemas mark as written: otherwise torch.compile drops or reorders a call."""

from typing import Any

import pytest
import torch

from tests.kit.bad_input import TABLES

OPERATORS = {
    "mla_fp8_decode": (("mla_fp8_decode, sparse", "mla_fp8_decode, two caches"), ["out", "lse"]),
    "gqa_decode": (("gqa_decode", "gqa_decode, paged", "gqa_decode, blocks"), ["out", "lse"]),
    "merge_states": (("merge_states",), ["out", "lse"]),
    "mla_fp8_append": (("mla_fp8_append", "mla_fp8_append, planar pages"), ["kv_cache"]),
    "kv_int8_append": (("kv_int8_append",), ["k_cache", "v_cache", "k_scale", "v_scale"]),
    "kv_append": (("kv_append",), ["k_cache", "v_cache", "k_scale", "v_scale"]),
    "index_append": (("index_append",), ["k_cache"]),
    "index_decode": (("index_decode",), ["out", "logits"]),
    "index_topk": (("index_topk",), ["out"]),
    "sink_attention": (("sink_attention", "sink_attention, packed"), []),
    "sink_attention_backward": (("sink_attention_backward",), []),
}
DEFAULTS = {
    "causal": True, "layout": "BNSH", "deterministic": False, "differentiable": False, "inf_if_empty": False,
    "index_block": 128,
}  # fmt: skip
CASES = [(name, table) for name, (tables, _) in OPERATORS.items() for table in tables]


def operator(name: str) -> Any:
    assert TABLES  # it has imported the modules that register them
    return getattr(torch.ops.cute_kernels, name).default


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_written_has_a_mark(name: str) -> None:
    marked = [argument for argument in operator(name)._schema.arguments if argument.alias_info is not None]
    assert [argument.name for argument in marked] == OPERATORS[name][1]
    assert all(argument.alias_info.is_write for argument in marked)
    names = [next(iter(argument.alias_info.before_set)) for argument in marked]
    assert len(set(names)) == len(names), "no two may be the same memory"


@pytest.mark.parametrize("name", OPERATORS)
def test_registered_for_both_devices(name: str) -> None:
    keys = ("CPU", "CUDA")
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(f"cute_kernels::{name}", key) for key in keys)


@pytest.mark.parametrize(("name", "table"), CASES)
def test_nothing_without_a_mark_is_written(name: str, table: str) -> None:
    """Outputs hold NaN or 7 before the call, so that a write to an output without a mark shows."""
    call = TABLES[table].right("cpu")
    names = [argument.name for argument in operator(name)._schema.arguments]
    arguments = [call.get(name, DEFAULTS.get(name)) for name in names]
    written = OPERATORS[name][1]
    before = {key: call[key].clone() for key in written}
    torch.library.opcheck(operator(name), tuple(arguments), test_utils=("test_schema", "test_faketensor"))
    operator(name)(*arguments)
    for key in written:
        assert not torch.equal(call[key].view(torch.uint8), before[key].view(torch.uint8)), "the check sees no change"
