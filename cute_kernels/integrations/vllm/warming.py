"""Compiles kernels before a server starts. Imports no vLLM."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from cute_kernels.integrations.vllm.calls import MAX_QUERIES, GqaCalls
from cute_kernels.runtime.compile import missing, precompile
from cute_kernels.warm import kernel_specs
from cute_kernels.warm.shapes import Shape

logger = logging.getLogger("vllm.cute_kernels")

WARM_BATCH_SIZES = 512
"""The largest batch whose kernels are compiled before a server starts; larger batches share them."""
LIMIT_S = 600
"""Seconds after which a server starts, whatever is missing. A model's kernels take a minute on 16 cores."""


@functools.cache  # builders of several layers and micro-batches ask for the same kernels
def compile_shapes(
    shapes: tuple[Shape, ...], batches: tuple[int, ...], query_tokens: tuple[int, ...], num_sms: int
) -> None:
    """Compiles kernels in new interpreters, for `LIMIT_S` at most.

    A kernel that is still missing is compiled by its first call, which raises any error.
    """
    absent = missing(kernel_specs(*shapes, batch_sizes=batches, query_tokens=query_tokens, num_sms=num_sms))
    if not absent:
        return
    logger.info("cute-kernels: compiling %d kernels", len(absent))
    why = f"not done after {LIMIT_S} s, or the cache cannot be written"
    try:
        precompile(absent, timeout_s=LIMIT_S)
    except Exception as error:
        why = str(error)
    if left := len(missing(absent)):
        logger.warning("cute-kernels: %d of them are compiled by their first calls instead: %s", left, why)
    else:
        logger.info("cute-kernels: compiled")


def warm_layers(names: list[str], page: int, query_tokens: int, spec: Any, config: Any, device: torch.device) -> None:
    """Compiles the kernels that layers with `GqaCalls` will ask for, unless they are on disk.

    Args:
        names: names of vLLM's layers.
        page: tokens that are read as one page.
        query_tokens: most query tokens of a request that decodes.
        spec: vLLM's spec of their caches.
        config: vLLM's configuration.
        device: device of the layers.
    """
    layers = [config.compilation_config.static_forward_context[name] for name in names]
    found = [getattr(getattr(layer, "impl", None), "calls", None) for layer in layers]
    calls = [call for call in found if isinstance(call, GqaCalls)]
    max_tokens = -(-config.model_config.max_model_len // spec.block_size) * spec.block_size
    shapes: dict[Shape, None] = {}
    for call in calls:
        shapes.update(dict.fromkeys(call.shapes(config.model_config.dtype, page, max_tokens)))
    batches = range(1, min(config.scheduler_config.max_num_seqs, WARM_BATCH_SIZES) + 1)
    few = [MAX_QUERIES] if any(call.copies_pages for call in calls) else []
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    compile_shapes(tuple(shapes), tuple(batches), tuple(sorted({1, query_tokens, *few})), num_sms)
