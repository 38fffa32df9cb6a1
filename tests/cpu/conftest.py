"""Fixtures for tests that compile kernels."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.kernel_place import Place


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """An empty disk cache for this process and its children. The process forgets its loaded kernels."""
    from cute_kernels.runtime import cache, compile

    here = Place(tmp_path / "cache", tmp_path / "log")
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(here.directory))
    monkeypatch.setenv("TINY_KERNEL_LOG", str(here.log))
    monkeypatch.setattr(compile, "_kernels", {})
    monkeypatch.setattr(cache, "_warned_about", set())
    old_umask = os.umask(0o022)  # under umask 002 a group could write the files of a test
    yield here
    os.umask(old_umask)
