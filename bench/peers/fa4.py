"""FlashAttention 4: a folder in the CuTe DSL, in vLLM's wheel.

It imports quack-kernels, which changes classes of the DSL: `Replaced` undoes that, so that our kernels are compiled by
the DSL as it was installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from bench.peers.offer import FLASH_ATTENTION, Offer, digest, folder_of
from bench.records import package_version
from tests.kit.sink_cases import SinkCase

DSL: Final = "cutlass"


@functools.cache
def library() -> tuple[Any, Replaced] | str:
    """Returns the module of forward and backward, and what its import replaces in the DSL; or why there is none."""
    folder = folder_of(FLASH_ATTENTION)
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
            interface = importlib.import_module(f"{FLASH_ATTENTION}.cute.interface")
        return interface, replaced
    except Exception as error:  # code for another version of the DSL or of quack raises anything
        return f"{FLASH_ATTENTION}.cute cannot be imported: {type(error).__name__}: {error}"


def version() -> str:
    """Returns the versions of vLLM and quack-kernels, and the digest of the sources."""
    found, folder = library(), folder_of(FLASH_ATTENTION)
    if isinstance(found, str) or isinstance(folder, str):
        return f"missing: {found if isinstance(found, str) else folder}"
    sources = digest(sorted((folder / "cute").glob("*.py")))
    return f"vllm {package_version('vllm')}, cute sha256 {sources}, quack-kernels {package_version('quack-kernels')}"


def prefill(case: Any, inputs: Sequence[SinkCase], store: Any) -> Offer | None:
    """Computes a forward, the backward of its own forward, or both over packed sequences; no gradient of sinks."""
    found, way = library(), case.key["pass"]
    if "deterministic" in case.key or isinstance(found, str):
        return None
    interface, replaced = found
    with replaced.during():
        calls = [_call(one, interface, way) for one in inputs]
        out = calls[0]()[0]
    note = "sinks in bfloat16" if way == "forward" else "sinks in bfloat16, which get no gradient"
    return Offer(calls, out, inputs[0], note)


def _call(one: SinkCase, fa4: Any, way: str) -> Callable[[], Any]:
    options: dict[str, Any] = {"softmax_scale": one.softmax_scale, "causal": True}
    if one.packed:
        longest = [max(pair[side] for pair in one.lengths) for side in range(2)]
        options |= {"cu_seqlens_q": one.cu_seqlens_q, "cu_seqlens_k": one.cu_seqlens_k}
        options |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    if one.window is not None:
        options |= {"window_size_left": one.window - 1, "window_size_right": 0}
    sinks = None if one.s_aux is None else one.s_aux.bfloat16()
    forward = functools.partial(
        fa4._flash_attn_fwd, one.q, one.k, one.v, **options, learnable_sink=sinks, return_lse=True
    )

    def backward(out: Any, lse: Any) -> Any:
        return fa4._flash_attn_bwd(one.q, one.k, one.v, out, one.d_out, lse, **options)

    if way == "forward":
        return lambda: forward()[:2]
    if way == "packed":
        return lambda: backward(*forward()[:2])
    return functools.partial(backward, *forward()[:2])


@contextlib.contextmanager
def _parents_that_do_not_run(folder: pathlib.Path) -> Iterator[None]:
    """Replaces FA4's parent packages while it is imported; those that are already imported stay."""
    parents = {FLASH_ATTENTION.partition(".")[0]: folder.parent, FLASH_ATTENTION: folder}
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
    """Returns cycles per token and CTA of each unit, for variants with 128 heads and the published estimate."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._changes: list[tuple[Any, str, Any, Any]] = []

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Restores replacements of earlier blocks, and records replacements of this one; undoes all at the end."""
        for owner, name, _, new in self._changes:
            setattr(owner, name, new)
        before = list(self._owners())
        try:
            yield
        finally:
            for owner, known in before:
                now = vars(owner)
                changed = [name for name, old in known.items() if name in now and now[name] is not old]
                self._changes += [(owner, name, known[name], now[name]) for name in changed]
            for owner, name, old, _ in reversed(self._changes):
                setattr(owner, name, old)

    def _owners(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yields modules and classes of the package, each with its functions."""
        functions = types.FunctionType | classmethod | staticmethod | property
        owners: dict[int, Any] = {id(one): one for name, one in list(sys.modules.items()) if self._is_own(name)}
        classes = (one for module in list(owners.values()) for one in list(vars(module).values()))
        owners |= {id(one): one for one in classes if isinstance(one, type)}
        for owner in owners.values():
            if self._is_own(owner.__module__ if isinstance(owner, type) else owner.__name__):
                yield owner, {name: value for name, value in vars(owner).items() if isinstance(value, functions)}

    def _is_own(self, name: str) -> bool:
        return name.partition(".")[0] == self._package
