"""Context parallelism over gloo: four processes equal one, and a rank that dies makes the others fail in time."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cute_kernels import mla_fp8_decode
from cute_kernels.budget.ranks import Exchange, Link, crossing_rows, predict_ranks
from cute_kernels.distributed import context_parallel_decode
from cute_kernels.distributed.exchange import Rows
from scripts import context_parallel_table
from tests.support import context_turns, context_workers, examples
from tests.support.context_workers import CASES, SHORT, WORLD, Case

Found = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of four processes found in all cases: one start for all of them."""
    return context_workers.run("all_cases", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_four_processes_equal_one(name: str, found: Found) -> None:
    assert [found[rank].get(name) for rank in range(WORLD)] == [[]] * WORLD


@pytest.mark.parametrize("case", CASES[::5], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_in_turns_equal_one_process(case: Case, world_size: int) -> None:
    """Without processes, as tests/gpu runs all cases on one GPU."""
    assert context_turns.problems(case, world_size, "cpu") == []


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


# ---- the page


def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    """As pasted into a file, on four CPU processes; every rank prints."""
    page, example = examples.EXAMPLES["context_parallel-0"]
    assert "torchrun --nproc-per-node 4 example.py" in page.read_text(encoding="utf-8")
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(examples.ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    run = subprocess.run(
        [*command, str(tmp_path / "example.py")], capture_output=True, text=True, timeout=180, check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    what = "ranks against one cache, relative error"
    printed = re.findall(rf"{what}: (\d\.\de[-+]\d\d)", run.stdout)  # lines of several processes may run together
    assert len(printed) == WORLD, run.stdout
    assert all(0 < float(value) < examples.LIMITS[what] for value in printed)


def test_the_table_is_up_to_date() -> None:
    page = context_parallel_table.PAGE.read_text(encoding="utf-8")
    assert context_parallel_table.filled(page) == page, "run python scripts/context_parallel_table.py --write"
    assert all(line in page for line in context_parallel_table.table())


# ---- on paper


def test_what_ranks_receive_is_what_is_sent() -> None:
    """The budget's bytes are those of the buffers."""
    for heads in ("gather", "scatter"):
        paper = Exchange(4, rows=3 * 2 * 8, d=512, heads=heads)
        rows = Rows.empty((3, 2, 8), 512, torch.bfloat16, torch.device("cpu"))
        from_each = rows.bytes.numel() if heads == "gather" else rows.bytes.numel() // 4
        assert paper.received == 3 * from_each
    queried = Exchange(4, rows=48, d=512, heads="scatter", d_q=576)
    assert queried.received - Exchange(4, rows=48, d=512, heads="scatter").received == 3 * 12 * 576 * 2


def test_gather_and_scatter_cross_where_the_link_says() -> None:
    rows = crossing_rows(8, 512, 576)
    for factor, cheaper in ((0.5, "gather"), (2.0, "scatter")):
        whole = round(rows * factor / 8) * 8
        gather = Exchange(8, whole, 512, "gather").link_us()
        scatter = Exchange(8, whole, 512, "scatter", 576).link_us()
        assert ("gather" if gather < scatter else "scatter") == cheaper
    assert crossing_rows(2, 512, 10_000) == math.inf


def test_a_group_of_one_waits_for_no_link() -> None:
    found = predict_ranks(10.0, Exchange(1, 128, 512))
    assert (found.decode_us, found.link_us, found.binds) == (10.0, 0.0, "decode")
    slow = predict_ranks(10.0, Exchange(8, 128, 512), link=Link(gbps=1, start_us=0))
    assert slow.binds == "link" and slow.link_us == 7 * 128 * 1040 / 1e3
    assert slow.us == slow.decode_us + slow.link_us + slow.merge_us
    with pytest.raises(ValueError, match="rows: got 7, needs a multiple of ranks 2"):
        Exchange(2, 7, 512)
    with pytest.raises(ValueError, match="heads: got 'all'"):
        Exchange(2, 8, 512, "all")
