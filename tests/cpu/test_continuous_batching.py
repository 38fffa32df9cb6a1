"""Continuous batching of transformers over the copy of this package for the kernels hub, on a CPU."""

from pathlib import Path

import pytest

from scripts import make_hub_kernel
from tests.kit import continuous_batching

pytestmark = continuous_batching.needs_kernels()


@pytest.mark.parametrize("model", continuous_batching.NAMES)
def test_its_tokens_are_those_that_the_model_has_learned(model: str, tmp_path: Path) -> None:
    make_hub_kernel.write(tmp_path / "kernel", version=1, repo_id=continuous_batching.NAMES[model])
    found = continuous_batching.served(model, "cpu", tmp_path)
    assert found["wrong"] == {} and found["calls"]["packed"] > 0
    assert ("pages" in found["calls"]) == (model == "llama"), "transformers has no pages where a layer has a window"
