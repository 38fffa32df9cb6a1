"""Set-up for every test, and how `pytest -n auto --dist loadgroup` (`make test`) distributes tests."""

import ctypes
import gc
import os
import pathlib

import pytest
import torch

from cute_kernels.runtime import arch

MOST_PROCESSES = 8  # each process needs 2.5 GB: torch, the DSL and memory that tests have freed
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h

# Some tests import device code, which imports the DSL. The DSL reads its target once, when it is imported, so
# the target is pinned before the first of them, whichever that is.
arch.pin()


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    return pathlib.Path(__file__).resolve().parents[1]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process per core. With a GPU there are none, because one process has the GPU to itself."""
    return 0 if torch.cuda.is_available() else min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(50_000, 20, 50)  # tracing a kernel makes a million objects, almost none of them in a cycle
    keep_freed_memory()
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers > 1:  # more threads than cores would wait for each other
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))


def keep_freed_memory() -> None:
    """Keeps large tensors that a test frees for the next test.

    glibc would give each back to the kernel, which clears every page again: 10 of 26 CPU seconds of test_bad_input.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc alone has it
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, 1 << 30)
        set_option(M_TRIM_THRESHOLD, 1 << 30)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of a file, or of a group, in one process, because they share what is slow to make.

    Tests marked `anywhere` may move.
    """
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("anywhere") is None and item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(item.path.name))
