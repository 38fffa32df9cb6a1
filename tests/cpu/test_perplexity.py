"""Perplexity through the formats of a cache: attention here is what the ops compute, and another format is noticed."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench.perplexity import formats, job, models  # noqa: E402
from bench.perplexity.formats import GQA_FORMATS, GqaCache, LatentCache, Mismatch, Recorder  # noqa: E402
from bench.progress import Progress  # noqa: E402
from bench.report import perplexity  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize("name", models.MODELS)
def test_outlier_channels_change_keys_and_not_the_function(name: str) -> None:
    model, tokens = models.build(name, 0), torch.arange(40).view(1, 40)
    before = models.logits(model, tokens)
    models.add_outliers(model)
    assert torch.allclose(models.logits(model, tokens), before, atol=1e-5)


def test_a_small_job_has_a_row_for_each_format() -> None:
    few = job.Measuring(windows=2, length=20, calibration=1)
    sizes = job.Sizes(models.Training(steps=2, batch=1, context=16, warmup=1), of_trained=few)
    record = job.run(("gqa",), sizes, Progress())
    for entries in record["models"]["gqa"]["variants"].values():
        assert [entry["format"] for entry in entries] == [one.name for one in GQA_FORMATS]
        assert entries[1]["difference_percent"] == entries[1]["divergence"] == 0
    assert len(perplexity.table(record)) == 3 + len(GQA_FORMATS)
    assert job.joined(record, record) == record
    with pytest.raises(ValueError, match="another torch"):
        job.joined({**record, "torch": "0"}, record)
