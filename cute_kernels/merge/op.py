"""`merge_states`: combine attention over disjoint sets of keys."""

from __future__ import annotations

import math

import torch

from cute_kernels.merge.reference import merge_states_reference
from cute_kernels.merge.spec import MAX_D, VECTOR_BYTES, MergeSpec
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_tensor, require
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.ops import register_op

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def merge_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    s_aux: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine the (out, lse) pairs of `n` disjoint sets of keys into those of their union.

    A pair is what attention over one set gives: its output, and the natural logarithm of its softmax denominator.
    Splits of one long sequence, levels of a shared prefix (a cascade) and the ranks of context parallelism are such
    sets. The sums are float32, and their order does not depend on the data: the same call gives the same bits.

    Args:
        outs: (n, ..., d) float32, bfloat16 or float16, n >= 1, d a multiple of 8 up to 512; often
            (n, batch, s_q, heads, d). Rows are contiguous and start at multiples of 16 bytes.
        lses: (n, ...) float32. -inf marks a state without keys: its output is not read and may hold anything.
        s_aux: (heads,) float32, where heads is the last of the dimensions "...": sink logits that join the denominator,
            once. The states must not contain them already. -inf is no sink, +inf makes the output 0.
        out: (..., d) float32, bfloat16 or float16: where to write the output, rows as those of `outs`.
        lse: (...) float32: where to write the log-sum-exp.

    Returns:
        out (..., d), of the dtype of `outs` unless given, and lse (...) float32, which leaves `s_aux` out. A row whose
        states are all empty has out 0 and lse -inf.

    Raises:
        TypeError: an argument is no tensor, or of another dtype.
        ValueError: a shape, stride, alignment or device does not fit, or the GPU is not an SM90.

    CPU tensors are merged by plain torch in float64.
    """
    _check_shapes(outs, lses, s_aux)
    if out is None:
        out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    if lse is None:
        lse = torch.empty(outs.shape[1:-1], dtype=torch.float32, device=outs.device)
    check_tensor("out", out, dtype=tuple(_DTYPES), shape=tuple(outs.shape[1:]), device=outs.device)
    check_tensor("lse", lse, dtype=torch.float32, shape=tuple(outs.shape[1:-1]), device=outs.device)
    _merge_states(outs, lses, s_aux, out, lse)
    return out, lse


def _check_shapes(outs: torch.Tensor, lses: torch.Tensor, s_aux: torch.Tensor | None) -> None:
    check_tensor("outs", outs, dtype=tuple(_DTYPES))
    shape = tuple(outs.shape)
    require(len(shape) >= 2, "outs", f"shape {shape}", "(n, ..., d)")
    require(shape[0] >= 1, "outs", f"shape {shape}", "at least one state")
    require(
        shape[-1] % 8 == 0 and 8 <= shape[-1] <= MAX_D, "outs", f"d = {shape[-1]}", f"a multiple of 8 up to {MAX_D}"
    )
    check_tensor("lses", lses, dtype=torch.float32, shape=shape[:-1], device=outs.device)
    if s_aux is not None:
        require(len(shape) >= 3, "s_aux", f"outs of shape {shape}", "outs (n, ..., heads, d)")
        check_tensor("s_aux", s_aux, dtype=torch.float32, shape=shape[-2:-1], device=outs.device)


def _run(
    outs: torch.Tensor, lses: torch.Tensor, s_aux: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor
) -> None:
    # addresses are known here, but not while torch.compile traces
    check_tensor("outs", outs, align=VECTOR_BYTES, unit_last_stride=True)
    check_tensor("out", out, align=VECTOR_BYTES, unit_last_stride=True)
    if outs.device.type == "cpu":
        merged, merged_lse = merge_states_reference(outs, lses, s_aux)
        out.copy_(merged)
        lse.copy_(merged_lse)
        return
    require_sm90("outs", outs.device)
    if lse.numel() == 0:
        return
    require(lse.numel() < 2**31, "outs", f"shape {tuple(outs.shape)}", "fewer than 2^31 rows")
    spec = MergeSpec.for_launch(
        rows=lse.numel(),
        num_states=outs.shape[0],
        d=outs.shape[-1],
        in_dtype=_DTYPES[outs.dtype],
        out_dtype=_DTYPES[out.dtype],
        has_sink=s_aux is not None,
    )
    kernel = get_kernel(spec)
    if outs.dim() == 5:
        kernel(outs, lses, s_aux, out, lse)
        return
    rows = _three_dimensions(tuple(outs.shape[1:-1]))
    kernel(
        outs.reshape(outs.shape[0], *rows, outs.shape[-1]),
        lses.reshape(lses.shape[0], *rows),
        s_aux,
        _view("out", out, (*rows, out.shape[-1])),
        _view("lse", lse, rows),
    )


def _three_dimensions(leading: tuple[int, ...]) -> tuple[int, int, int]:
    """The same rows in the same order as (batch, s, heads), the last one kept apart for `s_aux`."""
    padded = (1, 1, 1, *leading)
    return math.prod(padded[:-2]), padded[-2], padded[-1]


def _view(name: str, t: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`t` in another shape, without a copy: it is written."""
    try:
        return t.view(shape)
    except RuntimeError:
        needs = f"leading dimensions that can be viewed as {shape}"
        raise ValueError(f"{name}: got shape {tuple(t.shape)} with strides {t.stride()}; needs {needs}") from None


_merge_states = register_op(
    "merge_states",
    "(Tensor outs, Tensor lses, Tensor? s_aux, Tensor(a!) out, Tensor(b!) lse) -> ()",
    _run,
    lambda outs, lses, s_aux, out, lse: None,
)
