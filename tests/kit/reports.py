"""SASS reports of compiled specs out of the store that processes of a test run share: a spec is compiled once for all.

What sources and compiler have not changed since is not compiled at all; `bench.machine_code` has the key.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

from bench import sass
from bench.machine_code import Store
from bench.sass import SassReport


@functools.cache
def report_of(spec: Any) -> SassReport:
    """As `bench.sass.report`."""
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
    (cubin,) = Store().compiled(spec).cubins
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return sass._run("nvdisasm", "-c", str(path)).splitlines()
