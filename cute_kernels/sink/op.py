"""`sink_attention`: its checks, the choice of the kernel, and the operators that torch differentiates and traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from cute_kernels.gqa.op import gqa_decode
from cute_kernels.runtime import memory
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_tensor, fail, require
from cute_kernels.runtime.launch import launch_or_explain, require_memory
from cute_kernels.runtime.ops import NAMESPACE, is_traced, needs_grad
from cute_kernels.sink.launch import NAMES, BackwardRows, Gradients, launch_backward, launch_forward
from cute_kernels.sink.plan import route
from cute_kernels.sink.reference import reference_sink_attention, reference_sink_attention_backward
from cute_kernels.sink.request import BACKWARD, FORWARD, BackwardOptions, BackwardRequest, Options, Request

if TYPE_CHECKING:
    from typing_extensions import Unpack

DTYPES = tuple(NAMES)
HEAD_DIMS = (64, 128)
ALIGN = 16  # bytes, of rows and addresses: TMA requires it
MAX_TOKENS = 2**30
"""Tokens are fewer than this, so that differences of positions fit into 32 bits."""
_CODES = tuple(
    getattr(torch, name)
    for name in ("int8", "uint8", "int16", "int32", "int64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
                 "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")
)  # fmt: skip
_AUTOCAST = (torch.float32, *DTYPES)


Both = tuple[torch.Tensor, torch.Tensor]


@overload
def sink_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s_aux: torch.Tensor | None = ..., *,
    return_lse: Literal[False] = ..., **options: Unpack[Options],
) -> torch.Tensor: ...  # fmt: skip
@overload
def sink_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s_aux: torch.Tensor | None = ..., *,
    return_lse: Literal[True], **options: Unpack[Options],
) -> Both: ...  # fmt: skip
@overload
def sink_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s_aux: torch.Tensor | None = ..., *,
    return_lse: bool, **options: Unpack[Options],
) -> torch.Tensor | Both: ...  # fmt: skip
@FORWARD.describe
def sink_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s_aux: torch.Tensor | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> torch.Tensor | Both:
    """Compute attention for prefill and training, with a learned sink per head and a window; MHA, GQA and MQA.

    Query head h reads head ``h // (h_q // h_kv)`` of k and v, which are not copied. The queries are the last tokens of
    their sequence: query j is at position ``s_k - s_q + j``.

    It is differentiable in q, k, v and s_aux, once, and traces under torch.compile without a graph break. Under
    autocast q, k and v are cast to its dtype and s_aux to float32. Calls without gradients and with few query tokens
    run the kernel of `gqa_decode`. CPU tensors run the reference, which computes in float64.

    k and v must be finite wherever a query sees a key less than 192 tokens away, 320 with gradients: a NaN or infinity
    in a key tile reaches queries of that tile that do not see it. Other sequences, also packed ones, may hold anything.
    `cute_kernels.sink.request` has the arguments.

    Returns:
        out of q's shape and dtype; with `return_lse` also lse, (batch, s_q, h_q) or packed (tokens, h_q), float32,
        natural log, without the sink. lse never requires a gradient: in a loss it is a constant, and torch raises for a
        loss of lse alone. A query without keys has out 0, lse -inf and gradient 0.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what it got and what it needs.
    """
    q, k, v, s_aux = cast_under_autocast(q, k, v, s_aux)
    differentiable = needs_grad(q, k, v, s_aux)
    request: Request = {
        **FORWARD.defaults, **options, "q": q, "k": k, "v": v, "s_aux": s_aux, "differentiable": differentiable,
        "return_lse": return_lse,
    }  # fmt: skip
    if len(request) != len(FORWARD.defaults):
        FORWARD.refuse_unknown(options)
    if request["deterministic"] is False:
        request["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if not is_traced():
        if differentiable:  # else torch's dispatcher raises first, and its message only has types
            check(request)
        elif isinstance(q, torch.Tensor) and q.is_cuda:
            decoded = _decode_or_explain(request)
            if decoded is not None:
                return decoded
    out, lse = _forward(request)
    return (out, lse) if return_lse else out


@BACKWARD.describe
def sink_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    s_aux: torch.Tensor | None = None,
    **options: Unpack[BackwardOptions],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute gradients of attention with sinks, for callers who differentiate by hand, such as rings.

    `sink_attention` does this by itself if autograd records it. Here k and v may be some of the keys that the
    queries see: given the out and lse of all of them, dq of the parts add up, and dk and dv are those of the part.
    The gradient of s_aux belongs to the queries, so every part returns all of it: take one part's.

    CPU tensors run the reference, which computes in float64 from the out and lse that it is given.
    `cute_kernels.sink.request` has the arguments.

    Returns:
        dq, dk, dv in the shapes and dtypes of q, k and v, contiguous, and ds_aux (h_q,) float32, None without s_aux.
        Gradients of queries without keys and of keys without queries are 0. They have no gradients themselves.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what it got and what it needs.
    """
    request: BackwardRequest = {
        **BACKWARD.defaults, **options, "dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "s_aux": s_aux,
        "delta": options.get("delta"),
    }  # fmt: skip
    if len(request) != len(BACKWARD.defaults):
        BACKWARD.refuse_unknown(options)
    if request["deterministic"] is False:
        request["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if not is_traced():
        tensors = BACKWARD.tensors_of(request)
        require_memory(BACKWARD.tensors, tensors)
        if needs_grad(*tensors):  # torch's dispatcher comes before the checks of the operator
            check_backward(request)
    dq, dk, dv, ds_aux = _backward(request)
    return dq, dk, dv, None if s_aux is None else ds_aux


def cast_under_autocast(q: Any, k: Any, v: Any, s_aux: Any) -> tuple[Any, Any, Any, Any]:
    """Returns the tensors of a call; under autocast q, k and v in its dtype, and s_aux in float32."""
    device_type = q.device.type if isinstance(q, torch.Tensor) else None
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return q, k, v, s_aux
    dtype = torch.get_autocast_dtype(device_type)
    return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype), _cast(s_aux, torch.float32)


def _cast(t: Any, dtype: torch.dtype) -> Any:
    return t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype in _AUTOCAST else t


# ---- checks


def check(request: Request) -> None:
    """Checks the arguments; an error names the wrong one."""
    q, k, v, s_aux = request["q"], request["k"], request["v"], request["s_aux"]
    cu_seqlens_q, cu_seqlens_k = request["cu_seqlens_q"], request["cu_seqlens_k"]
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    packed = any(t is not None for t in lengths.values())
    ndim = 3 if packed else 4
    check_tensor("q", q, dtype=DTYPES)
    how = "(tokens, h_q, d) with cu_seqlens" if packed else "(batch, s_q, h_q, d), or cu_seqlens_q and cu_seqlens_k"
    require(q.dim() == ndim, "q", f"{q.dim()} dimensions, shape {tuple(q.shape)}", f"{ndim}: {how}")
    check_tensor("q", q, align=ALIGN, unit_last_stride=True)
    h_q, d = q.shape[-2:]
    device = q.device
    require(d in HEAD_DIMS, "q", f"head dimension {d}", " or ".join(map(str, HEAD_DIMS)))
    for name, t in (("k", k), ("v", v)):
        if isinstance(t, torch.Tensor) and t.dtype in _CODES:
            needs = f"{q.dtype}, that of q: codes have no gradient and no scale here; gqa_decode reads them"
            fail(name, f"dtype {t.dtype}", needs, TypeError)
        check_tensor(name, t, dtype=q.dtype, ndim=ndim, device=device, align=ALIGN, unit_last_stride=True)
    h_kv = k.shape[-2]
    need = (None, None, d) if packed else (q.shape[0], None, None, d)
    check_tensor("k", k, shape=need)
    check_tensor("v", v, shape=tuple(k.shape))
    good = h_kv > 0 and h_q > 0 and h_q % h_kv == 0
    require(good, "q", f"{h_q} heads", f"a multiple of the {h_kv} heads of k, at least one")
    for name, t in (("q", q), ("k", k)):
        tokens = t.shape[-3]
        require(tokens < MAX_TOKENS, name, f"{tokens} tokens", f"fewer than {MAX_TOKENS}")
    if s_aux is not None:
        check_tensor("s_aux", s_aux, dtype=torch.float32, shape=(h_q,), device=device, unit_last_stride=True)
    _check_options(request)
    if packed:
        for name, cu_seqlens in lengths.items():
            needs = "a tensor: sequences of queries and of keys are packed, or neither"
            require(cu_seqlens is not None, name, None, needs)
            check_tensor(name, cu_seqlens, dtype=torch.int32, ndim=1, device=device, unit_last_stride=True)
        assert cu_seqlens_q is not None and cu_seqlens_k is not None
        check_tensor("cu_seqlens_k", cu_seqlens_k, shape=tuple(cu_seqlens_q.shape))
    if device.type != "cpu":
        require_sm90("q", device)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        if request["max_seqlen_q"] is None or request["differentiable"] or device.type == "cpu":
            _check_lengths("cu_seqlens_q", cu_seqlens_q, q.shape[0])
            _check_lengths("cu_seqlens_k", cu_seqlens_k, k.shape[0])


def _check_options(request: Request) -> None:
    FORWARD.check_options(request)
    longest = request["max_seqlen_q"]
    if longest is not None:
        packed = request["cu_seqlens_q"] is not None
        require(packed, "max_seqlen_q", f"{longest} without cu_seqlens_q", "None: it is for packed sequences")


_checked_lengths: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The version of each tensor when it was checked, and its number of tokens."""


def _check_lengths(name: str, cu_seqlens: torch.Tensor, tokens: int) -> None:
    """Checks contents on the device, once for each tensor and each version of it.

    All layers of a model share their lengths, so a step waits only once. Capture forbids the wait. An inference-mode
    tensor has no version, so only its first contents are checked.
    """
    if memory.is_capturing(cu_seqlens.device):
        return
    version = 0 if cu_seqlens.is_inference() else cu_seqlens._version
    if _checked_lengths.get(cu_seqlens) == (version, tokens):
        return
    borders = cu_seqlens.tolist()
    needs = f"0 first, no decrease, and at most the number of tokens, {tokens}, last"
    require(bool(borders), name, "no element", needs)
    require(borders[0] == 0, name, f"{borders[0]} first", needs)
    for i in range(1, len(borders)):
        if borders[i] < borders[i - 1]:
            fail(name, f"{borders[i]} after {borders[i - 1]} at index {i}", needs)
    require(borders[-1] <= tokens, name, f"{borders[-1]} last", needs)
    _checked_lengths[cu_seqlens] = (version, tokens)


# ---- decoding


def _decodes(request: Request) -> bool:
    """Returns whether the call runs the kernel of `gqa_decode`, whose results are deterministic."""
    q, k = request["q"], request["k"]
    if q.dim() != 4 or k.dim() != 4:
        return False
    chosen = route(
        s_q=q.shape[1],
        h_q=q.shape[2],
        h_kv=k.shape[2],
        d=q.shape[3],
        dtype=NAMES.get(q.dtype, "other"),
        packed=request["cu_seqlens_q"] is not None or request["cu_seqlens_k"] is not None,
        differentiable=request["differentiable"],
    )
    return chosen == "decode"


def _fits_prefill(request: Request) -> bool:
    """Whether q and k pass the two checks that `gqa_decode` lacks: rows of q are 16-byte aligned, and k has q's dtype.

    A call that fails them goes to `check`, which refuses it in the same words as on a CPU and with more query tokens.
    """
    q, row = request["q"], ALIGN // request["q"].element_size()
    if q.data_ptr() % ALIGN or request["k"].dtype is not q.dtype:
        return False
    return q.is_contiguous() or all(n <= 1 or step % row == 0 for n, step in zip(q.shape[:3], q.stride(), strict=False))


def _decode(request: Request) -> Any:
    return gqa_decode(
        request["q"],
        request["k"],
        request["v"],
        layout="BSNH",
        causal=request["causal"],
        window=request["window"],
        s_aux=request["s_aux"],
        softmax_scale=request["softmax_scale"],
        num_splits=request["num_splits"],
        return_lse=request["return_lse"],
    )


def _decode_if_few(request: Request) -> Any:
    """Returns the result of `gqa_decode` if that is faster; None if the forward kernel must run."""
    if not (_decodes(request) and _fits_prefill(request)):
        return None
    _check_options(request)
    return _decode(request)


_decode_or_explain = launch_or_explain(FORWARD, _decode_if_few, check)


# ---- operators


def _run_forward(request: Request) -> Both:
    """The forward operator."""
    check(request)
    if request["q"].is_cuda:
        return _forward_on_gpu(request)
    out, lse = reference_sink_attention(**_of_reference(request))
    return out.to(request["q"].dtype), lse.float()


def _forward_on_gpu(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the forward; the arguments have been checked."""
    if _decodes(request):
        out, lse = _decode(request)
        return out, lse
    out, lse = _fake_forward(request)
    if _has_queries_and_keys(request):
        launch_forward(_launchable(request), out, lse)
    else:
        out.zero_()
        lse.fill_(-torch.inf)
    return out, lse


def _has_queries_and_keys(request: Request) -> bool:
    """Returns whether there is anything to launch for; all packed tokens may be padding."""
    cu_seqlens = request["cu_seqlens_q"]
    return bool(request["q"].numel() and request["k"].numel() and (cu_seqlens is None or cu_seqlens.shape[0] > 1))


def _fake_forward(request: Request) -> Both:
    q = request["q"]
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _launchable(request: Request) -> Request:
    """Makes the request for a launch: fills in defaults, and copies tensors whose rows kernels cannot read.

    Strides of q, k and v are then positive multiples of 16 bytes, except in dimensions of size 1. A window hides a key.
    """
    q, k, v = (_plain(request[name]) for name in ("q", "k", "v"))
    window, scale = request["window"], request["softmax_scale"]
    # the tokens of other sequences must not decide a row's kernel
    most = k.shape[-3] if request["cu_seqlens_q"] is None else MAX_TOKENS
    return {
        **request,
        "q": q,
        "k": k,
        "v": v,
        "window": None if window is None or window >= most else window,
        "softmax_scale": q.shape[-1] ** -0.5 if scale is None else float(scale),
    }


def _plain(t: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a contiguous copy if rows are expanded, not contiguous or not aligned.

    In q, k and v the checks leave only expanded rows. A gradient comes as autograd made it, for example expanded by a
    sum.
    """
    stride, size, row = t.stride(), t.shape, ALIGN // t.element_size()
    good = t.data_ptr() % ALIGN == 0 and stride[-1] == 1
    for dim in range(t.dim() - 1):
        good &= size[dim] <= 1 or (stride[dim] > 0 and stride[dim] % row == 0)
    return t if good else t.clone(memory_format=torch.contiguous_format)


def check_backward(request: BackwardRequest) -> Request:
    """Checks the arguments, naming the wrong one; returns the request of the forward."""
    forward: Request = FORWARD.request(
        **{name: value for name, value in request.items() if name in FORWARD.arguments}, differentiable=True
    )
    check(forward)
    q = request["q"]
    for name, t in (("dout", request["dout"]), ("out", request["out"])):
        check_tensor(name, t, dtype=q.dtype, shape=tuple(q.shape), device=q.device)
    rows: dict[str, object] = {"lse": request["lse"]}
    if request["delta"] is not None:
        rows["delta"] = request["delta"]
    for name, values in rows.items():
        check_tensor(name, values, dtype=torch.float32, shape=tuple(q.shape[:-1]), device=q.device)
    return forward


def _run_backward(request: BackwardRequest) -> Gradients:
    """The backward operator."""
    forward = check_backward(request)
    q, out, lse, delta = request["q"], request["out"], request["lse"], request["delta"]
    if not q.is_cuda:
        dq, dk, dv, ds_aux = reference_sink_attention_backward(**_of_backward_reference(request))
        sink = q.new_empty(0, dtype=torch.float32) if ds_aux is None else ds_aux.float()
        return Gradients(dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), sink)
    gradients = _fake_backward(request)
    if _has_queries_and_keys(forward):
        rows = BackwardRows(
            _plain(request["dout"]),
            out.contiguous(),
            lse.detach().contiguous(),
            None if delta is None else delta.detach().contiguous(),
        )
        launch_backward(_launchable(forward), rows, gradients)
    else:
        for t in gradients:
            t.zero_()
    return gradients


def _fake_backward(request: BackwardRequest) -> Gradients:
    q, k, v, s_aux = request["q"], request["k"], request["v"], request["s_aux"]
    sink = q.new_empty((0,) if s_aux is None else s_aux.shape, dtype=torch.float32)
    return Gradients(q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), sink)


_SAVED = [name for name in BACKWARD.tensors if name in FORWARD.tensors]


def _setup_context(ctx: Any, request: dict[str, Any], output: Both) -> None:
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(out, lse, *(request[name] for name in _SAVED))
    ctx.options = {name: request[name] for name in BACKWARD.names if name not in BACKWARD.tensors}


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    if dout is None:
        return {}
    out, lse, *tensors = ctx.saved_tensors
    inputs = dict(zip(_SAVED, tensors, strict=True))
    backward = getattr(torch.ops, NAMESPACE).sink_attention_backward.default
    dq, dk, dv, ds_aux = backward(dout=dout, out=out, lse=lse, delta=None, **inputs, **ctx.options)
    return {"q": dq, "k": dk, "v": dv, "s_aux": None if inputs["s_aux"] is None else ds_aux}


def _refuse_second_derivatives(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
    raise RuntimeError("sink_attention: it is differentiable once; its gradients have no gradients")


_of_reference = FORWARD.arguments_of(reference_sink_attention)
_of_backward_reference = BACKWARD.arguments_of(reference_sink_attention_backward)
_backward = BACKWARD.register(_run_backward, _fake_backward, backward=_refuse_second_derivatives)
_forward = FORWARD.register(_run_forward, _fake_forward, backward=_differentiate, setup_context=_setup_context)
