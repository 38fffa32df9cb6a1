"""Bad input to public functions raises a TypeError or ValueError with the argument, its value and what it needs.

The checks come before any work and do not depend on the device: tests/gpu/test_bad_input.py takes the same tables and
compares the words. Outputs of every call are poisoned before it and must still be poisoned after it.
"""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from cute_kernels import gqa_decode, kv_int8_append, merge_states, mla_fp8_append, mla_fp8_decode, sink_attention
from cute_kernels.compat.flash_mla import flash_mla_with_kvcache
from cute_kernels.runtime.checks import check_tensor, require
from tests.kit import gradients
from tests.kit.bad_input import ERROR, TABLES

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
    if "everything on another device" in TABLES[name].wrong("cpu"):
        error = TABLES[name].refusal("everything on another device", "cpu")
        assert isinstance(error, ValueError)
        assert "got a tensor on meta; needs an SM90 GPU" in str(error)


def test_checks_that_pass_format_nothing() -> None:
    class Loud:
        def __str__(self) -> str:
            raise AssertionError("formatted")

    require(True, "x", Loud(), Loud())
    check_tensor("scale", torch.ones(()), ndim=0, align=4, unit_last_stride=True)  # it has no rows


def test_both_kinds_of_states_that_cannot_be_viewed() -> None:
    """More than five dimensions are viewed as five. Strides that do not allow that are refused, not copied."""
    outs, lses = torch.zeros((2, 2, 3, 2, 4, 64)), torch.zeros((2, 2, 3, 2, 4))
    out, lse = torch.full((2, 3, 2, 4, 64), math.nan), torch.full((2, 3, 2, 4), math.nan)
    merge_states(outs, lses, out=out, lse=lse)
    assert (out == 0).all() and torch.allclose(lse, torch.full_like(lse, math.log(2)))
    with pytest.raises(ValueError, match=r"^lse: got shape \(2, 3, 2, 4\) with strides .*; needs leading dimensions"):
        merge_states(outs, lses, lse=torch.zeros((3, 2, 2, 4)).transpose(0, 1))


def test_strides_of_dimensions_of_one_element_are_free() -> None:
    """Torch leaves the stride of an axis of size 1 open, and slices of wider tensors have odd ones."""
    call = TABLES["mla_fp8_decode, sparse"].right("cpu")
    one = {name: call[name][:1, :1, :1].clone() for name in ("q", "out", "lse")}
    one["q"] = one["q"].as_strided(one["q"].shape, (577, 577, 577, 1))
    mla_fp8_decode(**one, kv_cache=call["kv_cache"], indices=call["indices"][:1, :1], s_aux=torch.zeros(8)[::8])
    assert one["out"].isfinite().all()
    append = TABLES["mla_fp8_append"].right("cpu")
    kv = append["kv"][:1].as_strided((1, 576), (577, 1))
    mla_fp8_append(kv, append["kv_cache"], append["slot_mapping"][:1])


# ---- tensors that are not what lies in their memory

NAMES = {"k_cache": "kv_cache", "attn_sink": "s_aux"}
"""Names of arguments of `flash_mla_with_kvcache` in messages."""


def tensors() -> Iterator[tuple[str, str]]:
    for name, table in TABLES.items():
        yield from ((name, key) for key, value in table.right("cpu").items() if isinstance(value, torch.Tensor))


SINKS = [("sink_attention", argument) for argument in ("q", "k", "v", "s_aux")]
CANDIDATES = [*gradients.candidates("cpu"), *SINKS]  # tensors that can have a derivative
EACH_TENSOR = pytest.mark.parametrize(("name", "argument"), list(tensors()))


def refusal(name: str, argument: str, value: torch.Tensor) -> str:
    """The error of a call whose message must name `argument` first."""
    table = TABLES[name]
    with pytest.raises((TypeError, ValueError)) as error:
        table.function(**table.right("cpu") | {argument: value})
    known = {argument, NAMES.get(argument, argument) if table.function is flash_mla_with_kvcache else argument}
    said, _, rest = str(error.value).partition(": got ")
    assert said in known
    return rest


@EACH_TENSOR
def test_nested_tensors(name: str, argument: str) -> None:
    t = TABLES[name].right("cpu")[argument]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        nested = torch.nested.nested_tensor(list(t.clone()))
    assert refusal(name, argument, nested).startswith("a nested tensor; needs a plain")


@EACH_TENSOR
def test_sparse_tensors(name: str, argument: str) -> None:
    t = TABLES[name].right("cpu")[argument]
    assert "needs a plain dense tensor" in refusal(name, argument, t.to_sparse())


@EACH_TENSOR
def test_views_with_another_sign_than_their_memory(name: str, argument: str) -> None:
    t = TABLES[name].right("cpu")[argument]
    said = refusal(name, argument, torch._neg_view(t))
    assert "neg bit" in said and "resolve_neg()" in said


@EACH_TENSOR
def test_batches_of_vmap(name: str, argument: str) -> None:
    table, seen = TABLES[name], []

    def call(value: torch.Tensor) -> torch.Tensor:
        seen.append(refusal(name, argument, value))
        return value

    t = table.right("cpu")[argument]
    torch.func.vmap(call)(torch.stack([t, t]))
    assert len(seen) == 1 and "a transform of torch.func, such as vmap" in seen[0]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("name", "argument"), CANDIDATES)
def test_forward_mode_derivatives(name: str, argument: str, grad: bool) -> None:
    t = TABLES[name].right("cpu")[argument]
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        dual = forward_ad.make_dual(t, torch.ones_like(t))
        assert refusal(name, argument, dual).startswith("a tensor with a forward-mode derivative; needs")
        table = TABLES[name]
        table.function(**table.right("cpu"))  # other tensors may have one


@pytest.mark.parametrize("transform", [torch.func.jvp, torch.func.linearize])
def test_no_derivative_is_silently_zero(transform: Any) -> None:
    call = TABLES["sink_attention"].right("cpu")
    q = call.pop("q")
    tangents = ((q,),) if transform is torch.func.jvp else ()
    with pytest.raises(ValueError, match="^q: got a tensor with a forward-mode derivative"):
        if tangents:
            transform(lambda q: sink_attention(q, **call), (q,), (q,))
        else:
            transform(lambda q: sink_attention(q, **call), q)


def test_functional_gradients_are_torch_autograds() -> None:
    call = TABLES["sink_attention"].right("cpu")
    s_aux = call.pop("s_aux")
    with pytest.raises(ValueError, match="^s_aux: got a tensor inside a transform of torch.func.*torch.autograd's"):
        torch.func.grad(lambda s_aux: sink_attention(**call, s_aux=s_aux).float().sum())(s_aux)


# ---- memory


def test_out_may_be_q() -> None:
    """torch.compile makes such calls, both for MLA decoding with 512 columns of q and for `gqa_decode`."""
    for name in ("gqa_decode", "gqa_decode, paged", "mla_fp8_decode, planar pages", "mla_fp8_decode, two caches"):
        table = TABLES[name]
        call = table.right("cpu")
        call["q"].normal_(generator=torch.Generator().manual_seed(0))
        expected = table.function(**call | {"q": call["q"].clone()})
        expected = expected.clone()  # it is call["out"]
        got = table.function(**call | {"out": call["q"]})
        assert got is call["q"] and torch.equal(got, expected)


def test_tensors_of_one_memory_that_share_no_byte_are_taken() -> None:
    """Ranks exchange rows of out and lse in alternation, and caches and scales are parts of pages."""
    call = TABLES["gqa_decode"].right("cpu")
    rows = torch.full((*call["lse"].shape, 2 * 64 + 16), 7, dtype=torch.uint8)
    out, lse = rows[..., :128].view(torch.bfloat16), rows[..., 128:132].view(torch.float32).squeeze(-1)
    expected, expected_lse = gqa_decode(**call, return_lse=True)
    gqa_decode(**call | {"out": out, "lse": lse})
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse) and (rows[..., 132:] == 7).all()

    h, t, d = 2, 16, 64
    codes, scales = t * h * d, t * h * 4
    pages = torch.zeros((3, 2 * (codes + scales)), dtype=torch.int8)
    k_cache, v_cache = (pages[:, n * codes :][:, :codes].view(3, t, h, d) for n in (0, 1))
    k_scale, v_scale = (
        pages[:, 2 * codes + n * scales :][:, :scales].view(torch.float32).view(3, t, h) for n in (0, 1)
    )
    k, v = torch.randn(2, 1, h, d).bfloat16()
    kv_int8_append(k, v, k_cache, v_cache, k_scale, v_scale, torch.tensor([17]), layout="paged_NHD")
    assert k_cache[1, 1].any() and v_cache[1, 1].any() and k_scale[1, 1].all() and v_scale[1, 1].all()
    assert not pages[0].any() and not pages[2].any()
    halves = torch.zeros((4, 2, t, h, d), dtype=torch.int8)
    one = torch.ones(1)
    kv_int8_append(k, v, halves[:, 0], halves[:, 1], one, one, torch.tensor([17]), layout="paged_NHD")
    assert halves[1, :, 1].any()


@pytest.mark.parametrize("name", ["mla_fp8_append", "mla_fp8_append, planar pages", "kv_int8_append"])
def test_int32_slots_are_those_of_int64(name: str) -> None:
    results = []
    for dtype in (torch.int64, torch.int32):
        call = TABLES[name].right("cpu")
        call |= {"slot_mapping": torch.tensor([2, -1, 1], dtype=dtype)}
        TABLES[name].function(**call)
        results.append([call[key].clone() for key in TABLES[name].outputs])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    before = TABLES[name].right("cpu")[TABLES[name].outputs[0]]
    assert not torch.equal(results[0][0], before)
