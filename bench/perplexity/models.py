"""Small language models over bytes: a Llama with grouped-query attention, and two with latent attention.

All three are `LlamaForCausalLM` of transformers. The two latent models have other attention modules, in the absorbed
form that decode kernels compute. `V3Attention` has 512 elements and 64 with rotary encoding, as DeepSeek-V3.2.
`V4Attention` has 512, the last 64 of them with rotary encoding and all of them the value, as DeepSeek-V4, without its
sinks, window, compressed cache and indexer.

A forward call takes `caches=`: for each layer an `Attend`, which keeps its keys and values and attends to them. Without
it, attention is in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from fp8_mla.formats import V3_2, V4

NAME: Final = "through_caches"
"""The name of attention that `caches` compute, for `attn_implementation`."""
VOCABULARY: Final = 256
HEAD_DIM: Final = 64
"""Size of the Llama's heads, and number of a latent's elements with rotary encoding."""
MODELS: Final = ("gqa", "v3.2", "v4")
OUTLIER: Final = 16.0
"""Factor of the channels in the variant with outliers. A power of two: float32 computes the same numbers."""

Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Causal attention of q (batch, tokens, h_q, d), k and v (batch, tokens, h_kv, d or d_v) and the softmax scale; returns
(batch, tokens, h_q, d_v). The value of a latent is the leading d_v elements of its key."""


class Size(NamedTuple):
    """Sizes of a model. `rank` is the rank of V4's factored projections."""

    layers: int
    heads: int
    kv_heads: int = 1
    hidden: int = 192
    intermediate: int = 512
    rank: int = 128


SIZES: Final = {
    "gqa": Size(layers=3, heads=8, kv_heads=2),
    "v3.2": Size(layers=2, heads=4),
    "v4": Size(layers=2, heads=4),
}


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Computes causal attention in the inputs' dtype: an `Attend` for keys and values that are not changed."""
    batch, tokens, h_q, d = q.shape
    ratio = h_q // k.shape[2]
    # query heads of a KV head become rows of one product
    rows = q.unflatten(2, (-1, ratio)).permute(0, 2, 3, 1, 4).reshape(batch, k.shape[2], ratio * tokens, d)
    scores = (rows @ k.permute(0, 2, 3, 1)).unflatten(2, (ratio, tokens)) * softmax_scale
    later = torch.ones((tokens, tokens), dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(dim=-1).flatten(2, 3)
    return (weights @ v.transpose(1, 2)).unflatten(2, (ratio, tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _attention_of_llama(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    caches: Sequence[Attend] | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    attend: Attend = causal_attention if caches is None else caches[module.layer_idx]
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return attend(q, k, v, scaling), None


AttentionInterface.register(NAME, _attention_of_llama)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies rotary encoding to (batch, tokens, heads, 64), pairs 32 apart; cos and sin (batch, tokens, 64)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(2) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(2)


class V3Attention(nn.Module):
    """Latent attention of DeepSeek-V3.2, absorbed: a key has 576 elements, its first 512 are the value."""

    def __init__(self, size: Size, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.heads = layer_idx, size.heads
        self.latent = V3_2.nope_dim
        self.softmax_scale = (2 * HEAD_DIM) ** -0.5
        self.q_proj = nn.Linear(size.hidden, size.heads * 2 * HEAD_DIM, bias=False)
        self.kv_proj = nn.Linear(size.hidden, V3_2.d_qk, bias=False)
        self.kv_norm = nn.RMSNorm(self.latent, eps=1e-6)
        self.key_up = nn.Parameter(torch.empty((size.heads, HEAD_DIM, self.latent), dtype=torch.float32, device="cpu"))
        self.value_up = nn.Parameter(torch.empty_like(self.key_up))
        self.o_proj = nn.Linear(size.heads * HEAD_DIM, size.hidden, bias=False)
        for up in (self.key_up, self.value_up):
            nn.init.normal_(up, std=self.latent**-0.5)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        caches: Sequence[Attend] | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, None]:
        """Returns (batch, tokens, hidden) of (batch, tokens, hidden)."""
        q_nope, q_rope = self.q_proj(hidden_states).unflatten(2, (self.heads, -1)).chunk(2, dim=-1)
        absorbed = torch.einsum("bthn,hnl->bthl", q_nope, self.key_up)
        q = torch.cat([absorbed, rotate(q_rope, *position_embeddings)], dim=-1)
        latent, k_rope = self.kv_proj(hidden_states).unsqueeze(2).split([self.latent, HEAD_DIM], dim=-1)
        kv = torch.cat([self.kv_norm(latent), rotate(k_rope, *position_embeddings)], dim=-1)
        attend = causal_attention if caches is None else caches[self.layer_idx]
        out = attend(q, kv, kv[..., : self.latent], self.softmax_scale)
        return self.o_proj(torch.einsum("bthl,hvl->bthv", out, self.value_up).flatten(2)), None

    @torch.no_grad()
    def widen(self, channels: torch.Tensor, factor: float) -> None:
        """Multiplies channels of the latent, and divides the weights that read them."""
        self.kv_norm.weight[channels] *= factor
        self.key_up[..., channels] /= factor
        self.value_up[..., channels] /= factor


class V4Attention(nn.Module):
    """Attention of DeepSeek-V4: one key of 512 elements, rotated ones included, is the value of all heads.

    The output's last 64 elements are rotated back to the query's position.
    """

    def __init__(self, size: Size, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.heads = layer_idx, size.heads
        self.softmax_scale = V4.d_qk**-0.5
        self.q_down = nn.Linear(size.hidden, size.rank, bias=False)
        self.q_up = nn.Linear(size.rank, size.heads * V4.d_qk, bias=False)
        self.q_norm = nn.RMSNorm(V4.d_qk, eps=1e-6)
        self.kv_proj = nn.Linear(size.hidden, V4.d_qk, bias=False)
        self.kv_norm = nn.RMSNorm(V4.d_qk, eps=1e-6)
        self.o_down = nn.Linear(size.heads * V4.d_v, size.rank, bias=False)
        self.o_up = nn.Linear(size.rank, size.hidden, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        caches: Sequence[Attend] | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, None]:
        """Returns (batch, tokens, hidden) of (batch, tokens, hidden)."""
        cos, sin = position_embeddings
        q = self.q_norm(self.q_up(self.q_down(hidden_states)).unflatten(2, (self.heads, -1)))
        kv = self.kv_norm(self.kv_proj(hidden_states)).unsqueeze(2)
        q, kv = (self._rotate_last(x, cos, sin) for x in (q, kv))
        attend = causal_attention if caches is None else caches[self.layer_idx]
        out = self._rotate_last(attend(q, kv, kv, self.softmax_scale), cos, -sin)
        return self.o_up(self.o_down(out.flatten(2))), None

    @staticmethod
    def _rotate_last(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[..., : V4.nope_dim], rotate(x[..., V4.nope_dim :], cos, sin)], dim=-1)

    @torch.no_grad()
    def widen(self, channels: torch.Tensor, factor: float) -> None:
        """Multiplies channels of the latent, none of them rotated, and divides the weights that read them."""
        self.kv_norm.weight[channels] *= factor
        self.q_norm.weight[channels] /= factor
        self.o_down.weight.unflatten(1, (self.heads, -1))[..., channels] /= factor


def build(name: str, seed: int, size: Size | None = None) -> Any:
    """Makes a model with random weights in float32, in evaluation mode.

    Args:
        name: one of `MODELS`.
        seed: seed of the weights; torch's own generator is not changed.
        size: default `SIZES[name]`.

    Raises:
        ValueError: the model does not exist.
    """
    if name not in MODELS:
        raise ValueError(f"name: got {name!r}, needs one of {', '.join(MODELS)}")
    size = SIZES[name] if size is None else size
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        use_cache=False,
        dtype=torch.float32,
    )
    config._attn_implementation = NAME
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for index, layer in enumerate(model.model.layers):
            if name != "gqa":
                layer.self_attn = (V3Attention if name == "v3.2" else V4Attention)(size, index)
    return model.to(dtype=torch.float32, device="cpu").eval()


def logits(model: Any, tokens: torch.Tensor, caches: Sequence[Attend] | None = None) -> torch.Tensor:
    """Returns (batch, tokens, vocabulary) of (batch, tokens) int64."""
    positions = torch.arange(tokens.shape[1], dtype=torch.int64, device="cpu").unsqueeze(0)
    return model(input_ids=tokens, position_ids=positions, caches=caches, use_cache=False).logits


class Training(NamedTuple):
    """Training parameters. `batch` windows of `context` + 1 bytes a step; `rate` after `warmup`, then a cosine."""

    steps: int = 300
    batch: int = 8
    context: int = 256
    rate: float = 3e-3
    warmup: int = 20
    seed: int = 0


def train(model: Any, text: torch.Tensor, how: Training, after_step: Callable[[int, float], None]) -> float:
    """Trains a model in place by AdamW; `after_step` gets the step, from 1, and its loss.

    Returns:
        The mean loss of the last tenth of the steps, in nats a byte.
    """
    gen = torch.Generator(device="cpu").manual_seed(how.seed)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=how.rate, betas=(0.9, 0.95))
    losses: list[float] = []
    model.train()
    for step in range(how.steps):
        part = min((step + 1) / how.warmup, 1.0) * 0.5 * (1 + math.cos(math.pi * step / how.steps))
        for group in optimizer.param_groups:
            group["lr"] = how.rate * max(part, 0.02)
        starts = torch.randint(len(text) - how.context, (how.batch,), generator=gen, dtype=torch.int64, device="cpu")
        rows = torch.stack([text[start : start + how.context + 1] for start in starts.tolist()])
        found = logits(model, rows[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(found, rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        after_step(step + 1, losses[-1])
    model.eval()
    last = losses[-max(1, how.steps // 10) :]
    return sum(last) / len(last)


@torch.no_grad()
def add_outliers(model: Any) -> None:
    """Makes some channels of the keys `OUTLIER` times as large, and weights that read them as much smaller, in place.

    The model's function stays the same: with a power of two float32 computes the same numbers.

    A Llama: in each layer the rotary pair of KV head 0 whose weights are largest, two channels of 64; a single one of
    them would not survive the rotation. Latents: in each layer four channels, the largest of each 128 among those that
    are quantized in every format; they are channels of the value as well.
    """
    for layer in model.model.layers:
        attention = layer.self_attn
        if isinstance(attention, V3Attention | V4Attention):
            size = attention.kv_norm.weight.abs()[: V4.nope_dim]
            tiles = [tile.argmax() + 128 * i for i, tile in enumerate(size.split(128))]
            attention.widen(torch.stack(tiles), OUTLIER)
            continue
        ratio = attention.num_key_value_groups
        keys = attention.k_proj.weight[:HEAD_DIM].norm(dim=1)
        pair = int((keys[: HEAD_DIM // 2] + keys[HEAD_DIM // 2 :]).argmax())
        channels = torch.tensor([pair, pair + HEAD_DIM // 2], dtype=torch.int64, device="cpu")
        attention.k_proj.weight[channels] *= OUTLIER
        attention.q_proj.weight.unflatten(0, (-1, HEAD_DIM))[:ratio, channels] /= OUTLIER
