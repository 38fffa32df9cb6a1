"""Bad input to the public functions: a TypeError or ValueError that names the argument, what it got and what it needs.

The checks come before any work and do not depend on the device: tests/gpu/test_bad_input.py takes the same tables and
compares the words. The outputs of every call are poisoned before it and must still be after it.
"""

import math
from collections.abc import Iterator

import pytest
import torch

from cute_kernels import merge_states, mla_fp8_append, mla_fp8_decode
from cute_kernels.mla import op as mla_op
from tests.support.bad_input import ERROR, TABLES

WRONG = [(name, label) for name, table in TABLES.items() for label in table.wrong("cpu")]
EACH_TABLE = pytest.mark.parametrize("name", TABLES)


@EACH_TABLE
def test_the_calls_that_the_others_break_are_right(name: str) -> None:
    TABLES[name].function(**TABLES[name].right("cpu"))


@pytest.mark.parametrize(("name", "label"), WRONG, ids=[f"{name}: {label}" for name, label in WRONG])
def test_wrong_calls_are_refused_in_words(name: str, label: str) -> None:
    table = TABLES[name]
    argument, _ = table.call(label, "cpu")
    with pytest.raises((TypeError, ValueError), match=ERROR.format(argument)):
        raise table.refusal(label, "cpu")


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@EACH_TABLE
def test_another_default_dtype_changes_no_word(name: str, default_dtype: torch.dtype) -> None:
    table = TABLES[name]
    labels = list(table.wrong("cpu"))[::4]
    said = [str(table.refusal(label, "cpu")) for label in labels]
    table.function(**table.right("cpu"))
    torch.set_default_dtype(torch.float32)
    assert said == [str(table.refusal(label, "cpu")) for label in labels]


@EACH_TABLE
def test_a_default_device_changes_no_word(name: str) -> None:
    table = TABLES[name]
    labels = list(table.wrong("cpu"))[::4]
    expected = [str(table.refusal(label, "cpu")) for label in labels]
    with torch.device("meta"):
        assert [str(table.refusal(label, "cpu")) for label in labels] == expected


@EACH_TABLE
def test_a_device_that_is_no_sm90_is_named(name: str) -> None:
    """A device that is neither a CPU nor an SM90 GPU is named in the message."""
    if "everything on another device" in TABLES[name].wrong("cpu"):
        error = TABLES[name].refusal("everything on another device", "cpu")
        assert isinstance(error, ValueError)
        assert "got a tensor on meta; needs an SM90 GPU" in str(error)


def test_both_kinds_of_states_that_cannot_be_viewed() -> None:
    """More than five dimensions are viewed as five. Strides that do not allow it are refused, not copied."""
    outs, lses = torch.zeros((2, 2, 3, 2, 4, 64)), torch.zeros((2, 2, 3, 2, 4))
    out, lse = torch.full((2, 3, 2, 4, 64), math.nan), torch.full((2, 3, 2, 4), math.nan)
    merge_states(outs, lses, out=out, lse=lse)
    assert (out == 0).all() and torch.allclose(lse, torch.full_like(lse, math.log(2)))
    with pytest.raises(ValueError, match=r"^lse: got shape \(2, 3, 2, 4\) with strides .*; needs leading dimensions"):
        merge_states(outs, lses, lse=torch.zeros((3, 2, 2, 4)).transpose(0, 1))


def test_strides_of_dimensions_of_one_element_are_free() -> None:
    """Axes of size 1 may have any stride: torch leaves it open, and slices of wider tensors have odd ones."""
    call = TABLES["mla_fp8_decode, sparse"].right("cpu")
    one = {name: call[name][:1, :1, :1].clone() for name in ("q", "out", "lse")}
    one["q"] = one["q"].as_strided(one["q"].shape, (577, 577, 577, 1))
    mla_fp8_decode(**one, kv_cache=call["kv_cache"], indices=call["indices"][:1, :1], s_aux=torch.zeros(8)[::8])
    assert one["out"].isfinite().all()
    append = TABLES["mla_fp8_append"].right("cpu")
    kv = append["kv"][:1].as_strided((1, 576), (577, 1))
    mla_fp8_append(kv, append["kv_cache"], append["slot_mapping"][:1])


def test_only_what_v3_2_has_takes_the_short_way_to_its_kernel() -> None:
    """A layout that does not exist was taken for V3.2's on a GPU, where the short way skips its check."""
    alone = mla_op._is_v3_2_alone
    assert alone(None, None) and alone("v3.2", "interleaved")
    for cache_format, cache_layout in ((None, "Planar"), (None, 1), (None, "planar"), ("v4", None), (["v3.2"], None)):
        assert not alone(cache_format, cache_layout)
    assert not alone(None, None, torch.zeros(1))
