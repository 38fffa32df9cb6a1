"""What all tests share, and how they are spread over processes by `pytest -n auto --dist loadgroup` (`make test`)."""

import os
import pathlib

import pytest
import torch

from cute_kernels.runtime import arch

MOST_PROCESSES = 8  # each has torch and the DSL in memory, 1 to 2 GB

# Some tests look at device code itself, whose modules import the DSL. It reads its target once, when it is imported, so
# the target is pinned before the first of them, whichever that is.
arch.pin()


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The checkout."""
    return pathlib.Path(__file__).resolve().parents[1]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One for each core; none where there is a GPU: one process then has its memory and time to itself."""
    return 0 if torch.cuda.is_available() else min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


def pytest_configure(config: pytest.Config) -> None:
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers > 1:  # else threads of each would wait for cores that the others have
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of a file together, because they share what is slow to make, but for those marked `anywhere`."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("anywhere") is None:
                item.add_marker(pytest.mark.xdist_group(item.path.name))
