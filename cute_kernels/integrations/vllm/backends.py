"""The backend classes that vLLM asks for by name. They stand aside if a class or method that they extend has moved.

Then vLLM's own class serves sparse MLA, and `--attention-backend CUSTOM` is refused before weights are loaded.
Importing this module imports no vLLM; asking it for a class does.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Iterable
from typing import Any

from cute_kernels.integrations.vllm import TESTED

logger = logging.getLogger("vllm.cute_kernels")

Function = tuple[Any, str, str]
"""A class or module, the name of its function, and the parameters; after `...` others with defaults may follow."""
MODULES = {"CuteAttentionBackend": "gqa", "CuteFlashMLASparseBackend": "sparse_mla"}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _backend(name)


@functools.cache  # vLLM asks once for each layer
def _backend(name: str) -> Any:
    try:
        module = importlib.import_module(f"{__package__}.{MODULES[name]}")
        trouble = moved(module.EXTENDS)
    except Exception as error:  # vLLM no longer has a name that our module imports
        trouble = [f"{type(error).__name__}: {error}"]
    if not trouble:
        return getattr(module, name)
    reason = f"{'; '.join(trouble)}; tested with vLLM {' and '.join(TESTED)}"
    if name == "CuteAttentionBackend":
        logger.warning("cute-kernels: CUSTOM is refused: %s", reason)  # vLLM 0.26 hides the words of the error
        raise ImportError(f"cute-kernels: {reason}; use another attention backend")
    logger.warning("cute-kernels: sparse MLA runs on vLLM's kernels: %s", reason)
    place = importlib.import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum.FLASHMLA_SPARSE
    path, _, own = place.value.rpartition(".")
    return getattr(importlib.import_module(path), own)


def moved(functions: Iterable[Function]) -> list[str]:
    """Returns in words which functions are gone or take other parameters."""
    lines = []
    for owner, name, parameters in functions:
        function = getattr(owner, name, None)
        if function is None:
            lines.append(f"{owner.__name__} has no {name}")
            continue
        found = inspect.signature(function).parameters
        known = [parameter for parameter in parameters.split() if parameter != "..."]
        more = list(found.values())[len(known) :]
        needed = [p for p in more if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if list(found)[: len(known)] != known or (needed if "..." in parameters else more):
            lines.append(f"{owner.__name__}.{name} takes {', '.join(found)}, and took {', '.join(known)}")
    return lines
