"""Continuous batching of transformers over the package's copy for the kernels hub: block tables, CUDA graphs."""

from pathlib import Path

import pytest

from scripts import make_hub_kernel
from tests.kit import continuous_batching

pytestmark = continuous_batching.needs_kernels()


@pytest.mark.parametrize("model", continuous_batching.NAMES)
def test_its_tokens_are_those_that_the_model_has_learned(model: str, tmp_path: Path) -> None:
    """Prompts and mixed steps are packed. Steps that decode use pages, unless a layer has a window."""
    make_hub_kernel.write(tmp_path / "kernel", version=1, repo_id=continuous_batching.NAMES[model])
    found = continuous_batching.served(model, "cuda", tmp_path)
    assert found["wrong"] == {} and found["calls"]["packed"] > 0
    assert ("pages" in found["calls"]) == (model == "llama")
