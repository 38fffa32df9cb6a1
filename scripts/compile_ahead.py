"""Compile, on a machine without a GPU, the kernels that tests/gpu and the benchmarks load on one.

    export CUTE_KERNELS_CACHE_DIR=build/kernels
    python scripts/compile_ahead.py                   all, the slowest to compile first
    python scripts/compile_ahead.py --only Latent     those whose specification matches

Copy the cache's folder and build/machine_code to the machine with the GPU: a run of scripts/gpu_check.py there compiles
nothing that is in both. Names of entries depend on the sources, the versions of the CuTe DSL and tvm-ffi, and the
platform, so what does not fit is compiled again, not loaded. It can be stopped: what is done stays.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

import torch  # noqa: E402

from bench import kernels_run  # noqa: E402
from bench.parts import SECTIONS  # noqa: E402
from bench.progress import Progress  # noqa: E402
from cute_kernels.runtime.cache import DiskCache, KernelSpec, directory, entry_name  # noqa: E402
from cute_kernels.warm.shapes import H100_SMS  # noqa: E402
from scripts.gpu_check import benchmark_specs  # noqa: E402

SLOW = ("LatentDecodeSpec", "MlaDecodeSpec", "MlaCrossoverSpec")
"""They take 10 s of a core each, others 2 to 5."""


@contextlib.contextmanager
def planned_for(num_sms: int) -> Iterator[None]:
    """Has planners see a GPU with so many SMs, where there is none."""
    card = SimpleNamespace(multi_processor_count=num_sms, L2_cache_size=50 << 20, major=9, minor=0)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda *_: card):
        yield


def wanted(num_sms: int = H100_SMS) -> list[KernelSpec]:
    """What every room ships, and what the tests and benchmarks ask for beyond that; the slowest first.

    Args:
        num_sms: of the GPU; plans depend on it.
    """
    specs = kernels_run.shipped_specs()
    with planned_for(num_sms):
        for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
            module = importlib.import_module(f"tests.gpu.{file.stem}")
            specs += module.kernel_specs() if hasattr(module, "kernel_specs") else []
        specs += benchmark_specs(SECTIONS)  # some variants of GQA are in no test
    return sorted(dict.fromkeys(specs), key=lambda spec: type(spec).__name__ not in SLOW)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles what is missing; 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="REGEX", default="", help="specifications that match, as Python prints them")
    parser.add_argument("--sms", type=int, default=H100_SMS, help=f"of the GPU ({H100_SMS})")
    parser.add_argument("--processes", type=int, help="at a time; default: one per core")
    parser.add_argument("--list", action="store_true", help="print what is missing, compile nothing")
    options = parser.parse_args(arguments)
    code: Any = kernels_run.machine_code()
    store, disk = code.Store(), DiskCache(directory())
    specs = [spec for spec in wanted(options.sms) if re.search(options.only, repr(spec))]
    missing = [spec for spec in specs if not (disk.exists(entry_name(spec)) and store.knows(spec))]
    if options.list:
        print(*missing, sep="\n")
        return 0
    progress = Progress()
    progress.say(f"{len(missing)} of {len(specs)} kernels to compile, into {directory()} and {store.root}")
    with progress.count("kernels", len(missing)) as count:
        code.precompile(missing, store, options.processes, lambda done, total: count(""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
