"""`mla_fp8_append`: quantize new tokens and write them to their slots of the paged cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cute_kernels.mla.append_spec import MlaAppendSpec
from cute_kernels.mla.checks import check_cache
from cute_kernels.mla.request import APPEND, AppendInputs, AppendOptions, AppendRequest
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_tensor
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import PreparedLaunches, by_name, do_nothing, launch_or_explain
from cute_kernels.runtime.overlap import check_written, holds
from fp8_mla import TOKEN_BYTES, pack, row_views, write_pages
from fp8_mla.formats import FORMATS, PageLayout, TokenFormat, format_of_cache

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ALIGN = 16  # bytes: every access of the kernels


@APPEND.describe
def mla_fp8_append(
    kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, **options: Unpack[AppendOptions]
) -> None:
    """Quantize latent key/value vectors and store each in its slot of a paged latent cache, in place.

    The stored bytes equal those of `fp8_mla.pack`, whose docstring has the rules; docs/users/formats.md has the formats
    of a token. Data and scale rows are written in one launch. CPU tensors are packed by plain torch.
    `cute_kernels.mla.request` has the arguments.

    Raises:
        TypeError: an argument is no tensor, or of another dtype.
        ValueError: a shape, format, stride, alignment or device does not fit, the GPU is not an SM90, or a tensor
            requires gradients while they are enabled: there is no backward.
    """
    tensors: AppendInputs = {"kv": kv, "kv_cache": kv_cache, "slot_mapping": slot_mapping}
    request: AppendRequest = {**APPEND.defaults, **options, **tensors}
    if len(request) != len(APPEND.defaults):
        APPEND.refuse_unknown(options)
    if torch.is_grad_enabled():
        APPEND.refuse_gradients(request)
    _append(request)


_Launch = Callable[..., None]
_prepared: PreparedLaunches[tuple[Any, ...], _Launch] = PreparedLaunches()
"""Prepared launches: kernels by name. The key has what selects a kernel and what the kernel does not check itself."""


def _launch(request: AppendRequest) -> None:
    kv, cache, slots = request["kv"], request["kv_cache"], request["slot_mapping"]
    if slots.dtype is torch.int32:
        slots = slots.long()
    key: tuple[Any, ...] = (
        kv.get_device(), kv.shape, cache.shape, cache.stride(), cache.dtype, slots.dtype, APPEND.key(request),
    )  # fmt: skip
    if cache.shape[-1] != TOKEN_BYTES:
        # no stride says where rows of a planar page are, and the kernel does not check that they are inside of memory
        key = (*key, cache.untyped_storage().nbytes() - cache.storage_offset())
    if holds(cache, (kv.data_ptr(), slots.data_ptr())):
        check(request)
    launch = _prepared.get(key) or _prepare(key, request)
    # a view of the pages, unchecked: the key's shape and dtype passed the checks
    if cache.dtype is not torch.uint8:
        cache = cache.view(torch.uint8)
    if cache.dim() == 4:
        cache = cache.squeeze(2)
    launch(request, mKV=kv, mCache=cache, mSlots=slots)


def _prepare(key: tuple[Any, ...], request: AppendRequest) -> _Launch:
    """Loads the kernel after all checks.

    On a CPU, or without tokens, another function replaces the kernel. It checks nothing, so it is not kept.
    """
    checked, kv = check(request), request["kv"]
    if kv.device.type == "cpu":
        return functools.partial(_append_on_cpu, checked)
    tokens = kv.shape[0]
    if not tokens or not request["kv_cache"].shape[0]:
        return do_nothing
    return _prepared.keep(key, prepare_append(tokens, *checked), kv.device)


def prepare_append(tokens: int, token_format: TokenFormat, layout: PageLayout) -> _Launch:
    """Returns the launch of an append of `tokens` (1 or more) tokens to pages of one layout; compiles it if necessary.

    It also works for other numbers of tokens, where it may be slower. The kernel checks dtypes, sizes, alignment and
    devices of the tensors. It does not check that the rows of `layout` lie in a page, that their strides are multiples
    of 16 bytes (8 for the scale rows of V4), or that there are fewer than 2^31 slots.

    Raises:
        RuntimeError: the DSL is not installed, or was imported for another target.
    """
    spec = MlaAppendSpec.for_launch(tokens, token_format.name)
    rows = {name: getattr(layout, name) for name in ("data_stride", "scale_offset", "scale_stride")}
    return by_name(APPEND, get_kernel(spec), spec.kernel, **rows)


def _append_on_cpu(
    checked: Checked, request: AppendRequest, mKV: torch.Tensor, mCache: torch.Tensor, mSlots: torch.Tensor
) -> None:
    token_format, layout = checked
    packed = pack(mKV, token_format=token_format)
    write_pages(mCache, mSlots, packed, token_format=token_format, cache_layout=layout.cache_layout)


class Checked(NamedTuple):
    """The format of a cache, and where its pages have the rows of tokens."""

    token_format: TokenFormat
    layout: PageLayout


def check(request: AppendRequest) -> Checked:
    """Checks the arguments; an error names the wrong one."""
    kv, cache, slots = request["kv"], request["kv_cache"], request["slot_mapping"]
    check_tensor("kv", kv, dtype=torch.bfloat16, shape=(None, None), align=_ALIGN, unit_last_stride=True)
    APPEND.check_options(request)
    name, cache_layout = request["cache_format"], request["cache_layout"]
    check_tensor("kv_cache", cache, device=kv.device)
    if name is None:
        token_format = format_of_cache(cache.shape[-1] if cache.dim() else 0, kv.shape[1])
    else:
        token_format = FORMATS[name]
    layout = check_cache("kv_cache", cache, token_format, cache_layout)
    check_tensor("kv", kv, shape=(None, token_format.d_qk))
    slot_dtypes = (torch.int64, torch.int32)
    check_tensor("slot_mapping", slots, dtype=slot_dtypes, shape=(kv.shape[0],), device=kv.device)
    if kv.device.type != "cpu":
        require_sm90("kv", kv.device)
    for rows in row_views(cache, token_format, cache_layout):
        check_written({"kv_cache": rows}, {"kv": kv, "slot_mapping": slots})
    return Checked(token_format, layout)


_append = APPEND.register(launch_or_explain(APPEND, _launch, check), lambda request: None)
