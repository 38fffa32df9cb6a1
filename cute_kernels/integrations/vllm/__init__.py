"""vLLM: sparse MLA over FP8 and V4 without a flag, GQA by `--attention-backend CUSTOM`; see docs/users/vllm.md.

`register` is the entry point that vLLM calls, in each of its processes; importing this package imports no vLLM.
"""

from __future__ import annotations

import logging

__all__ = ["GQA_BACKEND", "SPARSE_MLA_BACKEND", "register"]

GQA_BACKEND = "cute_kernels.integrations.vllm.gqa.CuteAttentionBackend"
"""What `--attention-backend CUSTOM` names."""
SPARSE_MLA_BACKEND = "cute_kernels.integrations.vllm.sparse_mla.CuteFlashMLASparseBackend"
"""What replaces FLASHMLA_SPARSE."""


def register() -> None:
    """Tells vLLM of both backends, as names: neither is imported, and CUDA stays as it is.

    Models with a FlashMLA class of their own are changed when vLLM imports them.

    A backend that another plugin has put in the same place stays there; a warning says so. `VLLM_PLUGINS=` (empty)
    keeps vLLM from calling this.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from cute_kernels.integrations.on_import import change_on_import
    from cute_kernels.integrations.vllm.v4 import CHANGES  # imports torch

    places = ((AttentionBackendEnum.CUSTOM, GQA_BACKEND), (AttentionBackendEnum.FLASHMLA_SPARSE, SPARSE_MLA_BACKEND))
    for place, ours in places:
        if place.is_overridden():
            theirs = place.get_path()
            if theirs != ours:
                _logger().warning("cute-kernels: attention backend %s is %s already, not ours", place.name, theirs)
            continue
        register_backend(place, ours)
    change_on_import(CHANGES)


def _logger() -> logging.Logger:
    return logging.getLogger("vllm.cute_kernels")  # vLLM's handlers and levels
