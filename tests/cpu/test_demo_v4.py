"""DeepSeek-V4 layers of transformers as an independent oracle for two caches in one softmax."""

import dataclasses
from typing import Any

import pytest
import torch

import fp8_mla

pytest.importorskip("transformers.models.deepseek_v4", reason="transformers has deepseek_v4 from some version on")

from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward  # noqa: E402

from scripts import demo, demo_v4  # noqa: E402

SMALL = demo_v4.Size(
    heads=4, hidden=256, q_rank=96, index_heads=4, index_topk=16, out_rank=32, prompt_tokens=300, sequences=2
)
TEXT = b"It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want. "
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=demo_v4.KINDS, ids=lambda kind: f"{kind.ratio} to 1")
def kind(request: pytest.FixtureRequest) -> demo_v4.Kind:
    return request.param


@pytest.fixture(scope="module")
def report(kind: demo_v4.Kind) -> demo_v4.Report:
    return demo_v4.run(kind, SMALL, TEXT, CPU)[0]


def test_queries_and_keys_are_the_layers_own(report: demo_v4.Report) -> None:
    assert report.exact.error < 3e-6  # float32 roundings; seen: 5e-7


def test_what_is_left_is_the_quantization(kind: demo_v4.Kind, report: demo_v4.Report) -> None:
    assert report.failures("V4") == []
    assert 5e-4 < report.bf16.error < 6e-3
    for pair, (error, _) in report.decode.items():
        assert error == pytest.approx(report.reference[pair].error, rel=0.05)
        assert 5e-3 < error < 0.1


@pytest.mark.parametrize("wrong", [0.4, float("nan")])
def test_a_wrong_result_is_named(kind: demo_v4.Kind, report: demo_v4.Report, wrong: float) -> None:
    (first, *others) = report.decode
    broken = dataclasses.replace(report, decode={**report.decode, first: demo.Cell(wrong, 1.0)})
    assert len(broken.failures("V4")) == 1 and first in broken.failures("V4")[0] and others[0] not in first
    broken = dataclasses.replace(report, exact=demo.Cell(wrong, 1.0))
    assert len(broken.failures("V4")) == 1


@pytest.mark.parametrize("pair", demo_v4.PAIRS, ids=lambda pair: " + ".join(one.name for one in pair))
def test_the_reference_is_the_models_attention_over_dequantized_keys(
    kind: demo_v4.Kind, pair: tuple[fp8_mla.TokenFormat, fp8_mla.TokenFormat]
) -> None:
    layer = demo_v4.Layer(kind, SMALL, CPU)
    with torch.no_grad():
        trace: Any = layer(TEXT * 3)
    cache, arguments = demo_v4.caches_of([trace], kind, SMALL, pair)
    out, _ = fp8_mla.reference_decode(trace.query.unsqueeze(0), cache.pages, s_aux=layer.sinks, **arguments)
    keys = torch.cat(
        [
            fp8_mla.unpack(fp8_mla.pack(latents.bfloat16(), token_format=name), torch.float64, token_format=name)
            for latents, name in zip((trace.window, trace.compressed), pair, strict=True)
        ]
    )
    length, n = len(trace.window), SMALL.next_tokens
    age = torch.arange(length - n, length)[:, None] - torch.arange(length)
    seen = torch.cat([(age >= 0) & (age < SMALL.window), trace.picked], dim=1)
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    layer.attention.double()
    expected, _ = eager_attention_forward(
        layer.attention, trace.query.double().transpose(0, 1).unsqueeze(0), keys[None, None], keys[None, None],
        mask[None, None], scaling=512**-0.5,
    )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_the_second_page_of_the_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo_v4, "CPU", SMALL)
    assert demo.second_page(demo.CPU, TEXT, CPU) == []
    printed = capsys.readouterr().out
    assert "v4.1 + v4.1_fp4, mla_fp8_decode" in printed and "Compressed 128 to 1" in printed
