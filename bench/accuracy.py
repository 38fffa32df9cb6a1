"""Errors of `mla_fp8_decode`, of bf16 keys and of FlashMLA, over ordinary and adversarial inputs.

Against float64 over the dequantized cache. The keys and queries of each kind are drawn twice: with scales as they come,
and with powers of two, whose keys bf16 holds exactly.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

import cute_kernels
from bench import accumulator
from bench.peers import load
from cute_kernels.mla.plan import plan_decode
from fp8_mla import QK_DIM, QUANT_TILE, ROPE_OFFSET, SCALE_OFFSET, V_DIM, reference_decode
from tests.kit.compare import emulate_bf16_decode, relative_error
from tests.kit.mla_cases import OUTLIER_CHANNELS, DecodeCase, sparse_case

BATCH, HEADS, TOPK = 4, 128, 2048
SHARP: Final = 6.0
OUTLIER_IN_Q: Final = 8.0
APART: Final = 2.0**20
"""Of the sizes of neighbouring quant tiles of q; keys make up for it."""
SCALES: Final = ("arbitrary", "power_of_two")
BF16: Final = "bf16 keys"
FLASH_MLA: Final = "flash_mla"
EXACT: Final = "exact"


def _plain(scales: str, **options: Any) -> DecodeCase:
    options = {"device": "cuda", "query_size": 1.0, **options}
    return sparse_case(batch=BATCH, h_q=HEADS, topk=TOPK, scales=scales, invalid=False, padded=False, **options)


def _outliers_in_q(case: DecodeCase) -> DecodeCase:
    q = case.q.clone()
    q[..., list(OUTLIER_CHANNELS)] *= OUTLIER_IN_Q
    return dataclasses.replace(case, q=q)


def _far_apart(case: DecodeCase) -> DecodeCase:
    """Quant tiles 1 and 3 of q are smaller, their scales larger."""
    q, cache = case.q.clone(), case.kv_cache.clone()
    scale = cache[..., SCALE_OFFSET:ROPE_OFFSET].view(torch.float32)
    for tile in (1, 3):
        q[..., QUANT_TILE * tile : QUANT_TILE * (tile + 1)] /= APART
        scale[..., tile] *= APART
    return dataclasses.replace(case, q=q, kv_cache=cache)


INPUTS: Final[Mapping[str, Callable[..., DecodeCase]]] = {
    "N(0,1)": lambda scales, **options: _plain(scales, **options),
    f"scores x {SHARP:g}": lambda scales, **options: _plain(scales, query_size=SHARP, **options),
    "outlier channels in q": lambda scales, **options: _outliers_in_q(_plain(scales, **options)),
    "outlier channels in k": lambda scales, **options: _plain(scales, outliers=True, **options),
    "outlier channels in q and k": lambda scales, **options: _outliers_in_q(_plain(scales, outliers=True, **options)),
    "quant tiles of q 2^20 apart": lambda scales, **options: _far_apart(_plain(scales, **options)),
}


def kernel_specs() -> list[Any]:
    """The kernels that the table runs."""
    sizes = {"sparse": True, "batch": BATCH, "s_q": 1, "h_q": HEADS, "max_keys": TOPK, "num_sms": 132}
    return [plan_decode(**sizes).spec]


def measure() -> tuple[dict[str, Any], list[str]]:
    """The entries "accuracy" and "accumulator" of a record, and in words what is not as it must be."""
    rows, problems = [], []
    peer = load(FLASH_MLA)
    for name, make in INPUTS.items():
        for scales in SCALES:
            found = errors(make(scales), peer)
            rows.append({"inputs": name, "scales": scales, "errors": found})
            problems += [f"accuracy, {name}, {scales}: {problem}" for problem in shortcomings(found)]
    kept = accumulator.probe(accumulator.on_card())
    problems += [f"accumulator: {kept['problem']}"] if "problem" in kept else []
    return {"accuracy": rows, "accumulator": kept}, problems


def errors(case: DecodeCase, peer: types.ModuleType | str) -> dict[str, dict[str, Any]]:
    """By who computed it, the relative error of the output, and of the log-sum-exp the largest and the rms error."""
    expected = reference_decode(**case.arguments())
    ways: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {EXACT: lambda: _ours(case)}
    ways[BF16] = lambda: emulate_bf16_decode(**case.arguments())
    if not isinstance(peer, str):
        ways[FLASH_MLA] = lambda: _flash_mla(case, peer)
    found: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        try:
            found[name] = _errors(way(), expected)
        except Exception as error:  # what one cannot compute is said in its place
            found[name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return found


def shortcomings(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """In words, where scores are less accurate than their rule says, see `docs/users/mla_decode.md`."""
    exact = found[EXACT]
    if "failed" in exact:
        return [f"exact scores: {exact['failed']}"]
    limit = 2e-5 + 1e-6 * exact["lse_size"]
    return [f"exact scores: log-sum-exp off by {exact['lse']:.1e}, needs {limit:.1e}"] if exact["lse"] > limit else []


def _errors(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    out, lse = got
    if not (out.isfinite().all() and lse.isfinite().all()):
        raise ValueError("not every element is finite")
    off = lse.double() - expected[1]
    figures = {
        "out": relative_error(out, expected[0]),
        "lse": off.abs().max().item(),
        "lse_rms": off.square().mean().sqrt().item(),
        "lse_size": expected[1].abs().max().item(),
    }
    assert all(map(math.isfinite, figures.values()))
    return {name: float(f"{value:.3g}") for name, value in figures.items()}


def _ours(case: DecodeCase) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = cute_kernels.mla_fp8_decode(case.q, case.kv_cache, **case.options(), return_lse=True)
    return out, lse


def _flash_mla(case: DecodeCase, peer: types.ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
    meta, _ = peer.get_mla_metadata()
    out, lse = peer.flash_mla_with_kvcache(
        q=case.q,
        k_cache=case.kv_cache.view(torch.float8_e4m3fn).unsqueeze(2),
        block_table=None,
        cache_seqlens=None,
        head_dim_v=V_DIM,
        tile_scheduler_metadata=meta,
        softmax_scale=QK_DIM**-0.5,
        is_fp8_kvcache=True,
        indices=case.indices,
    )
    return out, lse.transpose(1, 2)
