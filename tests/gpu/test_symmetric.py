"""Context parallelism over memory that ranks share, with several processes on one GPU, and the kernel alone."""

from pathlib import Path
from typing import Any

import pytest

from cute_kernels.merge.op import DTYPES
from cute_kernels.merge.peers_spec import PeerMergeSpec
from cute_kernels.merge.spec import MergeSpec
from tests.kit import peer_ranks, processes, symmetric_workers
from tests.kit.symmetric_workers import MLA, NAMES, SHAPES

pytestmark = pytest.mark.alone  # ranks wait for their turn on the GPU, for long if other processes use it


def kernel_specs() -> list[Any]:
    wanted = [(d, dtype, sink) for d, dtype in peer_ranks.WIDTHS for sink in (False, True)]
    wanted += [(d, dtype, sink) for _, d, dtype, sink in SHAPES]
    specs: list[Any] = []
    for d, dtype, sink in wanted:
        name = DTYPES[dtype]
        specs.append(PeerMergeSpec(d, name, sink))
        for rows in (32, 1680):
            specs.append(
                MergeSpec.for_launch(rows=rows, num_states=4, d=d, in_dtype=name, out_dtype=name, has_sink=sink)
            )
    return specs


def reports(task: processes.Task, directory: Path, world_size: int, timeout: float) -> list[dict[str, Any]]:
    """What each rank reports. Skips the test if torch finds that ranks cannot share memory."""
    found = processes.run(task, directory, world_size, timeout=timeout, life=symmetric_workers.work)
    reason = found[0].get("none", "")
    if "overlapping devices" in reason:  # a torch that ignores TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES
        pytest.skip(reason)
    assert not reason, "no error of torch, but one of ours"
    return found


def wrong(reported: dict[str, Any]) -> dict[str, Any]:
    """Problems by name, without empty ones."""
    return {name: problems for name, problems in reported.items() if problems}


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_on_one_gpu_equal_one(world_size: int, tmp_path: Path) -> None:
    """Cases are compared with the oracle, calls and graphs with `merge_states`. Choices and refusals are checked."""
    assert sorted(case.name for case in MLA) == sorted(NAMES)
    found = reports(symmetric_workers.everything, tmp_path, world_size, timeout=120.0)
    names = set(found[0])
    assert len(names) == len(NAMES) + 4 * len(SHAPES) + 3, names
    for reported in found:
        assert set(reported) == names
        assert not wrong(reported)


def test_a_rank_that_never_calls_ends_the_wait(tmp_path: Path) -> None:
    """After the group's timeout the kernel traps, and the next call says what happened."""
    first, _ = reports(symmetric_workers.a_rank_never_calls, tmp_path, 2, timeout=15.0)
    by_cuda, by_us = first["said"]
    assert "CUDA" in by_cuda
    assert by_us.startswith("context_parallel_decode: rank 0 of 2 waited for rank 1 in vain")
    assert "timeout of 15 s" in by_us


def test_ranks_of_one_process(tmp_path: Path) -> None:
    """The kernel runs without symmetric memory, at all widths and shapes; bits must be those of `merge_states`."""
    (found,) = reports(peer_ranks.kernel_alone, tmp_path, 1, timeout=60.0)
    assert len(found) == len(peer_ranks.CASES) + 2  # two ranks at a time, by gather and scatter
    assert not wrong(found)
