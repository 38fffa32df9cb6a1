"""Imports that every engine needs, made once: all processes are forked from the one that imports this module.

Nothing here may start CUDA. If an import fails here, each process tries it again and reports the error.
"""

from __future__ import annotations

import contextlib
import importlib

from bench import vllm_engine

vllm_engine.set_environment()

MODULES = (
    "torch",
    "vllm",
    "vllm.platforms",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.model_executor.models.registry",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.backends.flash_attn",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "cute_kernels.integrations.vllm.gqa",
    "cute_kernels.gqa.op",
    "cute_kernels.sink.op",
    "torch.profiler",
)

for module in MODULES:
    with contextlib.suppress(Exception):
        importlib.import_module(module)
