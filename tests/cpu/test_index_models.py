"""`index_decode` over FP8 chooses most of what indexers of transformers choose, whose keys have 16 or 32 bits.

Near rank k rounding decides: with e4m3 keys and queries 96 to 98% of the choice agrees, whatever the scales are.
"""

import contextlib
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")

from cute_kernels import index_append, index_decode
from cute_kernels.indexer.append_spec import SCALE_RULES
from fp8_mla import reference_index_logits
from tests.kit.threads import one_thread as one_thread

HEADS = {"deepseek_v32": 64, "glm_moe_dsa": 32, "hy_v4": 16, "deepseek_v4": 64}
CLASSES = {
    "deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa", "hy_v4": "HYV4", "deepseek_v4": "DeepseekV4"
}  # fmt: skip
TOKENS, TOPK, BATCH, S_Q, PAGE = 600, 64, 2, 8, 64
MIN_SHARE, NEAR = 0.9, 0.35
"""The smallest common share of the choice, and how far from rank k a key may be that only one side chooses, in
standard deviations of a row."""


class Products(TorchFunctionMode):
    """Keeps the operands of the first product of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: tuple[torch.Tensor, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.matmul and not self.operands and args[0].dim() == 4:
            self.operands = args[0], args[1]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def seen_of(indexer: Any) -> Iterator[dict[str, Any]]:
    """Queries (batch, tokens, heads, 128), keys (batch, n, 128) and gates of a forward pass."""
    seen: dict[str, Any] = {}
    projection = indexer.scorer.weights_proj if hasattr(indexer, "scorer") else indexer.weights_proj
    handle = projection.register_forward_hook(lambda module, inputs, out: seen.update(gates=out.float()))
    with Products() as products:
        yield seen
    handle.remove()
    q, k = products.operands
    seen.update(q=q.float(), k=k.squeeze(1).transpose(-1, -2).float())


def chosen_by(name: str) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor]:
    """For all tokens, what a module with random weights chooses, its operands, and how many keys each token sees."""
    if importlib.util.find_spec(f"transformers.models.{name}") is None:
        pytest.skip(f"this transformers has no {name}")
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    configuration = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    prefix = CLASSES[name]
    config = getattr(configuration, f"{prefix}Config")(
        hidden_size=256, q_lora_rank=96, index_n_heads=HEADS[name], index_topk=TOPK, num_hidden_layers=1
    )
    gen = torch.Generator().manual_seed(0)
    arguments = [config] if name == "deepseek_v4" else [config, 0]
    indexer = getattr(modeling, f"{prefix}Indexer")(*arguments).eval().requires_grad_(False)
    for parameter in indexer.parameters():
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 1.0, generator=gen)
    hidden = torch.randn(BATCH, TOKENS, 256, generator=gen)
    q_resid = torch.randn(BATCH, TOKENS, 96, generator=gen)
    positions = torch.arange(TOKENS).expand(BATCH, -1)
    with seen_of(indexer) as seen, torch.no_grad():
        if name == "deepseek_v4":
            picked = indexer(hidden, q_resid, positions, None, 0)
            visible = (positions[0] + 1) // 4
        else:
            angles = torch.rand(BATCH, TOKENS, 32, generator=gen) * 6
            angles = torch.cat([angles, angles], dim=-1)
            mask = torch.ones(1, TOKENS, TOKENS, dtype=torch.bool).tril()
            picked = indexer(hidden, q_resid, (angles.cos(), angles.sin()), mask, positions)
            visible = positions[0] + 1
    return picked, seen, visible.int()


@pytest.mark.parametrize("name", HEADS)
def test_index_decode_chooses_what_a_module_chooses(name: str) -> None:
    picked, seen, visible = chosen_by(name)
    keys, last = seen["k"], slice(-S_Q, None)
    n, pages = keys.shape[1], -(-keys.shape[1] // PAGE)
    table = torch.arange(BATCH * pages, dtype=torch.int32).view(BATCH, pages).flip(1)
    slots = table.long().repeat_interleave(PAGE, 1)[:, :n] * PAGE + torch.arange(n) % PAGE
    q = seen["q"][:, last]
    q_scale = q.abs().amax(-1).clamp(min=1e-4) / 448
    for scale in SCALE_RULES:
        cache = torch.zeros(BATCH * pages, PAGE, 132, dtype=torch.uint8)
        index_append(keys.bfloat16().flatten(0, 1), cache, slots.flatten(), scale=scale)
        call = {
            "q": (q / q_scale.unsqueeze(-1)).to(torch.float8_e4m3fn),
            "weights": (seen["gates"][:, last] * q_scale * 128**-0.5 * HEADS[name] ** -0.5).contiguous(),
            "k_cache": cache,
            "block_table": table,
            "cache_seqlens": visible[last].expand(BATCH, -1).contiguous(),
        }
        found, logits = index_decode(**call, topk=TOPK, return_positions=True), reference_index_logits(**call)
        for b, j in itertools.product(range(BATCH), range(S_Q)):
            ours, theirs = set(found[b, j].tolist()), set(picked[b, last][j].tolist())
            assert len(ours) == len(theirs) == TOPK and len(ours & theirs) >= MIN_SHARE * TOPK
            row = logits[b, j, : int(call["cache_seqlens"][b, j])]
            rank_k = row.topk(TOPK).values[-1]
            assert all(abs(row[t] - rank_k) <= NEAR * row.std() for t in ours ^ theirs)
