"""Bad input to `sink_attention`: a TypeError or ValueError that names the argument, what it got and what it needs.

The checks do not depend on the device, so CPU tensors show them. Every case is called with gradients and without, for
the ways to the checks differ.
"""

import math
from typing import Any

import pytest
import torch

from cute_kernels import sink_attention

BATCH, S_Q, S_K, H_Q, H_KV, D = 2, 3, 5, 6, 2, 64
ERROR = r"(?s)^{}: got .+; needs .+"


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def borders(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def call() -> dict[str, Any]:
    """A call that is right in everything."""
    return {
        "q": tensor(BATCH, S_Q, H_Q, D),
        "k": tensor(BATCH, S_K, H_KV, D),
        "v": tensor(BATCH, S_K, H_KV, D),
        "s_aux": torch.zeros(H_Q),
    }


def packed() -> dict[str, Any]:
    """The same of three packed sequences."""
    return {
        "q": tensor(7, H_Q, D),
        "k": tensor(9, H_KV, D),
        "v": tensor(9, H_KV, D),
        "s_aux": torch.zeros(H_Q),
        "cu_seqlens_q": borders(0, 3, 3, 7),
        "cu_seqlens_k": borders(0, 5, 6, 9),
    }


def every_second(like: torch.Tensor) -> torch.Tensor:
    """The same shape and dtype with a last stride of 2."""
    return torch.zeros((*like.shape[:-1], 2 * like.shape[-1]), dtype=like.dtype)[..., ::2]


def shifted(like: torch.Tensor, elements: int) -> torch.Tensor:
    """The same shape and dtype, so many elements behind an aligned address."""
    storage = torch.zeros(like.numel() + 32, dtype=like.dtype)
    start = -storage.data_ptr() // like.element_size() % 8 + elements
    return storage[start : start + like.numel()].view(like.shape)


BASE = call()
QUANTIZED = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
WRONG: dict[str, tuple[str, Any]] = {
    "q no tensor": ("q", None),
    "q a list": ("q", [1.0]),
    "q of float32": ("q", BASE["q"].float()),
    "q of float64": ("q", BASE["q"].double()),
    "q of int8": ("q", BASE["q"].to(torch.int8)),
    "q of rank 3": ("q", BASE["q"][0]),
    "q of rank 5": ("q", BASE["q"][None]),
    "q of heads that are no multiple": ("q", tensor(BATCH, S_Q, 5, D)),
    "q of fewer heads than k": ("q", tensor(BATCH, S_Q, 1, D)),
    "q without heads": ("q", tensor(BATCH, S_Q, 0, D)),
    "q with a last stride of 2": ("q", every_second(BASE["q"])),
    "q 8 bytes off": ("q", shifted(BASE["q"], 4)),
    "q with rows 8 bytes off": ("q", tensor(BATCH, S_Q, H_Q, D + 4)[..., :D]),
    "k no tensor": ("k", None),
    "k of float16": ("k", BASE["k"].half()),
    "k of float32": ("k", BASE["k"].float()),
    "k of rank 3": ("k", BASE["k"][0]),
    "k of another batch": ("k", tensor(BATCH + 1, S_K, H_KV, D)),
    "k of another head dimension": ("k", tensor(BATCH, S_K, H_KV, 128)),
    "v as other libraries have it": ("v", BASE["v"].transpose(1, 2).contiguous()),
    "k with a last stride of 2": ("k", every_second(BASE["k"])),
    "k 8 bytes off": ("k", shifted(BASE["k"], 4)),
    "k with rows 8 bytes off": ("k", tensor(BATCH, S_K, H_KV, D + 4)[..., :D]),
    "v no tensor": ("v", None),
    "v of float16": ("v", BASE["v"].half()),
    "v of other tokens": ("v", tensor(BATCH, S_K + 1, H_KV, D)),
    "v of other heads": ("v", tensor(BATCH, S_K, 1, D)),
    "v of another head dimension": ("v", tensor(BATCH, S_K, H_KV, 128)),
    "v of another batch": ("v", tensor(1, S_K, H_KV, D)),
    "v with a last stride of 2": ("v", every_second(BASE["v"])),
    "v 8 bytes off": ("v", shifted(BASE["v"], 4)),
    "s_aux of bfloat16": ("s_aux", torch.zeros(H_Q, dtype=torch.bfloat16)),
    "s_aux of float64": ("s_aux", torch.zeros(H_Q, dtype=torch.float64)),
    "s_aux too short": ("s_aux", torch.zeros(H_Q - 1)),
    "s_aux too long": ("s_aux", torch.zeros(H_Q + 1)),
    "s_aux of the heads of k": ("s_aux", torch.zeros(H_KV)),
    "s_aux of rank 2": ("s_aux", torch.zeros(1, H_Q)),
    "s_aux with a stride of 2": ("s_aux", torch.zeros(2 * H_Q)[::2]),
    "s_aux a number": ("s_aux", 0.0),
    "causal a number": ("causal", 1),
    "causal None": ("causal", None),
    "window 0": ("window", 0),
    "window negative": ("window", -1),
    "window a float": ("window", 4.0),
    "window a bool": ("window", True),
    "window two numbers": ("window", (4, 0)),
    "softmax_scale no number": ("softmax_scale", "1"),
    "softmax_scale a bool": ("softmax_scale", True),
    "softmax_scale a tensor": ("softmax_scale", torch.ones(())),
    "deterministic None": ("deterministic", None),
    "deterministic a number": ("deterministic", 1),
    **{f"{name} of {dtype}": (name, BASE[name].to(dtype)) for name in ("k", "v") for dtype in QUANTIZED},
    **{f"{name} on another device": (name, BASE[name].to("meta")) for name in ("k", "v", "s_aux")},
}
PACKED: dict[str, tuple[str, Any]] = {
    "q of rank 4": ("q", tensor(1, 7, H_Q, D)),
    "k of rank 4": ("k", tensor(1, 9, H_KV, D)),
    "v of other tokens": ("v", tensor(8, H_KV, D)),
    **{
        f"{name} {what}": (name, value)
        for name, total in (("cu_seqlens_q", 7), ("cu_seqlens_k", 9))
        for what, value in {
            "missing": None,
            "a list": [0, 3, 3, total],
            "of int64": borders(0, 3, 3, total, dtype=torch.int64),
            "of float32": torch.tensor([0.0, 3.0, 3.0, total]),
            "of rank 2": borders(0, 3, 3, total)[None],
            "with a stride of 2": borders(0, 0, 3, 0, 3, 0, total, 0)[::2],
            "on another device": borders(0, 3, 3, total).to("meta"),
            "that begin behind 0": borders(1, 3, 3, total),
            "that begin before 0": borders(-1, 3, 3, total),
            "that decrease": borders(0, 4, 3, total),
            "that decrease below 0": borders(0, -2, 3, total),
            "that end early": borders(0, 3, 3, total - 1),
            "that end late": borders(0, 3, 3, total + 1),
            "that pass the end": borders(0, total + 1, total, total),
        }.items()
    },
    "cu_seqlens_k of another batch": ("cu_seqlens_k", borders(0, 9)),
}


def require_error(arguments: dict[str, Any], name: str) -> None:
    for gradients in (False, True):
        if gradients:  # asked of all that can have them
            for t in arguments.values():
                if isinstance(t, torch.Tensor) and t.is_floating_point() and t.is_leaf and t.itemsize > 1:
                    t.requires_grad_()
        with pytest.raises((TypeError, ValueError), match=ERROR.format(name)):
            sink_attention(**arguments)


@pytest.mark.parametrize("arguments", [call(), packed()], ids=["contiguous", "packed"])
def test_the_calls_that_the_others_break_are_right(arguments):
    out: Any = sink_attention(**arguments)
    assert out.isfinite().all()


@pytest.mark.parametrize(("name", "value"), WRONG.values(), ids=WRONG)
def test_contiguous(name, value):
    require_error({**call(), name: value}, name)


@pytest.mark.parametrize(("name", "value"), PACKED.values(), ids=PACKED)
def test_packed(name, value):
    require_error({**packed(), name: value}, name)


def test_lengths_without_any_element():
    empty = borders()
    require_error({**packed(), "cu_seqlens_q": empty, "cu_seqlens_k": empty}, "cu_seqlens_q")


@pytest.mark.parametrize("d", [0, 16, 32, 80, 96, 192, 256])
def test_head_dimensions(d):
    require_error({**call(), "q": tensor(2, 3, 6, d), "k": tensor(2, 5, 2, d), "v": tensor(2, 5, 2, d)}, "q")


def test_more_tokens_than_32_bits_can_tell_apart():
    """Expanded, so that they take no memory."""
    long = tensor(1, 1, 1, D).expand(1, 2**30, 1, D)
    one = tensor(1, 1, 1, D)
    require_error({"q": long, "k": one, "v": one}, "q")
    require_error({"q": one, "k": long, "v": long}, "k")


def test_codes_are_sent_to_the_kernel_that_reads_them():
    codes = BASE["k"].to(torch.int8)
    with pytest.raises(TypeError, match=r"^k: got dtype torch.int8; needs torch.bfloat16.*no gradient.*gqa_decode"):
        sink_attention(BASE["q"].clone().requires_grad_(), codes, codes)


def test_lengths_that_change_are_looked_at_again():
    """They are read once for each change: a second call with the same tensor, then one with it broken in place."""
    arguments = packed()
    sink_attention(**arguments)
    sink_attention(**arguments)
    arguments["cu_seqlens_k"][1] = 8
    require_error(arguments, "cu_seqlens_k")
    arguments["cu_seqlens_k"][1] = 6
    sink_attention(**arguments)
    require_error({**arguments, "q": tensor(8, H_Q, D)}, "cu_seqlens_q")


def test_lengths_are_looked_at_in_inference_mode():
    with torch.inference_mode():
        require_error({**packed(), "cu_seqlens_q": borders(0, 4, 3, 7)}, "cu_seqlens_q")
        arguments = packed()
        assert torch.equal(sink_attention(**arguments), sink_attention(**arguments))


def test_errors_of_compiled_calls_name_the_argument_too():
    compiled = torch.compile(sink_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=ERROR.replace("^", "").format("window")):
        compiled(**call(), window=0)
    with pytest.raises(Exception, match=ERROR.replace("^", "").format("cu_seqlens_k")):
        compiled(**{**packed(), "cu_seqlens_k": borders(0, 6, 5, 9)})


def test_a_device_that_is_no_sm90_is_named():
    arguments = {name: t.to("meta") for name, t in call().items()}
    with pytest.raises(ValueError, match=r"^q: got .*meta.*; needs an SM90 GPU"):
        sink_attention(**arguments)


def test_a_nan_scale_is_no_error_but_nan():
    out: Any = sink_attention(**call(), softmax_scale=math.nan)
    assert out.isnan().all()
