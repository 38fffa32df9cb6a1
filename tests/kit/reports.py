"""SASS reports of compiled specs out of the store that processes of a test run share: a spec is compiled once for all.

What sources and compiler have not changed since is not compiled at all; `bench.machine_code` has the key.
"""

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import sass
from bench.machine_code import Store
from bench.sass import SassReport


@contextlib.contextmanager
def without_lines() -> Iterator[None]:
    """Kernels compile without the line of Python that the DSL looks up for each operation.

    It does so where the remarks of ptxas are asked for, and a compilation takes 1.5 to 1.8 times as long. The cubin and
    the warnings are the same.
    """
    from cutlass.base_dsl import dsl

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsl, "_set_enable_frame_filtering", lambda enable: None, raising=False)
        yield


@functools.cache
def report_of(spec: Any) -> SassReport:
    """As `bench.sass.report`."""
    with without_lines():
        compiled = Store().compiled(spec)
    kernels = []
    with tempfile.TemporaryDirectory() as folder:
        for cubin in compiled.cubins:
            path = Path(folder, "kernel.cubin")
            path.write_bytes(cubin)
            kernels += sass.read_cubin(path)
    return SassReport(tuple(kernels), sass.find_warnings(compiled.said))


@functools.cache
def listing_of(spec: Any) -> list[str]:
    """Lines of `nvdisasm -c` for the one cubin of a spec."""
    with without_lines():
        (cubin,) = Store().compiled(spec).cubins
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return sass._run("nvdisasm", "-c", str(path)).splitlines()
