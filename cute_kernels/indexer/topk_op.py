"""`index_topk` finds the positions, or slots, of the highest logits of each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cute_kernels.indexer.reference import index_topk_reference
from cute_kernels.indexer.request import TOPK, TopkOptions, TopkRequest
from cute_kernels.indexer.topk_spec import MAX_TOPK, MAX_WIDTH, TopkSpec
from cute_kernels.runtime import memory
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_int, check_tensor, require
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import PreparedLaunches, do_nothing, launch_or_explain
from cute_kernels.runtime.ops import is_traced
from cute_kernels.runtime.overlap import holds

if TYPE_CHECKING:
    from typing_extensions import Unpack

NUM_SLOTS = 2**31
"""A cache has at most this many slots, because slots are int32."""


@TOPK.describe
def index_topk(logits: torch.Tensor, lengths: torch.Tensor, topk: int, **options: Unpack[TopkOptions]) -> torch.Tensor:
    """Choose the `topk` highest logits of each row, exactly, and list where they are in ascending order.

    Logits are compared as float32 numbers: -0.0 equals 0.0, and NaN is -inf. Of equal ones the lower positions are
    chosen. So the result is a function of the logits alone: ranks, replays and batches agree in every element. Nothing
    waits for the host, and CUDA graphs replay with other lengths. CPU tensors are sorted by plain torch.
    `cute_kernels.indexer.request` has the arguments.

    Returns:
        (rows, topk) int32: positions or slots, in the order of positions; -1 after the last.

    Raises:
        TypeError: an argument is no tensor, or of another dtype.
        ValueError: a shape, stride, number or device does not fit, the GPU is not an SM90, or a tensor requires
            gradients while they are enabled: there is no backward.
    """
    request: TopkRequest = {**TOPK.defaults, **options, "logits": logits, "lengths": lengths, "topk": topk}
    if len(request) != len(TOPK.defaults):
        TOPK.refuse_unknown(options)
    if torch.is_grad_enabled():
        TOPK.refuse_gradients(request)
    if isinstance(logits, torch.Tensor) and logits.is_cuda and not is_traced():
        return _launch_or_explain(request)
    out = request["out"]
    if out is None:
        _check_sizes(logits)
        check_int("topk", topk, 1, MAX_TOPK)
        out = logits.new_empty((logits.shape[0], topk), dtype=torch.int32)
    _index_topk({**request, "out": out})
    return out


class PreparedLaunch(NamedTuple):
    """Facts that stay the same while the shapes of a call do: the kernel, and a template of out."""

    kernel: Callable[..., None]
    out_like: torch.Tensor


_prepared: PreparedLaunches[tuple[Any, ...], PreparedLaunch] = PreparedLaunches()


def _launch(request: TopkRequest) -> torch.Tensor:
    logits, lengths, table, starts, out = (
        request["logits"], request["lengths"], request["block_table"], request["row_starts"], request["out"],
    )  # fmt: skip
    key = (
        logits.get_device(), logits.shape, logits.is_neg(), lengths.dtype, None if starts is None else starts.dtype,
        TOPK.key(request),
        None if table is None else (table.shape, table.dtype), None if out is None else (out.shape, out.dtype),
    )  # fmt: skip
    prepared = _prepared.get(key) or _prepare(key, request)
    if out is None:
        out = memory.empty_like(prepared.out_like)
    elif holds(out, [t.data_ptr() for t in (logits, lengths, table, starts) if t is not None]):
        TOPK.check_outputs(request)
    prepared.kernel(logits, lengths, starts, table, out, request["page_size"] or 1, NUM_SLOTS)
    return out


def _prepare(key: tuple[Any, ...], request: TopkRequest) -> PreparedLaunch:
    """Loads the kernel after all checks. If there is nothing to write, another function replaces it."""
    check(request)
    logits = request["logits"]
    rows, width = logits.shape
    out_like = memory.template((rows, request["topk"]), torch.int32, logits.device)
    if not rows:
        return PreparedLaunch(do_nothing, out_like)
    num_sms = memory.constants(logits.device).num_sms
    has_table, has_starts = request["block_table"] is not None, request["row_starts"] is not None
    spec = TopkSpec.for_launch(rows, width, num_sms, has_table=has_table, has_starts=has_starts)
    return _prepared.keep(key, PreparedLaunch(get_kernel(spec), out_like), logits.device)


def _check_sizes(logits: torch.Tensor) -> None:
    """Checks the argument that determines the size of the result."""
    check_tensor("logits", logits, dtype=torch.float32, shape=(None, None), unit_last_stride=True)


def check(request: TopkRequest) -> None:
    """Checks the arguments; an error names the wrong one."""
    logits, table = request["logits"], request["block_table"]
    _check_sizes(logits)
    TOPK.check_options(request)
    (rows, width), device = logits.shape, logits.device
    require(width <= MAX_WIDTH, "logits", f"shape {tuple(logits.shape)}", f"rows of up to {MAX_WIDTH} logits")
    require(rows < 2**27, "logits", f"shape {tuple(logits.shape)}", "fewer than 2^27 rows")
    check_tensor("lengths", request["lengths"], dtype=torch.int32, shape=(rows,), device=device)
    if table is not None:
        check_tensor("block_table", table, dtype=torch.int32, shape=(None, None), device=device, unit_last_stride=True)
        batch = table.shape[0]
        fits = rows % batch == 0 if batch else rows == 0
        require(fits, "block_table", f"{batch} rows for {rows} of logits", "a number of rows that divides theirs")
    given = request["page_size"] is not None
    needs = "an int with block_table, and None without"
    require(given == (table is not None), "page_size", request["page_size"], needs)
    if request["row_starts"] is not None:
        check_tensor("row_starts", request["row_starts"], dtype=torch.int32, shape=(rows,), device=device)
    if request["out"] is not None:
        shape = (rows, request["topk"])
        check_tensor("out", request["out"], dtype=torch.int32, shape=shape, device=device, unit_last_stride=True)
    if device.type != "cpu":
        require_sm90("logits", device)
    TOPK.check_outputs(request)


def _run(request: TopkRequest) -> None:
    """The torch operator: it writes to `out`, which is always given."""
    if request["logits"].device.type != "cpu":
        _launch(request)
        return
    check(request)
    out = request["out"]
    assert out is not None
    out.copy_(index_topk_reference(**_of_reference(request)))


_of_reference = TOPK.arguments_of(index_topk_reference)
_launch_or_explain = launch_or_explain(TOPK, _launch, check)
_index_topk = TOPK.register(launch_or_explain(TOPK, _run, check), lambda request: None)
