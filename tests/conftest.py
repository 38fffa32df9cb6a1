"""What all tests share."""

import pathlib

import pytest

from cute_kernels.runtime import arch

# Some tests look at device code itself, whose modules import the DSL. It reads its target once, when it is imported, so
# the target is pinned before the first of them, whichever that is.
arch.pin()


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The checkout."""
    return pathlib.Path(__file__).resolve().parents[1]
