"""A small gpt-oss model learns with `sink_attention` what it learns with eager attention of transformers.

The measure is what bfloat16 does to the eager model: the same training under autocast and in float32 differ by so much.
`sink_attention` may differ from float32 by twice that, in the loss of every step (their mean) and in the way that the
sinks have moved, over all seeds. Wrong attention is shown to be told apart.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from cute_kernels import sink_attention

modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")

STEPS, BATCH, TOKENS, VOCABULARY, LAYERS, HEADS, WINDOW = 50, 4, 24, 32, 2, 4, 8
SEEDS = range(3)
NAME = "sink_attention_under_test"


class Trained(NamedTuple):
    """losses (seeds, steps); sinks (seeds, layers, heads), by how much they have moved."""

    losses: torch.Tensor
    sinks: torch.Tensor


def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, scaling: float, s_aux: Any,
           sliding_window: int | None, **options: Any) -> Any:  # fmt: skip
    """What transformers calls: heads before tokens, and no mask for an attention that it does not know."""
    assert attention_mask is None and options["dropout"] == 0
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return sink_attention(q, k, v, s_aux, window=sliding_window, softmax_scale=scaling), None


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads take longer to meet than these sizes to compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batch(gen: torch.Generator) -> torch.Tensor:
    """(BATCH, TOKENS) sequences that count in steps of 1 to 3 and begin anywhere."""
    begin, step = (torch.randint(*bounds, (BATCH, 1), generator=gen) for bounds in ((0, VOCABULARY), (1, 4)))
    return (begin + step * torch.arange(TOKENS)) % VOCABULARY


def train(attention: str, bfloat16: bool) -> Trained:
    config = modeling.GptOssConfig(
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, head_dim=64,
        sliding_window=WINDOW, hidden_size=64, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2,
        vocab_size=VOCABULARY, max_position_embeddings=TOKENS, initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    config._attn_implementation = attention
    losses, moved = [], []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = modeling.GptOssForCausalLM(config).train()
        sinks = [layer.self_attn.sinks for layer in model.model.layers]
        before = torch.stack([t.detach().clone() for t in sinks])
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        gen = torch.Generator().manual_seed(seed)
        for _ in range(STEPS):
            tokens = batch(gen)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        moved.append(torch.stack([t.detach() for t in sinks]) - before)
    return Trained(torch.tensor(losses).view(len(SEEDS), STEPS), torch.stack(moved))


@functools.cache
def eager(bfloat16: bool) -> Trained:
    return train("eager", bfloat16)


def trained_with(attention: Callable[..., Any]) -> Trained:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)  # in place of one that was there
    return train(NAME, True)


def excess(run: Trained) -> tuple[float, float]:
    """Distance to eager float32, of the losses and of the sinks' way, in units of that of eager bfloat16."""
    exact, rounded = eager(False), eager(True)
    loss = (run.losses - exact.losses).abs().mean() / (rounded.losses - exact.losses).abs().mean()
    sinks = (run.sinks - exact.sinks).norm() / (rounded.sinks - exact.sinks).norm()
    return loss.item(), sinks.item()


def test_follows_the_eager_model():
    exact = eager(False)
    assert (exact.losses[:, -5:].mean(1) < 0.4 * exact.losses[:, 0]).all(), "it has learned nothing to compare"
    assert exact.sinks.abs().mean() > 0.01, "the sinks have not moved"
    run = trained_with(attend)
    loss, sinks = excess(run)
    assert loss <= 2, f"losses are off by {loss:.2f} times what bfloat16 is"
    assert sinks <= 2, f"sinks are off by {sinks:.2f} times what bfloat16 is"


def without_gradient(module: Any, *tensors: Any, s_aux: Any, **options: Any) -> Any:
    return attend(module, *tensors, s_aux=s_aux.detach(), **options)


def without_sink(module: Any, *tensors: Any, s_aux: Any, **options: Any) -> Any:
    return attend(module, *tensors, s_aux=s_aux * 0 - 1e4, **options)


def window_off_by_one(module: Any, *tensors: Any, sliding_window: Any, **options: Any) -> Any:
    return attend(module, *tensors, sliding_window=sliding_window and sliding_window + 1, **options)


@pytest.mark.parametrize("wrong", [without_gradient, without_sink, window_off_by_one])
def test_wrong_attention_is_seen(wrong):
    assert max(excess(trained_with(wrong))) > 2
