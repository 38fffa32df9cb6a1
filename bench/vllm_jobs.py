"""The jobs of scripts/vllm_check.py: a process of vllm_pool.py calls `run`."""

from __future__ import annotations

import itertools
import pathlib
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.vllm_pool import Messages

PROMPT_TOKENS = (5, 30, 100)
REFERENCE_TOKENS = 64  # tokens by transformers; the rest must go on counting
INT8 = "int8_per_token_head"
TIMED_CACHES = ("auto", "fp8", INT8)
CACHES = (*TIMED_CACHES, "fp8_per_token_head", "int4_per_token_head")
PAGE = 16


def run(kind: str, options: dict[str, Any], messages: Messages) -> None:
    """Runs a job, in a process of its own."""
    from bench import vllm_engine, vllm_mla, vllm_v4

    vllm_engine.set_environment()
    jobs = {
        "probe": probe, "warm": warm, "train": train, "serve": vllm_engine.serve, "measure": vllm_engine.measure,
        "first": vllm_engine.first_tokens, "sparse": sparse, "prompts": prompts,
        "mla-train": vllm_mla.train, "mla-serve": vllm_mla.serve, "mla-steps": vllm_mla.steps,
        "v4-ahead": vllm_v4.compile_ahead,
    }  # fmt: skip
    jobs[kind](options, messages)


def probe(options: dict[str, Any], messages: Messages) -> None:
    """Sends "card": its name, its free memory in GB, its multiprocessors."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    torch.ones(1, dtype=torch.float32, device="cuda").add_(1).item()
    messages.send("card", {"name": torch.cuda.get_device_name(), "free_gb": free / 1e9, "sms": sms})


# ---- kernels before they are needed


def warm_calls(parts: list[str], max_tokens: int) -> list[tuple[Any, tuple[int, ...], tuple[int, ...]]]:
    """Returns the shapes, batch sizes and query tokens that engines and layers will ask for."""
    import torch

    from bench import vllm_kernels, vllm_mla, vllm_models
    from cute_kernels.integrations.vllm.calls import GqaCalls
    from cute_kernels.warm import IndexShape, MlaShape
    from tests.kit import tiny_models

    wanted: list[tuple[Any, tuple[int, ...], tuple[int, ...]]] = []
    layers: list[tuple[GqaCalls, int, int]] = []  # layer, tokens of a request, number of requests
    make = partial(GqaCalls, flash=_prompts_are_vllms)
    if "speed" in parts or "first" in parts:
        layers += [(make(32, 8, 128, 128**-0.5, cache), max_tokens, 64) for cache in TIMED_CACHES]
    if "tokens" in parts:
        sizes = tiny_models.SIZES
        heads, kv_heads, d = (int(sizes[k]) for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        for cache, window in itertools.product(CACHES, (None, tiny_models.WINDOW)):
            layers.append((make(heads, kv_heads, d, d**-0.5, cache, window=window), vllm_models.MAX_POSITIONS, 32))
    for layer, longest, batch in layers:
        shapes = layer.shapes(torch.bfloat16, PAGE, longest)
        wanted += [(shape, tuple(range(1, batch + 1)), (1,)) for shape in shapes]
    if "sparse" in parts:
        for heads in vllm_kernels.MLA_HEADS:
            shape = MlaShape(heads, vllm_kernels.MLA_TOPK, append=False)
            tokens = vllm_kernels.MLA_QUERY_TOKENS
            wanted.append((shape, tuple(n * tokens for n in vllm_kernels.MLA_REQUESTS), (1,)))
            wanted.append((shape, vllm_kernels.MLA_REQUESTS, (tokens,)))
    if {"mla-tokens", "mla-steps"} & set(parts):
        for heads in {model.heads for model in vllm_mla.MODELS.values()}:
            shape = MlaShape(heads, vllm_mla.TOPK, append=False)
            wanted.append((shape, (*range(1, 33), 64, vllm_mla.STEP_TOKENS), (1, 2)))
    if "mla-tokens" in parts:
        for index_heads in {model.index_heads for model in vllm_mla.MODELS.values()}:
            index = IndexShape(vllm_mla.LONGEST + vllm_mla.PAGE, slots=False, heads=index_heads, append=False)
            wanted.append((index, tuple(range(1, 33)), (1,)))
    return wanted


def _prompts_are_vllms(**arguments: Any) -> None:
    """Replaces vLLM's FlashAttention: no prompt is computed here."""


def warm(options: dict[str, Any], messages: Messages) -> None:
    """Compiles the kernels of all jobs, in one pool of processes. Needs no GPU."""
    from cute_kernels.runtime.compile import precompile
    from cute_kernels.warm import kernel_specs

    specs: dict[Any, None] = {}
    for shape, batches, tokens in warm_calls(options["parts"], options["max_tokens"]):
        found = kernel_specs(shape, batch_sizes=batches, query_tokens=tokens, num_sms=options["sms"])
        specs.update(dict.fromkeys(found))
    compiled = precompile(list(specs), None, lambda spec: None)
    messages.send("compiled", f"{len(specs)} kernels, {len(compiled)} compiled now")


# ---- small models and what transformers says


def asked() -> list[list[int]]:
    """Returns 32 prompts of several lengths."""
    from tests.kit import tiny_models

    lengths = [PROMPT_TOKENS[i % len(PROMPT_TOKENS)] for i in range(32)]
    return [tiny_models.sequences(500 + i, 1, length)[0].tolist() for i, length in enumerate(lengths)]


def train(options: dict[str, Any], messages: Messages) -> None:
    """Sends the model's name when it is saved, then "transformers": requests that transformers answers differently."""
    from bench import vllm_models

    name = options["model"]
    model = vllm_models.train(name, "cuda")
    vllm_models.save(model, pathlib.Path(options["folder"]))
    messages.send(f"saved {name}")
    messages.send("transformers", of_transformers(model, asked()))


def of_transformers(model: Any, prompts: list[list[int]]) -> dict[str, int]:
    """Returns how many requests transformers answers differently, eager and over `CuteInt8Cache` of two kinds."""
    import torch

    from bench import vllm_models
    from cute_kernels.integrations import transformers as cute

    wrong = {}
    for kind in ("eager", "int8", "int4"):
        model.set_attn_implementation("eager" if kind == "eager" else "cute")
        wrong[kind] = 0
        for length in PROMPT_TOKENS:
            some = [prompt for prompt in prompts if len(prompt) == length]
            ids = torch.tensor(some, dtype=torch.int64, device="cuda")
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=REFERENCE_TOKENS, do_sample=False,
                eos_token_id=None, pad_token_id=0,
                past_key_values=None if kind == "eager" else cute.CuteInt8Cache(model.config, kind=kind),
            )[:, length:].tolist()  # fmt: skip
            right = [vllm_models.counted_on(prompt, REFERENCE_TOKENS) for prompt in some]
            wrong[kind] += sum(a != b for a, b in zip(found, right, strict=True))
    return wrong


# ---- layers without an engine


def sparse(options: dict[str, Any], messages: Messages) -> None:
    """Sends "case" for each number of heads and requests."""
    from bench import vllm_kernels

    messages.wait_for_card()
    for case in vllm_kernels.sparse_mla():
        messages.send("case", case)


def prompts(options: dict[str, Any], messages: Messages) -> None:
    """Sends "case" for each size of prompts."""
    from bench import vllm_kernels

    messages.wait_for_card()
    for case in vllm_kernels.prompts():
        messages.send("case", case)
