"""A peer's offer for a case, and helpers that find libraries."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import pathlib
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

LIMIT: Final = 0.02
"""A peer whose relative error is above this computes something else: no ratio."""
FP8_LIMIT: Final = 0.05
"""The limit for a peer that rounds its probabilities to FP8, which alone is 0.027 in the mean."""
FLASH_ATTENTION: Final = "vllm.vllm_flash_attn"
"""The place of FlashAttention 3 and 4 in vLLM's wheel. `import vllm` takes 19 s and changes torch's compiler."""


@dataclass(frozen=True)
class Offer:
    """A peer's kernel for a case.

    calls  one for each of the case's inputs
    out    result of the first call, in the shape of ours
    input  the input of that result
    note   what was changed to make the case fit the peer
    limit  limit of its relative error
    eager  whether it may be timed without a graph if it cannot be captured
    """

    calls: Sequence[Callable[[], Any]]
    out: torch.Tensor
    input: Any
    note: str = ""
    limit: float = LIMIT
    eager: bool = False


@functools.cache
def load(name: str) -> types.ModuleType | str:
    """Returns a library's module, or why there is none."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # a library built for another torch raises any of them
        return f"{name} cannot be imported: {error}"


def folder_of(package: str) -> pathlib.Path | str:
    """Returns the folder of a package, without importing it, or why there is none."""
    name, *inner = package.split(".")
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # a module of this name without a spec
        found = None
    for place in (found and found.submodule_search_locations) or ():
        folder = pathlib.Path(place, *inner)
        if folder.is_dir():
            return folder
    return f"{name} is not installed" if found is None else f"{name} is installed without {'.'.join(inner)}"


def digest(paths: Iterable[pathlib.Path]) -> str:
    """Returns 16 hexadecimal digits of the sha256 of files, one after the other."""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(path.read_bytes())
    return whole.hexdigest()[:16]
