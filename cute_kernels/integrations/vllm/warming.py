"""Compiles kernels before a server starts. Imports no vLLM."""

from __future__ import annotations

import functools
import logging

from cute_kernels.runtime.compile import missing, precompile
from cute_kernels.warm import kernel_specs
from cute_kernels.warm.shapes import Shape

logger = logging.getLogger("vllm.cute_kernels")

LIMIT_S = 600
"""A server starts after so long, whatever is missing. A model's kernels take a minute on 16 cores."""


@functools.cache  # builders of several layers and micro-batches ask for the same
def compile_shapes(
    shapes: tuple[Shape, ...], batches: tuple[int, ...], query_tokens: tuple[int, ...], num_sms: int
) -> None:
    """Compiles kernels in new interpreters, for `LIMIT_S` at most.

    Kernels that are missing afterwards are compiled by their first call, which raises what is wrong.
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
