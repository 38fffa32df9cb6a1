"""Keys and values through the formats of a cache, as `Attend` of models.py has it; one object a layer.

`Stored...` attend to whole sequences at once, over keys that the package has quantized and dequantized: quick, and what
a decoding step computes, for no token's codes depend on a later token. `Decoding...` take one token after the other and
call the package's ops: append and decode.

Whatever the format, but float32, queries, keys, values and outputs are bfloat16, as the ops take and return them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

import fp8_mla
from bench.perplexity.models import causal_attention
from cute_kernels import gqa_decode, kv_int8_append, mla_fp8_append, mla_fp8_decode
from cute_kernels.gqa.layouts import ScaleKind
from cute_kernels.gqa.reference import dequantize, quantize

LAYOUT: Final = "BSNH"
SCALE_DTYPE: Final = torch.float16
PAGE_SIZE: Final = 64
CALIBRATED: Final = ("per_tensor", "per_head")
"""Granularities whose scales tokens share: known before the first token, so they come from other text."""


class GqaFormat(NamedTuple):
    """How keys and values are kept. `kind`: what shares a scale; None: no scale."""

    name: str
    dtype: torch.dtype
    kind: ScaleKind | None = None

    @property
    def calibrated(self) -> bool:
        """Whether scales come from other text."""
        return self.kind is not None and self.kind.granularity in CALIBRATED

    def bytes_per_token(self, h_kv: int, d: int) -> float:
        """Of one token's key and value in one KV head; scales that tokens share count nothing."""
        scales = 0
        if self.kind is not None and not self.calibrated:
            zeros = torch.zeros((1, h_kv, d), dtype=torch.float32, device="cpu")
            scales = 2 * quantize(zeros, self.kind, SCALE_DTYPE)[1].numel() * SCALE_DTYPE.itemsize
        return 2 * d * self.dtype.itemsize + scales / h_kv


GQA_FORMATS: Final = (
    GqaFormat("float32", torch.float32),
    GqaFormat("bfloat16", torch.bfloat16),
    GqaFormat("fp8 e4m3, no scale", torch.float8_e4m3fn),
    GqaFormat("fp8 e4m3, per_tensor", torch.float8_e4m3fn, ScaleKind("per_tensor")),
    *(GqaFormat(f"int8, {name}", torch.int8, ScaleKind(name)) for name in (*CALIBRATED, "per_token", "per_token_head")),
    GqaFormat("int8, per_group of 32", torch.int8, ScaleKind("per_group", 32)),
)
"""Heads have 64 elements, so a group of 64 is a head: per_token_head."""


class Scales(NamedTuple):
    """Scales of one layer that tokens share; None where a format has none."""

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None


class Recorder:
    """Attends as a bfloat16 cache and keeps the keys and values, for calibration: (batch, tokens, h_kv, d)."""

    def __init__(self) -> None:
        self.k: torch.Tensor | None = None
        self.v: torch.Tensor | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """An `Attend`."""
        self.k, self.v = k.bfloat16(), v.bfloat16()
        return StoredGqa(GQA_FORMATS[1])(q, k, v, softmax_scale)

    def scales(self, gqa_format: GqaFormat) -> Scales:
        """The scales with which no number that was seen saturates.

        Raises:
            ValueError: nothing was seen.
        """
        if self.k is None or self.v is None:
            raise ValueError("recorder: got no keys; needs a call of the model before")
        if gqa_format.kind is None or not gqa_format.calibrated:
            return Scales()
        if gqa_format.dtype == torch.int8:
            return Scales(*(quantize(x, gqa_format.kind, SCALE_DTYPE)[1] for x in (self.k, self.v)))
        return Scales(*((x.abs().amax().float() / fp8_mla.FP8_MAX).to(SCALE_DTYPE).view(1) for x in (self.k, self.v)))


def fp8_codes(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """e4m3 of x / scale, saturating, as a serving stack writes an FP8 cache: the package has no append of it."""
    scaled = x.float() if scale is None else x.float() / scale.float()
    return scaled.clamp(-fp8_mla.FP8_MAX, fp8_mla.FP8_MAX).to(torch.float8_e4m3fn)


class StoredGqa:
    """Attention over keys and values of whole sequences as a format gives them back."""

    def __init__(self, gqa_format: GqaFormat, scales: Scales | None = None) -> None:
        self.format, self.scales = gqa_format, scales or Scales()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """An `Attend`."""
        if self.format.dtype == torch.float32:
            return causal_attention(q, k, v, softmax_scale)
        k, v = self._read(k, self.scales.k), self._read(v, self.scales.v)
        return causal_attention(q.bfloat16().float(), k, v, softmax_scale).bfloat16().float()

    def _read(self, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """Keys, or values, as they are read from the cache, float32."""
        codes = x.bfloat16()
        if self.format.dtype == torch.float8_e4m3fn:
            codes = fp8_codes(codes, scale)
        elif self.format.dtype == torch.int8:
            assert self.format.kind is not None
            codes, scale = quantize(codes, self.format.kind, SCALE_DTYPE, scale)
        return dequantize(codes, scale, LAYOUT, "k", torch.float32)  # in this layout values are as keys


class DecodingGqa:
    """A cache of one sequence that grows by a token a call: `kv_int8_append`, then `gqa_decode`."""

    def __init__(self, gqa_format: GqaFormat, capacity: int, scales: Scales | None = None) -> None:
        if gqa_format.dtype == torch.float32:
            raise ValueError("gqa_format: got float32; needs a format that gqa_decode has")
        self.format, self.scales, self.capacity = gqa_format, scales or Scales(), capacity
        self.length = 0
        self.caches: list[torch.Tensor] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """An `Attend` of one token, (1, 1, heads, d), to all that came before."""
        if not self.caches:
            self._allocate(k)
        k_cache, v_cache = self.caches
        k, v = k[0].bfloat16(), v[0].bfloat16()
        if self.format.dtype == torch.int8:
            assert self.scales.k is not None and self.scales.v is not None
            slot = torch.tensor([self.length], dtype=torch.int64, device="cpu")
            kv_int8_append(k, v, k_cache, v_cache, self.scales.k, self.scales.v, slot, layout=LAYOUT)
        else:
            for x, cache, scale in ((k, k_cache, self.scales.k), (v, v_cache, self.scales.v)):
                codes = fp8_codes(x, scale) if self.format.dtype == torch.float8_e4m3fn else x
                cache[0, self.length] = codes[0]
        self.length += 1
        lengths = torch.tensor([self.length], dtype=torch.int32, device="cpu")
        out = gqa_decode(
            q.bfloat16(), k_cache, v_cache, self.scales.k, self.scales.v,
            layout=LAYOUT, cache_seqlens=lengths, softmax_scale=softmax_scale,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out.float()

    def _allocate(self, k: torch.Tensor) -> None:
        h_kv, d = k.shape[2:]
        shape = (1, self.capacity, h_kv, d)
        zeros = torch.zeros(shape, dtype=torch.float32, device="cpu")
        self.caches = [zeros.to(self.format.dtype) for _ in "kv"]
        if self.format.kind is not None and not self.format.calibrated:
            self.scales = Scales(*(quantize(zeros, self.format.kind, SCALE_DTYPE)[1] for _ in "kv"))


class StoredLatent:
    """Attention over latents of whole sequences out of a format: "float32", "bfloat16" or one of fp8_mla."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """An `Attend`."""
        if self.name == "float32":
            return causal_attention(q, k, v, softmax_scale)
        k = k.bfloat16()
        if self.name != "bfloat16":
            packed = fp8_mla.pack(k, token_format=self.name)
            k = fp8_mla.unpack(packed, torch.float32, token_format=self.name)
        k = k.float()
        out = causal_attention(q.bfloat16().float(), k, k[..., : fp8_mla.V_DIM], softmax_scale)
        return out.bfloat16().float()


class DecodingLatent:
    """A paged cache of one sequence that grows by a token a call: `mla_fp8_append`, then `mla_fp8_decode`."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        pages = -(-capacity // PAGE_SIZE)
        shape = (pages, PAGE_SIZE, fp8_mla.FORMATS[name].token_bytes)
        self.cache = torch.zeros(shape, dtype=torch.uint8, device="cpu")
        # pages in reverse: a position is not a slot
        self.table = torch.arange(pages, dtype=torch.int32, device="cpu").flip(0).unsqueeze(0)
        self.length = 0

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """An `Attend` of one token, (1, 1, heads, d_qk), to all that came before."""
        page = int(self.table[0, self.length // PAGE_SIZE])
        slot = torch.tensor([page * PAGE_SIZE + self.length % PAGE_SIZE], dtype=torch.int64, device="cpu")
        mla_fp8_append(k[0, :, 0].bfloat16(), self.cache, slot, cache_format=self.name)
        self.length += 1
        lengths = torch.tensor([self.length], dtype=torch.int32, device="cpu")
        out = mla_fp8_decode(
            q.bfloat16(), self.cache, block_table=self.table, cache_seqlens=lengths, softmax_scale=softmax_scale,
            cache_format=self.name,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out.float()


LATENT_FORMATS: Final = {
    "v3.2": ("float32", "bfloat16", "v3.2"),
    "v4": ("float32", "bfloat16", "v3.2_nope", "v4", "v4.1", "v4.1_fp4"),
}
"""Formats of each model, those of its sizes."""


def latent_bytes(name: str, d_qk: int) -> int:
    """Of a token, all heads."""
    plain = {"float32": 4, "bfloat16": 2}
    return plain[name] * d_qk if name in plain else fp8_mla.FORMATS[name].token_bytes
