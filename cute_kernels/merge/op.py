"""`merge_states`: combine attention over disjoint sets of keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_kernels.merge.reference import merge_states_reference
from cute_kernels.merge.spec import MAX_D, VECTOR_BYTES, MergeSpec
from cute_kernels.runtime import memory
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_tensor, refuse_gradients, require
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import PreparedLaunches, launch_or_explain
from cute_kernels.runtime.ops import is_traced, register_op
from cute_kernels.runtime.overlap import check_written, share_storage

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_TENSORS = ("outs", "lses", "s_aux", "out", "lse")


def merge_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    s_aux: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine the (out, lse) pairs of `n` disjoint sets of keys into those of their union.

    A pair is the result of attention over one set: its output, and the natural logarithm of its softmax denominator.
    Such sets are the splits of one long sequence, the levels of a shared prefix (a cascade) and the ranks of context
    parallelism. The sums are float32, in an order that does not depend on the data: the same call gives the same bits.

    Args:
        outs: (n, ..., d) float32, bfloat16 or float16, n >= 1, d a multiple of 8 up to 512; often
            (n, batch, s_q, heads, d). Rows are contiguous and start at multiples of 16 bytes.
        lses: (n, ...) float32. -inf marks a pair without keys, and so does +inf, which FlashMLA and its adapter here
            write: the output of such a pair is not read and may hold anything.
        s_aux: (heads,) float32, where heads is the last of the dimensions "...": sink logits that join the denominator
            once. The pairs must not contain them already. -inf is no sink, +inf makes the output 0.
        out: (..., d) float32, bfloat16 or float16: where to write the output, rows as those of `outs`.
        lse: (...) float32: where to write the log-sum-exp. Neither shares memory with another argument, `outs` and
            `lses` included: a row's lse may be written while others still read it.

    Returns:
        out (..., d), of the dtype of `outs` unless given, and lse (...) float32, without `s_aux`. A row whose pairs
        are all empty has out 0 and lse -inf.

    Raises:
        TypeError: an argument is no tensor, or of another dtype.
        ValueError: a shape, stride, alignment or device does not fit, the GPU is not an SM90, or a tensor requires
            gradients while they are enabled: there is no backward.

    CPU tensors are merged by plain torch in float64.
    """
    if torch.is_grad_enabled():
        refuse_gradients("merge_states", _TENSORS, outs, lses, s_aux, out, lse)
    return _merge(outs, lses, s_aux, out, lse, False)


def merge_received(
    outs: torch.Tensor,
    lses: torch.Tensor,
    s_aux: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge states of several ranks as `merge_states` does, on a GPU only those of one call.

    In memory a 32-bit word of the call follows each log-sum-exp. A kernel makes a row NaN whose states differ in it.
    """
    return _merge(outs, lses, s_aux, out, lse, True)


def _merge(
    outs: torch.Tensor,
    lses: torch.Tensor,
    s_aux: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    headers: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(outs, torch.Tensor) and outs.is_cuda and not is_traced():
        return _merge_or_explain(outs, lses, s_aux, out, lse, headers)
    if out is None or lse is None:
        _check_outs(outs)
        if out is None:
            out = outs.new_empty(outs.shape[1:])
        if lse is None:
            lse = outs.new_empty(outs.shape[1:-1], dtype=torch.float32)
    _merge_states(outs, lses, s_aux, out, lse, headers)
    return out, lse


_Kernel = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.Tensor, torch.Tensor], None]


class PreparedLaunch(NamedTuple):
    """What stays the same while the shapes of a call do: the kernel, and templates of out and lse."""

    kernel: _Kernel
    out_like: torch.Tensor
    lse_like: torch.Tensor


_prepared: PreparedLaunches[tuple[Any, ...], PreparedLaunch] = PreparedLaunches()
"""The key is all that kernels are chosen by and all that they do not check themselves."""
_MAX_DIMS = 5  # n, batch, s, heads, d: what the kernel takes


def _launch(
    outs: torch.Tensor,
    lses: torch.Tensor,
    s_aux: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    headers: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls the kernel with leading dimensions (batch, s, heads): heads stay apart for `s_aux`."""
    key = (
        outs.get_device(), outs.shape, outs.dtype, outs.dtype if out is None else out.dtype, s_aux is None,
        headers, lses.is_neg(),
        None if out is None or out.is_contiguous() else out.stride(),
        None if lse is None or lse.is_contiguous() else (lse.stride(), lse.is_neg()),
    )  # fmt: skip
    prepared = _prepared.get(key) or _prepare(key, outs, lses, s_aux, out, lse, headers)
    if (out is not None or lse is not None) and share_storage(out, lse, (outs, lses, s_aux)):
        _check_outputs(outs, lses, s_aux, out, lse)
    if out is None:
        out = memory.empty_like(prepared.out_like)
    if lse is None:
        lse = memory.empty_like(prepared.lse_like)
    merged = out, lse
    dims = outs.dim()
    for _ in range(dims, _MAX_DIMS):
        outs, lses, out, lse = outs.unsqueeze(1), lses.unsqueeze(1), out.unsqueeze(0), lse.unsqueeze(0)
    if dims > _MAX_DIMS:
        out, lse = _views(out, lse)
        n = outs.shape[0]
        outs, lses = outs.reshape(n, *out.shape), lses.reshape(n, *lse.shape)
    prepared.kernel(outs, lses, s_aux, out, lse)
    return merged


def _prepare(
    key: tuple[Any, ...],
    outs: torch.Tensor,
    lses: torch.Tensor,
    s_aux: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    headers: bool,
) -> PreparedLaunch:
    """Loads the kernel after all checks.

    On a CPU, or without rows, another function replaces it. That one checks nothing, so it is not kept.
    """
    _check(outs, lses, s_aux, out, lse, headers)
    shape, device = tuple(outs.shape), outs.device
    if device.type == "cpu":
        assert out is not None and lse is not None  # the operator requires both
        return PreparedLaunch(_merge_on_cpu, out, lse)
    templates = (
        memory.template(shape[1:], outs.dtype, device),
        memory.template(shape[1:-1], torch.float32, device),
    )
    rows = math.prod(shape[1:-1])
    if not rows:
        return PreparedLaunch(_merge_nothing, *templates)
    spec = MergeSpec.for_launch(
        rows=rows,
        num_states=shape[0],
        d=shape[-1],
        in_dtype=DTYPES[outs.dtype],
        out_dtype=DTYPES[outs.dtype if out is None else out.dtype],
        has_sink=s_aux is not None,
        headers=headers,
    )
    prepared = PreparedLaunch(get_kernel(spec), *templates)
    # of more dimensions the kernel sees views and cannot tell whether the shapes agree: each call is checked
    return prepared if len(shape) > _MAX_DIMS else _prepared.keep(key, prepared, device)


def _merge_on_cpu(
    outs: torch.Tensor, lses: torch.Tensor, s_aux: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor
) -> None:
    merged, merged_lse = merge_states_reference(outs, lses, s_aux)
    out.copy_(merged)
    lse.copy_(merged_lse)


def _merge_nothing(*tensors: torch.Tensor | None) -> None:
    pass


def _check(
    outs: torch.Tensor,
    lses: torch.Tensor,
    s_aux: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    headers: bool,
) -> None:
    """Raises what is wrong with the arguments, by name."""
    _check_outs(outs)
    check_tensor("outs", outs, align=VECTOR_BYTES, unit_last_stride=True)
    shape, device = tuple(outs.shape), outs.device
    check_tensor("lses", lses, dtype=torch.float32, shape=shape[:-1], device=device)
    if s_aux is not None:
        require(len(shape) >= 3, "s_aux", f"outs of shape {shape}", "outs (n, ..., heads, d)")
        check_tensor("s_aux", s_aux, dtype=torch.float32, shape=shape[-2:-1], device=device)
    if out is not None:
        check_tensor("out", out, dtype=tuple(DTYPES), shape=shape[1:], device=device, align=VECTOR_BYTES,
                     unit_last_stride=True)  # fmt: skip
    if lse is not None:
        check_tensor("lse", lse, dtype=torch.float32, shape=shape[1:-1], device=device)
    require(math.prod(shape[1:-1]) < 2**31, "outs", f"shape {shape}", "fewer than 2^31 rows")
    if len(shape) > _MAX_DIMS and out is not None and lse is not None:
        _views(out, lse)  # raises where the kernel's views do not exist, on a CPU too
    if device.type != "cpu":
        require_sm90("outs", device)
    _check_outputs(outs, lses, s_aux, out, lse)


def _check_outputs(
    outs: torch.Tensor,
    lses: torch.Tensor,
    s_aux: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """Raises where the memory of an output is also another argument's."""
    check_written({"out": out, "lse": lse}, {"outs": outs, "lses": lses, "s_aux": s_aux})


def _check_outs(outs: torch.Tensor) -> None:
    check_tensor("outs", outs, dtype=tuple(DTYPES))
    shape = tuple(outs.shape)
    require(len(shape) >= 2, "outs", f"shape {shape}", "(n, ..., d)")
    require(shape[0] >= 1, "outs", f"shape {shape}", "at least one state")
    require(
        shape[-1] % 8 == 0 and 8 <= shape[-1] <= MAX_D, "outs", f"d = {shape[-1]}", f"a multiple of 8 up to {MAX_D}"
    )


def _views(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs with all leading dimensions but the last two as one."""
    *leading, s, heads, d = out.shape
    rows = (math.prod(leading), s, heads)
    return _view("out", out, (*rows, d)), _view("lse", lse, rows)


def _view(name: str, t: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`t` in another shape, without a copy, because it is written."""
    try:
        return t.view(shape)
    except RuntimeError:
        needs = f"leading dimensions that can be viewed as {shape}"
        raise ValueError(f"{name}: got shape {tuple(t.shape)} with strides {t.stride()}; needs {needs}") from None


_merge_or_explain = launch_or_explain(_launch, _check, (*_TENSORS, "headers"))


def _run(
    outs: torch.Tensor,
    lses: torch.Tensor,
    s_aux: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    headers: bool = False,
) -> None:
    """The operator, for torch.compile and CPU tensors."""
    _merge_or_explain(outs, lses, s_aux, out, lse, headers)


_merge_states = register_op(
    "merge_states",
    "(Tensor outs, Tensor lses, Tensor? s_aux, Tensor(a!) out, Tensor(b!) lse, bool headers=False) -> ()",
    _run,
    lambda outs, lses, s_aux, out, lse, headers=False: None,
)
