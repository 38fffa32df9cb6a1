"""The accuracy that INT8 and smaller codes cost, by granularity of the scales.

    python -m bench.gqa_accuracy        computes the table of docs/users/gqa_decode.md anew

Keys and values are quantized as `kv_append` does it. Attention runs in float64, over the original numbers and over
the dequantized ones, so quantization is all that differs. CPU, seeded, well under a minute.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import torch

from bench.records import ROOT
from bench.report import markdown
from cute_kernels.gqa.codes import INT8, ROTATED_KINDS
from cute_kernels.gqa.codes import KINDS as STORED
from cute_kernels.gqa.layouts import ScaleKind
from cute_kernels.gqa.reference import quantize, quantize_as, reference_gqa_decode

PAGE: Final = ROOT / "docs" / "users" / "gqa_decode.md"
BLOCK: Final = "accuracy"
"""Name of the page's block."""

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
ROUNDING = 0.1
"""Two significant digits differ by at most this much when one of them is rounded the other way."""

LAYOUT, SCALE_DTYPE = "BSNH", torch.float16
BATCH, TOKENS, H_Q, H_KV, D = 8, 1024, 32, 8, 128
LOGITS = 3.0
"""Standard deviation of the scores, at which the softmax is as peaked as in trained models."""
OUTLIER = 20.0
"""Factor between outliers and other values."""
OUTLIER_TOKENS = 1 / 50
SETS = {"normal": "normal", "channels": "outlier channels", "tokens": "outlier tokens"}
"""Data sets, and their titles in the table."""
KINDS = {
    "per_tensor": ScaleKind("per_tensor"),
    "per_head": ScaleKind("per_head"),
    "per_token": ScaleKind("per_token"),
    "per_token_head": ScaleKind("per_token_head"),
    "per_group, 64": ScaleKind("per_group", 64),
    "per_group, 32": ScaleKind("per_group", 32),
}
APPENDED = tuple(kind for kind in STORED if kind != INT8)
"""Other kinds of `kv_append`: float32 scales, one for each token and head."""
PLAIN = {"none, float8_e4m3fn": torch.float8_e4m3fn, "none, bfloat16": torch.bfloat16}
"""Caches without scales, to compare with."""


class Error(NamedTuple):
    """Errors against attention over the unquantized numbers, means over all query heads.

    out   norm of the difference / norm of the output
    lse   absolute difference
    """

    out: float
    lse: float


def draw(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes a data set: unquantized q (batch, 1, h_q, d), k and v (batch, tokens, h_kv, d), float32.

    normal    N(0,1)
    channels  in every other head four channels of K (two rotary pairs, d / 2 apart) times 20; q is smaller there, so
              that every channel contributes equally to the scores
    tokens    one token in 50 of V and, independently, one in 50 of K times 20; in K only across the queries, so that
              scores stay as they were
    """
    gen = torch.Generator().manual_seed(0)
    q = torch.randn((BATCH, H_KV, H_Q // H_KV, D), generator=gen) * LOGITS
    k, v = (torch.randn((BATCH, TOKENS, H_KV, D), generator=gen) for _ in "kv")
    if name == "channels":
        size = torch.ones((H_KV, D))
        for head in range(0, H_KV, 2):
            pairs = torch.randperm(D // 2, generator=gen)[:2]
            size[head, torch.cat([pairs, pairs + D // 2])] = OUTLIER
        k *= size
        q /= size.unsqueeze(1)
    elif name == "tokens":
        large_k, large_v = torch.rand((2, BATCH, TOKENS, 1, 1), generator=gen) < OUTLIER_TOKENS
        basis = torch.linalg.qr(q.mT).Q  # spans the queries of a head
        projection = torch.einsum("bshd,bhdr,bher->bshe", k, basis, basis)
        k, v = torch.where(large_k, projection + OUTLIER * (k - projection), k), torch.where(large_v, v * OUTLIER, v)
    return q.flatten(1, 2).unsqueeze(1), k, v


def errors(name: str) -> dict[str, Error]:
    """Measures the errors of one data set, by granularity, and for caches without scales."""
    q, k, v = draw(name)
    want = _attend(q, k, v)
    caches = {kind: [quantize(x, scales, SCALE_DTYPE) for x in (k, v)] for kind, scales in KINDS.items()}
    caches |= {kind: [quantize_as(code, x) for code, x in zip(STORED[kind], (k, v), strict=True)] for kind in APPENDED}
    found = {}
    for kind, ((k_codes, k_scale), (v_codes, v_scale)) in caches.items():
        rotated = kind if kind in ROTATED_KINDS else None
        found[kind] = _compare(_attend(q, k_codes, v_codes, k_scale, v_scale, kind=rotated), want)
    return found | {kind: _compare(_attend(q, k.to(dtype), v.to(dtype)), want) for kind, dtype in PLAIN.items()}


def scale_bytes(kind: ScaleKind) -> int:
    """Returns the bytes of the scales that a token's keys and values have, all heads; 0 if tokens share them."""
    _, scale = quantize(torch.zeros((1, H_KV, D)), kind, SCALE_DTYPE)
    shared = kind.granularity in ("per_tensor", "per_head")
    return 0 if shared else 2 * scale.numel() * scale.element_size()


def _attend(q: torch.Tensor, *cache: torch.Tensor, kind: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return reference_gqa_decode(q, *cache, layout=LAYOUT, kind=kind, dtype=torch.float64)


def _compare(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> Error:
    (out, lse), (want_out, want_lse) = got, want
    return Error(
        ((out - want_out).norm(dim=-1) / want_out.norm(dim=-1)).mean().item(),
        (lse - want_lse).abs().mean().item(),
    )


def table(found: dict[str, dict[str, Error]]) -> str:
    """Formats the errors of each data set as Markdown."""
    header = ["scales", "their bytes per token", *(f"{SETS[name]}: output, lse" for name in found)]
    rows = [[f"`{name}`", _overhead(scale_bytes(kind))] for name, kind in KINDS.items()]
    rows += [[f"`{name}`", _overhead(2 * H_KV * 4)] for name in APPENDED]
    rows += [[name.replace("none, ", "none, `") + "`", _overhead(0)] for name in PLAIN]
    for row, name in zip(rows, (*KINDS, *APPENDED, *PLAIN), strict=True):
        row += [f"{_digits(100 * errors[name].out)}%, {_digits(errors[name].lse)}" for errors in found.values()]
    return "\n".join(markdown.table(header, rows))


def _digits(value: float) -> str:
    """Formats two significant digits."""
    return f"{value:#.2g}".rstrip(".")


def _overhead(scales: int) -> str:
    return f"{scales} ({scales / (2 * H_KV * D):.1%})" if scales else "0"


def same(one: str, other: str) -> bool:
    """Returns whether two tables agree, up to the rounding of their last digits."""
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    pairs = zip(map(float, NUMBER.findall(one)), map(float, NUMBER.findall(other)), strict=True)
    return all(abs(a - b) <= ROUNDING * max(a, b) * (1 + 1e-6) for a, b in pairs)


def main() -> None:
    """Writes the table into the page, unless the page's table agrees with it."""
    text, fresh = PAGE.read_text(encoding="utf-8"), table({name: errors(name) for name in SETS})
    if not same(markdown.split(text, BLOCK)[1], fresh):
        PAGE.write_text(markdown.fill(text, BLOCK, fresh), encoding="utf-8")


if __name__ == "__main__":
    main()
