"""Compiles kernels before a server starts. Imports no vLLM."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys

from cute_kernels.runtime.compile import missing
from cute_kernels.warm import kernel_specs
from cute_kernels.warm.shapes import Shape

logger = logging.getLogger("vllm.cute_kernels")


@functools.cache  # builders of several layers and micro-batches ask for the same
def compile_shapes(
    shapes: tuple[Shape, ...], batches: tuple[int, ...], query_tokens: tuple[int, ...], num_sms: int
) -> None:
    """Compiles kernels in processes of a new interpreter: a worker of vLLM may start none itself.

    Kernels that fail to compile here are compiled by their first call, which raises what is wrong.
    """
    absent = missing(kernel_specs(*shapes, batch_sizes=batches, query_tokens=query_tokens, num_sms=num_sms))
    if not absent:
        return
    logger.info("cute-kernels: compiling %d kernels", len(absent))
    code = (
        "from cute_kernels.warm import *\n"
        "if __name__ == '__main__':\n"
        f"    print(warm(*{shapes!r}, batch_sizes={batches!r}, query_tokens={query_tokens!r}, num_sms={num_sms},"
        " progress=False))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        logger.warning("cute-kernels: they are compiled by the first calls instead: %s", done.stderr.strip()[-500:])
    else:
        logger.info("cute-kernels: %s", done.stdout.strip())
