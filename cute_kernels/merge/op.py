"""`merge_states` combines attention over disjoint sets of keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cute_kernels.merge.reference import merge_states_reference
from cute_kernels.merge.request import MERGE, Options, Request
from cute_kernels.merge.spec import MAX_D, VECTOR_BYTES, MergeSpec
from cute_kernels.runtime import memory
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_tensor, require
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import PreparedLaunches, by_name, do_nothing, launch_or_explain
from cute_kernels.runtime.ops import is_traced

if TYPE_CHECKING:
    from typing_extensions import Unpack

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_MAX_DIMS = 5  # dimensions that the kernel takes: n, batch, s, heads, d


@MERGE.describe
def merge_states(
    outs: torch.Tensor, lses: torch.Tensor, **options: Unpack[Options]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine the (out, lse) pairs of `n` disjoint sets of keys into those of their union.

    A pair is the result of attention over one set: its output, and the natural logarithm of its softmax denominator.
    Such sets are the splits of one long sequence, the levels of a shared prefix (a cascade) and the ranks of context
    parallelism. The sums are float32, in an order that does not depend on the data: the same call gives the same bits.
    CPU tensors are merged by plain torch in float64. `cute_kernels.merge.request` has the arguments.

    Returns:
        out (..., d), of the dtype of `outs` unless given, and lse (...) float32, without `s_aux`. A row whose pairs
        are all empty has out 0 and lse -inf.

    Raises:
        TypeError: an argument is no tensor, or of another dtype.
        ValueError: a shape, stride, alignment or device does not fit, the GPU is not an SM90, or a tensor requires
            gradients while they are enabled: there is no backward.
    """
    request: Request = {**MERGE.defaults, **options, "outs": outs, "lses": lses}
    if len(request) != len(MERGE.defaults):
        MERGE.refuse_unknown(options)
    if torch.is_grad_enabled():
        MERGE.refuse_gradients(request)
    return merge_request(request)


def merge_request(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs `merge_states` for adapters of this package, which may ask for `headers`: a GPU then merges one call only.

    Raises:
        TypeError, ValueError: as `merge_states`.
    """
    outs, out, lse = request["outs"], request["out"], request["lse"]
    if isinstance(outs, torch.Tensor) and outs.is_cuda and not is_traced():
        return _merge_or_explain(request)
    if out is None or lse is None:
        _check_outs(outs)
        if out is None:
            out = outs.new_empty(outs.shape[1:])
        if lse is None:
            lse = outs.new_empty(outs.shape[1:-1], dtype=torch.float32)
    _merge_states({**request, "out": out, "lse": lse})
    return out, lse


class PreparedLaunch(NamedTuple):
    """Facts that stay the same while the shapes of a call do.

    launch    the kernel, called by name
    out_like, lse_like   templates of out and lse
    apart     see `Operator.check_addresses`
    """

    launch: Callable[..., None]
    out_like: torch.Tensor
    lse_like: torch.Tensor
    apart: set[tuple[int, ...]]


_prepared: PreparedLaunches[tuple[Any, ...], PreparedLaunch] = PreparedLaunches()
"""Prepared launches. The key has what selects a kernel and what the kernel does not check itself."""


def _launch(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls the kernel with leading dimensions (batch, s, heads): heads stay apart for `s_aux`."""
    outs, lses, s_aux, out, lse = (
        request["outs"], request["lses"], request["s_aux"], request["out"], request["lse"],
    )  # fmt: skip
    key = (
        outs.get_device(), outs.shape, outs.dtype, outs.dtype if out is None else out.dtype,
        None if s_aux is None else s_aux.is_neg(), lses.is_neg(), MERGE.key(request),
    )  # fmt: skip
    prepared = _prepared.get(key) or _prepare(key, request)
    if out is not None or lse is not None:
        MERGE.check_addresses(request, prepared.apart)
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
    prepared.launch(request, mOuts=outs, mLses=lses, mSink=s_aux, mOut=out, mLse=lse)
    return merged


def _prepare(key: tuple[Any, ...], request: Request) -> PreparedLaunch:
    """Loads the kernel after all checks.

    On a CPU, or without rows, another function replaces the kernel. It checks nothing, so it is not kept.
    """
    check(request)
    outs, out, lse = request["outs"], request["out"], request["lse"]
    shape, device = tuple(outs.shape), outs.device
    if device.type == "cpu":
        assert out is not None and lse is not None  # the operator requires both
        return PreparedLaunch(_merge_on_cpu, out, lse, set())
    templates = (
        memory.template(shape[1:], outs.dtype, device),
        memory.template(shape[1:-1], torch.float32, device),
    )
    rows = math.prod(shape[1:-1])
    if not rows:
        return PreparedLaunch(do_nothing, *templates, set())
    spec = MergeSpec.for_launch(
        rows=rows,
        num_states=shape[0],
        d=shape[-1],
        in_dtype=DTYPES[outs.dtype],
        out_dtype=DTYPES[outs.dtype if out is None else out.dtype],
        has_sink=request["s_aux"] is not None,
        **MERGE.facts_of(request),
    )
    prepared = PreparedLaunch(by_name(MERGE, get_kernel(spec), spec.kernel), *templates, set())
    # with more dimensions the kernel sees views and cannot tell whether the shapes agree: each call is checked
    return prepared if len(shape) > _MAX_DIMS else _prepared.keep(key, prepared, device)


def _merge_on_cpu(
    request: Request,
    mOuts: torch.Tensor,
    mLses: torch.Tensor,
    mSink: torch.Tensor | None,
    mOut: torch.Tensor,
    mLse: torch.Tensor,
) -> None:
    merged, lse = merge_states_reference(mOuts, mLses, mSink)
    mOut.copy_(merged)
    mLse.copy_(lse)


def check(request: Request) -> None:
    """Checks the arguments; an error names the wrong one."""
    outs, s_aux, out, lse = request["outs"], request["s_aux"], request["out"], request["lse"]
    _check_outs(outs)
    check_tensor("outs", outs, align=VECTOR_BYTES, unit_last_stride=True)
    shape, device = tuple(outs.shape), outs.device
    check_tensor("lses", request["lses"], dtype=torch.float32, shape=shape[:-1], device=device)
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
        _views(out, lse)  # raises if the kernel's views do not exist, on a CPU too
    if device.type != "cpu":
        require_sm90("outs", device)
    MERGE.check_outputs(request)


def _check_outs(outs: torch.Tensor) -> None:
    check_tensor("outs", outs, dtype=tuple(DTYPES))
    shape = tuple(outs.shape)
    require(len(shape) >= 2, "outs", f"shape {shape}", "(n, ..., d)")
    require(shape[0] >= 1, "outs", f"shape {shape}", "at least one state")
    require(
        shape[-1] % 8 == 0 and 8 <= shape[-1] <= MAX_D, "outs", f"d = {shape[-1]}", f"a multiple of 8 up to {MAX_D}"
    )


def _views(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views the outputs with all leading dimensions but the last two as one."""
    *leading, s, heads, d = out.shape
    rows = (math.prod(leading), s, heads)
    return _view("out", out, (*rows, d)), _view("lse", lse, rows)


def _view(name: str, t: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Views `t` in another shape, without a copy, because it is written."""
    try:
        return t.view(shape)
    except RuntimeError:
        needs = f"leading dimensions that can be viewed as {shape}"
        raise ValueError(f"{name}: got shape {tuple(t.shape)} with strides {t.stride()}; needs {needs}") from None


_merge_or_explain = launch_or_explain(MERGE, _launch, check)


def _run(request: Request) -> None:
    """The torch operator, for torch.compile and CPU tensors."""
    _merge_or_explain(request)


_merge_states = MERGE.register(_run, lambda request: None)
