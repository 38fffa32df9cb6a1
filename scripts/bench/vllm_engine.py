"""One engine of vLLM on a GPU: `python -m scripts.bench.vllm_engine JOB RESULT`, started by scripts/vllm_check.py.

A job has the engine's options and either rounds of prompts, whose tokens it returns, or batches and contexts, whose
time per token it measures.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process: its caches are filled from here
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    VLLM_USE_FLASHINFER_SAMPLER="0",  # where FlashInfer is not installed its probe ends the engine
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch

STEPS, FIRST = 48, 8
"""Steps of a run, and how many of them go by before time is taken."""
ROUNDS = 3
PROFILED = 12


def prepare() -> None:
    """Registers our backends, as the plugin does; leaves out a warm-up that asks for a package nobody needs."""
    from cute_kernels.integrations import vllm as cute_vllm

    cute_vllm.register()
    if find_spec("quack") is None:
        from vllm.model_executor.warmup import kernel_warmup

        if hasattr(kernel_warmup, "_warmup_ll_bf16_router_gemm"):
            kernel_warmup._warmup_ll_bf16_router_gemm = lambda: None


def engine(options: dict[str, Any]) -> Any:
    """An engine without a tokenizer."""
    from vllm import LLM

    return LLM(skip_tokenizer_init=True, seed=0, enable_prefix_caching=False, **options)


def sampling(tokens: int) -> Any:
    """Greedy, to the last token."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)


def generate(llm: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy tokens of each prompt."""
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(o.outputs[0].token_ids) for o in llm.generate(requests, sampling(tokens), use_tqdm=False)]


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """The tokens of each request, round by round."""
    llm = engine(job["options"])
    return {"rounds": [generate(llm, prompts, job["tokens"]) for prompts in job["rounds"]]}


# ---- time per token


def keep_filled() -> None:
    """VLLM's connector for decode benchmarks counts prompts as computed; it leaves the caches as they are."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as bench

    bench.DecodeBenchConnectorWorker._fill_block_tensor = lambda self, kv_cache, block_ids: None


def fill(worker: Any) -> int:
    """Random numbers in every cache of a worker, and their bytes: zeros would draw less power, and run faster."""
    total = 0
    for layer in worker.model_runner.vllm_config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        if not isinstance(cache, torch.Tensor) or not cache.numel():
            continue
        total += cache.numel() * cache.element_size()
        if cache.dtype in (torch.bfloat16, torch.float16):
            cache.normal_()
        elif cache.dtype is torch.int8:
            cache.random_(-127, 128)
            _fill_scales(layer, cache)
        else:  # FP8: no NaN
            cache.view(torch.uint8).random_(0, 0x78)
    return total


def _fill_scales(layer: Any, cache: torch.Tensor) -> None:
    """Scales of an INT8 cache, 0.01, where the layer's backend has them."""
    calls = getattr(layer.impl, "calls", None)
    if calls is not None:
        *_, k_scale, v_scale = calls.views(cache).tokens_first()
    else:
        layer.impl._ensure_scale_caches(cache)
        k_scale, v_scale = layer.impl._k_scale_cache, layer.impl._v_scale_cache
    k_scale.fill_(0.01)
    v_scale.fill_(0.01)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds per token of each batch and context: on the clock, and of the GPU's kernels."""
    keep_filled()
    transfer = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}
    llm = engine({**job["options"], "kv_transfer_config": transfer})
    filled = llm.collective_rpc(fill)
    marks = mark_steps(llm)
    cases = []
    for context in job["contexts"]:
        for batch in job["batches"]:
            prompts = [[(7 * i + j) % 29 + 3 for j in range(context)] for i in range(batch)]
            spans = []
            for _ in range(ROUNDS):
                marks.clear()
                generate(llm, prompts, STEPS)
                spans.append((marks[-1] - marks[FIRST]) / (len(marks) - 1 - FIRST) * 1e3)
            case: dict[str, Any] = {
                "context": context, "batch": batch, "ms": sorted(spans)[ROUNDS // 2], "ms_all": spans,
                "steps": len(marks),
            }  # fmt: skip
            case.update(kernel_times(functools.partial(generate, llm, prompts, PROFILED)))
            cases.append(case)
            print(json.dumps({**case, "name": job["name"]}), flush=True)
    return {"cases": cases, "filled_bytes": filled}


def mark_steps(llm: Any) -> list[float]:
    """A list that gets the time of each step that has brought a token to each request."""
    marks: list[float] = []
    core = llm.llm_engine.engine_core
    get_output = core.get_output

    def marked() -> Any:
        outputs = get_output()
        if outputs.outputs:
            marks.append(time.perf_counter())
        return outputs

    core.get_output = marked
    return marks


def kernel_times(run: Callable[[], Any]) -> dict[str, Any]:
    """Of `PROFILED` tokens: milliseconds of a step's kernels, all and those of attention; empty without a profiler."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
        events = [(e.key, e.self_device_time_total) for e in profiler.key_averages() if e.self_device_time_total]
    except (AssertionError, RuntimeError) as error:
        return {"profiler": str(error)}
    attention = ("gqa", "attention", "flash", "fmha", "combine", "reduce_segments", "kernel_unified")
    mine = [(name, us) for name, us in events if any(word in name.lower() for word in attention)]
    mine = [(name, us) for name, us in mine if "reshape_and_cache" not in name]
    mine.sort(key=lambda pair: -pair[1])
    return {
        "gpu_ms": sum(us for _, us in events) / PROFILED / 1e3,
        "attention_ms": sum(us for _, us in mine) / PROFILED / 1e3,
        "attention_kernels": [name[:100] for name, _ in mine[:3]],
    }


def main() -> None:
    """Runs the job."""
    job = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
    prepare()
    result = measure(job) if "contexts" in job else serve(job)
    pathlib.Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
