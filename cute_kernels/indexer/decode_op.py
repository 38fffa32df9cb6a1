"""`index_decode` finds the tokens that sparse attention reads, from queries of the indexer and its cache of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cute_kernels.indexer.append_op import check_index_cache
from cute_kernels.indexer.reference import index_topk_reference
from cute_kernels.indexer.request import DECODE, DecodeInputs, DecodeOptions, DecodeRequest
from cute_kernels.indexer.score_spec import HEADS, PAGE_STEP, ScoreSpec
from cute_kernels.indexer.topk_op import NUM_SLOTS
from cute_kernels.indexer.topk_spec import MAX_TOPK, MAX_WIDTH, TopkSpec
from cute_kernels.runtime import memory
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_int, check_tensor, require
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import PreparedLaunches, do_nothing, launch_or_explain
from cute_kernels.runtime.ops import is_traced
from fp8_mla import reference_index_logits
from fp8_mla.formats import INDEX_KEY

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_S_Q = 8
MAX_LOGITS = 2**30
"""Most logits of a call: 4 GB."""
_ALIGN = 16  # bytes: alignment of the copies of q and of keys


@DECODE.describe
def index_decode(
    q: torch.Tensor, weights: torch.Tensor, k_cache: torch.Tensor, **options: Unpack[DecodeOptions]
) -> torch.Tensor:
    """Choose the tokens that each query attends to: score all index keys it sees, take the highest.

        logit[t] = scale[t] * sum over h of weights[h] * max(q[h] . codes[t], 0)

    Products come from the FP8 tensor core; sums are float32. The choice is made as in `index_topk`: exact on these
    logits, ascending by position, ties to the lower position. CPU tensors are scored by plain torch in float64.
    `cute_kernels.indexer.request` has the arguments.

    Returns:
        (batch, s_q, topk) int32, in the order of positions, -1 after the last and for a slot that no table has.

    Raises:
        TypeError: an argument is no tensor, or of another dtype.
        ValueError: a shape, stride, number or device does not fit, a call has more than 2^30 logits, the GPU is not an
            SM90, or a tensor requires gradients while they are enabled: there is no backward.
    """
    tensors: DecodeInputs = {"q": q, "weights": weights, "k_cache": k_cache}
    request: DecodeRequest = {**DECODE.defaults, **options, **tensors}
    if len(request) != len(DECODE.defaults):
        DECODE.refuse_unknown(options)
    if torch.is_grad_enabled():
        DECODE.refuse_gradients(request)
    if isinstance(q, torch.Tensor) and q.is_cuda and not is_traced():
        return _launch_or_explain(request)
    out, logits = request["out"], request["logits"]
    _check_topk(request)
    if out is None:
        _check_query(q)
        out = q.new_empty((*q.shape[:2], request["topk"]), dtype=torch.int32)
    if logits is None:  # the operator only writes to tensors that it is given
        _check_query(q)
        check_tensor("k_cache", k_cache)
        table, _ = _required(request)
        require(k_cache.dim() > 1, "k_cache", f"shape {tuple(k_cache.shape)}", "(num_pages, page_size, 132)")
        require(table.dim() == 2, "block_table", f"shape {tuple(table.shape)}", "(batch, max_pages)")
        logits = q.new_empty((*q.shape[:2], table.shape[1] * k_cache.shape[1]), dtype=torch.float32)
    _index_decode({**request, "out": out, "logits": logits})
    return out


class PreparedLaunch(NamedTuple):
    """Facts that stay the same while the shapes of a call do: both kernels, the first one's CTAs, and templates.

    slots  page size of the cache whose slots are wanted, and its number of slots
    apart  see `Operator.check_addresses`
    """

    score: Callable[..., None]
    choose: Callable[..., None]
    ctas: int
    slots: tuple[int, int]
    out_like: torch.Tensor
    logits_like: torch.Tensor
    lengths_like: torch.Tensor
    apart: set[tuple[int, ...]]


_prepared: PreparedLaunches[tuple[Any, ...], PreparedLaunch] = PreparedLaunches()


def _launch(request: DecodeRequest) -> torch.Tensor:
    q, weights, k_cache, names, out, logits = (
        request["q"], request["weights"], request["k_cache"], request["slot_table"], request["out"], request["logits"],
    )  # fmt: skip
    block_table, seqlens = _required(request)
    key = (
        q.get_device(), q.shape, q.dtype, k_cache.shape, k_cache.stride(), k_cache.dtype, block_table.shape,
        block_table.dtype, seqlens.shape, seqlens.dtype, weights.is_neg(), DECODE.key(request),
        k_cache.untyped_storage().nbytes() - k_cache.storage_offset(),  # the kernel is not told where pages end
        # the second kernel's own checks: it would refuse only after the first has been launched
        None if names is None else (names.shape, names.dtype, names.get_device(), names.stride(-1)),
        None if out is None else (out.shape, out.dtype, out.get_device()),
        None if logits is None else (logits.shape, logits.dtype),
    )  # fmt: skip
    prepared = _prepared.get(key) or _prepare(key, request)
    if out is not None or logits is not None:
        DECODE.check_addresses(request, prepared.apart)
    out = memory.empty_like(prepared.out_like) if out is None else out
    unscored = request["topk"] if logits is None else 0  # queries of no more keys get all of them
    logits = memory.empty_like(prepared.logits_like) if logits is None else logits.flatten(0, 1)
    lengths = memory.empty_like(prepared.lengths_like)
    if k_cache.dtype is not torch.uint8:
        k_cache = k_cache.view(torch.uint8)
    if k_cache.dim() == 4:
        k_cache = k_cache.squeeze(2)
    seqlens = seqlens.unsqueeze(1) if seqlens.dim() == 1 else seqlens
    prepared.score(
        q.view(torch.uint8), weights, k_cache, block_table, seqlens, logits, lengths, prepared.ctas, request["first"],
        request["last"], unscored,
    )  # fmt: skip
    table = None if request["return_positions"] else block_table if names is None else names
    prepared.choose(logits, lengths, None, table, out.flatten(0, 1), *prepared.slots)
    return out


def _required(request: DecodeRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns table and lengths, which callers give by name.

    Raises:
        TypeError: table or lengths are missing.
    """
    table, seqlens = request["block_table"], request["cache_seqlens"]
    for name, t in (("block_table", table), ("cache_seqlens", seqlens)):
        check_tensor(name, t)
    assert table is not None and seqlens is not None
    return table, seqlens


def _prepare(key: tuple[Any, ...], request: DecodeRequest) -> PreparedLaunch:
    """Loads the kernels after all checks. If there is nothing to write, other functions replace them."""
    check(request)
    q, device = request["q"], request["q"].device
    batch, s_q, heads, _ = q.shape
    num_pages, page_size = request["k_cache"].shape[:2]
    block_table, _ = _required(request)
    rows, width = batch * s_q, block_table.shape[1] * page_size
    templates = (
        memory.template((batch, s_q, request["topk"]), torch.int32, device),
        memory.template((rows, width), torch.float32, device),
        memory.template((rows,), torch.int32, device),
    )
    slots = (page_size, num_pages * page_size)
    if request["slot_page_size"] is not None:
        slots = (request["slot_page_size"], NUM_SLOTS)
    if not rows:
        return PreparedLaunch(do_nothing, do_nothing, 1, slots, *templates, set())
    num_sms = memory.constants(device).num_sms
    has_table = not request["return_positions"]
    choose = TopkSpec.for_launch(rows, width, num_sms, has_table=has_table, has_starts=False)
    score = ScoreSpec.for_launch(heads, s_q)
    kernels = get_kernel(score), get_kernel(choose) if request["topk"] else do_nothing
    ctas = score.ctas_per_sm * num_sms
    return _prepared.keep(key, PreparedLaunch(*kernels, ctas, slots, *templates, set()), device)


def _check_query(q: torch.Tensor) -> None:
    """Checks the argument that determines the size of the result."""
    dtypes, shape = (torch.float8_e4m3fn, torch.uint8), (None, None, None, INDEX_KEY.d_qk)
    check_tensor("q", q, dtype=dtypes, shape=shape)


def _check_topk(request: DecodeRequest) -> None:
    """Raises if nothing is asked for. The operator cannot see that, because all its outputs are given."""
    topk, needs = request["topk"], f"1 to {MAX_TOPK}; 0 if logits are given, which are then all that is wanted"
    check_int("topk", topk, 0, MAX_TOPK)
    require(topk > 0 or request["logits"] is not None, "topk", topk, needs)


def check(request: DecodeRequest) -> None:
    """Checks the arguments; an error names the wrong one."""
    q, k_cache, topk = request["q"], request["k_cache"], request["topk"]
    _check_query(q)
    check_tensor("q", q, align=_ALIGN, unit_last_stride=True)
    DECODE.check_options(request)
    _check_topk(request)
    (batch, s_q, heads, _), device = q.shape, q.device
    require(heads in HEADS, "q", f"{heads} heads", f"one of {', '.join(map(str, HEADS))}")
    require(1 <= s_q <= MAX_S_Q, "q", f"s_q {s_q}", f"1 to {MAX_S_Q}")
    shape = (batch, s_q, heads)
    check_tensor("weights", request["weights"], dtype=torch.float32, shape=shape, device=device, unit_last_stride=True)
    check_index_cache(k_cache, device)
    num_pages, page_size = k_cache.shape[:2]
    require(num_pages >= 1, "k_cache", "no pages", "at least one")
    require(page_size % PAGE_STEP == 0, "k_cache", f"pages of {page_size} keys", f"a multiple of {PAGE_STEP}")
    table, seqlens = _required(request)
    for name, t in (("block_table", table), ("slot_table", request["slot_table"])):
        if t is not None:
            check_tensor(name, t, dtype=torch.int32, shape=(batch, None), device=device, unit_last_stride=True)
    width = table.shape[1] * page_size
    require(1 <= width <= MAX_WIDTH, "block_table", f"{width} keys a request", f"1 to {MAX_WIDTH}")
    logits = batch * s_q * width
    require(logits <= MAX_LOGITS, "block_table", f"{logits} logits of all queries", f"at most {MAX_LOGITS}")
    lengths_shape = (batch,) if seqlens.dim() == 1 else (batch, s_q)
    check_tensor("cache_seqlens", seqlens, dtype=torch.int32, shape=lengths_shape, device=device)
    given, got = request["slot_page_size"] is not None, request["slot_page_size"]
    needs = "an int with slot_table, and None without"
    require(given == (request["slot_table"] is not None), "slot_page_size", got, needs)
    forced = request["first"] + request["last"]
    require(forced <= topk, "first, last", f"{forced} keys in all", f"at most topk, {topk}")
    for name, t, dtype, columns in (
        ("out", request["out"], torch.int32, topk),
        ("logits", request["logits"], torch.float32, width),
    ):
        if t is not None:
            check_tensor(name, t, dtype=dtype, shape=(batch, s_q, columns), device=device)
            require(t.is_contiguous(), name, f"strides {t.stride()}", "a contiguous tensor")
    if device.type != "cpu":
        require_sm90("q", device)
    DECODE.check_outputs(request)


def _run(request: DecodeRequest) -> None:
    """The torch operator: it writes to `out`, which is always given."""
    if request["q"].device.type == "cpu":
        check(request)
        _decode_on_cpu(request)
    else:
        _launch(request)


def _decode_on_cpu(request: DecodeRequest) -> None:
    q, k_cache, out = request["q"].view(torch.float8_e4m3fn), request["k_cache"], request["out"]
    block_table, seqlens = _required(request)
    assert out is not None
    (batch, s_q), (num_pages, page_size) = q.shape[:2], k_cache.shape[:2]
    logits = reference_index_logits(q, request["weights"], k_cache, block_table=block_table, cache_seqlens=seqlens)
    width = logits.shape[2]
    lengths = seqlens.clamp(0, width)
    if lengths.dim() == 1:
        lengths = (lengths[:, None] - (s_q - 1) + torch.arange(s_q, dtype=torch.int32, device=q.device)).clamp(0)
    positions = torch.arange(width, dtype=torch.int32, device=q.device)
    seen = positions < lengths[..., None]
    forced = (positions < request["first"]) | (positions >= lengths[..., None] - request["last"])
    logits = logits.masked_fill(seen & forced, torch.inf)
    if request["logits"] is not None:
        request["logits"].copy_(torch.where(seen, logits, request["logits"]))
    table, slot_page_size = request["slot_table"], request["slot_page_size"]
    if table is None:
        exists = (block_table >= 0) & (block_table < num_pages)
        table, slot_page_size = torch.where(exists, block_table, -1), page_size
    if request["return_positions"]:
        table = slot_page_size = None
    rows = (logits.view(batch * s_q, width), lengths.reshape(-1).int())
    out.copy_(index_topk_reference(*rows, request["topk"], table, slot_page_size).view(out.shape))


_launch_or_explain = launch_or_explain(DECODE, _launch, check)
_index_decode = DECODE.register(launch_or_explain(DECODE, _run, check), lambda request: None)
