"""Attention over keys and values that went through the formats of a cache, an `Attend` of models.py.

The package's appends write whole sequences into a cache, and attention reads them back dequantized. A decoding step
computes the same, because no token's codes depend on a later token. To make sure, the package's op also decodes the
last query of each call over the same cache, and both must agree.

In every format but float32, queries, keys, values and outputs are bfloat16, as the ops take and return them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

import fp8_mla
from bench.perplexity.models import HEAD_DIM, Attend, causal_attention, logits
from cute_kernels import gqa_decode, kv_append, kv_int8_append, mla_fp8_append, mla_fp8_decode
from cute_kernels.gqa.codes import INT8, KINDS, ROTATED_KINDS, values_of
from cute_kernels.gqa.layouts import ScaleKind
from cute_kernels.gqa.reference import dequantize, quantize, quantize_as

LAYOUT: Final = "BSNH"
SCALE_DTYPE: Final = torch.float16
CALIBRATED: Final = ("per_tensor", "per_head")
"""Granularities whose scales tokens share: known before the first token, so they are computed from other text."""
ROUNDING, CANCELLATION = 2.0**-7, 2.0**-16
"""Limits of the difference of an output from the op's: a unit in the last place of bfloat16, because sums are float32
here and float64 there; and this part of the largest value, because values may cancel."""


class Mismatch(RuntimeError):
    """An op's output differs from attention over the whole sequence: the table would describe something else."""


def require_agreement(name: str, got: torch.Tensor, want: torch.Tensor, largest: torch.Tensor) -> None:
    """Compares the output of an op with the output of attention here.

    Raises:
        Mismatch: they differ by more than rounding, or one is not a number.
    """
    worst = ((got.float() - want).abs() / (ROUNDING * want.abs() + CANCELLATION * largest)).max().item()
    if not worst <= 1:
        raise Mismatch(f"{name}: an output of the op is at {worst:.3g} of what is allowed")


# ---- keys and values of heads


class GqaFormat(NamedTuple):
    """A way to store keys and values.

    kind    granularity of the scales; None: no scale
    stored  the kind of `kv_append`, if that is not "int8"
    """

    name: str
    dtype: torch.dtype
    kind: ScaleKind | None = None
    stored: str | None = None

    @property
    def calibrated(self) -> bool:
        """Whether scales come from other text."""
        return self.kind is not None and self.kind.granularity in CALIBRATED

    def bytes_per_token(self, h_kv: int, d: int) -> float:
        """Bytes of one token's key and value in one KV head; scales that tokens share count nothing."""
        scales = 0
        if self.stored is not None:
            return sum(d / values_of(name) + 4 for name in KINDS[self.stored])
        if self.kind is not None and not self.calibrated:
            scales = 2 * quantize(torch.zeros((1, h_kv, d)), self.kind, SCALE_DTYPE)[1].numel() * SCALE_DTYPE.itemsize
        return 2 * d * self.dtype.itemsize + scales / h_kv


E4M3: Final = torch.float8_e4m3fn
GQA_FORMATS: Final = (
    GqaFormat("float32", torch.float32),
    GqaFormat("bfloat16", torch.bfloat16),
    GqaFormat("fp8 e4m3, no scale", E4M3),
    GqaFormat("fp8 e4m3, per_tensor", E4M3, ScaleKind("per_tensor")),
    *(GqaFormat(f"int8, {name}", torch.int8, ScaleKind(name)) for name in (*CALIBRATED, "per_token", "per_token_head")),
    GqaFormat("int8, per_group of 32", torch.int8, ScaleKind("per_group", 32)),
    *(GqaFormat(kind, getattr(torch, types[0]), stored=kind) for kind, types in KINDS.items() if kind != INT8),
)
"""Heads have 64 elements, so a group of 64 is a head: per_token_head."""


class Recorder:
    """Attends like a bfloat16 cache and keeps the keys and values, for calibration: (batch, tokens, h_kv, d)."""

    def __init__(self) -> None:
        self.seen: tuple[torch.Tensor, ...] = ()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """Attends: see `Attend`."""
        self.seen = k.bfloat16(), v.bfloat16()
        keys, values = (x.float() for x in self.seen)
        return causal_attention(q.bfloat16().float(), keys, values, softmax_scale).bfloat16().float()

    def scales(self, gqa_format: GqaFormat) -> tuple[torch.Tensor, ...]:
        """Returns the scales of K and V with which no recorded number saturates; none if tokens have their own."""
        if gqa_format.kind is None or not gqa_format.calibrated:
            return ()
        if gqa_format.dtype == torch.int8:
            return tuple(quantize(x, gqa_format.kind, SCALE_DTYPE)[1] for x in self.seen)
        return tuple((x.abs().amax().float() / fp8_mla.FP8_MAX).to(SCALE_DTYPE).view(1) for x in self.seen)


class GqaCache:
    """Attention over whole sequences, with keys and values after a round trip through a format."""

    def __init__(self, gqa_format: GqaFormat, scales: tuple[torch.Tensor, ...] = ()) -> None:
        self.format, self.scales = gqa_format, scales

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """Attends: see `Attend`."""
        if self.format.dtype == torch.float32:
            return causal_attention(q, k, v, softmax_scale)
        caches, scales = self._written(k.bfloat16(), v.bfloat16())
        both = zip(caches, scales, strict=True)
        keys, values = (dequantize(x, s, LAYOUT, "k", torch.float32) for x, s in both)
        kind = self.format.stored if self.format.stored in ROTATED_KINDS else None
        out = causal_attention(q.bfloat16().float(), keys, values, softmax_scale).bfloat16().float()
        last = gqa_decode(q[:, -1:].bfloat16(), *caches, *scales, layout=LAYOUT, softmax_scale=softmax_scale, kind=kind)
        assert isinstance(last, torch.Tensor)
        require_agreement(self.format.name, last, out[:, -1:], v.abs().max())
        return out

    def _written(self, k: torch.Tensor, v: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Returns both caches, and their scales."""
        slots = torch.arange(k.shape[0] * k.shape[1])
        if self.format.stored is not None:
            stored = [quantize_as(name, torch.zeros(k.shape)) for name in KINDS[self.format.stored]]
            (k_cache, k_scale), (v_cache, v_scale) = stored
            tokens, kind = (k.flatten(0, 1), v.flatten(0, 1)), self.format.stored
            kv_append(*tokens, k_cache, v_cache, k_scale, v_scale, slots, layout=LAYOUT, kind=kind)
            return [k_cache, v_cache], [k_scale, v_scale]
        if self.format.dtype != torch.int8:
            scales: list[torch.Tensor | None] = list(self.scales) or [None, None]
            if self.format.dtype == torch.bfloat16:
                return [k, v], scales
            # saturating, as a serving stack writes an FP8 cache: the package has no append for it
            scaled = [x.float() if s is None else x.float() / s.float() for x, s in zip((k, v), scales, strict=True)]
            return [x.clamp(-fp8_mla.FP8_MAX, fp8_mla.FP8_MAX).to(E4M3) for x in scaled], scales
        assert self.format.kind is not None
        caches = [torch.zeros(x.shape, dtype=torch.int8) for x in (k, v)]
        kept = self.scales or tuple(quantize(torch.zeros(k.shape), self.format.kind, SCALE_DTYPE)[1] for _ in "kv")
        kv_int8_append(k.flatten(0, 1), v.flatten(0, 1), caches[0], caches[1], kept[0], kept[1], slots, layout=LAYOUT)
        return caches, list(kept)


# ---- latents

LATENT_FORMATS: Final = {
    "v3.2": ("float32", "bfloat16", "v3.2"),
    "v4": ("float32", "bfloat16", "v3.2_nope", "v4", "v4.1", "v4.1_fp4"),
}
"""Formats of each model that fit its sizes."""
LATENT_D_QK: Final = {"v3.2": 576, "v4": 512}


class LatentCache:
    """Attention over latents of whole sequences after a format: "float32", "bfloat16" or one of fp8_mla."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """Attends: see `Attend`."""
        if self.name == "float32":
            return causal_attention(q, k, v, softmax_scale)
        batch, tokens, _, d = k.shape
        keys, q16 = k.bfloat16(), q.bfloat16()
        if self.name == "bfloat16":
            return self._attend(q16, keys.float(), softmax_scale)
        page = -(-tokens // 16) * 16  # one page a sequence; rows are aligned
        slots = (torch.arange(batch).view(-1, 1) * page + torch.arange(tokens)).flatten()
        cache = torch.zeros((batch, page, fp8_mla.FORMATS[self.name].token_bytes), dtype=torch.uint8)
        mla_fp8_append(keys.view(-1, d), cache, slots, cache_format=self.name)
        codes = fp8_mla.read_pages(cache, slots, token_format=self.name)
        read = fp8_mla.unpack(codes, torch.float32, token_format=self.name).view(batch, tokens, 1, d)
        out = self._attend(q16, read, softmax_scale)
        sequences: dict[str, Any] = {
            "block_table": torch.arange(batch).int().view(-1, 1),
            "softmax_scale": softmax_scale,
        }
        lengths = torch.full((batch,), tokens, dtype=torch.int32)
        last = mla_fp8_decode(q16[:, -1:], cache, **sequences, cache_seqlens=lengths, cache_format=self.name)
        assert isinstance(last, torch.Tensor)
        require_agreement(self.name, last, out[:, -1:], v.abs().max())
        return out

    @staticmethod
    def _attend(q: torch.Tensor, keys: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        return causal_attention(q.float(), keys, keys[..., : fp8_mla.V_DIM], softmax_scale).bfloat16().float()


# ---- all formats of a model


class Way(NamedTuple):
    """A format of one model's cache: its name, bytes of a token (and KV head), and an `Attend` for each layer."""

    name: str
    num_bytes: float
    layers: Sequence[Attend]


def ways(model_name: str, model: Any, calibration: torch.Tensor) -> list[Way]:
    """Returns all formats of a model's cache.

    Args:
        model_name: a key of `LATENT_FORMATS`; any other has keys and values of heads.
        model: a model of `models.build`, or another Llama with its attention.
        calibration: (windows, tokens) int64, text from which shared scales are computed.
    """
    number = len(model.model.layers)
    if model_name in LATENT_FORMATS:
        d_qk = LATENT_D_QK[model_name]
        num_bytes = {"float32": 4 * d_qk, "bfloat16": 2 * d_qk}
        num_bytes |= {name: made.token_bytes for name, made in fp8_mla.FORMATS.items()}
        return [Way(name, num_bytes[name], [LatentCache(name)] * number) for name in LATENT_FORMATS[model_name]]
    recorders = [Recorder() for _ in range(number)]
    with torch.no_grad():
        logits(model, calibration, recorders)
    h_kv = model.config.num_key_value_heads
    return [
        Way(one.name, one.bytes_per_token(h_kv, HEAD_DIM), [GqaCache(one, each.scales(one)) for each in recorders])
        for one in GQA_FORMATS
    ]
