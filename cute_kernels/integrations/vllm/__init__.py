"""vLLM: sparse MLA over FP8 and V4 without a flag, GQA by `--attention-backend CUSTOM`; see docs/users/vllm.md.

`register` is the entry point that vLLM calls, in each of its processes; importing this package imports no vLLM.
"""

from __future__ import annotations

import logging

__all__ = ["GQA_BACKEND", "SPARSE_MLA_BACKEND", "TESTED", "register"]

GQA_BACKEND = "cute_kernels.integrations.vllm.backends.CuteAttentionBackend"
"""The class for `--attention-backend CUSTOM`."""
SPARSE_MLA_BACKEND = "cute_kernels.integrations.vllm.backends.CuteFlashMLASparseBackend"
"""The class that replaces FLASHMLA_SPARSE."""
TESTED = ("0.26", "0.33")
"""The minor versions of vLLM in which changes that need no flag are on."""


def register(untested: bool = False) -> None:
    """Registers both backends with vLLM by name: neither is imported, and CUDA is not initialized.

    Models with a FlashMLA class of their own are changed when vLLM imports them. A backend that another plugin has put
    in the same place stays there; a warning says so. `VLLM_PLUGINS=` (empty) keeps vLLM from calling this.

    vLLM calls entry points without a guard, so this function never raises: a warning says what kept it from
    registering.

    Args:
        untested: turns on what needs no flag in any version of vLLM, not only in those of `TESTED`, and the choice of
            the sparse indexer by `index_decode` or `index_topk`, which only an engine of 0.26 has run. Your own plugin
            may call `register(untested=True)`.
    """
    tested = "tested with vLLM " + " and ".join(TESTED)
    try:
        _register(untested, tested)
    except Exception as error:  # another version may have changed its private modules in any way
        reason = f"{type(error).__name__}: {error}"
        _logger().warning("cute-kernels: vLLM runs without its kernels: %s; %s", reason, tested)


def _register(untested: bool, tested: str) -> None:
    import vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from cute_kernels.integrations.on_import import change_on_import
    from cute_kernels.integrations.vllm import indexer, v4  # import torch

    places = [(AttentionBackendEnum.CUSTOM, GQA_BACKEND)]  # a flag selects this one
    version = str(getattr(vllm, "__version__", "unknown"))
    without_flag = untested or ".".join(version.split(".")[:2]) in TESTED
    if without_flag:
        places.append((AttentionBackendEnum.FLASHMLA_SPARSE, SPARSE_MLA_BACKEND))
    else:
        _logger().warning(
            "cute-kernels: sparse MLA runs on vLLM's kernels: vLLM is %s; %s;"
            " a plugin of yours may call cute_kernels.integrations.vllm.register(untested=True)",
            version, tested,
        )  # fmt: skip
    for place, ours in places:
        if place.is_overridden():
            theirs = place.get_path()
            if theirs != ours:
                _logger().warning("cute-kernels: attention backend %s is %s already, not ours", place.name, theirs)
            continue
        register_backend(place, ours)
    if without_flag:
        change_on_import(v4.CHANGES)
    if untested:
        change_on_import(indexer.CHANGES)


def _logger() -> logging.Logger:
    return logging.getLogger("vllm.cute_kernels")  # vLLM's handlers and levels
