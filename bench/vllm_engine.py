"""The jobs of scripts/vllm_check.py in vLLM's engine on a GPU, each in a process of its own: see vllm_pool.py.

An engine is asked for the tokens of rounds of prompts, for its time per token over batches and contexts, or for the
time to the first token of prompts.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.vllm_pool import Messages

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, which fills its caches
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # without FlashInfer its probe ends the engine
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_DEEP_GEMM_WARMUP": "skip",  # kernels compile when they are called
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "OMP_NUM_THREADS": "1",  # several engines share the cores
}
SUMMED = "hc_attn_fn_broadcast"
"""An attribute of a layer of DeepSeek-V4, a sum of its weights."""
FIRST, SPANS, SPAN = 8, 3, 20
"""Steps that pass before time is taken, and the number and length of timed spans, whose median counts."""
STEPS = FIRST + SPANS * SPAN + 2
PROFILED = 12
PROMPT_RUNS = 3
"""Timed runs of a prompt, after one that is not timed; the median counts."""

ATTENTION = (
    *("gqadecode", "mergekernel", "flash", "fmha", "combine"),
    *("reduce_segments", "kernel_unified", "prepare_varlen"),
)
NOT_ATTENTION = ("reshape_and_cache", "append")


def set_environment() -> None:
    """Sets the environment before vLLM is imported."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")


def prepare(plugin: bool = True, untested: bool = False) -> None:
    """Registers our backends, as the plugin does, and disables slow or unneeded parts of vLLM.

    Args:
        plugin: False leaves vLLM as it is: an installed plugin stays off as well.
        untested: as in `register`.
    """
    from vllm.model_executor.models import registry
    from vllm.model_executor.warmup import kernel_warmup

    if plugin:
        from cute_kernels.integrations import vllm as cute_vllm

        cute_vllm.register(untested)
    else:
        os.environ["VLLM_PLUGINS"] = ""
    # compiles CuTe DSL kernels for routers of other models, and imports quack; 0.33's imports torchvision
    for name in ("_warmup_ll_bf16_router_gemm", "qwen_vl_triton_warmup"):
        if hasattr(kernel_warmup, name):
            setattr(kernel_warmup, name, lambda *arguments: None)
    # these import other models, and torchvision with them
    for name in ("minimax_m3_msa_warmup", "step5_dsa_warmup"):
        other: Any = types.ModuleType(f"vllm.model_executor.warmup.{name}")
        setattr(other, name, lambda worker: None)
        sys.modules[other.__name__] = other
    finish_dummy_weights()
    # inspects a model's class in another interpreter, which imports vLLM again
    registry._run_in_subprocess = lambda function: function()


def finish_dummy_weights() -> None:
    """Processes dummy weights like loaded ones; otherwise DeepSeek-V4 does not start."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load = DummyModelLoader.load_weights

    def load_and_finish(self: Any, model: Any, *arguments: Any) -> None:
        load(self, model, *arguments)
        finish_weights(model)

    DummyModelLoader.load_weights = load_and_finish


def finish_weights(model: Any) -> None:
    """Does what DeepSeek-V4's class does after it has read its weights; nothing for other models.

    It makes a new tensor of some weights each time, while captured graphs still read the old one.
    """
    inner = getattr(model, "model", None)
    layers = [layer for layer in getattr(inner, "layers", ()) if getattr(layer, SUMMED, None) is not None]
    old = [getattr(layer, SUMMED) for layer in layers]
    for name in ("finalize_mega_moe_weights", "finalize_mhc_broadcast_weights"):
        getattr(inner, name, lambda: None)()
    for layer, tensor in zip(layers, old, strict=True):
        setattr(layer, SUMMED, tensor.copy_(getattr(layer, SUMMED)))


def engine(options: dict[str, Any]) -> Any:
    """Makes an engine without a tokenizer. The memory of its cache is given, so several engines share a card."""
    from vllm import LLM

    given = {
        "skip_tokenizer_init": True, "seed": 0, "enable_prefix_caching": False, "gpu_memory_utilization": 0.04,
        "kernel_config": {"enable_flashinfer_autotune": False, "enable_cutedsl_warmup": False}, **options,
    }  # fmt: skip
    return LLM(**given)


def sampling(tokens: int, logprobs: int | None = None) -> Any:
    """Returns greedy sampling, to the last token; `logprobs` of that many tokens."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=logprobs)


def generate(llm: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Returns greedy tokens of each prompt."""
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(o.outputs[0].token_ids) for o in llm.generate(requests, sampling(tokens), use_tqdm=False)]


def about(llm: Any) -> dict[str, Any]:
    """Returns the choices that vLLM made."""
    config = llm.llm_engine.vllm_config
    return {
        "runner": 2 if config.use_v2_model_runner else 1,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "page": config.cache_config.block_size,
    }


def serve(options: dict[str, Any], messages: Messages) -> None:
    """Sends "round", the tokens of each request, for each round of prompts."""
    prepare()
    llm = engine(options["engine"])
    messages.send("engine", about(llm))
    for prompts in options["rounds"]:
        messages.send("round", generate(llm, prompts, options["tokens"]))


# ---- time per token


def keep_filled() -> None:
    """Makes vLLM's connector for decode benchmarks count prompts as computed; it leaves the caches as they are."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as bench

    bench.DecodeBenchConnectorWorker._fill_block_tensor = lambda self, kv_cache, block_ids: None


def fill(worker: Any) -> int:
    """Fills a worker's caches with random numbers, returns their bytes: zeros would draw less power, and run faster."""
    import torch

    total = 0
    for layer in worker.model_runner.vllm_config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        if not isinstance(cache, torch.Tensor) or not cache.numel():
            continue
        total += cache.numel() * cache.element_size()
        fill_cache(cache, layer.impl)
    return total


def fill_cache(cache: Any, impl: Any) -> None:
    """Fills a layer's cache with random numbers, and INT8 scales with 0.01 if the layer's backend has them."""
    import torch

    if cache.dtype in (torch.bfloat16, torch.float16):
        cache.normal_()
    elif cache.dtype is torch.int8:
        cache.random_(-127, 128)
        with torch.inference_mode():  # the worker made them in this mode
            for scale in _scales(cache, impl):
                scale.fill_(0.01)
    else:  # FP8: no NaN
        cache.view(torch.uint8).random_(0, 0x78)


def _scales(cache: Any, impl: Any) -> Any:
    calls = getattr(impl, "calls", None)
    if calls is not None:
        return calls.views(cache).tokens_first()[2:]
    impl._ensure_scale_caches(cache)
    return impl._k_scale_cache, impl._v_scale_cache


def measure(options: dict[str, Any], messages: Messages) -> None:
    """Sends "case" for each context and batch: milliseconds per token on the clock, and those of kernels.

    Prompts are not computed: requests begin with all but one of their tokens in the cache, in pages of their own that
    hold random numbers. The timed steps are those of vLLM's scheduler, runner and sampler as they serve.
    """
    prepare()
    keep_filled()
    transfer = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}
    llm = engine({**options["engine"], "kv_transfer_config": transfer})
    llm.llm_engine.engine_core.engine_core.request_block_hasher = None  # it takes seconds for long prompts, without use
    filled = llm.collective_rpc(fill)
    messages.send("engine", {**about(llm), "filled_bytes": filled})
    marks = mark_steps(llm)
    generate(llm, [[1] * 64] * max(options["batches"]), 4)
    messages.wait_for_card()
    for context in options["contexts"]:
        for batch in options["batches"]:
            case: dict[str, Any] = {"context": context, "batch": batch}
            messages.send("case", case | timed(llm, marks, context, batch, shares))


def timed(
    llm: Any, marks: list[float], context: int, batch: int, group: Callable[[list[tuple[str, float]]], Any]
) -> dict[str, Any]:
    """Measures milliseconds per token of `batch` requests over `context` tokens each; `group` sums up their kernels."""
    prompts = [[(7 * i + j) % 29 + 3 for j in range(context)] for i in range(batch)]
    marks.clear()
    gc.collect()
    gc.disable()  # it would walk the prompts, lists of millions of numbers, between two steps
    generate(llm, prompts, STEPS)
    case = per_token(marks) | kernel_times(functools.partial(generate, llm, prompts, PROFILED), group)
    gc.enable()
    return case


def first_tokens(options: dict[str, Any], messages: Messages) -> None:
    """Sends "case" for each number of requests and tokens: milliseconds until all requests have their first token.

    Prompts longer than a step come in parts, as vLLM does it, and requests that begin together share steps.
    """
    import time

    prepare()
    llm = engine(options["engine"])
    messages.send("engine", about(llm))
    generate(llm, [[1] * 64], 1)
    messages.wait_for_card()
    for requests, tokens in options["prompts"]:
        prompts = [[(7 * i + j) % 29 + 3 for j in range(tokens)] for i in range(requests)]
        spans = []
        for _ in range(1 + PROMPT_RUNS):
            begin = time.perf_counter()
            generate(llm, prompts, 1)
            spans.append((time.perf_counter() - begin) * 1e3)
        spans = sorted(spans[1:])
        messages.send("case", {"requests": requests, "tokens": tokens, "ms": spans[len(spans) // 2], "ms_all": spans})


def per_token(marks: list[float]) -> dict[str, Any]:
    """Returns the milliseconds of a step, from the times at which steps ended."""
    ends = marks[FIRST::SPAN][: SPANS + 1]
    spans = [(end - begin) / SPAN * 1e3 for begin, end in zip(ends, ends[1:], strict=False)]
    return {"ms": sorted(spans)[len(spans) // 2], "ms_all": spans, "steps": len(marks)}


def mark_steps(llm: Any) -> list[float]:
    """Returns a list that gets the time of each step that has brought a token to each request."""
    import time

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


def kernel_times(run: Callable[[], Any], group: Callable[[list[tuple[str, float]]], Any]) -> dict[str, Any]:
    """Returns `group` of the kernels of `PROFILED` tokens, names and microseconds; or why there is none."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
        events = [(e.key, e.self_device_time_total) for e in profiler.key_averages() if e.self_device_time_total]
    except (AssertionError, RuntimeError) as error:
        return {"profiler": str(error)}
    found: dict[str, Any] = group(events)
    return found


def shares(events: list[tuple[str, float]]) -> dict[str, Any]:
    """Converts microseconds of `PROFILED` steps to milliseconds of a step, attention separately."""
    found = shares_of(events, {"attention": ATTENTION}, NOT_ATTENTION)
    return {**found, "attention_ms": found["shares_ms"]["attention"]}


def shares_of(
    events: list[tuple[str, float]], kinds: Mapping[str, Sequence[str]], hidden: Sequence[str]
) -> dict[str, Any]:
    """Converts microseconds of `PROFILED` steps to milliseconds of a step, in total and for each kind of kernels.

    Args:
        events: names and microseconds.
        kinds: by kind, words of which a kernel's name has one; the first kind that fits counts, else "rest".
        hidden: words of kernels that belong to no kind.
    """
    found = dict.fromkeys((*kinds, "rest"), 0.0)
    for name, us in events:
        small = name.lower()
        known = not any(word in small for word in hidden)
        kind = next((kind for kind, words in kinds.items() if known and any(w in small for w in words)), "rest")
        found[kind] += us / PROFILED / 1e3
    longest = sorted(events, key=lambda event: -event[1])[:8]
    return {
        "gpu_ms": sum(found.values()), "shares_ms": found,
        "kernels": [[name[:100], us / PROFILED / 1e3] for name, us in longest],
    }  # fmt: skip
