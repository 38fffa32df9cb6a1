"""vLLM's sparse indexer chooses with `index_topk`: exactly, in ascending order, the same in all tensor-parallel ranks.

Decode rows alone: DeepGEMM makes their logits, prompts keep vLLM's kernels. Written against vLLM 0.26, whose indexer
calls operators of torch, and 0.33, which asks a function for a kernel; imports no vLLM.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.indexer.topk_op import index_topk
from cute_kernels.integrations.hooks import SayOnce, or_original
from cute_kernels.runtime.arch import is_sm90

logger = logging.getLogger("vllm.cute_kernels")
GET_TOPK = "get_indexer_topk"
OPERATORS = ("cooperative_topk", "persistent_topk")
"""Of `torch.ops._C`. Both take logits, lengths, the result, a workspace, topk, and the longest length."""
say_once = SayOnce(functools.partial(logger.info, "cute-kernels: %s"))
"""Logs a line, once in each process."""


class Replaced:
    """A module or namespace, some of whose names mean something else."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self._original = original
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        """Any other name, when it is asked for: operators are loaded late."""
        return getattr(self._original, name)


def choose(logits: torch.Tensor, seq_lens: torch.Tensor, topk_indices: torch.Tensor, topk: int) -> None:
    """Writes the positions of the highest logits of each row.

    Args:
        logits: (rows, width) float32.
        seq_lens: int32, one number a row, as (rows,) or (batch, next_n).
        topk_indices: (rows, topk) int32, where to write.
        topk: how many.

    Raises:
        ValueError: there are other lengths, or the GPU is not an SM90; or as `index_topk`.
        TypeError: as `index_topk`.
    """
    rows = logits.shape[0]
    if seq_lens.numel() != rows:
        raise ValueError(f"seq_lens: got {tuple(seq_lens.shape)} for {rows} rows of logits; needs one for each")
    if not is_sm90(logits.device):
        raise ValueError(f"logits: got a tensor on {logits.device}; needs an SM90 GPU")
    index_topk(logits, seq_lens.reshape(rows), topk, out=topk_indices)
    say_once("the sparse indexer chooses with index_topk: exact, in order of positions")


def change_indexer(module: types.ModuleType) -> None:
    """Puts `choose` where the indexer of decode rows asks for a kernel."""
    if hasattr(module, GET_TOPK):
        _change_function(module)
    elif isinstance(getattr(module, "torch", None), types.ModuleType):
        _change_operators(module)
    elif not isinstance(getattr(module, "torch", None), Replaced):
        logger.warning("cute-kernels: the sparse indexer stays as it is: %s has no kernels to replace", module.__name__)


def _change_function(module: types.ModuleType) -> None:
    """Changes vLLM 0.33, where `get_indexer_topk(backend)` returns the function of a kernel."""
    get = getattr(module, GET_TOPK)
    if hasattr(get, "__wrapped__"):
        return

    @functools.wraps(get)
    def get_indexer_topk(*args: Any, **kwargs: Any) -> Any:
        original = get(*args, **kwargs)

        def topk(
            logits: torch.Tensor, seq_lens: torch.Tensor, next_n: int, topk_indices: torch.Tensor, topk_tokens: int,
            max_seq_len: int,
        ) -> None:  # fmt: skip
            choose(logits, seq_lens, topk_indices, topk_tokens)

        return functools.partial(or_original, topk, original, _stays)

    setattr(module, GET_TOPK, get_indexer_topk)


def _change_operators(module: types.ModuleType) -> None:
    """Changes vLLM 0.26, which calls `torch.ops._C.cooperative_topk` with the `torch` of its module."""

    def operator(name: str) -> Callable[..., Any]:
        def topk(
            logits: torch.Tensor, seq_lens: torch.Tensor, topk_indices: torch.Tensor, workspace: torch.Tensor,
            topk_tokens: int, max_seq_len: int,
        ) -> None:  # fmt: skip
            choose(logits, seq_lens, topk_indices, topk_tokens)

        def original(*args: Any) -> Any:
            return getattr(torch.ops._C, name)(*args)

        return functools.partial(or_original, topk, original, _stays)

    ours = Replaced(torch.ops._C, **{name: operator(name) for name in OPERATORS})
    setattr(module, "torch", Replaced(torch, ops=Replaced(torch.ops, _C=ours)))  # noqa: B010  a module has no such type


def _stays(reason: str) -> None:
    say_once(f"the sparse indexer stays with vLLM's top-k: {reason}")


CHANGES: dict[str, Callable[[types.ModuleType], None]] = {
    "vllm.model_executor.layers.sparse_attn_indexer": change_indexer,
}
"""What is done to the module once vLLM has imported it."""
