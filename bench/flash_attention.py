"""FlashAttention 3 and 4 as peers: found in vLLM's wheel, of which nothing else is imported.

`import vllm` takes 19 s and changes torch's compiler. FA3 is a library of two torch operators, which is loaded as one.
FA4 is a folder in the CuTe DSL that imports quack-kernels, which changes classes of the DSL: `Replaced` undoes that, so
that our kernels are compiled by the DSL as it was installed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

PACKAGE: Final = "vllm.vllm_flash_attn"
FA3_LIBRARY: Final = "_vllm_fa3_C.abi3.so"
FA3_SINK_HEADS: Final = 64
"""The most query heads of a call with sinks."""
FA3_FORWARD: Final[dict[str, Any]] = {
    **dict.fromkeys(("q", "k", "v", "k_new", "v_new", "q_v", "out")),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k")),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k")),
    **dict.fromkeys(("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale")),
    "softmax_scale": 1.0,
    "is_causal": True,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "is_rotary_interleaved": True,
    "scheduler_metadata": None,
    "num_splits": 0,
    "pack_gqa": None,
    "sm_margin": 0,
    "s_aux": None,
    "cp_world_size": 1,
    "cp_rank": 0,
    "cp_tot_seqused_k": None,
}
"""Arguments of `_vllm_fa3_C.fwd`, none of which has a default there: a causal call without anything optional."""
FA3_SCHEDULE: Final[dict[str, Any]] = {
    **dict.fromkeys(("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads", "num_heads_k", "headdim", "headdim_v")),
    **dict.fromkeys(("qkv_dtype", "seqused_k", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q")),
    **dict.fromkeys(("leftpad_k", "page_size")),
    "max_seqlen_k_new": 0,
    "is_causal": True,
    "window_size_left": -1,
    "window_size_right": -1,
    "has_softcap": False,
    "num_splits": 0,
    "pack_gqa": None,
    "sm_margin": 0,
}
"""Those of `_vllm_fa3_C.get_scheduler_metadata`, likewise. In both, 0 splits leave their number to FA3."""
DSL: Final = "cutlass"


def _folder() -> pathlib.Path | str:
    """Where FlashAttention lies, or why it does not."""
    try:
        found = importlib.util.find_spec(PACKAGE.partition(".")[0])
    except ValueError:  # a module of this name without a spec
        found = None
    for place in (found and found.submodule_search_locations) or ():
        folder = pathlib.Path(place, *PACKAGE.split(".")[1:])
        if folder.is_dir():
            return folder
    return "vllm is not installed" if found is None else "vllm is installed without vllm_flash_attn"


def window_sizes(window: int | None) -> dict[str, int]:
    """A window, own position included, as FA3 takes it: how many keys to either side."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


# ---- FA3


@functools.cache
def fa3() -> Any | str:
    """Namespace of FA3's operators `fwd` and `get_scheduler_metadata`, or why there is none."""
    operators = torch.ops._vllm_fa3_C
    if hasattr(operators, "fwd"):  # vLLM has been imported
        return operators
    folder = _folder()
    if isinstance(folder, str):
        return folder
    library = folder / FA3_LIBRARY
    if not library.is_file():
        return f"vllm_flash_attn has no {FA3_LIBRARY}"
    try:
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:  # built for another torch, or another CUDA
        return f"{FA3_LIBRARY} cannot be loaded: {error.__cause__ or error}"
    return operators if hasattr(operators, "fwd") else f"{FA3_LIBRARY} registers no operator fwd"


def fa3_forward(operators: Any, **arguments: Any) -> torch.Tensor:
    """Output of a call, by the names of `FA3_FORWARD`; q (tokens, h_q, d), packed by `cu_seqlens_q`."""
    return operators.fwd(**{**FA3_FORWARD, **arguments})[0]


def fa3_schedule(operators: Any, **arguments: Any) -> torch.Tensor:
    """What vLLM makes once for all layers of a step, by the names of `FA3_SCHEDULE`."""
    return operators.get_scheduler_metadata(**{**FA3_SCHEDULE, **arguments})


# ---- FA4


@dataclass(frozen=True)
class FA4:
    """FlashAttention 4.

    forward    (q, k, v, ...) of (batch, tokens, heads, d): out, lse and more
    backward   (q, k, v, out, d_out, lse, ...): dq, dk, dv
    compiling  a context in which calls of new shapes may be made; all other calls need none
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    compiling: Callable[[], contextlib.AbstractContextManager[None]]


@functools.cache
def fa4() -> FA4 | str:
    """FA4, or why there is none."""
    folder = _folder()
    if isinstance(folder, str):
        return folder
    if not (folder / "cute" / "interface.py").is_file():
        return "vllm_flash_attn has no cute/interface.py"
    for name in (DSL, "quack", "einops"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    try:
        importlib.import_module(f"{DSL}.cute")
        replaced = Replaced(DSL)
        with _parents_that_do_not_run(folder), replaced.during():
            interface = importlib.import_module(f"{PACKAGE}.cute.interface")
        return FA4(interface._flash_attn_fwd, interface._flash_attn_bwd, replaced.during)
    except Exception as error:  # code for another version of the DSL or of quack raises anything
        return f"{PACKAGE}.cute cannot be imported: {type(error).__name__}: {error}"


@contextlib.contextmanager
def _parents_that_do_not_run(folder: pathlib.Path) -> Iterator[None]:
    """Has packages in the place of FA4's parents for as long as it is imported; those that are there stay."""
    parents = {PACKAGE.partition(".")[0]: folder.parent, PACKAGE: folder}
    made = [name for name in parents if name not in sys.modules]
    for name in made:
        module = types.ModuleType(name)
        module.__path__ = [str(parents[name])]
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


class Replaced:
    """Functions of a package and methods of its classes that others replace, so that both are there by turns."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._changes: list[tuple[Any, str, Any, Any]] = []

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Has in place what was replaced in earlier blocks, and notes what is replaced in this one; undoes all."""
        for owner, name, _, new in self._changes:
            setattr(owner, name, new)
        before = list(self._owners())
        try:
            yield
        finally:
            for owner, known in before:
                for name, old, new in _differences(known, vars(owner)):
                    self._changes.append((owner, name, old, new))
            for owner, name, old, _ in reversed(self._changes):
                setattr(owner, name, old)

    def _owners(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Modules and classes of the package, each with its functions."""
        known: set[int] = set()
        for module_name, module in list(sys.modules.items()):
            if module_name.partition(".")[0] != self._package:
                continue
            for owner in (module, *(value for value in list(vars(module).values()) if isinstance(value, type))):
                if id(owner) not in known and _name(owner).partition(".")[0] == self._package:
                    known.add(id(owner))
                    yield owner, {name: value for name, value in vars(owner).items() if _is_function(value)}


def _name(owner: Any) -> str:
    """Of a module, or of the module of a class."""
    return str(owner.__module__ if isinstance(owner, type) else owner.__name__)


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType | classmethod | staticmethod | property)


def _differences(known: dict[str, Any], now: Any) -> list[tuple[str, Any, Any]]:
    """Name, old and new value of what is another one now."""
    return [(name, old, now[name]) for name, old in known.items() if name in now and now[name] is not old]


# ---- versions


def digest(paths: Iterable[pathlib.Path]) -> str:
    """16 hexadecimal digits of the sha256 of files, one after the other."""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(path.read_bytes())
    return whole.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of FA3 and FA4, "missing" with the reason where there is none."""
    folder = _folder()
    found = {"fa3": fa3(), "fa4": fa4()}
    texts = {name: f"missing: {one}" for name, one in found.items() if isinstance(one, str)}
    if isinstance(folder, str):
        return {name: texts.get(name, "unknown") for name in found}
    if "fa3" not in texts:
        texts["fa3"] = f"vllm {_installed('vllm')}, {FA3_LIBRARY} sha256 {digest([folder / FA3_LIBRARY])}"
    if "fa4" not in texts:
        sources = digest(sorted((folder / "cute").glob("*.py")))
        texts["fa4"] = f"vllm {_installed('vllm')}, cute sha256 {sources}, quack-kernels {_installed('quack-kernels')}"
    return {name: " ".join(texts[name].split())[:300] for name in found}


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
