"""Helpers for tests of `attn_implementation="cute_mla"`: eager attention over FP8 latents, and reasons to fall back."""

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

import fp8_mla
from cute_kernels.integrations import transformers_mla
from tests.kit.transformers_calls import generate

MODELS = ("deepseek_v32", "glm_moe_dsa")


def attention_class(name: str) -> Any:
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    return getattr(modeling, transformers_mla.ATTENTIONS[name])


FORWARD = inspect.getsource(attention_class("deepseek_v32").forward)
CACHES_LATENTS = FORWARD.index(".update(") < FORWARD.index(".expand_kv(")
"""Whether transformers caches latents for other implementations: 5.23 and 5.24 do, 5.17 caches keys and values."""


@contextlib.contextmanager
def fp8_latents(name: str) -> Iterator[None]:
    """Gives other implementations the latents of a 656-byte token, in the model's dtype."""
    attention = attention_class(name)
    expand_kv = attention.expand_kv

    def expand_quantized(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Any:
        packed = fp8_mla.pack(torch.cat([kv_nope, k_rot], dim=-1).bfloat16())
        return expand_kv(self, *fp8_mla.unpack(packed, torch.float32).to(kv_nope.dtype).split([512, 64], dim=-1))

    attention.expand_kv = expand_quantized
    try:
        yield
    finally:
        attention.expand_kv = expand_kv


def eager(name: str, model: Any, ids: torch.Tensor, **options: Any) -> Any:
    with fp8_latents(name):
        return generate(model, "eager", ids, **options)
