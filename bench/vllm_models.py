"""Models that vLLM's engine serves on a GPU: small ones that have learned to count, and one of real shapes."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any, Final

import torch

from tests.kit import tiny_models

MAX_POSITIONS: Final = 1024
counted_on = tiny_models.counted_on
SHORT_STEPS, LONG_STEPS, LONG_TOKENS = 100, 150, 640


def train(name: str, device: str) -> Any:
    """Trains a bfloat16 model that counts up to `LONG_TOKENS` tokens: 20 s on a CPU."""
    model = tiny_models.untrained(name, max_position_embeddings=MAX_POSITIONS).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(SHORT_STEPS + LONG_STEPS):
        long = step >= SHORT_STEPS
        if long:
            optimizer.param_groups[0]["lr"] = 3e-3 * (1 - (step - SHORT_STEPS) / LONG_STEPS)
        tokens = tiny_models.sequences(step, 4 if long else 16, LONG_TOKENS if long else tiny_models.TOKENS)
        tokens = tokens.to(device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.bfloat16().eval()


def save(model: Any, folder: pathlib.Path) -> None:
    """Saves a model for vLLM: its gpt-oss insists on YaRN, which does nothing at a factor of 1."""
    model.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    if config["model_type"] == "gpt_oss":
        config["rope_parameters"] = {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": config["max_position_embeddings"], "truncate": False,
        }  # fmt: skip
        file.write_text(json.dumps(config), encoding="utf-8")


def save_llama_8b(folder: pathlib.Path, layers: int, max_positions: int) -> None:
    """Saves the configuration of Llama 3 8B with few layers and a small vocabulary; vLLM draws its weights."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 1024, "max_position_embeddings": max_positions, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "dtype": "bfloat16",
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    write_config(config, folder)


def write_config(config: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Writes a model's configuration where vLLM looks for it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
