"""The second page of the demo: layers of DeepSeek-V4 decode from a window and a compressed cache in one softmax.

It runs text through two attention layers of `transformers` (random weights): one whose indexer picks from a cache that
is compressed 4 to 1, and one that sees all of a cache that is compressed 128 to 1. Their keys go into paged caches, in
V4's format and in V4.1's with its fp4, and one call of `mla_fp8_decode` each decodes the last tokens again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4RotaryEmbedding,
    apply_rotary_pos_emb,
)

import fp8_mla
from cute_kernels import mla_fp8_decode
from scripts.demo_parts import (
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

PAIRS = ((fp8_mla.V4, fp8_mla.V4), (fp8_mla.V4_1, fp8_mla.V4_1_FP4))
WINDOW_PAGE = 64


class Kind(NamedTuple):
    """A kind of layer, by the compression of its second cache."""

    layer_type: str
    ratio: int
    page_size: int
    """Page size of the compressed cache."""


KINDS = (Kind("compressed_sparse_attention", 4, 16), Kind("heavily_compressed_attention", 128, 2))


@dataclass(frozen=True)
class Size:
    """Sizes that are smaller without a GPU. As in the model, a key has 512 elements and a window 128 tokens."""

    heads: int = 64
    hidden: int = 4096
    q_rank: int = 1024
    index_heads: int = 64
    index_topk: int = 512
    out_rank: int = 1024
    prompt_tokens: int = 4096
    sequences: int = 8
    next_tokens: int = 2
    window: int = 128


FULL = Size()
CPU = Size(
    heads=8, hidden=1024, q_rank=256, index_heads=8, index_topk=128, out_rank=128, prompt_tokens=1024, sequences=2
)


class Trace(NamedTuple):
    """One sequence through the layer, float32. n: number of last tokens, which are decoded; s: number of all tokens."""

    out: torch.Tensor
    """(n, hidden): the layer's own output."""
    query: torch.Tensor
    """(n, heads, 512): queries."""
    window: torch.Tensor
    """(s, 512): keys of the tokens."""
    compressed: torch.Tensor
    """(t, 512): keys of the compressed cache."""
    picked: torch.Tensor
    """(n, t) bool: which compressed keys a token sees."""


class Layer:
    """A DeepSeek-V4 attention layer with random weights over a byte-level embedding, float32."""

    def __init__(self, kind: Kind, size: Size, device: torch.device) -> None:
        config = DeepseekV4Config(
            num_hidden_layers=1,
            hidden_size=size.hidden,
            num_attention_heads=size.heads,
            q_lora_rank=size.q_rank,
            o_lora_rank=size.out_rank,
            index_n_heads=size.index_heads,
            index_topk=size.index_topk,
            sliding_window=size.window,
            layer_types=[kind.layer_type],
            attn_implementation="eager",
        )
        self.size = size
        generator = torch.Generator(device).manual_seed(0)
        with torch.device(device):
            self.attention = DeepseekV4Attention(config, layer_idx=0).eval().requires_grad_(False)
            self.rotary = DeepseekV4RotaryEmbedding(config)
            self.embedding = byte_tables(size.hidden, generator)
        for name, parameter in self.attention.named_parameters():
            if name.endswith("norm.weight"):  # gains: uneven, as in a trained model
                parameter.normal_(0.0, 0.5, generator=generator).exp_()
            elif name.endswith("weight"):  # unit variance in, unit variance out
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
            else:  # sinks and position biases
                parameter.normal_(0.0, 1.0, generator=generator)
        self.sinks = self.attention.sinks.detach().float()

    def _rope(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(length, device=like.device).unsqueeze(0)
        cos, sin = self.rotary(like, position_ids=positions, layer_type="compress")
        return cos, sin

    def __call__(self, text: bytes) -> Trace:
        """Runs `text` through the layer."""
        hidden, n = embed(text, self.embedding), self.size.next_tokens
        length = hidden.shape[1]
        rope = self._rope(length, hidden)
        positions = torch.arange(length, device=hidden.device)
        age = positions[:, None] - positions
        mask = torch.zeros((length, length), device=hidden.device)
        mask.masked_fill_((age < 0) | (age >= self.size.window), -torch.inf)
        with outputs_of(self.attention, "q_b_norm", "kv_norm", "compressor") as seen:
            out, _ = self.attention(
                hidden,
                position_embeddings={"compress": rope},
                position_ids=positions.unsqueeze(0),
                attention_mask=mask[None, None],
            )
        compressed, bias = seen["compressor"]
        query = apply_rotary_pos_emb(seen["q_b_norm"], *rope)
        window = apply_rotary_pos_emb(seen["kv_norm"].view(1, 1, length, -1), *rope)
        return Trace(
            out=out[0, -n:],
            query=query[0, :, -n:].transpose(0, 1).contiguous(),
            window=window[0, 0],
            compressed=compressed[0, 0],
            picked=bias[0, 0, -n:] == 0,
        )

    def project(self, attended: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Projects attention's result (batch, n, heads, 512) to the layer's output (batch * n, hidden)."""
        projected = []
        for latent, length in zip(attended.float(), lengths, strict=True):
            cos, sin = (values[:, -len(latent) :] for values in self._rope(length, latent))
            # a value has its position in its rope part; the layer turns it back by the query's
            turned = apply_rotary_pos_emb(latent.transpose(0, 1).unsqueeze(0), cos, -sin).transpose(1, 2)
            grouped = turned.reshape(1, len(latent), self.attention.config.o_groups, -1)
            projected.append(self.attention.o_b_proj(self.attention.o_a_proj(grouped).flatten(2))[0])
        return torch.cat(projected)


def attend(trace: Trace, query: torch.Tensor, sinks: torch.Tensor, window: int, dtype: torch.dtype) -> torch.Tensor:
    """Computes plain attention of a sequence's last tokens in float32 over keys of any dtype: (n, heads, 512)."""
    n, length = len(query), len(trace.window)
    keys = torch.cat([trace.window, trace.compressed]).to(dtype).float()
    age = torch.arange(length - n, length, device=keys.device)[:, None] - torch.arange(length, device=keys.device)
    seen = torch.cat([(age >= 0) & (age < window), trace.picked], dim=1)
    scores = torch.einsum("nhc,sc->nhs", query.float(), keys) * keys.shape[1] ** -0.5
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    with_sinks = torch.cat([scores, sinks.view(1, -1, 1).expand(n, -1, 1)], dim=-1)
    return with_sinks.softmax(dim=-1)[..., :-1] @ keys


def caches_of(
    traces: list[Trace], kind: Kind, size: Size, pair: tuple[fp8_mla.TokenFormat, fp8_mla.TokenFormat]
) -> tuple[PagedCache, dict[str, Any]]:
    """Returns the paged window, and all other arguments that a decode of both caches takes."""
    window = PagedCache.of([trace.window for trace in traces], WINDOW_PAGE, size.next_tokens, pair[0])
    far = PagedCache.of([trace.compressed for trace in traces], kind.page_size, 1, pair[1])
    ages = torch.arange(size.window - 1, -1, -1, device=window.seqlens.device)
    newest = torch.arange(-size.next_tokens, 0, device=ages.device) + window.seqlens.long().view(-1, 1)
    # If a token sees fewer entries than another, the rest of its row is -1. Transposed, as padding goes first.
    entries = [
        torch.where(trace.picked, torch.arange(trace.picked.shape[1], device=ages.device), fp8_mla.INVALID_SLOT)
        for trace in traces
    ]
    chosen = pad_sequence([row.T for row in entries], True, fp8_mla.INVALID_SLOT).mT.sort(descending=True).values
    most = int((chosen >= 0).sum(dim=-1).max())
    return window, {
        "indices": window.slots_at(newest.unsqueeze(-1) - ages),
        "cache_format": pair[0].name,
        "extra_kv_cache": far.pages,
        "extra_indices": far.slots_at(chosen[..., :most]),
        "extra_cache_format": pair[1].name,
    }


@torch.no_grad()
def run(kind: Kind, size: Size, text: bytes, device: torch.device) -> tuple[Report, int]:
    """Decodes the last tokens of a few sequences cut from `text`, in plain torch and over the caches of each pair.

    It also returns the largest number of keys that a token sees.
    """
    layer = Layer(kind, size, device)
    traces = [layer(part) for part in batch_of(text, size.prompt_tokens + size.next_tokens, size.sequences)]
    want, lengths = torch.cat([trace.out for trace in traces]), [len(trace.window) for trace in traces]
    query = torch.stack([trace.query for trace in traces])

    def plain(dtype: torch.dtype) -> torch.Tensor:
        both = zip(traces, query.to(dtype), strict=True)
        return torch.stack([attend(trace, q, layer.sinks, size.window, dtype) for trace, q in both])

    def cell(way: Any) -> Cell:
        return Cell(relative_error(layer.project(way(), lengths), want), milliseconds(way, device))

    report, keys = Report(cell(lambda: plain(torch.float32)), cell(lambda: plain(torch.bfloat16))), 0
    for pair in PAIRS:
        name = " + ".join(token_format.name for token_format in pair)
        cache, arguments = caches_of(traces, kind, size, pair)
        arguments["s_aux"] = layer.sinks
        keys = size.window + arguments["extra_indices"].shape[-1]
        exact = functools.partial(fp8_mla.reference_decode, query, cache.pages, dtype=torch.float32, **arguments)
        report.reference[name] = cell(lambda: exact()[0])  # noqa: B023
        report.decode[name] = cell(functools.partial(mla_fp8_decode, query.bfloat16(), cache.pages, **arguments))
    return report, keys


def page(size: Size, text: bytes, device: torch.device) -> list[str]:
    """Prints the page; returns in words what is wrong."""
    print(
        f"\nLayers: DeepSeek-V4 attention with random weights, {size.heads} heads; a window of {size.window} tokens "
        f"and a\n        compressed cache in one softmax, with learned sinks; {size.sequences} sequences of about "
        f"{size.prompt_tokens} tokens.\n"
    )
    failures = []
    for kind in KINDS:
        report, keys = run(kind, size, text, device)
        report.show(f"Compressed {kind.ratio} to 1, up to {keys} keys")
        failures += report.failures(f"V4, {kind.ratio} to 1")
    return failures
