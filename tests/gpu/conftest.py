"""Tests that need an SM90 GPU: skipped with one reason elsewhere, and looked for only when the first of them runs."""

import functools
from collections.abc import Callable

import pytest
import torch

from cute_kernels import mla_fp8_decode
from cute_kernels.merge import spec as merge_spec
from cute_kernels.mla import append_spec
from cute_kernels.mla import spec as mla_spec
from cute_kernels.runtime.arch import is_sm90
from cute_kernels.runtime.compile import precompile
from cute_kernels.testing.compare import Comparison, check_decode
from cute_kernels.testing.inputs import DecodeCase


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker("gpu")


def pytest_runtest_setup() -> None:
    # skipped from here, not from a fixture: all tests then share one place and one line of the summary
    found = other_than_sm90()
    if found:
        pytest.skip(f"needs an SM90 GPU (Hopper, compute capability 9.0); found {found}")


@functools.cache
def other_than_sm90() -> str:
    """What this machine has instead of an SM90 GPU; empty if it has one."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    return "" if is_sm90(torch.device("cuda")) else torch.cuda.get_device_name()


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """All kernels that are not on disk yet, one per core at a time."""
    precompile([*mla_spec.shipped_specs(), *append_spec.shipped_specs(), *merge_spec.shipped_specs()])


RunDecode = Callable[..., Comparison]


@pytest.fixture(scope="session")
def run_decode() -> RunDecode:
    """Run one case into poisoned outputs and hold it to the tolerance rule."""

    def run(case: DecodeCase, *, num_splits: int | None = None, padded: bool = True) -> Comparison:
        out, lse = case.outputs(padded=padded)
        mla_fp8_decode(case.q, case.kv_cache, **case.options(), num_splits=num_splits, out=out.tensor, lse=lse.tensor)
        check = check_decode(out.tensor, lse.tensor, **case.arguments()).require()
        out.require_no_stray_writes()
        lse.require_no_stray_writes()
        return check

    return run
