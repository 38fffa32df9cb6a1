"""Calls of transformers' models, and the arguments that its installed version passes to functions."""

from __future__ import annotations

import ast
import copy
import inspect
import io
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch

from tests.kit import tiny_models

NEW: Final = 12
"""Number of tokens that are generated."""


def generate(model: Any, attention: str, ids: torch.Tensor, cache: Any = None, **options: Any) -> Any:
    """Greedy tokens (batch, NEW) and their logits (batch, NEW, vocabulary)."""
    model.set_attn_implementation(attention)
    mask = options.pop("attention_mask", torch.ones_like(ids))
    try:
        result = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=NEW, do_sample=False, eos_token_id=None,
            pad_token_id=0, return_dict_in_generate=True, output_logits=True, **options,
        )  # fmt: skip
    finally:
        model.set_attn_implementation("eager")
    return result.sequences[:, ids.shape[1] :], torch.stack(result.logits, 1).float()


def counted_on(ids: torch.Tensor) -> torch.Tensor:
    """The tokens that a model that counts continues with."""
    step = ids[:, -1:] - ids[:, -2:-1]
    numbers = torch.arange(1, NEW + 1, dtype=torch.int64, device=ids.device)
    return (ids[:, -1:] + step * numbers) % tiny_models.VOCABULARY


def moved(function: Callable[..., Any], expected: tuple[str, ...]) -> list[str]:
    """Says for each parameter that a function of the installed version no longer has at its position where it went."""
    found = [name for name in inspect.signature(function).parameters if name != "self"]
    name = getattr(function, "__qualname__", str(function))
    return [
        f"{name}: parameter {i} is {found[i] if i < len(found) else 'gone'}, was {want}"
        for i, want in enumerate(expected)
        if i >= len(found) or found[i] != want
    ]


def keywords_of_calls(function: Callable[..., Any], called: str) -> Iterator[tuple[int, set[str]]]:
    """For each call of `called` within a function, the number of positional arguments and the names of the others."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == called:
            yield len(node.args), {keyword.arg for keyword in node.keywords if keyword.arg}


def saved_and_loaded(cache: Any) -> Any:
    """A cache after `torch.save` and `torch.load`, which pickle it."""
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "saved": saved_and_loaded}
"""Ways in which people copy the cache of a prompt."""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from cute_kernels.integrations import transformers as cute
    from cute_kernels.integrations import transformers_mla

    reasons: list[str] = []
    for module in (cute, transformers_mla):
        monkeypatch.setattr(module, "_say_once", reasons.append)
    return reasons


def counted(monkeypatch: pytest.MonkeyPatch, *functions: tuple[Any, str]) -> dict[str, int]:
    """Counts the calls of functions of modules or classes, by name."""
    count: dict[str, int] = {}

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[name] = count.get(name, 0) + 1
            return function(*args, **kwargs)

        return call

    for owner, name in functions:
        monkeypatch.setattr(owner, name, wrap(name, getattr(owner, name)))
    return count
