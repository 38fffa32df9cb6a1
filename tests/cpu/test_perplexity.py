"""Perplexity through the formats of a cache. Attention must equal the operators', and another format must show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench.perplexity import formats  # noqa: E402
from bench.perplexity.formats import GQA_FORMATS, GqaCache, LatentCache, Mismatch, Recorder  # noqa: E402


def heads(d: int = 64, h_kv: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    q = torch.randn((2, 19, 2 * h_kv, d), generator=gen)
    k, v = (torch.randn((2, 19, h_kv, d), generator=gen) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("gqa_format", GQA_FORMATS[1:], ids=lambda one: one.name)
def test_attention_through_a_cache_is_the_op_and_another_format_is_noticed(
    gqa_format: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = heads()
    recorder = Recorder()
    recorder(q, k, v, 0.125)
    attend = GqaCache(gqa_format, recorder.scales(gqa_format))
    assert attend(q, k, v, 0.125).shape == q.shape
    real = formats.gqa_decode
    monkeypatch.setattr(formats, "gqa_decode", lambda *args, **options: 1.02 * real(*args, **options))
    with pytest.raises(Mismatch, match=gqa_format.name):
        attend(q, k, v, 0.125)


@pytest.mark.parametrize(
    ("name", "d"), [("v3.2", 576), ("v3.2_nope", 512), ("v4", 512), ("v4.1", 512), ("v4.1_fp4", 512)]
)
def test_latent_attention_through_a_cache_is_the_op(name: str, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = heads(d, 1)
    attend = LatentCache(name)
    assert attend(q, k, k[..., :512], d**-0.5).shape == (2, 19, 2, 512)
    real = formats.mla_fp8_decode
    monkeypatch.setattr(formats, "mla_fp8_decode", lambda *args, **options: real(*args, **options) * float("nan"))
    with pytest.raises(Mismatch, match=name):
        attend(q, k, k[..., :512], d**-0.5)
