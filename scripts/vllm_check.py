"""Check and measure our backends in vLLM's engine on an SM90 GPU, and write build/vllm_check.json.

    python scripts/vllm_check.py                              all parts; each takes one to three minutes
    python scripts/vllm_check.py --parts layers,tokens
    python scripts/vllm_check.py --parts speed --backends cute-int8,triton-int8 --contexts 1024,8192

Parts, each of which adds to the file what it found, also where another one fails:

    layers   tests/gpu/test_vllm.py: layers with vLLM's metadata and Triton kernels, CUDA graphs, sparse MLA
    tokens   a Llama and a gpt-oss that have learned to count: the engine's tokens are transformers', for each cache,
             eager and in full CUDA graphs, 1 to 32 requests, prompts among decoding requests
    prompts  attention of fresh prompts: sink_attention, FlashAttention 3, vLLM's Triton kernel
    sparse   sparse MLA: FlashMLA's time and ours, by vLLM's own forward
    speed    time per token of Llama 3 8B's attention, a few layers, by each backend over its cache

Exit status 1 when something failed or is wrong. Needs vLLM and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from scripts.bench.progress import Progress  # noqa: E402

INT8 = "int8_per_token_head"
CACHES = ("auto", "fp8", INT8)
BACKENDS = {
    "cute-int8": ("CUSTOM", INT8),
    "triton-int8": ("TRITON_ATTN", INT8),
    "cute-bf16": ("CUSTOM", "auto"),
    "flash-bf16": ("FLASH_ATTN", "auto"),
    "cute-fp8": ("CUSTOM", "fp8"),
    "flash-fp8": ("FLASH_ATTN", "fp8"),
    "triton-fp8": ("TRITON_ATTN", "fp8"),
}
BATCHES, CONTEXTS, LAYERS = (1, 16, 64), (1024, 8192, 32768), 4
TOKENS = 512
PROMPT_TOKENS = (5, 30, 100)
REFERENCE_TOKENS = 64  # of transformers; the rest must go on counting
ENGINE_SECONDS = 240
AT_A_TIME = 6  # engines that check tokens; those that are timed run alone


def child(arguments: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """A Python of its own with the checkout on its path; both outputs together."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )


def run_engine(folder: pathlib.Path, job: dict[str, Any]) -> dict[str, Any]:
    """What an engine returns, or {"error"}: one that fails leaves the others as they are."""
    ask, answer = folder / f"{job['name']}.json", folder / f"{job['name']}.result.json"
    ask.write_text(json.dumps(job), encoding="utf-8")
    answer.unlink(missing_ok=True)
    begin = time.monotonic()
    try:
        done = child(["-m", "scripts.bench.vllm_engine", str(ask), str(answer)], ENGINE_SECONDS)
    except subprocess.TimeoutExpired as error:
        return {"error": f"no answer within {ENGINE_SECONDS} s: {str(error.stdout)[-2000:]}"}
    (folder / f"{job['name']}.log").write_text(done.stdout, encoding="utf-8")
    if done.returncode or not answer.exists():
        return {"error": done.stdout[-2000:]}
    return {**json.loads(answer.read_text(encoding="utf-8")), "seconds": time.monotonic() - begin}


def graphs(sizes: list[int]) -> dict[str, Any]:
    """Full CUDA graphs of decoding, without torch.compile, whose warm-up would take most of the time."""
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes, "custom_ops": ["none"]}


# ---- parts


def layers(options: argparse.Namespace, folder: pathlib.Path, say: Callable[[str], None]) -> dict[str, Any]:
    """tests/gpu/test_vllm.py."""
    done = child(["-m", "pytest", "tests/gpu/test_vllm.py", "-q", "-p", "no:cacheprovider"], 300)
    lines = done.stdout.strip().splitlines()
    say(lines[-1] if lines else "no output")
    return {"ok": done.returncode == 0, "summary": lines[-1:], "output": done.stdout[-6000:]}


def tokens(options: argparse.Namespace, folder: pathlib.Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The tokens of each engine against those of transformers and of counting."""
    import torch

    from scripts.bench import vllm_models
    from tests.support import tiny_models

    lengths = [PROMPT_TOKENS[i % len(PROMPT_TOKENS)] for i in range(32)]
    asked = [tiny_models.sequences(500 + i, 1, length)[0].tolist() for i, length in enumerate(lengths)]
    expected = [vllm_models.counted_on(prompt, TOKENS) for prompt in asked]
    rounds = [asked[:1], asked, asked[5:13]]
    result: dict[str, Any] = {"ok": True, "engines": {}, "transformers": {}}
    jobs = []
    for name in options.models:
        model = vllm_models.train(name, "cuda")
        vllm_models.save(model, folder / name)
        result["transformers"][name] = of_transformers(model, asked, expected)
        say(f"transformers, {name}: {result['transformers'][name]}")
        result["ok"] &= all(wrong == 0 for wrong in result["transformers"][name].values())
        del model
        torch.cuda.empty_cache()
        for cache in CACHES:
            for graph in (False, True):
                # 48 tokens a step: the prompts of 32 requests come in parts, among requests that decode
                engine = {
                    "model": str(folder / name), "kv_cache_dtype": cache, "max_model_len": 1024, "max_num_seqs": 32,
                    "max_num_batched_tokens": 48, "attention_config": {"backend": "CUSTOM"},
                    "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1, "enforce_eager": not graph,
                    "compilation_config": graphs([1, 2, 4, 8, 16, 32]) if graph else {"custom_ops": ["none"]},
                }  # fmt: skip
                kind = f"{name}-{cache}-{'graphs' if graph else 'eager'}"
                jobs.append({"name": kind, "options": engine, "rounds": rounds, "tokens": TOKENS})
    wanted = [expected[:1], expected, expected[5:13]]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for job, found in zip(jobs, pool.map(lambda job: run_engine(folder, job), jobs), strict=True):
            if "rounds" in found:
                found["wrong_requests"] = [
                    sum(a != b for a, b in zip(got, want, strict=True))
                    for got, want in zip(found.pop("rounds"), wanted, strict=True)
                ]
            result["ok"] &= found.get("wrong_requests") == [0, 0, 0]
            result["engines"][job["name"]] = found
            say(f"{job['name']}: {found.get('error', found.get('wrong_requests'))}"[-300:])
    return result


def of_transformers(model: Any, asked: list[list[int]], expected: list[list[int]]) -> dict[str, int]:
    """How many of the requests transformers answers otherwise, by eager attention and over `CuteInt8Cache`."""
    import torch

    from cute_kernels.integrations import transformers as cute

    wrong = {}
    for kind in ("eager", "cute"):
        model.set_attn_implementation(kind)
        wrong[kind] = 0
        for length in PROMPT_TOKENS:
            some = [i for i, prompt in enumerate(asked) if len(prompt) == length]
            ids = torch.tensor([asked[i] for i in some], dtype=torch.int64, device="cuda")
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=REFERENCE_TOKENS, do_sample=False,
                eos_token_id=None, pad_token_id=0,
                past_key_values=cute.CuteInt8Cache(model.config) if kind == "cute" else None,
            )[:, length:].tolist()  # fmt: skip
            wrong[kind] += sum(row != expected[i][:REFERENCE_TOKENS] for row, i in zip(found, some, strict=True))
    return wrong


def prompts(options: argparse.Namespace, folder: pathlib.Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Microseconds of fresh prompts."""
    from scripts.bench import vllm_kernels

    return {"ok": True, "cases": vllm_kernels.prompts()}


def sparse(options: argparse.Namespace, folder: pathlib.Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Microseconds of sparse MLA."""
    from scripts.bench import vllm_kernels

    cases = vllm_kernels.sparse_mla()
    return {"ok": all(isinstance(c["ours_us"], float) and c.get("difference", 0) < 0.01 for c in cases), "cases": cases}


def speed(options: argparse.Namespace, folder: pathlib.Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Time per token of each backend, one engine after the other."""
    from scripts.bench import vllm_models

    longest = max(options.contexts) + 256
    vllm_models.save_llama_8b(folder / "llama_8b", options.layers, longest)
    result: dict[str, Any] = {"ok": True, "layers": options.layers, "backends": {}}
    for name in options.backends:
        backend, cache = BACKENDS[name]
        token = options.layers * 2 * 8 * {"auto": 256, "fp8": 128, INT8: 132}[cache]
        engine = {
            "model": str(folder / "llama_8b"), "load_format": "dummy", "kv_cache_dtype": cache,
            "max_model_len": longest, "max_num_seqs": max(options.batches), "max_num_batched_tokens": 2048,
            "kv_cache_memory_bytes": int(token * (max(options.batches) * longest + 4096) * 1.01),
            "attention_config": {"backend": backend}, "compilation_config": graphs(sorted(options.batches)),
            "gpu_memory_utilization": 0.5,
        }  # fmt: skip
        job = {"name": name, "options": engine, "contexts": options.contexts, "batches": options.batches}
        found = result["backends"][name] = run_engine(folder, job)
        result["ok"] &= "error" not in found
        for case in found.get("cases", ()):
            gpu = f", kernels {case['gpu_ms']:.3f}, attention {case['attention_ms']:.3f}" if "gpu_ms" in case else ""
            say(f"{name}: {case['batch']} x {case['context']}: {case['ms']:.3f} ms a token{gpu}")
        if "error" in found:
            say(f"{name}: {found['error'][-600:]}")
    return result


PARTS = {"layers": layers, "tokens": tokens, "prompts": prompts, "sparse": sparse, "speed": speed}


# ---- the command


def numbers(text: str) -> list[int]:
    """Of "1,16,64"."""
    return [int(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """The options."""
    it = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    it.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    it.add_argument("--models", type=lambda text: text.split(","), default=["llama", "gpt_oss"], help="of tokens")
    it.add_argument("--backends", type=lambda text: text.split(","), default=list(BACKENDS), help="of speed")
    it.add_argument("--batches", type=numbers, default=list(BATCHES), help="of speed (1,16,64)")
    it.add_argument("--contexts", type=numbers, default=list(CONTEXTS), help="of speed (1024,8192,32768)")
    it.add_argument("--layers", type=int, default=LAYERS, help="of speed (4)")
    it.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "vllm_check.json")
    return it


def main() -> int:
    """Runs the parts; 0 if all that they checked holds."""
    command = parser()
    options = command.parse_args()
    for name, given, known in (("parts", options.parts, tuple(PARTS)), ("backends", options.backends, tuple(BACKENDS))):
        if not set(given) <= set(known):
            command.error(f"--{name}: got {given}; needs some of {', '.join(known)}")
    say = Progress().say
    folder = options.out.parent / "vllm_check"
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    found["versions"] = versions()
    for part in options.parts:
        say(f"== {part}")
        try:
            found[part] = PARTS[part](options, folder, say)
        except Exception as error:  # what the other parts find is kept
            found[part] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            say(found[part]["error"])
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    failed = [part for part in options.parts if not found[part]["ok"]]
    say(f"failed: {', '.join(failed)}" if failed else "all that was checked holds")
    return 1 if failed else 0


def versions() -> dict[str, str]:
    """Of the card and of what takes part."""
    import importlib.metadata

    import torch

    names = ("vllm", "torch", "transformers", "nvidia-cutlass-dsl", "apache-tvm-ffi", "triton")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return {"card": torch.cuda.get_device_name(), **found}


if __name__ == "__main__":
    sys.exit(main())
