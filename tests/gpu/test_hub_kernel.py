"""The package's copy for the kernels hub on a GPU: its kernels give the bits of the package's kernels."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

import cute_kernels
from scripts import make_hub_kernel
from tests.kit.sglang_stand_ins import sparse_call


def test_the_copy_gives_the_bits_of_the_package(tmp_path: Path) -> None:
    make_hub_kernel.write(tmp_path / "kernel")
    place = tmp_path / "kernel" / "build" / "torch-cuda"
    name = json.loads((place / "metadata.json").read_text(encoding="utf-8"))["id"]
    spec = importlib.util.spec_from_file_location(name, place / "__init__.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        call = sparse_call(5, 16, "cuda")
        q, cache = call["q_all"].view(5, 1, 16, 576), call["kv_cache"].view(2, 64, 656)
        options = {"indices": call["page_table_1"].unsqueeze(1), "return_lse": True}
        found, expected = (package.mla_fp8_decode(q, cache, **options) for package in (module, cute_kernels))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    finally:
        for key in [key for key in sys.modules if key.partition(".")[0] == name]:
            del sys.modules[key]
