"""Check and measure our backends in vLLM's engine on an SM90 GPU, and write build/vllm_check.json.

    python scripts/vllm_check.py                              all parts; about ten minutes on 16 cores
    python scripts/vllm_check.py --seconds 280                as much as fits into this time, the most telling first
    python scripts/vllm_check.py --parts speed --backends cute-int8,triton-int8 --contexts 1024,8192
    python scripts/vllm_check.py --parts warm                 compile the kernels that it needs; needs no GPU

Parts, each of which adds to the file what it finds as soon as it has it:

    tokens   a Llama and a gpt-oss that have learned to count: the engine's tokens are transformers', for each cache,
             eager and in full CUDA graphs, 1 to 32 requests, prompts among decoding requests
    speed    time per token of Llama 3 8B's attention, a few layers, by each backend over its cache
    first    time to the first token of prompts, by the same backends
    mla-tokens  small DeepSeek-V3.2 and GLM-5: with our plugin and without it, eager and in graphs, every token is the
             same but for near ties, and transformers' below the top-k; prompts of 1 to 4,000 tokens in parts, prefix
             caching, a draft token. `--models v4-64` has DeepSeek-V4 instead
    mla-steps   a decoding step of DeepSeek-V3.2's shapes, with our plugin and without it, and the shares of kernels
    sparse   sparse MLA: FlashMLA's time and ours, by vLLM's own forward
    prompts  attention of prompts, fresh ones and those with tokens in the cache: ours, vLLM's, sink_attention

Every engine is a process. Those of `tokens` run at the same time; those that are timed start at the same time, and
measure alone. Logs are in build/vllm_check/. Exit status 1 when something failed, is wrong or was left out. Needs vLLM
and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

import fp8_mla  # noqa: E402
from bench import jsonl, vllm_jobs, vllm_mla, vllm_pool  # noqa: E402
from bench.progress import Progress  # noqa: E402
from bench.records import package_version, today  # noqa: E402
from bench.vllm_jobs import CACHES, INT8  # noqa: E402
from bench.vllm_pool import Job  # noqa: E402

BACKENDS = {
    "cute-int8": ("CUSTOM", INT8),
    "triton-int8": ("TRITON_ATTN", INT8),
    "cute-bf16": ("CUSTOM", "auto"),
    "flash-bf16": ("FLASH_ATTN", "auto"),
    "cute-fp8": ("CUSTOM", "fp8"),
    "flash-fp8": ("FLASH_ATTN", "fp8"),
    "triton-fp8": ("TRITON_ATTN", "fp8"),
}
PARTS = ("mla-tokens", "mla-steps", "tokens", "speed", "first", "sparse", "prompts", "warm")
BATCHES, CONTEXTS, LAYERS = (1, 16, 64), (8192, 32768, 1024), 4
PACKAGES = ("vllm", "torch", "transformers", "nvidia-cutlass-dsl", "apache-tvm-ffi", "triton")
ROOM = 128  # tokens of a timed request after its prompt
TOKENS = 512
FIRST = ((1, 8192), (1, 32768), (4, 8192))
"""(requests, tokens of each)."""
STEP_TOKENS = 8192  # as vLLM's server on these cards
MLA_CONTEXTS = (32768, 131072, 8192)
WAYS_OF_MLA = (
    "stock-eager", "ours-eager", "ours-given", "ours-graphs", "stock-graphs", "ours-index", "ours-index-graphs",
    "ours-drafts", "stock-drafts",
)  # fmt: skip
"""Our plugin, or vLLM without it; full CUDA graphs of decoding, also with a token that the model drafts. "given" is
eager and uses the keys that the indexer of "stock-eager" has chosen. "index" has our indexer too; the eager engine
compares it with DeepGEMM's scores, call by call."""
WAYS_OF_V4 = ("stock-eager", "ours-eager", "stock-graphs", "ours-graphs", "ours-index")
BYTES = {"auto": 256, "fp8": 128, INT8: 132}  # bytes of a head and token
ENGINE_GB = 6.0  # memory of a timed engine, without its cache
SLOTS = 7
WARM_SECONDS = 60.0  # 10 to 20 s on 16 cores; engines compile kernels that are missing then
SMS = 132  # SMs of an H100 SXM or an H200: other cards compile kernels when they need them
NEVER = 1e9  # seconds
RUNS = "runs on mla_fp8_decode"
"""Text that the plugin logs when its kernels attend."""


def graphs(sizes: list[int], custom_ops: str) -> dict[str, Any]:
    """Returns options of full CUDA graphs of decoding, without torch.compile, whose warm-up takes most of the time."""
    return {
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes, "custom_ops": [custom_ops],
    }  # fmt: skip


# ---- which jobs


def jobs(options: argparse.Namespace, folder: pathlib.Path, probed: bool = True) -> list[Job]:
    """Returns all jobs of the parts, the most telling first; without a card only kernels, for which there is time."""
    longest = max(options.contexts) + ROOM
    given = {"parts": options.parts, "max_tokens": longest, "sms": SMS}
    found = [
        Job("warm", "warm", given, gigabytes=0, seconds=WARM_SECONDS if probed else NEVER, fresh=True),
        Job("probe", "probe", gigabytes=0, seconds=30),
    ]
    if not probed:
        return found[:1]
    if "tokens" in options.parts:
        for model in own_models(options):
            train = {"model": model, "folder": str(folder / model)}
            found.append(Job(f"train-{model}", "train", train, 0, ("card",), gigabytes=3, least=30))
        found += token_jobs(options, folder)
    if "mla-tokens" in options.parts:
        found += mla_jobs(options, folder)
    if "mla-steps" in options.parts:
        found += [mla_steps_job(who, heads, options, folder) for heads in (128, 16) for who in ("ours", "stock")]
    if "speed" in options.parts:
        found += [speed_job(name, options, folder, longest) for name in options.backends]
    if "first" in options.parts:
        found += [first_job(name, options, folder) for name in options.backends]
    if "sparse" in options.parts:
        found.append(Job("sparse", "sparse", {}, 1, ("card",), gigabytes=8, seconds=90, least=15))
    if "prompts" in options.parts:
        found.append(Job("prompts", "prompts", {}, 1, ("card",), gigabytes=8, seconds=60, least=15))
    return found


FIRST_TOKENS = (
    ("llama", INT8, True), ("llama", INT8, False), ("llama", "auto", True), ("llama", "fp8", True),
    ("gpt_oss", INT8, True), ("gpt_oss", "auto", True),
)  # fmt: skip


def token_jobs(options: argparse.Namespace, folder: pathlib.Path) -> list[Job]:
    """Returns an engine per model, cache and way to run: FIRST_TOKENS' now, the others after all measurements."""
    kinds = [(m, cache, graph) for m in own_models(options) for cache in CACHES for graph in (True, False)]
    # vLLM 0.26 counts the pages of layers with a window as if INT4 had a byte a number
    kinds = [kind for kind in kinds if kind[:2] != ("gpt_oss", "int4_per_token_head")]
    first = [kind for kind in FIRST_TOKENS if kind in kinds]
    found = []
    for kind in first + [kind for kind in kinds if kind not in first]:
        model, cache, graph = kind
        # 48 tokens a step: the prompts of 32 requests come in parts, among requests that decode
        engine = {
            "model": str(folder / model), "kv_cache_dtype": cache, "max_model_len": 1024, "max_num_seqs": 32,
            "max_num_batched_tokens": 48, "attention_config": {"backend": "CUSTOM"},
            "kv_cache_memory_bytes": 1 << 29, "enforce_eager": not graph,
            "compilation_config": graphs([1, 2, 4, 8, 16, 32], "none") if graph else {"custom_ops": ["none"]},
        }  # fmt: skip
        given = {"engine": engine, "rounds": rounds(vllm_jobs.asked()), "tokens": TOKENS}
        name = f"{model}-{cache}-{'graphs' if graph else 'eager'}"
        needs, phase = ("warm over", f"saved {model}"), 0 if kind in first else 2
        found.append(Job(name, "serve", given, phase, needs, gigabytes=3, seconds=150, least=25))
    return found


def own_models(options: argparse.Namespace) -> list[str]:
    """Returns the models of the part "tokens"."""
    return [model for model in options.models if model not in vllm_mla.MODELS]


def mla_jobs(options: argparse.Namespace, folder: pathlib.Path) -> list[Job]:
    """Returns training and engines of each model, drafting ones last; V4's, which compile most, after timed jobs."""
    models = [model for model in options.models if model in vllm_mla.MODELS]
    found = [
        Job(f"train-{model}", "mla-train", {"model": model, "folder": str(folder / model)}, 0, ("card",), 18, 200, 30)
        for model in models
        if model != vllm_mla.V4
    ]
    if vllm_mla.V4 in models:  # 16 contexts of CUDA
        found.append(Job("v4-ahead", "v4-ahead", {}, 2, ("card",), gigabytes=12, seconds=150, least=60, fresh=True))
    for model in models:
        choices = str(folder / model / "choices.pickle")
        for way in WAYS_OF_MLA if model != vllm_mla.V4 else WAYS_OF_V4:
            drafts = way.endswith("drafts")
            engine: dict[str, Any] = {
                "model": str(folder / model), "kv_cache_dtype": "fp8", "block_size": vllm_mla.PAGE, "dtype": "bfloat16",
                "max_model_len": vllm_mla.LONGEST + vllm_mla.PAGE, "max_num_seqs": 32, "enable_prefix_caching": True,
                "max_num_batched_tokens": vllm_mla.STEP_TOKENS, "kv_cache_memory_bytes": 1 << 29, "max_logprobs": 64,
                "enforce_eager": way.endswith(("eager", "given", "index")),
            }  # fmt: skip
            if not engine["enforce_eager"]:
                engine["compilation_config"] = graphs([2, 4, 8, 16, 32, 64] if drafts else [1, 2, 4, 8, 16, 32], "all")
            if drafts:
                engine["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
                engine["disable_log_stats"] = False
            given = {
                "model": model, "way": way, "engine": engine, "plugin": way.startswith("ours"),
                "rounds": list(vllm_mla.ROUNDS) if way.split("-", 1)[1] in ("eager", "graphs") else ["all"],
                "untested": "index" in way,
            }  # fmt: skip
            needs: tuple[str, ...] = ("warm over", f"saved {model}")
            if way == "ours-given":
                given["takes"], needs = choices, (*needs, f"{model}-stock-eager")
            elif way == "ours-index":
                given["shadow"] = "indexer"
            elif way == "stock-eager" and model != vllm_mla.V4:
                given["keeps"] = choices
            elif way == "ours-eager" and model == vllm_mla.V4:
                given["shadow"] = "attention"
            phase, gigabytes = 0, 4
            if model == vllm_mla.V4:
                engine |= {"load_format": "dummy", "block_size": None, "kv_cache_memory_bytes": 4 << 30}
                given |= {"truth": str(folder / model / "truth.json"), "first": way == WAYS_OF_V4[0]}
                needs, phase, gigabytes = needs[: 1 if given["first"] else 2], 2, 14
                needs += ("v4-ahead over",)
            found.append(Job(f"{model}-{way}", "mla-serve", given, phase, needs, gigabytes, 180, 30))
    return sorted(found, key=lambda job: job.name.endswith("drafts"))


def mla_steps_job(who: str, heads: int, options: argparse.Namespace, folder: pathlib.Path) -> Job:
    """Returns the job of an engine of DeepSeek-V3.2's shapes that is timed."""
    longest, batch = max(MLA_CONTEXTS) + ROOM, max(options.batches)
    row = vllm_mla.LAYERS * (fp8_mla.TOKEN_BYTES + vllm_mla.INDEX_BYTES)
    engine = {
        "model": str(folder / f"v32_{heads}"), "load_format": "dummy", "kv_cache_dtype": "fp8", "dtype": "bfloat16",
        "block_size": vllm_mla.PAGE, "max_model_len": longest, "max_num_seqs": batch, "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": int(batch * (longest + 2 * vllm_mla.PAGE) * row * 1.02) + (1 << 28),
        "compilation_config": graphs(sorted(options.batches), "all"),
        "kv_transfer_config": {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"},
    }  # fmt: skip
    name = f"{who}-{heads}"
    given = {
        "backend": name, "plugin": who == "ours", "engine": engine, "contexts": MLA_CONTEXTS,
        "batches": options.batches,
    }  # fmt: skip
    gigabytes = engine["kv_cache_memory_bytes"] / 1e9 + ENGINE_GB
    return Job(f"steps-{name}", "mla-steps", given, 1, ("warm over", "card"), gigabytes, 150, 30)


def rounds(asked: list[Any]) -> list[list[Any]]:
    """Returns requests that are served together: one, all, some."""
    return [asked[:1], asked, asked[5:13]]


def timed_engine(name: str, options: argparse.Namespace, folder: pathlib.Path, tokens: int) -> dict[str, Any]:
    """Returns the options that all timed engines share, with room for `tokens` tokens."""
    backend, cache = BACKENDS[name]
    return {
        "model": str(folder / "llama_8b"), "load_format": "dummy", "kv_cache_dtype": cache,
        "kv_cache_memory_bytes": int(options.layers * 2 * 8 * BYTES[cache] * (tokens + 4096) * 1.01),
        "attention_config": {"backend": backend},
    }  # fmt: skip


def speed_job(name: str, options: argparse.Namespace, folder: pathlib.Path, longest: int) -> Job:
    """Returns the job of an engine that is timed."""
    engine = timed_engine(name, options, folder, max(options.batches) * longest) | {
        "max_model_len": longest, "max_num_seqs": max(options.batches), "max_num_batched_tokens": 2048,
        "compilation_config": graphs(sorted(options.batches), "all"),
    }  # fmt: skip
    given = {
        "backend": name, "engine": engine, "contexts": options.contexts, "batches": options.batches,
    }  # fmt: skip
    gigabytes = engine["kv_cache_memory_bytes"] / 1e9 + ENGINE_GB
    # engines that check tokens are small and start first; they leave little memory
    trained = [f"train-{model} over" for model in own_models(options) if "tokens" in options.parts]
    needs = ("warm over", "card", *trained)
    return Job(name, "measure", given, 0, needs, gigabytes, seconds=90, least=25)


def first_job(name: str, options: argparse.Namespace, folder: pathlib.Path) -> Job:
    """Returns the job of an engine that is timed over prompts."""
    longest = max(tokens for _, tokens in FIRST)
    engine = timed_engine(name, options, folder, max(n * tokens for n, tokens in FIRST)) | {
        "max_model_len": longest + 64, "max_num_seqs": 8, "max_num_batched_tokens": STEP_TOKENS,
        "compilation_config": graphs([1], "all"),
    }  # fmt: skip
    given = {"backend": name, "engine": engine, "prompts": FIRST}
    gigabytes = engine["kv_cache_memory_bytes"] / 1e9 + ENGINE_GB + 4
    return Job(f"first-{name}", "first", given, 0, ("warm over", "card"), gigabytes, seconds=90, least=25)


# ---- what they find


GROUPS = {
    "serve": ("tokens", "engines"), "measure": ("speed", "backends"), "first": ("first", "backends"),
    "mla-steps": ("mla-steps", "backends"), "mla-train": ("mla-tokens", "engines"),
    "mla-serve": ("mla-tokens", "engines"),
}  # fmt: skip
"""The file's keys for the results of each kind of job, each under the job's name or its backend's."""
LAYERS_ALONE = ("sparse", "prompts")


def place_of(job: Job) -> tuple[str, ...]:
    """Returns the file's keys for the results of a job, from the outside in."""
    if job.kind in LAYERS_ALONE:
        return (job.kind,)
    return (*GROUPS.get(job.kind, ("others",)), job.options.get("backend", job.name))


class Report:
    """The results so far, written to disk immediately."""

    def __init__(self, out: pathlib.Path, options: argparse.Namespace) -> None:
        self.out, self.progress, self.started = out, Progress(), time.monotonic()
        self.pool: vllm_pool.Pool | None = None
        old = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        self.found: dict[str, Any] = {k: v for k, v in old.items() if k not in options.parts}
        self.found |= {
            "card": "unknown",
            "date": today(),
            "versions": {name: package_version(name) for name in PACKAGES},
            "others": {},
        }
        self.found |= {part: {} for part in options.parts}
        for part in {"speed", "first", "mla-steps"} & set(options.parts):
            self.found[part]["layers"] = vllm_mla.LAYERS if part == "mla-steps" else options.layers
        self.runs: dict[str, dict[tuple[str, str], Any]] = {}

    def receive(self, job: Job, event: str, data: Any) -> None:
        """Handles an event of a job."""
        place = self.found
        for name in place_of(job):
            place = place.setdefault(name, {})
        if event == "started":
            place.clear()
        elif event in ("engine", "trained"):
            place |= data
        elif event == "case":
            place.setdefault("cases", []).append(data)
        elif event == "done":
            place["done"] = True
        elif event == "failed":
            place["failed"] = data
        elif event == "round":
            (self._served if job.kind == "serve" else self._led)(job, place, data)
        elif event == "transformers":
            self.found["tokens"].setdefault("transformers", {})[job.options["model"]] = data
        elif event == "card":
            self.found["card"] = data["name"]
            if self.pool is not None:
                self.pool.gigabytes = 0.9 * data["free_gb"]
        if event != "round":
            said = in_words(data) if isinstance(data, dict) else "" if data is None else str(data)[-600:]
            self.progress.say(f"{job.name}: {event} {said}")
        self.found["seconds"] = time.monotonic() - self.started
        self.write()

    def _served(self, job: Job, engine: dict[str, Any], data: Any) -> None:
        got = engine.setdefault("wrong_requests", [])
        asked = rounds(vllm_jobs.asked())[len(got)]
        got.append(wrong_requests(asked, data))
        self.progress.say(f"{job.name}: {got[-1]} of {len(asked)} requests wrong")

    def _led(self, job: Job, engine: dict[str, Any], data: Any) -> None:
        model = job.options["model"]
        runs = self.runs.setdefault(model, {})
        runs[data["way"], data["name"]] = data
        for key in ("cached", "turns"):
            engine.setdefault(key, {})[data["name"]] = data.get(key)
        models = self.found["mla-tokens"].setdefault("models", {})
        models[model] = vllm_mla.cases(runs)
        for case in models[model]["cases"]:
            if data["way"] in (case["a"], case["b"]) and data["name"] in case["round"]:
                self.progress.say(f"{model}: {in_words(case)}")

    def end(self, left: dict[str, str]) -> list[str]:
        """Writes the rest; returns in words what is wrong."""
        self.found["left_out"] = left
        wrong = [f"{name}: {why}" for name, why in left.items()] + failures(self.found)
        self.found["wrong"] = wrong
        self.write()
        return wrong

    def write(self) -> None:
        """Writes the results to a file that is complete at any time."""
        part = self.out.with_suffix(".part")
        part.write_text(jsonl.folded(self.found), encoding="utf-8")
        part.replace(self.out)


def wrong_requests(asked: list[list[int]], got: list[list[int]]) -> int:
    """Returns how many requests of a round do not go on counting."""
    from bench import vllm_models

    return sum(vllm_models.counted_on(prompt, TOKENS) != tokens for prompt, tokens in zip(asked, got, strict=True))


def in_words(case: dict[str, Any]) -> str:
    """Describes a case in a line of the log."""
    return ", ".join(
        f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in case.items() if "kernels" not in k
    )


def failures(found: dict[str, Any]) -> list[str]:
    """Returns what is wrong in the results."""
    wrong = [f"{name}: {job['failed'][-300:]}" for name, job in found["others"].items() if "failed" in job]
    for name, counts in found.get("tokens", {}).get("transformers", {}).items():
        wrong += [f"transformers, {name}, {kind}: {n} requests" for kind, n in counts.items() if n]
    for name, model in found.get("mla-tokens", {}).get("models", {}).items():
        wrong += [f"mla-tokens, {name}: {in_words(case)}" for case in model["cases"] if case["wrong"]]
    for part, group in dict.fromkeys(GROUPS.values()):
        for name, place in found.get(part, {}).get(group, {}).items():
            if not place.get("done"):
                wrong.append(f"{part}, {name}: {len(place.get('cases', ()))} cases, not done")
            elif part == "tokens" and place.get("wrong_requests") != [0, 0, 0]:
                wrong.append(f"{part}, {name}: wrong requests {place.get('wrong_requests', 'unknown')}")
            elif part == "mla-tokens" and not is_ours(name, place):
                wrong.append(f"{part}, {name}: ran without our kernels")
    for part in LAYERS_ALONE:
        place = found.get(part, {})
        wrong += [f"{part}: {place['failed'][-300:]}"] if "failed" in place else []
    for case in found.get("sparse", {}).get("cases", []):
        if not isinstance(case["ours_us"], float) or case.get("difference", 0) >= 0.01:
            wrong.append(f"sparse: {in_words(case)}")
    return wrong


def is_ours(name: str, engine: dict[str, Any]) -> bool:
    """Returns whether an engine that should run our kernels has said so, and was heard when it calls them.

    A DeepSeek-V4 engine says so in its first step, after it was asked.
    """
    silent = "-ours-" in name and vllm_mla.V4 not in name and not any(RUNS in line for line in engine.get("said", ()))
    return not silent and engine.get("shadow", {}).get("calls") != 0


# ---- the command


def numbers(text: str) -> list[int]:
    """Parses "1,16,64"."""
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """Parses "a,b"."""
    return text.split(",")


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    it = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    it.add_argument("--parts", type=names, default=list(PARTS[:-1]))
    it.add_argument("--seconds", type=float, default=NEVER, help="after which it ends, and says what was left out")
    every = ["llama", "gpt_oss", *(model for model in vllm_mla.MODELS if model != vllm_mla.V4)]
    it.add_argument("--models", type=names, default=every, help="of tokens and mla-tokens")
    it.add_argument("--backends", type=names, default=list(BACKENDS), help="of speed and first")
    it.add_argument("--batches", type=numbers, default=list(BATCHES), help="of speed (1,16,64)")
    it.add_argument("--contexts", type=numbers, default=list(CONTEXTS), help="of speed (8192,32768,1024)")
    it.add_argument("--layers", type=int, default=LAYERS, help="of speed and first (4)")
    it.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "vllm_check.json")
    return it


def main() -> int:
    """Runs the parts; 0 if all that they checked holds."""
    begin = time.monotonic()
    command = parser()
    options = command.parse_args()
    for name, given, known in (("parts", options.parts, PARTS), ("backends", options.backends, tuple(BACKENDS))):
        if not set(given) <= set(known):
            command.error(f"--{name}: got {given}; needs some of {', '.join(known)}")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.environ.update(PYTHONPATH=path)  # for child processes
    folder = ROOT / "build" / "vllm_check"
    folder.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    only_warm = options.parts == ["warm"]
    if only_warm:
        options.parts, options.out = list(PARTS[:-1]), folder / "warm.json"  # results stay as they are
    report = Report(options.out, options)
    pool = vllm_pool.Pool(
        vllm_jobs.run, folder, report.receive, deadline=begin + options.seconds, slots=SLOTS,
        preload=() if only_warm else ("bench.vllm_preload",),
    )  # fmt: skip
    report.pool = pool
    if {"speed", "first"} & set(options.parts):
        from bench import vllm_models

        longest = max(*options.contexts, *(tokens for _, tokens in FIRST))
        vllm_models.save_llama_8b(folder / "llama_8b", options.layers, longest + ROOM)
    if "mla-steps" in options.parts:
        for heads in (128, 16):
            vllm_mla.save_v32(folder / f"v32_{heads}", heads, max(MLA_CONTEXTS) + ROOM)
    if "mla-tokens" in options.parts:
        vllm_mla.save_v4(folder / vllm_mla.V4)
    left = pool.run(jobs(options, folder, probed=not only_warm))
    if only_warm:
        return 0
    wrong = report.end(left)
    for line in wrong:
        report.progress.say(f"wrong: {line}"[:700])
    report.progress.say(f"{len(wrong)} things failed or were left out" if wrong else "all that was checked holds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
