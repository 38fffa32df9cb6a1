"""`context_parallel_sink_attention` over NCCL: two and four GPUs equal one."""

from pathlib import Path

import pytest
import torch

from tests.kit import processes, training_ranks


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gpus_equal_one(world_size: int, tmp_path: Path) -> None:
    """Bits of out, and of dq if it is deterministic, for chunks of whole key tiles; all else under the rule."""
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs of one host")
    found = processes.run(training_ranks.sink_training, tmp_path, world_size, backend="nccl", timeout=300)
    assert found == [{case.name: [] for case in training_ranks.ON_GPUS}] * world_size
