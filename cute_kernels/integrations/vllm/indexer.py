"""vLLM's sparse indexer scores and chooses with `index_decode`, or chooses with `index_topk`.

Both choose exactly, in ascending order, the same in all tensor-parallel ranks. They serve only decode rows; prompts
keep vLLM's kernels. Written against vLLM 0.26, whose indexer calls operators of torch, and 0.33, which asks a function
for a kernel; imports no vLLM.

The indexer asks first for logits and then for a choice from them. If `index_decode` can do both, the indexer gets
`Unscored` logits, and the choice computes them.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from cute_kernels.indexer.decode_op import index_decode
from cute_kernels.indexer.topk_op import index_topk
from cute_kernels.integrations.hooks import SayOnce, or_original, replace
from cute_kernels.runtime.arch import is_sm90

logger = logging.getLogger("vllm.cute_kernels")
LOGITS = "fp8_fp4_paged_mqa_logits"
GET_TOPK = "get_indexer_topk"
OPERATORS = ("cooperative_topk", "persistent_topk")
"""Operators of `torch.ops._C`: both take logits, lengths, the result, a workspace, topk, and the longest length."""
say_once = SayOnce(functools.partial(logger.info, "cute-kernels: %s"))
"""Logs a line, once in each process."""


class Replaced:
    """A module or namespace, some of whose names are replaced."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self._original = original
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        """Returns any other name when it is asked for: operators are loaded late."""
        return getattr(self._original, name)


class Unscored(torch.Tensor):
    """Logits (rows, width) float32 that are not computed yet, with the arguments that a choice needs.

    If an operator of torch reads them, DeepGEMM computes them first, once.
    """

    decode: Callable[..., torch.Tensor]
    make: Callable[[], torch.Tensor]
    queries: torch.Size

    @staticmethod
    def of(
        decode: Callable[..., torch.Tensor], make: Callable[[], torch.Tensor], q: torch.Tensor, keys: int
    ) -> Unscored:
        """Makes unscored logits of all queries of a call.

        Args:
            decode: `index_decode` with all arguments that decide logits.
            make: returns the logits from DeepGEMM.
            q: (batch, next_n, heads, 128).
            keys: number of keys of each row, including those that no query sees.
        """
        shape = (q.shape[0] * q.shape[1], keys)
        logits = torch.Tensor._make_wrapper_subclass(Unscored, shape, dtype=torch.float32, device=q.device)
        logits.decode, logits.make, logits.queries = decode, functools.cache(make), q.shape[:2]
        return logits

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Calls an operator with computed logits."""
        args, kwargs = tree_map(made, (args, kwargs or {}))
        return func(*args, **kwargs)


def made(value: Any) -> Any:
    """Returns the value, or for unscored logits those that DeepGEMM computes."""
    return value.make() if isinstance(value, Unscored) else value


def put_off(
    get_dcp_group: Callable[[], Any],
    original: Callable[..., torch.Tensor],
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Returns unscored logits for a call of `fp8_fp4_paged_mqa_logits`.

    Args:
        get_dcp_group: returns the ranks that share a request's keys.
        original: function that computes logits.
        q: (batch, next_n, heads, 128) float8_e4m3fn, and None.
        kv_cache: (pages, page_size, 1, 132) uint8.
        weights: (batch x next_n, heads) float32.
        context_lens: (batch, next_n) int32.
        block_tables: (batch, max_pages) int32.
        args: arguments only of the original.
        kwargs: arguments only of the original.

    Raises:
        ValueError: q has scales and so is FP4, ranks share keys, whose logits they would have to compare, weights
            belong to another number of queries, or the GPU is not an SM90.
    """
    codes, scales = q
    if scales is not None:
        raise ValueError("q: got scales beside codes; needs FP8 without")
    if get_dcp_group().world_size > 1:
        raise ValueError(f"keys: got {get_dcp_group().world_size} ranks that share a request's; needs one")
    if not is_sm90(codes.device):
        raise ValueError(f"q: got a tensor on {codes.device}; needs an SM90 GPU")
    if weights.numel() != codes[..., 0].numel() or not weights.is_contiguous():
        raise ValueError(f"weights: got {tuple(weights.shape)} for q {tuple(codes.shape)}; needs one for each head")
    weights_of_q = weights.view(codes.shape[:3])
    decode = functools.partial(
        index_decode, codes, weights_of_q, kv_cache, block_table=block_tables, cache_seqlens=context_lens
    )
    make = functools.partial(original, q, kv_cache, weights, context_lens, block_tables, *args, **kwargs)
    return Unscored.of(decode, make, codes, block_tables.shape[1] * kv_cache.shape[1])


def choose(logits: torch.Tensor, seq_lens: torch.Tensor, topk_indices: torch.Tensor, topk: int) -> None:
    """Writes the positions of the highest logits of each row.

    Args:
        logits: (rows, width) float32, computed or unscored.
        seq_lens: int32, one number a row, as (rows,) or (batch, next_n).
        topk_indices: (rows, topk) int32 to write to.
        topk: number of positions to choose.

    Raises:
        ValueError: lengths have another shape, or the GPU is not an SM90; or as `index_topk`.
        TypeError: as `index_topk`.
    """
    rows = logits.shape[0]
    if seq_lens.numel() != rows:
        raise ValueError(f"seq_lens: got {tuple(seq_lens.shape)} for {rows} rows of logits; needs one for each")
    if not is_sm90(logits.device):
        raise ValueError(f"logits: got a tensor on {logits.device}; needs an SM90 GPU")
    if isinstance(logits, Unscored):
        try:
            logits.decode(topk=topk, return_positions=True, out=topk_indices.view(*logits.queries, -1))
            say_once("the sparse indexer scores and chooses with index_decode: exact, in order of positions")
            return
        except (TypeError, ValueError) as error:
            say_once(f"DeepGEMM scores the keys of the sparse indexer: {error}")
    index_topk(made(logits), seq_lens.reshape(rows), topk, out=topk_indices)
    say_once("the sparse indexer chooses with index_topk: exact, in order of positions")


def change_indexer(module: types.ModuleType) -> None:
    """Installs `choose` where the indexer of decode rows asks for a kernel, and `put_off` where it asks for logits."""
    if hasattr(module, GET_TOPK):
        _change_function(module)
    elif isinstance(getattr(module, "torch", None), types.ModuleType):
        _change_operators(module)
    elif not isinstance(getattr(module, "torch", None), Replaced):
        logger.warning("cute-kernels: the sparse indexer stays as it is: %s has no kernels to replace", module.__name__)
        return
    _change_logits(module)


def _change_logits(module: types.ModuleType) -> None:
    """Changes the function that computes the logits of decode rows, if it exists under that name."""

    def say(reason: str) -> None:
        say_once(f"DeepGEMM scores the keys of the sparse indexer: {reason}")

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def logits(*args: Any, **kwargs: Any) -> torch.Tensor:
            return put_off(module.get_dcp_group, original, *args, **kwargs)

        return functools.partial(or_original, logits, original, say)

    replace(module, LOGITS, around, lambda: None)


def _change_function(module: types.ModuleType) -> None:
    """Changes vLLM 0.33, where `get_indexer_topk(backend)` returns the function of a kernel."""

    def topk(
        logits: torch.Tensor, seq_lens: torch.Tensor, next_n: int, topk_indices: torch.Tensor, topk_tokens: int,
        max_seq_len: int,
    ) -> None:  # fmt: skip
        choose(logits, seq_lens, topk_indices, topk_tokens)

    def around(get: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: functools.partial(or_original, topk, _made(get(*args, **kwargs)), _stays)

    replace(module, GET_TOPK, around, lambda: None)


def _made(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel so that it gets computed logits."""
    return lambda *args, **kwargs: kernel(*tree_map(made, args), **tree_map(made, kwargs))


def _change_operators(module: types.ModuleType) -> None:
    """Changes vLLM 0.26, which calls `torch.ops._C.cooperative_topk` with the `torch` of its module."""

    def operator(name: str) -> Callable[..., Any]:
        def topk(
            logits: torch.Tensor, seq_lens: torch.Tensor, topk_indices: torch.Tensor, workspace: torch.Tensor,
            topk_tokens: int, max_seq_len: int,
        ) -> None:  # fmt: skip
            choose(logits, seq_lens, topk_indices, topk_tokens)

        def original(*args: Any) -> Any:  # operators are loaded late
            return _made(getattr(torch.ops._C, name))(*args)

        return functools.partial(or_original, topk, original, _stays)

    ours = Replaced(torch.ops._C, **{name: operator(name) for name in OPERATORS})
    setattr(module, "torch", Replaced(torch, ops=Replaced(torch.ops, _C=ours)))  # noqa: B010  a module has no such type


def _stays(reason: str) -> None:
    say_once(f"the sparse indexer stays with vLLM's top-k: {reason}")


CHANGES: dict[str, Callable[[types.ModuleType], None]] = {
    "vllm.model_executor.layers.sparse_attn_indexer": change_indexer,
}
"""The change of the module, made once vLLM has imported it."""
