"""Small models of transformers that have learned to count, so that their next tokens are unambiguous.

A sequence counts in steps of 1 to 5, modulo `VOCABULARY`: only attention knows the step. After training the best token
is several units of logits ahead of the next, a hundred times what rounding to bfloat16 changes. All experts of gpt-oss
take part, so that rounding has no choice to flip.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

VOCABULARY: Final = 32
TOKENS: Final = 48
STEPS: Final = {"gemma4": (100, 12), "deepseek_v32": (180, 16), "glm_moe_dsa": (160, 16)}
"""Steps of training and sequences per step. Other models learn in 120 steps of 8 sequences."""
RATE: Final = 3e-3
"""Learning rate in the first half of the steps; it then falls to 0. At a constant rate the last steps are noise, and
deepseek_v32 counted wrong, by up to 9 units of logits, on processors that round differently."""
WINDOW: Final = 8
TOPK: Final = 24
"""Number of tokens that an indexer chooses. Sequences are longer, so a model learns to count from these alone."""
LATENTS: Final = {
    "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64,
    "q_lora_rank": 64, "index_topk": TOPK, "index_n_heads": 16, "mlp_layer_types": ["dense", "dense"],
    "pad_token_id": None, "eos_token_id": None, "bos_token_id": 1,
}  # fmt: skip
"""Sizes of a model with latents of 512 + 64. Its indexer has random weights, which training does not change.

No token is padding: torch makes its embedding 0, so that its keys all score 0, and top-k chooses among equal scores
otherwise on a GPU than on a CPU.
"""
GLOBAL_HEADS: Final = {
    "head_dim": 256, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
    "global_head_dim": 512, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
}  # fmt: skip
"""A layer with a window and heads of 256, then one with heads of 512 whose values are its keys' projection."""
SIZES: Final = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
    "initializer_range": 0.1,
}  # fmt: skip


def sequences(seed: int, batch: int, tokens: int) -> torch.Tensor:
    """(batch, tokens) sequences that count."""
    gen = torch.Generator(device="cpu").manual_seed(seed)
    begin, step = (
        torch.randint(*bounds, (batch, 1), generator=gen, dtype=torch.int64, device="cpu")
        for bounds in ((0, VOCABULARY), (1, 6))
    )
    return (begin + step * torch.arange(tokens, dtype=torch.int64, device="cpu")) % VOCABULARY


def counted_on(prompt: list[int], tokens: int) -> list[int]:
    """The tokens that a model that counts continues with."""
    step = prompt[-1] - prompt[-2]
    return [(prompt[-1] + step * i) % VOCABULARY for i in range(1, tokens + 1)]


def untrained(name: str, **more: Any) -> Any:
    """A model with random weights.

    Args:
        name: "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma4", "gpt_oss", "deepseek_v32" or "glm_moe_dsa".
        more: of the configuration.
    """
    import transformers

    classes: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("Llama", {}),
        "qwen2": ("Qwen2", {}),
        "qwen3": ("Qwen3", {}),
        "mistral": ("Mistral", {"sliding_window": WINDOW}),
        "gemma2": ("Gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 2.0}),
        "gemma4": ("Gemma4", GLOBAL_HEADS),
        "gpt_oss": (
            "GptOss",
            {
                "sliding_window": WINDOW,
                "num_local_experts": 4,
                "num_experts_per_tok": 4,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        "deepseek_v32": ("DeepseekV32", LATENTS),
        "glm_moe_dsa": ("GlmMoeDsa", {**LATENTS, "indexer_types": ["full", "shared"]}),
    }
    prefix, options = classes[name]
    text = "Text" if prefix == "Gemma4" else ""
    config = getattr(transformers, f"{prefix}{text}Config")(**{**SIZES, **options, **more})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return getattr(transformers, f"{prefix}ForCausalLM")(config)


@functools.cache
def trained(name: str) -> Any:
    """A bfloat16 model that counts, with eager attention. A caller that sets another attention sets it back."""
    model = untrained(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads wait for each other: minutes instead of seconds if cores are busy
    torch.set_flush_denormal(True)  # Gemma 4's probabilities become denormal, which costs 0.26 s a step instead of 0.12
    try:
        steps, batch = STEPS.get(name, (120, 8))
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, 2 * (1 - step / steps))
            tokens = sequences(step, batch, TOKENS)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    return model.bfloat16().eval()
