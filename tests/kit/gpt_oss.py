"""A small gpt-oss model of `transformers`, trained with different attention functions.

The measure is what bfloat16 does to the model with eager attention: the same training under autocast and in float32
differ by so much. Another attention, under autocast, is as far from float32 as that, in the loss of every step (their
mean) and in the way that the sinks have moved, over all seeds; twice as far is too far.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from cute_kernels.sink.op import sink_attention

STEPS, BATCH, TOKENS, VOCABULARY, LAYERS, HEADS, WINDOW = 50, 4, 24, 32, 2, 4, 8
SEEDS: Final = 3
NAME: Final = "attention_under_test"


class Trained(NamedTuple):
    """Losses (seeds, steps), and how far the sinks have moved (seeds, layers, heads)."""

    losses: torch.Tensor
    sinks: torch.Tensor


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    s_aux: torch.Tensor,
    sliding_window: int | None,
    **options: Any,
) -> tuple[Any, None]:
    """`sink_attention` with transformers' arguments: heads before tokens, and no mask for an attention not built in."""
    if attention_mask is not None or options["dropout"]:
        raise ValueError("attention_mask, dropout: got one, needs none")
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return sink_attention(q, k, v, s_aux, window=sliding_window, softmax_scale=scaling), None


def batch(gen: torch.Generator) -> torch.Tensor:
    """(BATCH, TOKENS) sequences that count in steps of 1 to 3 from a random start."""
    begin, step = (
        torch.randint(*bounds, (BATCH, 1), generator=gen, dtype=torch.int64, device=gen.device)
        for bounds in ((0, VOCABULARY), (1, 4))
    )
    return (begin + step * torch.arange(TOKENS, dtype=torch.int64, device=gen.device)) % VOCABULARY


def train(attention: str, bfloat16: bool, device: str, seeds: int = SEEDS) -> Trained:
    """Trains 50 steps for each seed, with an attention that transformers knows by name.

    Args:
        attention: name of the attention.
        bfloat16: whether to train under autocast.
        device: "cpu" or "cuda". Data and the first weights are the same on both.
    """
    from transformers.models.gpt_oss import modeling_gpt_oss as modeling

    config = modeling.GptOssConfig(
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, head_dim=64,
        sliding_window=WINDOW, hidden_size=64, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2,
        vocab_size=VOCABULARY, max_position_embeddings=TOKENS, initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    config._attn_implementation = attention
    losses, moved = [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = modeling.GptOssForCausalLM(config).train().to(device)
        sinks = [layer.self_attn.sinks for layer in model.model.layers]
        initial = torch.stack([t.detach().clone() for t in sinks])
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        gen = torch.Generator(device="cpu").manual_seed(seed)
        for _ in range(STEPS):
            tokens = batch(gen).to(device)
            with torch.autocast(device, dtype=torch.bfloat16, enabled=bfloat16):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        moved.append((torch.stack([t.detach() for t in sinks]) - initial).cpu())
    every_loss = torch.tensor(losses, dtype=torch.float32, device="cpu")
    return Trained(every_loss.view(seeds, STEPS), torch.stack(moved))


@functools.cache
def eager(bfloat16: bool, device: str) -> Trained:
    """The results of a model with its own eager attention."""
    return train("eager", bfloat16, device)


def require_learned(device: str) -> None:
    """Raises AssertionError if training changes too little to show a wrong attention."""
    exact = eager(False, device)
    if not (exact.losses[:, -5:].mean(1) < 0.4 * exact.losses[:, 0]).all():
        raise AssertionError("the model has learned nothing to compare")
    if not exact.sinks.abs().mean() > 0.01:
        raise AssertionError("the sinks have not moved")


def excess(attention: Callable[..., Any], device: str, seeds: int = SEEDS) -> tuple[float, float]:
    """Distances of the losses and of the sinks' moves from eager float32, in units of those of eager bfloat16."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)  # replaces an attention of the same name
    run = train(NAME, True, device, seeds)
    exact, rounded = (Trained(*(t[:seeds] for t in eager(bfloat16, device))) for bfloat16 in (False, True))
    loss = (run.losses - exact.losses).abs().mean() / (rounded.losses - exact.losses).abs().mean()
    sinks = (run.sinks - exact.sinks).norm() / (rounded.sinks - exact.sinks).norm()
    return loss.item(), sinks.item()
