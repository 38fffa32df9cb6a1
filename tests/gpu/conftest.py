"""Tests that need an SM90 GPU. Elsewhere they are skipped with one reason; the first test looks for the GPU.

One process is enough, but spends most of its time on the host. `scripts/gpu_check.py` therefore compiles in one process
and then runs several side by side:

    pytest tests/gpu --compile-only
    pytest tests/gpu -m alone                              tests that measure time
    pytest tests/gpu -m "not alone" --shard 1/10           and 2/10 to 10/10 at the same time
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cute_kernels import mla_fp8_decode
from cute_kernels.gqa import append_spec as kv_append_spec
from cute_kernels.gqa import block_table_spec, gather_spec
from cute_kernels.gqa import spec as gqa_spec
from cute_kernels.indexer import append_spec as index_append_spec
from cute_kernels.indexer import score_spec, topk_spec
from cute_kernels.merge import peers_spec
from cute_kernels.merge import spec as merge_spec
from cute_kernels.mla import append_spec
from cute_kernels.mla import spec as mla_spec
from cute_kernels.mla.crossover import spec as crossover_spec
from cute_kernels.runtime.arch import is_sm90
from cute_kernels.runtime.compile import precompile
from cute_kernels.sink import backward_spec as sink_backward_spec
from cute_kernels.sink import spec as sink_spec
from tests.kit.compare import Comparison, check_decode
from tests.kit.mla_cases import DecodeCase
from tests.kit.sink_calls import change_results


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", type=shard, help="of the selected tests, run the I-th of N equal parts")
    parser.addoption("--compile-only", action="store_true", help="compile the kernels of tests/gpu and run no test")


def shard(text: str) -> tuple[int, int]:
    """(i, n) from "i/n"; 1 <= i <= n."""
    part, _, parts = text.partition("/")
    i, n = int(part), int(parts)
    if not 1 <= i <= n:
        raise ValueError(f"no such part: {text}")
    return i, n


def on_gpu(item: pytest.Item) -> bool:
    return "tests/gpu/" in item.path.as_posix()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if on_gpu(item):
            item.add_marker("gpu")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keeps one shard of the selected tests. It is every n-th test, because neighbouring tests are often alike."""
    part = session.config.getoption("shard", None)
    if part is not None:
        i, n = part
        session.items[:] = session.items[i - 1 :: n]


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not session.config.getoption("compile_only", False):
        return None
    if not other_than_sm90():
        precompile(kernel_specs(session))
    return True  # the kernels are compiled


def pytest_runtest_setup() -> None:
    # skipped here, not in a fixture, so that the summary has one line for all tests
    found = other_than_sm90()
    if found:
        pytest.skip(f"needs an SM90 GPU (Hopper, compute capability 9.0); found {found}")


@functools.cache
def other_than_sm90() -> str:
    """Why this machine cannot run the tests; empty if it has an SM90 GPU."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    return "" if is_sm90(torch.device("cuda")) else torch.cuda.get_device_name()


def kernel_specs(session: pytest.Session) -> list[Any]:
    """Shipped specs, and the results of `kernel_specs` in each collected file."""
    modules: tuple[Any, ...] = (
        mla_spec,
        crossover_spec,
        append_spec,
        merge_spec,
        peers_spec,
        gqa_spec,
        kv_append_spec,
        gather_spec,
        block_table_spec,
        index_append_spec,
        score_spec,
        topk_spec,
        sink_spec,
        sink_backward_spec,
    )
    specs = [spec for module in modules for spec in module.shipped_specs()]
    files: dict[Any, None] = dict.fromkeys(getattr(item, "module", None) for item in session.items if on_gpu(item))
    return specs + [spec for file in files if hasattr(file, "kernel_specs") for spec in file.kernel_specs()]


@pytest.fixture(scope="session", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Compiles all kernels that are not on disk, one per core at a time."""
    precompile(kernel_specs(request.session))


@pytest.fixture
def free_memory() -> Iterator[None]:
    """Frees cached memory: some cases fill gigabytes, in blocks of sizes that no other case asks for."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def poisoned_sink(monkeypatch: pytest.MonkeyPatch, free_memory: None) -> None:
    """Fills the results of `sink_attention` with NaN before its kernels are launched."""
    change_results(monkeypatch, lambda t: t.fill_(torch.nan))


RunDecode = Callable[..., Comparison]


@pytest.fixture(scope="session")
def run_decode() -> RunDecode:
    """Runs one case into poisoned outputs and applies the tolerance rule."""

    def run(
        case: DecodeCase,
        *,
        num_splits: int | None = None,
        exchange: str | None = None,
        padded: bool = True,
    ) -> Comparison:
        out, lse = case.outputs(padded=padded)
        forced: dict[str, Any] = {"num_splits": num_splits, "exchange": exchange}
        mla_fp8_decode(case.q, case.kv_cache, **case.options(), **forced, out=out.tensor, lse=lse.tensor)
        check = check_decode(out.tensor, lse.tensor, **case.arguments()).require()
        out.require_no_stray_writes()
        lse.require_no_stray_writes()
        return check

    return run
