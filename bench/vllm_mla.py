"""DeepSeek-V3.2 and GLM-5 in vLLM's engine on a GPU: small models whose tokens are checked, and steps at real shapes.

The small models count, like those of tests/kit/tiny_models.py, up to the longest prompt that is tested. The right
answer of a request is known, so all engines are led along the same tokens: if one says another token, that is noted,
and it continues after the right one. Each engine thus gives the scores of all positions, and any two can be compared.
"""

from __future__ import annotations

import json
import logging
import pathlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

import fp8_mla
from bench import vllm_choices, vllm_engine, vllm_models, vllm_shadow

if TYPE_CHECKING:
    from bench.vllm_pool import Messages


class Model(NamedTuple):
    """A small model of an architecture that transformers and vLLM have."""

    kind: str
    heads: int
    index_heads: int


MODELS: Final = {
    "v32-16": Model("deepseek_v32", 16, 64),
    "v32-128": Model("deepseek_v32", 128, 64),
    "glm5-64": Model("glm_moe_dsa", 64, 32),
    "v4-64": Model("deepseek_v4", 64, 64),
}
"""The last one is not trained, because vLLM's class only has quantized weights. It has random ones, and all engines are
led along the first engine's tokens."""
V4: Final = "v4-64"
PROMPT_TOKENS: Final = (1, 17, 300, 4000)
TOKENS: Final = 256
TOKENS_OF_V4: Final = 48
LONGEST: Final = max(PROMPT_TOKENS) + TOKENS
TOPK: Final = 2048
SHORT: Final = [i for i in range(32) if PROMPT_TOKENS[i % len(PROMPT_TOKENS)] + TOKENS <= TOPK]
"""Requests that never reach beyond the top-k, in which transformers' indexer has nothing to choose."""
ROUNDS: Final = {"one": [3], "all": list(range(32)), "again": list(range(8))}
"""Requests that are served together; the last ones find their prompts in the cache."""
MOST_TURNS: Final = 48
PAGE: Final = 64
STEP_TOKENS: Final = 512
"""Tokens of a step: longer prompts come in parts, among requests that decode."""


# ---- small models


class Stage(NamedTuple):
    """A stage of training: tokens of a sequence, sequences, steps, and the learning rate."""

    tokens: int
    batch: int
    steps: int
    rate: float


STAGES: Final = (Stage(48, 16, 200, 2e-3), Stage(256, 16, 60, 1.5e-3), Stage(1024, 4, 40, 1e-3))
LAST: Final = Stage(LONGEST, 1, 150, 5e-4)
ENOUGH: Final = 2e-3
"""Mean loss of the newest steps at which the last stage ends; 7 of a sequence's tokens cannot be known."""


def asked() -> list[tuple[list[int], list[int]]]:
    """Returns 32 prompts, and the tokens that follow each."""
    from tests.kit import tiny_models

    found = []
    for i in range(32):
        length = PROMPT_TOKENS[i % len(PROMPT_TOKENS)]
        tokens = tiny_models.sequences(700 + i, 1, length + TOKENS)[0].tolist()
        found.append((tokens[:length], tokens[length:]))
    return found


def untrained(name: str) -> Any:
    """Makes a model of `MODELS` with random weights.

    No token is padding: its embedding would be zero, all keys would have one score in its first layer, and any of them
    could be chosen.
    """
    from tests.kit import tiny_models

    kind, heads, index_heads = MODELS[name]
    more = {"indexer_types": ["full", "full"]} if kind == "glm_moe_dsa" else {}
    return tiny_models.untrained(
        kind, num_attention_heads=heads, num_key_value_heads=heads, index_n_heads=index_heads, index_head_dim=128,
        index_topk=TOPK, hidden_size=256, intermediate_size=256, max_position_embeddings=8192, initializer_range=0.05,
        pad_token_id=None, **more,
    )  # fmt: skip


def train_model(name: str, device: str = "cuda", stages: tuple[Stage, ...] = (*STAGES, LAST)) -> tuple[Any, float]:
    """Trains a bfloat16 model that counts up to the tokens of the last stage; also returns its last loss."""
    import torch

    from tests.kit import tiny_models

    model = untrained(name).to(device).train()
    model.set_attn_implementation("sdpa")  # its memory does not grow with the square of a sequence
    optimizer = torch.optim.AdamW(model.parameters(), lr=stages[0].rate)
    seed, losses = 0, [9.0]
    for stage in stages:
        losses = []
        for step in range(stage.steps):
            optimizer.param_groups[0]["lr"] = stage.rate * (1 - 0.9 * step / stage.steps)
            tokens = tiny_models.sequences(seed, stage.batch, stage.tokens).to(device)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            seed += 1
            if stage is stages[-1] and len(losses) >= 20 and sum(losses[-10:]) / 10 < ENOUGH:
                break
    return model.bfloat16().eval(), sum(losses[-10:]) / len(losses[-10:])


def save(model: Any, folder: pathlib.Path) -> None:
    """Saves a model for vLLM, with a layer that drafts a token: a copy of the last one, which is seldom right."""
    import torch
    from safetensors.torch import save_file

    model.save_pretrained(folder)
    layers = model.config.num_hidden_layers
    old, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    draft = {key.replace(old, new): value.clone() for key, value in state.items() if key.startswith(old)}
    norm, one = state["model.norm.weight"], torch.eye(model.config.hidden_size, dtype=torch.bfloat16, device="cpu")
    draft |= {f"{new}{name}.weight": norm.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    draft[f"{new}eh_proj.weight"] = torch.cat([one, one], 1)
    draft[f"{new}embed_tokens.weight"] = state["model.embed_tokens.weight"]
    draft[f"{new}shared_head.head.weight"] = state["lm_head.weight"].clone()
    save_file(draft, folder / "draft.safetensors", {"format": "pt"})
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    v32 = config["model_type"] == "deepseek_v32"
    config |= {
        "first_k_dense_replace": layers + 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 1,
        "architectures": ["DeepseekV32ForCausalLM" if v32 else "GlmMoeDsaForCausalLM"],
        "indexer_rope_interleave": not v32,
    }  # fmt: skip
    file.write_text(json.dumps(config), encoding="utf-8")


def train(options: dict[str, Any], messages: Messages) -> None:
    """Sends "saved NAME", "trained" with the loss and seconds, then transformers' answers as rounds."""
    name, begin = options["model"], time.monotonic()
    model, loss = train_model(name)
    save(model, pathlib.Path(options["folder"]))
    messages.send(f"saved {name}")
    messages.send("trained", {"loss": loss, "seconds": time.monotonic() - begin})
    for kind in ("cute_mla", "eager"):
        messages.send("round", {"way": f"transformers-{kind}", "name": "all", **of_transformers(model, kind)})


def of_transformers(model: Any, attention: str) -> dict[str, Any]:
    """Makes a round like those of `serve`: the short requests, each with all of its tokens at once.

    "cute_mla" reads the 656 bytes a token that vLLM writes, "eager" latents that were not quantized.
    """
    import torch

    from cute_kernels.integrations.transformers_mla import CuteMlaCache

    model.set_attn_implementation(attention)
    requests, scores = asked(), []
    for i in SHORT:
        prompt, truth = requests[i]
        ids = torch.tensor([prompt + truth], dtype=torch.int64, device=model.device)
        cache = CuteMlaCache(model.config) if attention == "cute_mla" else None
        with torch.no_grad():
            logits = model(input_ids=ids, past_key_values=cache, use_cache=cache is not None).logits
        scores.append(logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).cpu().numpy())
    logp = np.stack(scores)
    return {"requests": SHORT, "chosen": logp.argmax(-1), "logp": logp}


def save_v4(folder: pathlib.Path) -> None:
    """Saves a configuration of DeepSeek-V4 Flash with four layers, one of each kind and two of one, and eight experts.

    All experts take part, so that rounding cannot change a choice.
    """
    from tests.kit.tiny_models import VOCABULARY

    config = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": VOCABULARY,
        "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 64,
        "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_lora_rank": 1024,
        "o_groups": 8, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "sliding_window": 128,
        "compress_ratios": [0, 4, 128, 4], "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 8, "num_hash_layers": 1,
        "topk_method": "noaux_tc", "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "swiglu_limit": 10.0,
        "routed_scaling_factor": 1.5, "expert_dtype": "fp8", "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "max_position_embeddings": 8192, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16, "original_max_position_embeddings": 65536,
            "beta_fast": 32, "beta_slow": 1,
        },
        "attention_bias": False, "tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2, "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
            "scale_fmt": "ue8m0",
        },
    }  # fmt: skip
    vllm_models.write_config(config, folder)


# ---- engines


def serve(options: dict[str, Any], messages: Messages) -> None:
    """Sends "round" for each of `options["rounds"]`, names of `ROUNDS`; see `led`."""
    llm, requests = _started(options, messages), asked()
    if "truth" in options:
        llm.collective_rpc(draw_weights)
        file = pathlib.Path(options["truth"])
        if options["first"]:
            file.write_text(json.dumps(vllm_engine.generate(llm, [prompt for prompt, _ in requests], TOKENS_OF_V4)))
            messages.send(f"saved {options['model']}")
        truths = json.loads(file.read_text(encoding="utf-8"))
        requests = [(prompt, truth) for (prompt, _), truth in zip(requests, truths, strict=True)]
    if "shadow" in options:
        llm.collective_rpc(vllm_shadow.SHADOWS[options["shadow"]])
    if "keeps" in options:
        llm.collective_rpc(vllm_choices.keep, args=(TOPK,))
    if "takes" in options:
        llm.collective_rpc(vllm_choices.take, args=(options["takes"], TOPK))

    def settle(prompt: list[int], last: int) -> None:
        if "keeps" in options:
            llm.collective_rpc(vllm_choices.settle, args=(prompt, last))

    for name in options["rounds"]:
        which = ROUNDS[name]
        found = led(llm, [requests[i] for i in which], settle)
        messages.send("round", {"way": options["way"], "name": name, "requests": which, **found})
    if "keeps" in options:
        messages.send("engine", {"choices": llm.collective_rpc(vllm_choices.write, args=(options["keeps"],))[0]})
    if "takes" in options:
        messages.send("engine", {"choices": llm.collective_rpc(vllm_choices.taken)[0]})
    if "shadow" in options:
        messages.send("engine", {"shadow": llm.collective_rpc(vllm_shadow.seen)[0]})
    if "speculative_config" in options["engine"]:
        counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        names = ("draft", "accepted")
        messages.send("engine", {name: counters.get(f"vllm:spec_decode_num_{name}_tokens") for name in names})


def _started(options: dict[str, Any], messages: Messages) -> Any:
    """Starts an engine with our plugin or without it, and sends it as "engine"."""
    begin, said = time.monotonic(), list[str]()

    def hear(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return True

    logging.getLogger("vllm.cute_kernels").addFilter(hear)  # a handler would be lost: vLLM configures its loggers again
    vllm_engine.prepare(options["plugin"], options.get("untested", False))
    llm = vllm_engine.engine(options["engine"])
    messages.send("engine", {**vllm_engine.about(llm), "start_s": time.monotonic() - begin, "said": said})
    return llm


def led(
    llm: Any, requests: list[tuple[list[int], list[int]]], settle: Callable[[list[int], int], None] | None = None
) -> dict[str, Any]:
    """Returns an engine's scores at each position of the truths of some requests, being led along them.

    `settle` is told, turn by turn, up to which position of a request the engine's tokens are known.

    Returns:
        chosen (requests, tokens) and logp (requests, tokens, vocabulary), the first turn's tokens that were cached, and
        the number of turns: after a token that differs from the truth, a request begins again behind the right one.
    """
    from tests.kit.tiny_models import VOCABULARY

    tokens = len(requests[0][1])
    chosen: Any = np.zeros((len(requests), tokens), np.int32)
    logp: Any = np.full((len(requests), tokens, VOCABULARY), -np.inf, np.float32)
    begins, cached, turns = dict.fromkeys(range(len(requests)), 0), list[int](), 0
    while begins and turns < MOST_TURNS:
        prompts = [{"prompt_token_ids": requests[i][0] + requests[i][1][:begin]} for i, begin in begins.items()]
        given = [vllm_engine.sampling(tokens - begin, VOCABULARY) for begin in begins.values()]
        outputs = llm.generate(prompts, given, use_tqdm=False)
        if not turns:
            cached = [output.num_cached_tokens or 0 for output in outputs]
        turns += 1
        for (i, begin), output in zip(list(begins.items()), outputs, strict=True):
            del begins[i]
            done = output.outputs[0]
            for place, (token, scores) in enumerate(zip(done.token_ids, done.logprobs, strict=True), begin):
                chosen[i, place] = token
                for which, score in scores.items():
                    logp[i, place, which] = score.logprob
                if token != requests[i][1][place]:
                    if place + 1 < tokens:
                        begins[i] = place + 1
                    break
            if settle is not None:
                settle(requests[i][0], len(requests[i][0]) + place - 1)
    if begins:
        raise RuntimeError(f"{len(begins)} requests were not done after {MOST_TURNS} turns: the model does not count")
    return {"chosen": chosen, "logp": logp, "cached": sum(cached), "turns": turns}


# ---- engines compared


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Returns the largest difference of two runs in the distance between a position's two best scores."""
    best = np.argsort(a["logp"], -1)[..., -2:]
    gap_a, gap_b = (np.diff(np.take_along_axis(run["logp"], best, -1), axis=-1) for run in (a, b))
    return float(np.where(_numberless(a, b)[..., None], 0.0, np.abs(gap_a - gap_b)).max())


def _numberless(a: dict[str, Any], b: dict[str, Any]) -> Any:
    """Returns positions at which the scores of one of two runs are not numbers."""
    return np.isnan(a["logp"]).any(-1) | np.isnan(b["logp"]).any(-1)


def compared(
    a: dict[str, Any], b: dict[str, Any], near: float, excused: frozenset[tuple[int, int]] = frozenset()
) -> dict[str, Any]:
    """Finds positions at which two runs say different tokens: near ties, whose scores are within `near`, and errors.

    Wrong ones that are `excused`, (request, position), count as "otherwise": other keys were chosen. Scores that are
    not numbers are wrong whatever the tokens are.
    """
    both = [i for i in a["requests"] if i in b["requests"]]
    a, b = ({key: run[key][[run["requests"].index(i) for i in both]] for key in ("chosen", "logp")} for run in (a, b))
    gaps, wrong, otherwise, where = [0.0], 0, 0, list[list[Any]]()
    numberless = _numberless(a, b)
    for place in zip(*np.nonzero((a["chosen"] != b["chosen"]) & ~numberless), strict=True):
        pair = [a["chosen"][place], b["chosen"][place]]
        gaps.append(max(abs(float(run["logp"][place][pair[0]] - run["logp"][place][pair[1]])) for run in (a, b)))
        if gaps[-1] > near:
            excuse = (both[place[0]], int(place[1])) in excused
            wrong, otherwise = wrong + (not excuse), otherwise + excuse
            if not excuse:
                where.append([both[place[0]], int(place[1]), round(gaps[-1], 3)])
    lost = [[both[i], int(j), None] for i, j in zip(*np.nonzero(numberless), strict=True)]
    return {
        "tokens": a["chosen"].size, "differ": len(gaps) - 1 + len(lost), "wrong": wrong + len(lost),
        "otherwise": otherwise, "gap": max(gaps), "scores": distance(a, b),
        **({"where": [*lost[:8], *where[:8]]} if lost or where else {}),
    }  # fmt: skip


def only(run: dict[str, Any], requests: list[int]) -> dict[str, Any]:
    """Returns a run's results of some requests."""
    rows = [i for i, request in enumerate(run["requests"]) if request in requests]
    return {"requests": [run["requests"][i] for i in rows], "chosen": run["chosen"][rows], "logp": run["logp"][rows]}


def agreed(a: dict[str, Any], b: dict[str, Any]) -> frozenset[tuple[int, int]]:
    """Returns (request, position) of all tokens that two runs of the same requests share."""
    return frozenset((a["requests"][i], int(j)) for i, j in zip(*np.nonzero(a["chosen"] == b["chosen"]), strict=True))


def cases(runs: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """Compares all runs of a model that can be compared, by their names and rounds; see `compared`.

    A near tie is two scores no further apart than the same engine's differ between eager and graph runs. If our engine
    agrees with vLLM's own once it is given the keys that the other's indexer chose, other keys were chosen. For that
    agreement scores count as near if they are near in short requests, which see all of their keys.
    """
    engines = [(who, name) for who in ("ours", "stock") for name in ROUNDS]
    same = [[(f"{who}-{how}", name) for how in ("eager", "graphs")] for who, name in engines]
    both = [(runs[a], runs[b]) for a, b in same if a in runs and b in runs]
    near = max((distance(a, b) for a, b in both), default=0.0)
    sure = max(
        (distance(*(only(run, SHORT) for run in pair)) for pair in both if {*SHORT} & {*pair[0]["requests"]}),
        default=0.0,
    )
    hows = ("eager", "graphs", "drafts")
    pairs = [((f"ours-{how}", name), (f"stock-{how}", name)) for how in hows for name in ROUNDS]
    pairs += [(a, b) for a, b in same]
    pairs += [(("ours-graphs", "all"), (f"{who}-drafts", "all")) for who in ("ours", "stock")]
    pairs += [(("ours-eager", "all"), (f"transformers-{kind}", "all")) for kind in ("cute_mla", "eager")]
    pairs += [((f"ours-{how}", name), (f"ours-{how}", "all")) for how in hows[:2] for name in ("one", "again")]
    given, taken = ("ours-given", "all"), ("stock-eager", "all")
    pairs.append((given, taken))
    pairs += [(("ours-index", "all"), (f"{who}-eager", "all")) for who in ("ours", "stock")]
    pairs += [(("ours-index-graphs", "all"), (f"{who}-graphs", "all")) for who in ("ours", "stock")]
    excused = agreed(runs[given], runs[taken]) if given in runs and taken in runs else frozenset()
    found = []
    for a, b in pairs:
        if a in runs and b in runs:
            which = {"a": a[0], "b": b[0], "round": a[1] if a[1] == b[1] else f"{a[1]}, {b[1]}"}
            both_engines = a[0].startswith("ours") and b[0].startswith("stock") and a != given
            limit = sure if a == given else near
            found.append(which | compared(runs[a], runs[b], limit, excused if both_engines else frozenset()))
    return {"near": near, "sure": sure, "cases": found}


# ---- steps at real shapes


LAYERS: Final = 4
FAMILIES: Final = {"normal": None, "few small": 32768, "tokens and tiles": 32768}
"""Values of the caches, by names of tests/kit/values.py, and the context at which they are timed; None: all."""
INDEX_BYTES: Final = 132
SHARES: Final = {
    "indexer": ("mqa_logits",),
    "top-k": ("topk", "top_k", "radix"),
    "slots": ("convert_req", "global_index"),
    "attention": ("mla", "latent", "flash", "splitkv", "combine", "merge"),
}
NOT_SHARED: Final = ("concat_and_cache", "metadata")


def save_v32(folder: pathlib.Path, heads: int, max_positions: int) -> None:
    """Saves DeepSeek-V3.2's configuration with few layers, no experts and a small vocabulary; vLLM draws weights."""
    config = {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "hidden_size": 7168,
        "intermediate_size": 2048, "moe_intermediate_size": 2048, "num_hidden_layers": LAYERS,
        "num_attention_heads": heads, "num_key_value_heads": heads, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_head_dim": 128, "index_n_heads": 64,
        "index_topk": TOPK, "first_k_dense_replace": LAYERS, "moe_layer_freq": 1, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0, "vocab_size": 1024,
        "max_position_embeddings": max_positions, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "mlp_layer_types": ["dense"] * LAYERS,
    }  # fmt: skip
    vllm_models.write_config(config, folder)


def steps(options: dict[str, Any], messages: Messages) -> None:
    """Sends "case" for each family, context and batch, as `vllm_engine.measure` does, with the shares of kernels."""
    vllm_engine.keep_filled()
    llm = _started(options, messages)
    llm.llm_engine.engine_core.engine_core.request_block_hasher = None
    llm.collective_rpc(draw_weights)
    llm.collective_rpc(fill, args=("normal",))
    marks = vllm_engine.mark_steps(llm)
    vllm_engine.generate(llm, [[1] * 64] * max(options["batches"]), 4)
    messages.wait_for_card()
    for family, only in FAMILIES.items():
        if family != "normal":
            llm.collective_rpc(fill, args=(family,))
        for context in [only] if only else options["contexts"]:
            for batch in options["batches"]:
                case = {"family": family, "context": context, "batch": batch}
                case |= vllm_engine.timed(llm, marks, context, batch, shares)
                messages.send("case", case)


def draw_weights(worker: Any) -> None:
    """Draws weights that keep numbers at a trained model's size: dummy ones are so small that attention is nothing."""
    import torch

    torch.manual_seed(0)  # every engine draws the same weights
    model = worker.model_runner.get_model()
    with torch.inference_mode():
        for name, weight in model.named_parameters():
            if weight.element_size() == 1 and weight.is_floating_point():  # FP8, with scales beside it
                weight.copy_(torch.randn(weight.shape, dtype=torch.bfloat16, device=weight.device))
            elif not weight.is_floating_point():
                continue
            elif "weight_scale" in name:
                weight.fill_(2.0**-6)
            elif weight.dim() == 1:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
            else:  # weights that are multiplied from the left sum along the second to last dimension
                fan_in = 1 if "embed" in name else weight.shape[-2 if weight.dim() == 3 else -1]
                weight.normal_(0, fan_in**-0.5)
        vllm_engine.finish_weights(model)


def fill(worker: Any, family: str) -> None:
    """Fills every cache of latents with tokens of a family, and those of the indexer with N(0, 1)."""
    import torch

    from tests.kit import values

    with torch.inference_mode():
        for layer in worker.model_runner.vllm_config.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            cache = cache[0] if isinstance(cache, (list, tuple)) and cache else cache
            if not isinstance(cache, torch.Tensor) or not cache.numel():
                continue
            pages = cache.view(torch.uint8)
            if pages.shape[-1] == fp8_mla.TOKEN_BYTES:
                values.fill_pages(pages, family, "v3.2")
            elif family == "normal":
                fill_index(pages)


def fill_index(pages: Any) -> None:
    """Fills pages (n, 64, 132) of the indexer with keys of N(0, 1): codes of all tokens, then scales of all of them."""
    import torch

    rows = pages.flatten(1) if pages.is_contiguous() else pages.view(len(pages), -1)
    for part in rows.split(2048):
        keys = torch.randn(len(part), PAGE, 128, dtype=torch.float32, device=pages.device)
        scales = torch.exp2(torch.ceil(torch.log2(keys.abs().amax(-1) / 448)))
        codes = (keys / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
        part[:, : PAGE * 128] = codes.view(torch.uint8).flatten(1)
        part[:, PAGE * 128 :] = scales.view(torch.uint8).flatten(1)


def shares(events: list[tuple[str, float]]) -> dict[str, Any]:
    """Converts microseconds of `PROFILED` steps to milliseconds of a step, by `SHARES`."""
    return vllm_engine.shares_of(events, SHARES, NOT_SHARED)
