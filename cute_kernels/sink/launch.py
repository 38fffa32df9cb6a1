"""The launches of `sink_attention` on a GPU: their arguments and their scratch memory.

`op.py` has checked all arguments, allocated all outputs, and answered calls without any query or key itself.

Scratch memory comes from torch's allocator, so it belongs to the current stream, or to the graph under capture. Only
the counters of the kernels' schedules, which are 0 between launches, are kept: see `runtime/workspace.py`.

The kernels take softmax scales above 0, and the backward at most 65535 sequences and heads. No model makes other calls;
they run plain torch on the tensors' device, in float32, which is slow and not possible under graph capture.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from cute_kernels.runtime import memory, workspace
from cute_kernels.runtime.cache import KernelSpec
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.memory import MAX_HEADS
from cute_kernels.runtime.sources import parameters
from cute_kernels.sink.backward_spec import (
    PADDING,
    QUERIES,
    SinkBackwardSpec,
    SinkFinishSpec,
    SinkPrepareSpec,
    SinkQueryGradSpec,
)
from cute_kernels.sink.plan import backward_section, forward_section
from cute_kernels.sink.reference import reference_sink_attention, reference_sink_attention_backward
from cute_kernels.sink.request import FORWARD, Request
from cute_kernels.sink.spec import SinkForwardSpec, SinkWorkListSpec

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
NO_WINDOW = 2**30
SCALES = (2.0**-100, 2.0**100)
"""The range of softmax scales that leaves room for scores in float32."""
MAX_GRID = 65535
COUNTERS = 2  # counters of a kernel that takes work tiles from a list


class BackwardRows(NamedTuple):
    """Inputs of a backward with a row for each query.

    dout    gradient of out, its shape and dtype; in a launch with strides and alignment of q
    out     q's shape and dtype, contiguous
    lse     (batch, s_q, h_q), packed (tokens_q, h_q), float32, contiguous: natural log, without the sink
    delta   lse's shape, float32, contiguous; None: sum_d dout out
    """

    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor | None


class Gradients(NamedTuple):
    """Outputs of the backward; `ds_aux` has no elements if there is no sink."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    ds_aux: torch.Tensor


class _Sizes(NamedTuple):
    """Sizes of a call. If packed, s_q and s_k count all sequences together."""

    batch: int
    s_q: int
    s_k: int
    h_q: int
    h_kv: int
    d: int
    packed: bool

    @classmethod
    def of(cls, request: Request) -> _Sizes:
        (s_q, h_q, d), (s_k, h_kv) = request["q"].shape[-3:], request["k"].shape[-3:-1]
        cu_seqlens = request["cu_seqlens_q"]
        batch = request["q"].shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return cls(batch, s_q, s_k, h_q, h_kv, d, cu_seqlens is not None)

    @property
    def rows(self) -> int:
        """Number of queries of all sequences."""
        return self.s_q if self.packed else self.batch * self.s_q

    @property
    def ratio(self) -> int:
        """Query heads of a KV head."""
        return self.h_q // self.h_kv


def launch_forward(request: Request, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Starts the forward.

    Args:
        request: as `op` makes it for launches, with at least one query and one key in total.
        out: q's shape and dtype, contiguous, its memory not initialized. Every element is written.
        lse: (batch, s_q, h_q), packed (tokens_q, h_q), float32, contiguous, not initialized. Every element is written:
            natural log, the softmax scale applied, without the sink.

    A query without keys (at a negative position under `causal`, in a packed sequence that has none, or past the last
    sequence) gets out 0 and lse -inf. A sink of +inf gives out 0 and leaves lse unchanged. Tokens of another
    sequence, NaN included, affect neither.
    """
    if not _has_kernel_scale(request):
        result, result_lse = reference_sink_attention(**_of_reference(request), dtype=torch.float32)
        out.copy_(result)
        lse.copy_(result_lse)
        return
    sizes = _Sizes.of(request)
    spec = SinkForwardSpec.for_launch(**_kind(request, sizes), ratio=sizes.ratio)
    results = {"mSink": _sink(request), "mOut": out, "mLse": lse}
    work = _work(request, sizes, spec.rows, queries=out, lses=lse)
    _run(spec, {**_operands(request), **results, **work, **_numbers(request, sizes, "queries")})


def launch_backward(request: Request, rows: BackwardRows, gradients: Gradients) -> None:
    """Starts the backward: `prepare`, the key-stationary kernel, and `finish` or the query-stationary kernel.

    Args:
        request: the request of the forward, with at least one query and one key in total.
        rows: inputs of the same queries.
        gradients: of q's, k's and v's shapes and dtypes, contiguous, not initialized. Every element is written: 0 for a
            query without keys and for a key that no query sees. A sink of -inf or +inf gets 0, and so does a head whose
            queries have no keys.

    If deterministic, the same call gives the same bits in all four gradients. Otherwise dq is a float32 sum whose terms
    come in any order; dk, dv and ds_aux have the same bits anyway.
    """
    sizes = _Sizes.of(request)
    if not _has_kernel_scale(request) or max(sizes.batch, sizes.h_q) > MAX_GRID:
        found = reference_sink_attention_backward(**_of_reference(request), **rows._asdict(), dtype=torch.float32)
        for target, gradient in zip(gradients, found, strict=True):
            if gradient is not None:
                target.copy_(gradient)
        return
    kind, (dq, dk, dv, ds_aux) = _kind(request, sizes), gradients
    spec = SinkBackwardSpec.for_launch(**kind, deterministic=request["deterministic"])
    common = (spec.dtype, spec.d, spec.packed)
    out, dout, given = _strided(rows.out), _strided(rows.dout), rows.delta is not None
    inputs = {**_operands(request), "mDOut": dout}
    positions = -(-(sizes.rows + PADDING * sizes.batch) // QUERIES) * QUERIES
    scratch = functools.partial(torch.empty, dtype=torch.float32, device=out.device)
    stats = scratch((2, sizes.h_q, positions))
    blocks = -(-(positions if spec.packed else sizes.s_q) // SinkPrepareSpec.rows)
    parts = scratch((sizes.h_q, blocks if spec.packed else sizes.batch * blocks))
    sums = scratch((sizes.h_q, positions, spec.d) if spec.fused else 0)
    shared = {"mCuQ": request["cu_seqlens_q"], "sums": sums.data_ptr(), "mStats": stats}

    prepared = {"mOut": out, "mDOut": dout, "mLse": rows.lse, "mDelta": rows.delta}
    prepared |= {"mSink": _sink(request), "mParts": parts}
    _run(SinkPrepareSpec(*common, spec.fused, given), {**shared, **prepared})
    work = _work(request, sizes, spec.keys, of_keys=True, queries=dq, keys=dk, values=dv)
    _run(spec, {**shared, **inputs, "mDK": dk, "mDV": dv, **work, **_numbers(request, sizes, "keys")})
    if spec.fused:
        scale = request["softmax_scale"]
        _run(SinkFinishSpec(*common), {**shared, "mDQ": dq, "positions": positions, "softmax_scale": scale})
    else:
        queries = SinkQueryGradSpec.for_launch(**kind, ratio=sizes.ratio)
        work = _work(request, sizes, queries.rows)
        _run(queries, {**shared, **inputs, "mDQ": dq, **work, **_numbers(request, sizes, "queries")})
    if request["s_aux"] is not None:
        torch.sum(parts, -1, out=ds_aux)


# ---- arguments of kernels


def _run(spec: KernelSpec, arguments: Mapping[str, Any]) -> None:
    """Launches the kernel of a spec with the arguments that it takes."""
    get_kernel(spec)(*(arguments[name] for name in parameters(spec.kernel)))


_of_reference = FORWARD.arguments_of(reference_sink_attention)


def _has_kernel_scale(request: Request) -> bool:
    scale = request["softmax_scale"]
    return scale is not None and SCALES[0] <= scale <= SCALES[1]


def _operands(request: Request) -> dict[str, torch.Tensor]:
    return {"mQ": _strided(request["q"]), "mK": _strided(request["k"]), "mV": _strided(request["v"])}


def _mask(request: Request) -> dict[str, int]:
    """Returns the kernels' arguments that say which keys a query sees."""
    return {"window": NO_WINDOW if request["window"] is None else request["window"], "causal": int(request["causal"])}


def _counters(device: torch.device) -> int:
    """Returns the address of counters that are 0 when the next launch begins, and again when it has ended.

    It must be called last: under capture the counters may be memory of the graph that the next tensor would get.
    """
    return workspace.addresses(_need(device))[1]


@memory.once_per_device
def _need(device: torch.device) -> workspace.Need:
    memory.require_not_capturing(device)
    return workspace.reserve(device, 0, COUNTERS)


def _sink(request: Request) -> torch.Tensor:
    """Returns the sinks, -inf if there are none."""
    heads = request["q"].shape[-2]
    s_aux = request["s_aux"]
    if s_aux is not None:
        return s_aux.detach().as_strided((heads,), (1,))  # with one head the stride may be anything
    if heads <= MAX_HEADS:
        return memory.constants(request["q"].device).no_sink[:heads]
    return torch.full((heads,), -torch.inf, dtype=torch.float32, device=request["q"].device)


def _strided(t: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with strides that kernels take, also in dimensions of size 1, where torch allows any."""
    if 1 in t.shape:
        d = t.shape[-1]
        return t.detach().as_strided(t.shape, [d if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)])
    return t.detach() if t.requires_grad else t


def _kind(request: Request, sizes: _Sizes) -> dict[str, Any]:
    """Returns the facts that all variants of kernels are chosen by."""
    return {"dtype": NAMES[request["q"].dtype], "d": sizes.d, "packed": sizes.packed, "window": request["window"]}


def _numbers(request: Request, sizes: _Sizes, stay: str) -> dict[str, Any]:
    """Returns numbers for the kernels whose "queries" or "keys" stay. Counters come last: see `_counters`."""
    cut: dict[str, Any] = {
        "batch": sizes.batch,
        "s_k": sizes.s_k,
        "h_kv": sizes.h_kv,
        "d": sizes.d,
        "window": request["window"],
    }
    section = backward_section(**cut) if stay == "keys" else forward_section(**cut, h_q=sizes.h_q)
    return {
        "softmax_scale": request["softmax_scale"],
        **_mask(request),
        "section": section,
        "ctas": memory.constants(request["q"].device).num_sms,
        "counters": _counters(request["q"].device),
    }


def _work(
    request: Request, sizes: _Sizes, rows: int, *, of_keys: bool = False, **filled: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    """Returns lengths, and the list of blocks of `rows` queries (or keys) from a launch; all None unless packed.

    The launch also fills rows past the last sequence of the results "queries", "lses", "keys" and "values" with zeros,
    and with -inf in "lses".
    """
    cu_seqlens_q, cu_seqlens_k = request["cu_seqlens_q"], request["cu_seqlens_k"]
    if cu_seqlens_q is None:
        return {"mCuQ": None, "mCuK": None, "mWork": None}
    listed, other = (sizes.s_k, sizes.s_q) if of_keys else (sizes.s_q, sizes.s_k)
    work = torch.empty((listed // rows + sizes.batch + 1, 2), dtype=torch.int32, device=cu_seqlens_q.device)
    lists = {"mCuQ": cu_seqlens_q, "mCuK": cu_seqlens_k, "mWork": work}
    words = sizes.d // 2  # words of two 16-bit values
    numbers = {
        "rows": rows,
        **_mask(request),
        "listed": listed,
        "other": other,
        "query_words": sizes.h_q * words,
        "heads": sizes.h_q,
        "key_words": sizes.h_kv * words,
    }
    addresses = dict.fromkeys(("queries", "lses", "keys", "values"), 0)
    addresses |= {name: t.data_ptr() for name, t in filled.items()}
    _run(SinkWorkListSpec(of_keys), {**lists, **numbers, **addresses})
    return lists
