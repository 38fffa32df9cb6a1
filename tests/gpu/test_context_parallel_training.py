"""`context_parallel_sink_attention` over NCCL: two and four GPUs give the results of one."""

from pathlib import Path

import pytest
import torch

from tests.kit import processes, training_ranks


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gpus_equal_one(world_size: int, tmp_path: Path) -> None:
    """Chunks of whole key tiles must have the same bits of out, and of dq if deterministic; else the rule applies."""
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs of one host")
    found = processes.run(training_ranks.sink_training, tmp_path, world_size, backend="nccl", timeout=300)
    assert found == [{case.name: [] for case in training_ranks.ON_GPUS}] * world_size
