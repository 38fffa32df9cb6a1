"""What tests of compiled kernels share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel_place import Place


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """An empty cache for this process and its children, and a process that remembers no kernel."""
    from cute_kernels.runtime import cache, compile

    here = Place(tmp_path / "cache", tmp_path / "log")
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(here.directory))
    monkeypatch.setenv("TINY_KERNEL_LOG", str(here.log))
    monkeypatch.setattr(compile, "_kernels", {})
    monkeypatch.setattr(cache, "_warned_about", set())
    before = os.umask(0o022)  # under 002, files that a test makes would be ones that a group may write
    yield here
    os.umask(before)
