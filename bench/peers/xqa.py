"""FlashInfer's XQA kernel over FP8 caches as a peer, compiled from the sources in its wheel with nvcc.

FlashInfer itself is not imported, because it needs a dozen packages. nvcc takes 20 s for a form of the kernel, once:
the library is kept in build/peers. (A form of its MLA kernel for SM90 took 160 s, so that is no peer.)
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import torch

from bench.peers.fa3 import as_dtype
from bench.peers.offer import FP8_LIMIT, Offer, digest, folder_of
from bench.records import package_version
from tests.kit.gqa_cases import GqaCase

FOLDER: Final = pathlib.Path(__file__).resolve().parents[2] / "build" / "peers"
SOURCES: Final = (
    *("xqa/mha.cu", "xqa/mha_sm90.cu", "xqa/xqa_wrapper.cu", "flashinfer_xqa_binding.cu"),
    "xqa/tensorMap.cpp",
)
FLAGS: Final = (
    *("-std=c++17", "-O3", "-use_fast_math", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC", "-DNDEBUG=1"),
    *("-gencode=arch=compute_90a,code=sm_90a", "-static-global-template-stub=false"),
    *("-DFLASHINFER_ENABLE_F16", "-DFLASHINFER_ENABLE_BF16", "-DFLASHINFER_ENABLE_FP8_E4M3"),
    *("-DBEAM_WIDTH=1", "-DUSE_INPUT_KV=0", "-DUSE_CUSTOM_BARRIER=1", "-DINPUT_FP16=0", "-DDTYPE=__nv_bfloat16"),
    *("-DCACHE_ELEM_ENUM=2", "-DSLIDING_WINDOW=0", "-DLOW_PREC_OUTPUT=0", "-DSPEC_DEC=0", "-DMLA_WRAPPER=0"),
    "-DUSE_SM90_MHA=1",
)
"""Parameters of FlashInfer 0.7.2 for queries in bfloat16, one a sequence, over FP8 without a window."""
INCLUDES: Final = (
    *("include", "csrc", "cutlass/include", "cutlass/tools/util/include", "spdlog/include"),
    *("cccl/cub", "cccl/libcudacxx/include", "cccl/thrust"),
)
SCRATCH_BYTES: Final = 64 << 20
"""Bytes for partial results; 132 SMs need 2 MB."""
COMPILE_SECONDS: Final = 120


class Form(NamedTuple):
    """The parameters that one library of the kernel is compiled for."""

    d: int
    group: int
    page_size: int


FORMS: Final = (Form(128, 4, 64),)
"""The forms that are compiled: only the form of most cases."""


def decode(case: Any, inputs: Sequence[GqaCase], store: Any) -> Offer | None:
    """Decodes over an FP8 cache, one query a sequence; both caches have one scale, and the kernel rounds q to FP8."""
    form = Form(case.d, case.h_q // case.h_kv, case.page_size)
    if case.kv_dtype == "bf16" or case.s_q > 1 or case.window is not None or form not in FORMS:
        return None
    own = [as_dtype(case, one, store, "fp8") for one in inputs]
    own = [dataclasses.replace(one, q=one.q.bfloat16(), v_scale=one.k_scale) for one in own]
    calls = [_call(wrapper(form), one) for one in own]
    notes = [] if case.kv_dtype == "fp8" else ["a fp8 cache of as many tokens"]
    notes += ["q in FP8"] if own[0].k_scale is None else ["q in FP8, one scale for keys and values"]
    return Offer(calls, calls[0](), own[0], ", ".join(notes), FP8_LIMIT)


def _data() -> pathlib.Path | str:
    """Returns the folder of the sources, or why they or their compiler are missing."""
    data = folder_of("flashinfer.data")
    if isinstance(data, str):
        return data
    if not all((data / "csrc" / name).is_file() for name in SOURCES):
        return "flashinfer is installed without the sources of XQA"
    return data if _nvcc() else "there is no nvcc to compile FlashInfer's kernels"


def _nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


@functools.cache
def wrapper(form: Form) -> Callable[..., None]:
    """Returns the kernel's `xqa_wrapper`, compiled if necessary.

    Raises:
        RuntimeError: it cannot be compiled; another version of FlashInfer or tvm_ffi raises anything.
    """
    data = _data()
    assert not isinstance(data, str), data
    tvm_ffi = importlib.import_module("tvm_ffi")
    try:
        library = _library(form, data, pathlib.Path(str(tvm_ffi.__file__)).parent)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"XQA cannot be compiled: {error.stderr[-200:]}") from error
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # the library finds the driver's functions there
    return tvm_ffi.load_module(str(library)).xqa_wrapper


def _library(form: Form, data: pathlib.Path, tvm_ffi: pathlib.Path) -> pathlib.Path:
    """Compiles a form, unless it was compiled before from the same sources with the same flags."""
    shape = (f"-DHEAD_ELEMS={form.d}", f"-DHEAD_GRP_SIZE={form.group}", f"-DTOKENS_PER_PAGE={form.page_size}")
    sources = [data / "csrc" / name for name in SOURCES]
    name = hashlib.sha256(" ".join([*FLAGS, *shape, _digest(data)]).encode()).hexdigest()[:16]
    library = FOLDER / f"xqa_{name}.so"
    if library.is_file():
        return library
    FOLDER.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{folder}" for folder in (*(data / name for name in INCLUDES), tvm_ffi / "include")]
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        objects = [str(pathlib.Path(folder, f"{source.stem}.o")) for source in sources]
        commands = [
            [*FLAGS, *shape, *includes, "-c", str(source), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(len(commands)) as pool:
            list(pool.map(_run_nvcc, commands))
        draft = pathlib.Path(folder, library.name)
        _run_nvcc(["-shared", *objects, "-o", str(draft)])
        os.replace(draft, library)
    return library


def _run_nvcc(arguments: list[str]) -> None:
    command = [str(_nvcc()), *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)


def _digest(data: pathlib.Path) -> str:
    """Returns a digest of all sources of the kernel."""
    return digest(sorted(path for path in (data / "csrc" / "xqa").iterdir() if path.is_file()))


def _call(wrapper: Callable[..., None], case: GqaCase) -> Callable[[], torch.Tensor]:
    """Returns a call that returns its output, always the same tensor.

    Args:
        wrapper: wrapper of the case's form.
        case: one query a sequence, q in bfloat16, which the kernel rounds to FP8; caches of FP8 in paged_NHD, of which
            both have the scale of keys, one number, or none.
    """
    q, block_table, lengths = case.q, case.block_table, case.cache_seqlens
    if block_table is None or lengths is None:
        raise ValueError("case: got no block table or no lengths, needs both")
    batch, h_kv, device = len(q), case.k_cache.shape[2], q.device
    scale = None if case.k_scale is None else case.k_scale.float()
    out = torch.full_like(q, torch.nan)
    semaphores = torch.zeros(batch * h_kv, dtype=torch.int32, device=device)
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count if q.is_cuda else 132
    longest = block_table.shape[1] * case.k_cache.shape[1]
    arguments: tuple[Any, ...] = (
        *(True, sms, h_kv, 0),  # the kernel for FP8 on SM90; no window
        *(1.0, None, out, 1.0, q, None),  # scale of q; of the output; no sinks
        *(case.k_cache, case.v_cache, None, None, block_table, longest, lengths.view(-1, 1), batch, 1.0, scale),
        *(1, None, None, semaphores, scratch, True),  # one query; programmatic dependent launch, as FlashInfer has it
    )

    def run() -> torch.Tensor:
        wrapper(*arguments)
        return out

    return run


def version() -> str:
    """Returns the versions of FlashInfer and its sources."""
    data = _data()
    if isinstance(data, str):
        return f"missing: {data}"
    return f"flashinfer-python {package_version('flashinfer-python')}, csrc/xqa sha256 {_digest(data)}"
