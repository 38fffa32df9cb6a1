"""Context parallelism over gloo: four processes give the results of one, and a dead rank ends the others in time."""

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

from bench import ranks
from cute_kernels import mla_fp8_decode
from cute_kernels.budget.ranks import HALF_BYTES, NVLINK, Exchange, Link, crossing_tokens, predict_ranks
from cute_kernels.compat.flash_mla import flash_mla_with_kvcache
from cute_kernels.distributed import context_parallel_decode, shard_lengths, symmetric
from cute_kernels.distributed.exchange import Rows
from scripts import context_parallel_table
from tests.kit import context_shards, context_turns, context_workers, examples, processes
from tests.kit.compare import check_decode
from tests.kit.context_workers import CASES, SHORT, WORLD, Case
from tests.kit.mla_cases import dense_case

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of four processes found in all cases, from a single start."""
    return processes.run(context_workers.all_cases, tmp_path_factory.mktemp("ranks"), WORLD)


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_four_processes_equal_one(name: str, found: Found) -> None:
    assert [found[rank].get(name) for rank in range(WORLD)] == [[]] * WORLD


@pytest.mark.parametrize("case", CASES[::5], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_in_turns_equal_one_process(case: Case, world_size: int) -> None:
    """The ranks take turns in one process, as in tests/gpu on one GPU."""
    assert context_turns.problems(case, world_size, "cpu") == []


def test_a_callable_may_say_plus_infinity_for_no_keys() -> None:
    """`compat.flash_mla` does so, like FlashMLA. For the last two of three requests one rank or none has keys."""
    case = dense_case(seqlens=[70, 20, 0], h_q=8, page_size=64, sink="none", causal=False, seed=1)
    dealt: dict[str, Any] = {"world_size": 2, "interleave": 30}
    ranks = [context_shards.mla_dense(case, page_size=64, rank=rank, **dealt) for rank in range(2)]

    def call(rank: int) -> Any:
        own = ranks[rank]
        lengths = shard_lengths(own["cache_seqlens"], rank=rank, **dealt)
        out, lse = flash_mla_with_kvcache(
            own["q"], own["kv_cache"].unsqueeze(2), own["block_table"], lengths, 512, None, is_fp8_kvcache=True
        )
        assert (lse[lengths == 0] == math.inf).all()
        return context_parallel_decode(lambda: (out, lse.transpose(1, 2)), combine="collective", return_lse=True)

    (out, lse), other = context_turns.Turns(2).run(call)
    assert context_workers.same_bits(out, other[0]) and context_workers.same_bits(lse, other[1])
    assert list(check_decode(out, lse, **case.arguments()).problems) == []
    assert (out[2] == 0).all() and (lse[2] == -math.inf).all()


def test_calls_inside_of_compiled_functions(tmp_path: Path) -> None:
    found = processes.run(context_workers.compiled, tmp_path, 2)
    for rank in range(2):
        assert len(found[rank]) == 1 + len(context_workers.COMPILED) and not any(found[rank].values()), found[rank]


@pytest.mark.parametrize("task", [context_workers.a_rank_dies, context_workers.a_rank_never_calls])
def test_ranks_do_not_wait_for_ever(task: processes.Task, tmp_path: Path) -> None:
    found = processes.run(task, tmp_path, WORLD, timeout=SHORT, wait_for=WORLD - 1)
    for rank in range(WORLD - 1):
        message, seconds = found[rank]["error"]
        assert message.startswith(f"context_parallel_decode: rank {rank} of {WORLD} waited for the others in vain")
        assert seconds < 2 * SHORT


def test_ranks_that_disagree_are_told_the_same(tmp_path: Path) -> None:
    """Ranks must find the difference before they exchange tensors, must not hang, and the next call must work."""
    found = processes.run(context_workers.disagreements, tmp_path, 2)
    assert found[0] == found[1]
    for name, words in found[0].items():
        if name in ("rounding of q", "nothing"):
            assert not words
        else:
            assert words.startswith(f"{name.partition(' ')[0]}: got ") and "needs the same on all ranks" in words
    assert "torch.bfloat16 of shape (2, 1, 4, 64) on rank 0 and torch.float16" in found[0]["q dtype"]


def test_no_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="group: got None; needs a torch.distributed group: call"):
        context_parallel_decode(mla_fp8_decode)


# ---- the page


def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    """The example runs as pasted, on two CPU processes in the place of the page's four. Every rank prints."""
    page, example = examples.EXAMPLES["context_parallel-0"]
    assert "torchrun --nproc-per-node 4 example.py" in page.read_text(encoding="utf-8")
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(examples.ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, str(tmp_path / "example.py")], capture_output=True, text=True, timeout=180, check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    what = "ranks against one cache, relative error"
    printed = re.findall(rf"{what}: (\d\.\de[-+]\d\d)", run.stdout)  # lines of several processes may run together
    assert len(printed) == 2, run.stdout
    assert all(0 < float(value) < examples.LIMITS[what] for value in printed)


# ---- on paper


def test_what_ranks_receive_is_what_is_sent() -> None:
    """The bytes in the budget must be those of the buffers."""
    for heads in ("gather", "scatter"):
        paper = Exchange(4, rows=3 * 2 * 8, d=512, heads=heads)
        rows = Rows.empty((3, 2, 8), 512, torch.bfloat16, torch.device("cpu"))
        from_each = rows.bytes.numel() if heads == "gather" else rows.bytes.numel() // 4
        assert paper.received == 3 * from_each
    queried = Exchange(4, rows=48, d=512, heads="scatter", d_q=576)
    assert queried.received - Exchange(4, rows=48, d=512, heads="scatter").received == 3 * 12 * 576 * 2


def test_gather_and_scatter_cross_where_the_link_says() -> None:
    tokens = crossing_tokens(8, 128, 512, 576)
    assert tokens is not None and tokens > 1
    for count, cheaper in ((tokens - 1, "gather"), (tokens, "scatter"), (8 * tokens, "scatter")):
        gather = predict_ranks(0.0, Exchange(8, count * 128, 512, "gather")).us
        scatter = predict_ranks(0.0, Exchange(8, count * 128, 512, "scatter", 576)).us
        assert ("gather" if gather <= scatter else "scatter") == cheaper
    assert crossing_tokens(2, 128, 512, 10_000) is None


def test_a_group_of_one_waits_for_no_link() -> None:
    alone = Exchange(1, 128, 512)
    assert (alone.link_us(), alone.symmetric_us(), predict_ranks(10.0, alone).way) == (0.0, math.inf, "collective")
    slow = Exchange(8, 128, 512)
    link = Link(gbps=1, start_us=0, symmetric_gbps=2, symmetric_start_us=5)
    assert slow.link_us(link) == 7 * 128 * 1040 / 1e3
    found = predict_ranks(10.0, slow, link=link)
    assert (found.binds, found.way) == ("exchange", "symmetric")
    assert found.us == found.decode_us + found.exchange_us == 10.0 + 5 + 7 * 128 * 1040 / 2e3
    with pytest.raises(ValueError, match="rows: got 7, needs a multiple of ranks 2"):
        Exchange(2, 7, 512)
    with pytest.raises(ValueError, match="heads: got 'all'"):
        Exchange(2, 8, 512, "all")


def test_symmetric_memory_holds_what_its_buffers_hold() -> None:
    assert HALF_BYTES == symmetric.HALF_BYTES
    rows = HALF_BYTES // (8 * 1040) // 8 * 8
    assert Exchange(8, rows, 512).symmetric_us() < math.inf == Exchange(8, rows + 8, 512).symmetric_us()
    queried = Exchange(8, 1024, 512, "scatter", 576)
    partials = Exchange(8, 1024, 512, "scatter")
    assert queried.symmetric_us() - partials.symmetric_us() == pytest.approx(
        NVLINK.start_us + 7 * 128 * 2 * 576 / (NVLINK.gbps * 1e3)
    )


# ---- as measured


@pytest.mark.parametrize(
    "record", context_parallel_table.records(), ids=lambda record: f"{record['ranks']} x {record['card']}"
)
def test_the_link_is_the_measured_one(record: dict[str, Any]) -> None:
    """The constants are fitted to exchanges of two ranks. Exchanges between those, and of four ranks, are predicted."""
    if record["ranks"] == 2:
        assert NVLINK.gbps == pytest.approx(record["link"]["gbps"], rel=0.05)
        assert NVLINK.start_us == pytest.approx(record["link"]["start_us"], rel=0.15)
    errors = []
    for case in record["exchanges"]:
        assert case["difference"] < 4e-3
        exchange = ranks.exchange_of(case["batch"], case["heads"], record["ranks"])
        assert exchange.received == case["received_bytes"]
        errors += [exchange.symmetric_us() / case["symmetric_us"], exchange.collective_us() / case["collective_us"]]
    assert all(0.6 < error < 1.5 for error in filter(math.isfinite, errors)), errors
    assert all(case["difference"] < 5e-3 for case in record["decodes"])
