"""Compiles kernels of DeepSeek-V4 that vLLM 0.26 compiles when they are called, in many processes at once.

An engine would compile them one after another: 30 kernels of TileLang and DeepGEMM, 7 to 27 s each. Both keep compiled
kernels on disk, where engines find them. Shapes are those of `vllm_mla.save_v4`, tokens those of its steps.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
import traceback
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from bench.vllm_pool import Messages

TOKENS: Final = (500, 40, 1, 8, 140, 200, 300, 340, 400)
"""Tokens of a step: one for each number of splits that vLLM has for up to 512 tokens."""
HIDDEN, STREAMS = 4096, 4
LINEARS: Final = ((1536, 4096), (32768, 1024), (4096, 8192), (4096, 4096), (4096, 2048), (8192, 1024))
"""Outputs and inputs of FP8 linear layers."""


def streams(tokens: int) -> None:
    """Compiles TileLang's kernels between layers, and DeepGEMM's in them."""
    import torch
    from vllm.model_executor.kernels.mhc import tilelang as mhc

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device="cuda")

    bf16, mixes = torch.bfloat16, STREAMS * (2 + STREAMS)
    fn, scale, base = random(mixes, STREAMS * HIDDEN), random(3), random(mixes)
    norm, x = random(HIDDEN, dtype=bf16), random(tokens, HIDDEN, dtype=bf16)
    settings: tuple[Any, ...] = (1e-6, 1e-6, 1e-6, 2.0, 20)
    residual = random(tokens, STREAMS, HIDDEN, dtype=bf16)
    post, comb = random(tokens, STREAMS, 1), random(tokens, STREAMS, STREAMS)
    mhc.mhc_fused_post_pre_tilelang(
        x, residual, post, comb, fn, scale, base, *settings, n_splits=1, tile_n=1, norm_weight=norm, norm_eps=1e-6
    )


def ends(tokens: int) -> None:
    """Compiles the kernels before the first layer and after the last."""
    import torch
    from vllm.model_executor.kernels.mhc import tilelang as mhc

    bf16, mixes = torch.bfloat16, STREAMS * (2 + STREAMS)
    fn = torch.randn(mixes, STREAMS * HIDDEN, dtype=torch.float32, device="cuda")
    scale, base = fn[0, :3].clone(), fn[:, 0].clone()
    x = torch.randn(tokens, HIDDEN, dtype=bf16, device="cuda")
    once = fn.view(mixes, STREAMS, HIDDEN).sum(1)
    mhc.mhc_pre_broadcast_tilelang(
        x, fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 20, norm_weight=x[0].clone(), norm_eps=1e-6, fn_broadcast=once
    )


def head(tokens: int) -> None:
    """Compiles the kernel of the head, after the last layer."""
    import torch
    from vllm.model_executor.kernels.mhc import tilelang as mhc

    x = torch.randn(tokens, STREAMS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    fn = torch.randn(STREAMS, STREAMS * HIDDEN, dtype=torch.float32, device="cuda")
    mhc.hc_head_fused_kernel_tilelang(x, fn, fn[0, :1].clone(), fn[0, :STREAMS].clone(), 1e-6, 1e-6)


def scales(rows: int, blocks: int) -> Any:
    """Makes ones (rows, blocks) float32 in TMA's order, rows next to each other."""
    import torch

    return torch.ones(blocks, (rows + 3) // 4 * 4, dtype=torch.float32, device="cuda").t()[:rows]


def linear(outputs: int, inputs: int, some: tuple[int, ...]) -> None:
    """Compiles DeepGEMM's kernels of a linear layer."""
    import torch
    from vllm.utils.deep_gemm import fp8_gemm_nt

    fp8 = torch.float8_e4m3fn
    weight = torch.ones(outputs, inputs, dtype=torch.float32, device="cuda").to(fp8)
    weight_scales = torch.ones(outputs // 128, inputs // 128, dtype=torch.float32, device="cuda")
    for tokens in some:
        x = torch.ones(tokens, inputs, dtype=torch.float32, device="cuda").to(fp8)
        out = torch.empty(tokens, outputs, dtype=torch.bfloat16, device="cuda")
        fp8_gemm_nt((x, scales(tokens, inputs // 128)), (weight, weight_scales), out, is_deep_gemm_e8m0_used=True)


def groups(some: tuple[int, ...]) -> None:
    """Compiles DeepGEMM's kernels of the output projection, 8 groups of 1024 outputs and 4096 inputs."""
    import torch
    from vllm.utils.deep_gemm import fp8_einsum

    fp8 = torch.float8_e4m3fn
    weight = torch.ones(8, 1024, 4096, dtype=torch.float32, device="cuda").to(fp8)
    weight_scales = torch.ones(8, 8, 32, dtype=torch.float32, device="cuda")
    for tokens in some:
        x = torch.ones(8, tokens, 4096, dtype=torch.float32, device="cuda").to(fp8).transpose(0, 1)
        aligned = (tokens + 3) // 4 * 4
        x_scales = torch.ones(8, 32, aligned, dtype=torch.float32, device="cuda")[..., :tokens].permute(2, 0, 1)
        out = torch.empty(tokens, 8, 1024, dtype=torch.bfloat16, device="cuda")
        fp8_einsum("bhr,hdr->bhd", (x, x_scales), (weight, weight_scales), out, recipe=(1, 128, 128))


TASKS: Final[list[tuple[str, tuple[Any, ...]]]] = [
    ("ends", (64,)), ("head", (64,)), *(("streams", (tokens,)) for tokens in TOKENS),
    ("groups", (TOKENS,)), *(("linear", (*shape, TOKENS)) for shape in LINEARS),
]  # fmt: skip


def task(name: str, arguments: tuple[Any, ...]) -> str:
    """Runs one task in a process of its own; returns a line for the log."""
    from bench import vllm_engine

    vllm_engine.set_environment()
    begin = time.monotonic()
    try:
        import torch

        globals()[name](*arguments)
        torch.cuda.synchronize()
        why = ""
    except Exception:
        why = ": " + traceback.format_exc(limit=-4)
    return f"{name} {arguments} {time.monotonic() - begin:.1f} s{why}"


def compile_ahead(options: dict[str, Any], messages: Messages) -> None:
    """Runs all tasks, one process a core; sends "ahead", a line of each. An engine reports any error in full."""
    context, processes = multiprocessing.get_context("spawn"), min(len(TASKS), len(os.sched_getaffinity(0)))
    with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
        for done in concurrent.futures.as_completed([pool.submit(task, *one) for one in TASKS]):
            messages.send("ahead", done.result())
