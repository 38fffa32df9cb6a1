"""The main job on a real model's attention: a DeepSeek-V3.2 layer decodes its next tokens from an FP8 cache.

It runs text through a DeepSeek-V3.2 attention layer of `transformers` (random weights, nothing is downloaded), packs
its compressed latents into a paged cache of 656 bytes a token, and decodes the last tokens again with `mla_fp8_decode`,
sparse over the keys that the layer's own indexer picks and dense over all keys. It prints the distance from the layer's
own output. Then the indexer's keys go into a cache of 132 bytes a token, and `index_decode` picks.

On an SM90 GPU the kernel runs at the model's full size; elsewhere the torch reference runs with fewer heads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Attention,
    DeepseekV32RotaryEmbedding,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

import fp8_mla  # noqa: E402
from cute_kernels import index_append, index_decode, mla_fp8_decode  # noqa: E402
from cute_kernels.runtime.arch import is_sm90  # noqa: E402
from scripts.demo_parts import (  # noqa: E402
    Cell,
    PagedCache,
    Report,
    batch_of,
    byte_tables,
    embed,
    milliseconds,
    outputs_of,
    relative_error,
)

DEFAULT_PROMPT = ROOT / "LICENSE"
MODEL_HEADS, MODEL_TOPK = 128, 2048
BF16_BYTES = 2 * fp8_mla.QK_DIM
MIN_SHARE = 0.9
"""Least share of the layer's own keys among those of `index_decode`. FP8 queries and keys order keys near the last one
differently: 96 to 98% of 2,048 of 16,384 are the same."""
# The context extension of the released model. It changes the frequencies and, through mscale, the softmax scale.
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@dataclass(frozen=True)
class Size:
    """Sizes that are smaller without a GPU. All others are those of DeepSeek-V3.2."""

    heads: int
    index_topk: int
    prompt_tokens: int
    sequences: int
    next_tokens: int = 2
    hidden: int = 7168
    q_rank: int = 1536
    index_heads: int = 64
    page_size: int = 64


FULL = Size(heads=MODEL_HEADS, index_topk=MODEL_TOPK, prompt_tokens=4096, sequences=8)
CPU = Size(heads=16, index_topk=512, prompt_tokens=1536, sequences=2)


class Trace(NamedTuple):
    """One sequence through the layer, float32. n: number of last tokens, which are decoded; s: number of all tokens."""

    out: torch.Tensor
    """(n, hidden): the layer's own output."""
    query: torch.Tensor
    """(n, heads, 576): queries with the key projection absorbed."""
    latents: torch.Tensor
    """(s, 576): normalized latents and roped keys, what a cache stores."""
    picked: torch.Tensor
    """(n, topk) int: positions that the indexer picked."""
    index_query: torch.Tensor
    """(n, index heads, 128): the indexer's queries."""
    index_weights: torch.Tensor
    """(n, index heads): weights of the products of these queries."""
    index_keys: torch.Tensor
    """(s, 128): the indexer's keys."""


class Choice(NamedTuple):
    """The keys that `index_decode` picks in place of the layer's own indexer.

    share  share of the layer's keys that are among them
    error  error of `mla_fp8_decode` over them, at the layer's output
    ms     milliseconds of `index_decode` alone
    """

    share: float
    error: float
    ms: float


class Found(NamedTuple):
    """Reports of "sparse" and "dense", tokens in the cache, and the choice of `index_decode`."""

    reports: dict[str, Report]
    tokens: int
    choice: Choice


class Layer:
    """A DeepSeek-V3.2 attention layer with random weights over a byte-level embedding, float32."""

    def __init__(self, size: Size, device: torch.device) -> None:
        config = DeepseekV32Config(
            num_hidden_layers=1,
            hidden_size=size.hidden,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            q_lora_rank=size.q_rank,
            index_n_heads=size.index_heads,
            index_topk=size.index_topk,
            rope_parameters=dict(ROPE),
            attn_implementation="eager",
        )
        self.next_tokens = size.next_tokens
        generator = torch.Generator(device).manual_seed(0)
        with torch.device(device):
            self.attention = DeepseekV32Attention(config, layer_idx=0).eval().requires_grad_(False)
            self.rotary = DeepseekV32RotaryEmbedding(config)
            self.embedding = byte_tables(size.hidden, generator)
        for name, parameter in self.attention.named_parameters():
            if parameter.ndim == 2:  # unit variance in, unit variance out: scores spread by about 2, far from uniform
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
            elif name.endswith("weight"):  # a norm's gains: uneven, as in a trained model
                parameter.normal_(0.0, 0.5, generator=generator).exp_()
        # (heads, 128 of the key or 128 of the value, 512)
        self.key_up, self.value_up = self.attention.kv_b_proj.weight.view(size.heads, -1, fp8_mla.V_DIM).split(
            [config.qk_nope_head_dim, config.v_head_dim], dim=1
        )
        self.softmax_scale = float(self.attention.scaling)

    def __call__(self, text: bytes, *, sparse: bool) -> Trace:
        """Runs `text` through the layer; unless `sparse`, its indexer picks every token."""
        hidden = embed(text, self.embedding)
        tokens = hidden[0]
        positions = torch.arange(len(tokens), device=tokens.device).unsqueeze(0)
        rope = self.rotary(hidden, positions)
        mask = torch.full((len(tokens), len(tokens)), torch.finfo(torch.float32).min, device=tokens.device).triu(1)

        indexer = self.attention.indexer
        topk = indexer.index_topk
        indexer.index_topk = topk if sparse else len(tokens)
        names = ("q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "indexer")
        indexer_weights = ("indexer.wq_b", "indexer.k_norm", "indexer.weights_proj")
        try:
            with outputs_of(self.attention, *names, *indexer_weights) as seen:
                out, _ = self.attention(
                    hidden, position_embeddings=rope, attention_mask=mask[None, None], position_ids=positions
                )
        finally:
            indexer.index_topk = topk

        query = seen["q_b_proj"].view(1, len(tokens), self.attention.num_heads, -1).transpose(1, 2)
        query_nope, query_rope = query.split([self.key_up.shape[1], fp8_mla.ROPE_DIM], dim=-1)
        key_rope = seen["kv_a_proj_with_mqa"][:, None, :, fp8_mla.NOPE_DIM :]
        query_rope, key_rope = apply_rotary_pos_emb_interleave(query_rope, key_rope, *rope)
        absorbed = torch.cat([query_nope @ self.key_up, query_rope], dim=-1)
        # the indexer's rope is not interleaved, and on the first values
        index_query = seen["indexer.wq_b"].unflatten(-1, (indexer.n_heads, -1))
        query_pass, key = index_query[..., fp8_mla.ROPE_DIM :], seen["indexer.k_norm"].unsqueeze(2)
        first = slice(fp8_mla.ROPE_DIM)
        index_query, index_key = apply_rotary_pos_emb(index_query[..., first], key[..., first], *rope, unsqueeze_dim=2)
        index_query = torch.cat([index_query, query_pass], dim=-1)
        index_key = torch.cat([index_key, key[..., fp8_mla.ROPE_DIM :]], dim=-1)
        last = slice(-self.next_tokens, None)
        return Trace(
            out=out[0, last],
            query=absorbed[0, :, last].transpose(0, 1).contiguous(),
            latents=torch.cat([seen["kv_a_layernorm"][0], key_rope[0, 0]], dim=-1),
            picked=seen["indexer"][0, last],
            index_query=index_query[0, last],
            index_weights=seen["indexer.weights_proj"][0, last] * indexer.softmax_scale * indexer.n_heads**-0.5,
            index_keys=index_key[0, :, 0],
        )

    def project(self, latent_out: torch.Tensor) -> torch.Tensor:
        """Projects attention's result in the latent space, (n, heads, 512), to the layer's output (n, hidden)."""
        values = torch.einsum("nhc,hvc->nhv", latent_out.float(), self.value_up)
        return self.attention.o_proj(values.flatten(1))


def attend(
    query: torch.Tensor, latents: torch.Tensor, picked: torch.Tensor | None, softmax_scale: float
) -> torch.Tensor:
    """Computes plain attention of a sequence's last tokens, in float32 over latents of any dtype: (n, heads, 512).

    Args:
        query: (n, heads, 576).
        latents: (s, 576).
        picked: (n, topk) int, positions that each token may see. None: all positions up to its own.
        softmax_scale: factor of the scores.
    """
    n, s = len(query), len(latents)
    seen = torch.ones(n, s, dtype=torch.bool, device=latents.device).tril(s - n)
    if picked is not None:
        seen &= torch.zeros_like(seen).scatter(1, picked.long(), True)
    keys = latents.float()
    scores = torch.einsum("nhc,sc->nhs", query.float(), keys) * softmax_scale
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1)
    return weights @ keys[:, : fp8_mla.V_DIM]


def measure(layer: Layer, traces: list[Trace], cache: PagedCache, *, sparse: bool) -> Report:
    """Attends in the four ways of `Report`."""
    scale = layer.softmax_scale
    want = torch.cat([trace.out for trace in traces])
    query = torch.stack([trace.query for trace in traces])
    query_bf16 = query.bfloat16()
    out = query_bf16.new_empty(*query.shape[:-1], fp8_mla.V_DIM)
    latents = [trace.latents for trace in traces]
    latents_bf16 = [trace.latents.bfloat16() for trace in traces]
    picked = [trace.picked if sparse else None for trace in traces]
    keys: dict[str, Any] = {"block_table": cache.block_table, "cache_seqlens": cache.seqlens}
    if sparse:
        keys = {"indices": cache.slots_of([trace.picked for trace in traces])}

    def plain(query: torch.Tensor, latents: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([attend(*sequence, scale) for sequence in zip(query, latents, picked, strict=True)])

    def reference() -> torch.Tensor:
        return fp8_mla.reference_decode(query, cache.pages, **keys, softmax_scale=scale, dtype=torch.float32)[0]

    def decode() -> torch.Tensor:
        mla_fp8_decode(query_bf16, cache.pages, **keys, softmax_scale=scale, out=out)
        return out

    def cell(way: Callable[[], torch.Tensor]) -> Cell:
        error = relative_error(layer.project(way().flatten(0, 1)), want)
        return Cell(error, milliseconds(way, query.device))

    exact, bf16 = cell(lambda: plain(query, latents)), cell(lambda: plain(query_bf16, latents_bf16))
    return Report(exact, bf16, {"FP8": cell(reference)}, {"FP8": cell(decode)})


def choose(layer: Layer, traces: list[Trace], cache: PagedCache, topk: int) -> Choice:
    """Indexes and attends: keys of the indexer are in pages of their own, with the same block table as the latents."""
    page_size, device = cache.pages.shape[1], cache.pages.device
    keys = torch.full((len(cache.pages), page_size, 132), 0xFF, dtype=torch.uint8, device=device)
    slots = fp8_mla.slots_from_block_table(cache.block_table, cache.seqlens, page_size)
    for row, trace in enumerate(traces):
        index_append(trace.index_keys.bfloat16(), keys, slots[row, : len(trace.index_keys)])
    query = torch.stack([trace.index_query for trace in traces])
    scale = query.abs().amax(-1).clamp(min=1e-10) / 448
    codes = (query / scale[..., None]).to(torch.float8_e4m3fn)
    weights = torch.stack([trace.index_weights for trace in traces]) * scale

    def pick() -> torch.Tensor:
        return index_decode(codes, weights, keys, block_table=cache.block_table, cache_seqlens=cache.seqlens, topk=topk)

    picked, own = pick(), cache.slots_of([trace.picked for trace in traces])
    same = sum(
        torch.isin(a[a >= 0], b).sum().item() for a, b in zip(own.flatten(0, 1), picked.flatten(0, 1), strict=True)
    )
    queries = torch.stack([trace.query for trace in traces]).bfloat16()
    out = mla_fp8_decode(queries, cache.pages, indices=picked, softmax_scale=layer.softmax_scale)
    error = relative_error(layer.project(out.flatten(0, 1)), torch.cat([trace.out for trace in traces]))
    return Choice(same / int((own >= 0).sum()), error, milliseconds(pick, device))


@torch.no_grad()
def run(size: Size, text: bytes, device: torch.device) -> Found:
    """Decodes the last tokens of a few sequences cut from `text`, sparse and dense."""
    layer = Layer(size, device)
    texts = batch_of(text, size.prompt_tokens + size.next_tokens, size.sequences)
    traces = {mode: [layer(part, sparse=mode == "sparse") for part in texts] for mode in ("sparse", "dense")}
    cache = PagedCache.of([trace.latents for trace in traces["sparse"]], size.page_size, size.next_tokens)
    found = {mode: measure(layer, of_mode, cache, sparse=mode == "sparse") for mode, of_mode in traces.items()}
    return Found(found, int(cache.seqlens.sum()), choose(layer, traces["sparse"], cache, size.index_topk))


def choose_size() -> tuple[Size, torch.device, str]:
    """Returns the size to run, the device, and in words the reason."""
    found = "torch finds no CUDA GPU"
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        found = torch.cuda.get_device_name(device)
        if is_sm90(device):
            return FULL, device, f"{found}, so mla_fp8_decode runs the SM90 kernel at full size"
        found += " is no SM90 GPU"
    return (
        CPU,
        torch.device("cpu"),
        f"{found}, so mla_fp8_decode runs its torch reference on the CPU, at a smaller size",
    )


def second_page(size: Size, text: bytes, device: torch.device) -> list[str]:
    """Runs two caches in one softmax, if transformers has DeepSeek-V4; returns in words what is wrong."""
    try:
        from scripts import demo_v4
    except ImportError as error:
        print(f"\nDeepSeek-V4: no second page, as transformers has no such model ({error}).")
        return []
    return demo_v4.page(demo_v4.FULL if size == FULL else demo_v4.CPU, text, device)


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; 1 if an error is larger than its roundings explain."""
    parser = argparse.ArgumentParser(description="Decode the next tokens of a DeepSeek-V3.2 attention layer.")
    parser.add_argument("--prompt", type=Path, default=DEFAULT_PROMPT, help="a text file (default: the licence)")
    prompt = parser.parse_args(arguments).prompt
    text = prompt.read_bytes()
    if not text:
        parser.error(f"--prompt: {prompt} is empty")
    size, device, why = choose_size()

    print(f"Device: {why}.")
    print(
        f"Layer:  DeepSeek-V3.2 attention with random weights, {size.heads} heads (the model has {MODEL_HEADS});"
        f"\n        its indexer picks {size.index_topk} tokens (the model's: {MODEL_TOPK})."
    )
    print(
        f"Prompt: {size.sequences} sequences of about {size.prompt_tokens} bytes of {prompt.name};"
        f"\n        the {size.next_tokens} tokens after each are decoded.\n"
    )
    reports, tokens, choice = run(size, text, device)
    for mode, report in reports.items():
        report.show(f"Error against the layer's own output, and time of the attention alone: {mode}")
    print(
        f"Index:  index_decode over FP8 keys of 132 bytes a token picks {choice.share:.1%} of the layer's own keys"
        f"\n        in {choice.ms:.2f} ms; attention over its choice is off by {choice.error:.1e}."
    )
    saved = 1 - fp8_mla.TOKEN_BYTES / BF16_BYTES
    print(
        f"Cache:  {tokens} tokens in {tokens * fp8_mla.TOKEN_BYTES / 1e6:.2f} MB instead of "
        f"{tokens * BF16_BYTES / 1e6:.2f} MB in bfloat16: {saved:.0%} saved."
    )
    print("Error:  the first row shows that the absorbed weights are the layer's; the last two have what FP8 costs:")
    print("        3 mantissa bits round a value by 2.6% rms, and random weights average nothing out.")
    if device.type == "cpu":
        print("Time:   of plain torch on this CPU; it says nothing about the kernel.")
    failures = [failure for mode, report in reports.items() for failure in report.failures(mode)]
    if not choice.share >= MIN_SHARE:
        failures.append(f"index_decode picks {choice.share:.1%} of the layer's own keys, under {MIN_SHARE:.0%}")
    failures += second_page(size, text, device)
    for failure in failures:
        print(f"WRONG:  {failure}.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
