"""Bad input on a CUDA device: same messages as on a CPU for the tables of tests/kit, and GPU-only checks."""

import dataclasses
from typing import Any

import pytest
import torch

from cute_kernels import gqa_decode, kv_int8_append, merge_states, mla_fp8_append, mla_fp8_decode
from cute_kernels.gqa import append_op as kv_append_op
from cute_kernels.gqa import op as gqa_op
from cute_kernels.merge import op as merge_op
from cute_kernels.mla import append_op, op
from cute_kernels.runtime import arch
from cute_kernels.runtime.launch import PreparedLaunches
from fp8_mla import QK_DIM, TOKEN_BYTES
from tests.kit import specs
from tests.kit.bad_input import TABLES
from tests.kit.gqa_cases import gqa_case
from tests.kit.mla_cases import DecodeCase, dense_case, sparse_case


def kernel_specs() -> list[Any]:
    """The kernels that valid calls launch."""
    return specs.of_tables()


def decode(case: DecodeCase, **options: Any) -> Any:
    return mla_fp8_decode(case.q, case.kv_cache, **{**case.options(), **options})


def cases() -> list[DecodeCase]:
    sparse = sparse_case(batch=2, h_q=16, lengths="batch", sink="finite", device="cuda")
    return [sparse, dense_case(seqlens=[3, 70], h_q=16, sink="finite", device="cuda")]


@pytest.mark.parametrize("name", ["kv_cache", "indices", "topk_length", "block_table", "cache_seqlens", "s_aux"])
def test_decode_tensors_on_different_devices(name):
    for case in cases():
        tensor = getattr(case, name)
        if tensor is None:
            continue
        out, lse = case.outputs()
        moved = dataclasses.replace(case, **{name: tensor.cpu()})
        with pytest.raises(ValueError, match=rf"^{name}: got .*cpu.*; needs .*cuda"):
            decode(moved, out=out.tensor, lse=lse.tensor)
        torch.cuda.synchronize()
        assert out.tensor.isnan().all(), "something was launched"


@pytest.mark.parametrize("name", ["out", "lse"])
def test_decode_outputs_on_another_device(name):
    case = cases()[0]
    out, lse = case.outputs()
    buffers = {"out": out.tensor, "lse": lse.tensor}
    buffers[name] = buffers[name].cpu()
    with pytest.raises(ValueError, match=rf"^{name}: got .*cpu.*; needs .*cuda"):
        decode(case, **buffers)


def test_append_tensors_on_different_devices():
    kv = torch.zeros((2, QK_DIM), dtype=torch.bfloat16, device="cuda")
    cache = torch.zeros((1, 64, TOKEN_BYTES), dtype=torch.uint8, device="cuda")
    slots = torch.arange(2, device="cuda")
    with pytest.raises(ValueError, match="^kv_cache: got .*cpu"):
        mla_fp8_append(kv, cache.cpu(), slots)
    with pytest.raises(ValueError, match="^slot_mapping: got .*cpu"):
        mla_fp8_append(kv, cache, slots.cpu())


def test_merge_tensors_on_different_devices():
    outs, lses = torch.zeros((2, 1, 1, 4, 64), device="cuda"), torch.zeros((2, 1, 1, 4), device="cuda")
    with pytest.raises(ValueError, match="^lses: got .*cpu"):
        merge_states(outs, lses.cpu())


def test_another_gpu_is_named(monkeypatch):
    monkeypatch.setattr(arch, "device_capability", lambda device: (8, 0))
    monkeypatch.setattr(op, "_prepared", PreparedLaunches())  # forgets that this GPU has passed the check
    for case in cases():
        with pytest.raises(ValueError, match=r"^q: got .*compute capability 8\.0.*; needs an SM90 GPU"):
            decode(case)


def test_misaligned_addresses():
    """A view that starts 8 bytes into an aligned allocation."""
    case = sparse_case(batch=1, h_q=16, padded=False, device="cuda")
    size = case.kv_cache.numel()
    storage = torch.zeros(size + 16, dtype=torch.uint8, device="cuda")
    shifted = storage[8 : 8 + size].view(case.kv_cache.shape)
    with pytest.raises(ValueError, match="^kv_cache: got .*; needs 16-byte"):
        decode(dataclasses.replace(case, kv_cache=shifted))
    halves = torch.zeros(case.q.numel() + 8, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="^q: got .*; needs 16-byte"):
        decode(dataclasses.replace(case, q=halves[4 : 4 + case.q.numel()].view(case.q.shape)))


# ---- gqa_decode and kv_int8_append


def gqa_call(**options: Any) -> dict[str, Any]:
    """A valid call whose outputs are full of NaN."""
    usual = {"seqlens": [70, 3], "h_q": 8, "h_kv": 2, "layout": "paged_NHD", "sink": "finite", "padded": False}
    case = gqa_case(**{**usual, **options}, device="cuda")
    out, lse = case.outputs()
    return {**case.arguments(), "out": out.tensor, "lse": lse.tensor}


def require_refusal(call: dict[str, Any], name: str, message: str = ".+") -> None:
    """The call raises an error that names the argument, launches nothing, and the device still works."""
    with pytest.raises((TypeError, ValueError), match=rf"(?s)^{name}: got {message}"):
        gqa_decode(**call)
    torch.cuda.synchronize()
    for buffer in ("out", "lse"):
        if buffer != name:
            assert call[buffer].isnan().all(), "something was launched"


def moved(call: dict[str, Any], name: str) -> dict[str, Any]:
    return {**call, name: call[name].cpu()}


@pytest.mark.parametrize("prepared", [False, True], ids=["first call", "prepared"])
@pytest.mark.parametrize(
    "name",
    [
        "k_cache", "v_cache", "k_scale", "v_scale", "cache_seqlens", "block_table", "alibi_slopes", "s_aux",
        "out", "lse",
    ],
)  # fmt: skip
def test_gqa_tensors_on_different_devices(name, prepared, monkeypatch):
    monkeypatch.setattr(gqa_op, "_prepared", PreparedLaunches())
    call = gqa_call(layout="BNSH", alibi="head", softcap=2.0) if name == "alibi_slopes" else gqa_call()
    if prepared:
        gqa_decode(**call)
        call["out"].fill_(float("nan"))
        call["lse"].fill_(float("nan"))
    require_refusal(moved(call, name), name, ".*cpu.*; needs .*cuda")


def other_gqa_arguments() -> dict[str, tuple[str, Any]]:
    """Calls that a prepared launch must still refuse: their shapes are those of a valid call."""
    call = gqa_call()
    table = call["block_table"]
    return {
        "cache_seqlens of int64": ("cache_seqlens", call["cache_seqlens"].long()),
        "cache_seqlens of uint32": ("cache_seqlens", call["cache_seqlens"].view(torch.uint32)),
        "cache_seqlens missing": ("cache_seqlens", None),
        "block_table of int64": ("block_table", table.long()),
        "block_table of uint32": ("block_table", table.view(torch.uint32)),
        "block_table of another batch": ("block_table", table[:1].contiguous()),
        "block_table missing": ("block_table", None),
        "q of float32": ("q", call["q"].float()),
        "q with a last stride of 2": ("q", torch.zeros((2, 1, 8, 256), dtype=torch.bfloat16, device="cuda")[..., ::2]),
        "k_cache of uint8": ("k_cache", call["k_cache"].view(torch.uint8)),
        "k_cache of FP8": ("k_cache", call["k_cache"].view(torch.float8_e4m3fn)),
        "v_cache of uint8": ("v_cache", call["v_cache"].view(torch.uint8)),
        "v_cache of other pages": ("v_cache", call["v_cache"][:-1]),
        "k_scale missing": ("k_scale", None),
        "v_scale of another dtype": ("v_scale", call["v_scale"].half()),
        "v_scale of another shape": ("v_scale", call["v_scale"][:, 1:]),
        "s_aux of bfloat16": ("s_aux", call["s_aux"].bfloat16()),
        "s_aux of other heads": ("s_aux", call["s_aux"][:4]),
        "alibi_slopes of other heads": ("alibi_slopes", torch.zeros(4, device="cuda")),
        "window 0": ("window", 0),
        "window no int": ("window", 2.5),
        "softcap 0": ("softcap", 0.0),
        "softcap negative": ("softcap", -1.0),
        "softcap infinite": ("softcap", float("inf")),
        "num_splits 0": ("num_splits", 0),
        "softmax_scale no number": ("softmax_scale", "1"),
        "layout of another name": ("layout", "NHD"),
        "out of another dtype": ("out", call["out"].float()),
        "out of another shape": ("out", torch.zeros((2, 1, 8, 64), dtype=torch.bfloat16, device="cuda")),
        "lse of bfloat16": ("lse", call["lse"].bfloat16()),
        "lse of other heads": ("lse", call["lse"][..., :4]),
    }


@pytest.mark.parametrize("prepared", [False, True], ids=["first call", "prepared"])
def test_gqa_calls_are_refused_before_a_launch(prepared, monkeypatch):
    good = gqa_call()
    expected = gqa_decode(**{**good, "out": None, "lse": None})
    for label, (name, value) in other_gqa_arguments().items():
        if not prepared:
            monkeypatch.setattr(gqa_op, "_prepared", PreparedLaunches())
        call = {**gqa_call(), name: value}
        if label == "k_cache of FP8":
            name = "v_cache"  # the prepared launch no longer fits
        try:
            require_refusal(call, name)
        except pytest.fail.Exception as error:
            raise AssertionError(f"{label}: {error}") from error
    assert torch.equal(gqa_decode(**good), expected)


@pytest.mark.parametrize(("name", "bytes_"), [("q", 4), ("k_cache", 8), ("v_cache", 8), ("out", 4)])
@pytest.mark.parametrize("prepared", [False, True], ids=["first call", "prepared"])
def test_misaligned_gqa_addresses(name, bytes_, prepared, monkeypatch):
    monkeypatch.setattr(gqa_op, "_prepared", PreparedLaunches())
    call = gqa_call()
    if prepared:
        gqa_decode(**call)
        call["out"].fill_(float("nan"))
        call["lse"].fill_(float("nan"))
    shape, dtype = call[name].shape, call[name].dtype
    size = call[name].numel() * dtype.itemsize
    storage = torch.zeros(size + 16, dtype=torch.uint8, device="cuda")
    shifted = storage[bytes_ : bytes_ + size].view(dtype).view(shape)
    require_refusal({**call, name: shifted}, name, f".*; needs {8 if name in ('q', 'out') else 16}-byte")


def test_another_gpu_is_named_by_gqa(monkeypatch):
    monkeypatch.setattr(arch, "device_capability", lambda device: (8, 0))
    monkeypatch.setattr(gqa_op, "_prepared", PreparedLaunches())
    require_refusal(gqa_call(), "q", r".*compute capability 8\.0.*; needs an SM90 GPU")


def test_kv_append_is_refused_before_a_launch():
    caches = [torch.full((2, 2, 16, 64), 7, dtype=torch.int8, device="cuda") for _ in range(2)]
    scales = [torch.full((2, 2, 16), 7.0, device="cuda") for _ in range(2)]
    k, v = torch.ones((2, 3, 2, 64), dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(3, device="cuda")
    names = ("k", "v", "k_cache", "v_cache", "k_scale", "v_scale", "slot_mapping")
    good: dict[str, Any] = dict(zip(names, (k, v, *caches, *scales, slots), strict=True))
    wrong: dict[str, tuple[str, Any]] = {
        "k of float32": ("k", k.float()),
        "v of float16": ("v", v.half()),
        "v of other tokens": ("v", v[:2]),
        "k_cache of uint8": ("k_cache", caches[0].view(torch.uint8)),
        "v_cache of other tokens": ("v_cache", caches[1][:, :, :8]),
        "v_scale of float16": ("v_scale", scales[1].half()),
        "k_scale of a shape of its own": ("k_scale", scales[0][:, :, :15]),
        "slot_mapping of int16": ("slot_mapping", slots.short()),
        "slot_mapping of uint64": ("slot_mapping", slots.view(torch.uint64)),
        "slot_mapping of other tokens": ("slot_mapping", slots[:2]),
        "layout of another name": ("layout", "HND"),
    }
    for prepared in (False, True):
        if prepared:
            kv_int8_append(**good, layout="BNSH")
            torch.cuda.synchronize()
            for tensor in (*caches, *scales):
                tensor.fill_(7)
        for label, (name, value) in wrong.items():
            with pytest.raises((TypeError, ValueError), match=rf"(?s)^{name}: got .+"):
                kv_int8_append(**{**good, "layout": "BNSH", name: value})
            torch.cuda.synchronize()
            assert all((tensor == 7).all() for tensor in (*caches, *scales)), f"{label}: something was written"


# ---- the tables that tests/cpu has, too


def words(name: str, label: str, device: str) -> str:
    """Type and message of the error, without the device's name; or what happened instead of an error."""
    try:
        error = TABLES[name].refusal(label, device)
    except Exception as other:  # the test fails after it has tried all labels
        return f"not refused, but {type(other).__name__}: {other}"
    return f"{type(error).__name__}: {error}".replace(device, "here")


@pytest.mark.parametrize("prepared", [False, True], ids=["first call", "prepared"])
@pytest.mark.parametrize("name", TABLES)
def test_a_gpu_refuses_in_the_words_of_a_cpu(name, prepared, monkeypatch):
    table, device = TABLES[name], f"cuda:{torch.cuda.current_device()}"
    for module in (op, gqa_op, append_op, kv_append_op, merge_op):
        monkeypatch.setattr(module, "_prepared", PreparedLaunches())
    if prepared:
        table.function(**table.right(device))
    different = {}
    for label in table.wrong("cpu"):
        got, expected = words(name, label, device), words(name, label, "cpu")
        if got != expected:
            different[label] = (got, expected)
        torch.cuda.synchronize()  # no launch has failed
    assert different == {}
    table.function(**table.right(device))
    torch.cuda.synchronize()


def test_strides_of_dimensions_of_one_element_are_free():
    """Axes of size 1 may have any stride: torch leaves it open, and slices of wider tensors have odd ones."""
    call = TABLES["mla_fp8_decode, sparse"].right("cuda")
    one = {name: call[name][:1, :1, :1].clone() for name in ("q", "out", "lse")}
    one["q"] = one["q"].as_strided(one["q"].shape, (577, 577, 577, 1))
    sink = torch.zeros(8, dtype=torch.float32, device="cuda")[::8]
    mla_fp8_decode(**one, kv_cache=call["kv_cache"], indices=call["indices"][:1, :1], s_aux=sink)
    assert one["out"].isfinite().all()
    append = TABLES["mla_fp8_append"].right("cuda")
    kv = append["kv"][:1].as_strided((1, QK_DIM), (QK_DIM + 1, 1))
    mla_fp8_append(kv, append["kv_cache"], append["slot_mapping"][:1])
    assert (append["kv_cache"] != 7).any(-1).sum() == 1
