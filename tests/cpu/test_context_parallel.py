"""Context parallelism over gloo: four processes equal one, and a rank that dies makes the others fail in time."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cute_kernels import mla_fp8_decode
from cute_kernels.distributed import context_parallel_decode
from tests.support import context_workers
from tests.support.context_workers import CASES, SHORT, WORLD

Found = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of four processes found in all cases: one start for all of them."""
    return context_workers.run("all_cases", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_four_processes_equal_one(name: str, found: Found) -> None:
    assert [found[rank].get(name) for rank in range(WORLD)] == [[]] * WORLD


@pytest.mark.parametrize("task", ["a_rank_dies", "a_rank_never_calls"])
def test_ranks_do_not_wait_for_ever(task: str, tmp_path: Path) -> None:
    found = context_workers.run(task, tmp_path, timeout=SHORT, wait_for=WORLD - 1)
    for rank in range(WORLD - 1):
        message, seconds = found[rank]["error"]
        assert message.startswith(f"context_parallel_decode: rank {rank} of {WORLD} waited for the others in vain")
        assert seconds < 2 * SHORT


def test_no_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="group: got None; needs a torch.distributed group: call"):
        context_parallel_decode(mla_fp8_decode)
