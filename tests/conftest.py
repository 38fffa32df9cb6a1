"""What all tests share."""

import pathlib

import pytest


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The checkout."""
    return pathlib.Path(__file__).resolve().parents[1]
