"""The demo at small size: an attention layer of transformers against `mla_fp8_decode`, end to end."""

import dataclasses

import pytest
import torch

import fp8_mla

pytest.importorskip("transformers.models.deepseek_v32", reason="the demo needs transformers with deepseek_v32")

from scripts import demo  # noqa: E402  (imports transformers)

SMALL = demo.Size(
    heads=4, index_topk=64, prompt_tokens=200, sequences=3, hidden=256, q_rank=96, index_heads=16, page_size=16
)
TEXT = b"It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want. "
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def found() -> demo.Found:
    return demo.run(SMALL, TEXT, CPU)


def trace_of(size: demo.Size, *, sparse: bool) -> tuple[demo.Layer, demo.Trace]:
    layer = demo.Layer(size, CPU)
    with torch.no_grad():
        return layer, layer(TEXT * 2, sparse=sparse)


@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_absorbed_attention_is_the_layers_own(found: demo.Found, mode: str) -> None:
    assert found.reports[mode].exact.error < 3e-6  # float32 roundings of 3 matrix products; seen: 1.1e-6


@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_what_is_left_is_the_quantization(found: demo.Found, mode: str) -> None:
    report = found.reports[mode]
    bf16, reference, decode = report.bf16.error, report.reference["FP8"].error, report.decode["FP8"].error
    assert 1e-3 < bf16 < 6e-3
    assert 1e-2 < reference < 5e-2  # 2.6% rms in the values, and about as much through the scores
    assert decode == pytest.approx(reference, rel=0.05)
    assert report.failures(mode) == []


@pytest.mark.parametrize("sparse", [True, False])
def test_a_wrong_scale_or_a_wrong_rope_would_show(sparse: bool) -> None:
    """The layer's softmax scale is not 192 ** -0.5 (mscale) and its rope is interleaved, so a mistake is large."""
    layer, trace = trace_of(SMALL, sparse=sparse)

    def error(query: torch.Tensor, scale: float) -> float:
        picked = trace.picked if sparse else None
        with torch.no_grad():
            return demo.relative_error(layer.project(demo.attend(query, trace.latents, picked, scale)), trace.out)

    half = fp8_mla.ROPE_DIM // 2
    nope, rope = trace.query.split([fp8_mla.NOPE_DIM, fp8_mla.ROPE_DIM], dim=-1)
    rope_other_order = torch.cat([nope, rope.unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)], dim=-1)
    assert error(trace.query, layer.softmax_scale) < 3e-6
    assert error(trace.query, 192**-0.5) > 1e-2
    assert error(rope_other_order, layer.softmax_scale) > 1e-2


def test_the_indexer_matters() -> None:
    _, sparse = trace_of(SMALL, sparse=True)
    _, dense = trace_of(SMALL, sparse=False)
    assert sparse.picked.shape[1] == SMALL.index_topk < dense.picked.shape[1]
    assert demo.relative_error(sparse.out, dense.out) > 0.1


def test_index_decode_picks_what_the_layer_picks(found: demo.Found) -> None:
    """The choices may differ only near rank k. A misplaced rope or missing weights would change more."""
    assert demo.MIN_SHARE < found.choice.share < 1
    assert found.choice.error < 0.3
    layer, trace = trace_of(SMALL, sparse=True)
    cache = demo.PagedCache.of([trace.latents], SMALL.page_size, SMALL.next_tokens)
    half = trace.index_query.roll(64, -1)
    for wrong in (trace._replace(index_query=half), trace._replace(index_weights=trace.index_weights.abs())):
        assert demo.choose(layer, [wrong], cache, SMALL.index_topk).share < demo.MIN_SHARE


def test_an_indexer_with_too_few_tokens_picks_none_that_lie_ahead() -> None:
    """If topk exceeds the prompt, the layer's indexer also names tokens after it."""
    size = dataclasses.replace(SMALL, index_topk=4 * SMALL.prompt_tokens)
    reports, _, choice = demo.run(size, TEXT, CPU)
    sparse, dense = reports["sparse"], reports["dense"]
    assert sparse.exact.error < 3e-6 and sparse.failures("sparse") == []
    assert sparse.decode["FP8"].error == pytest.approx(dense.decode["FP8"].error, rel=1e-3)
    assert choice.share == 1 and choice.error == pytest.approx(dense.decode["FP8"].error, rel=1e-3)


@pytest.mark.parametrize("wrong", [0.2, float("nan")])
def test_the_demo_fails_on_a_wrong_result(found: demo.Found, wrong: float) -> None:
    report, cell = found.reports["sparse"], demo.Cell(wrong, 1.0)
    assert len(dataclasses.replace(report, exact=cell).failures("sparse")) == 1
    (failure,) = dataclasses.replace(report, decode={"FP8": cell}).failures("sparse")
    assert failure.startswith("sparse, FP8")


def test_the_command(found: demo.Found, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "run", lambda size, text, device: found)
    wrong: list[str] = []
    monkeypatch.setattr(demo, "second_page", lambda size, text, device: wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert demo.main([]) == 0
    printed = capsys.readouterr().out
    assert "torch finds no CUDA GPU" in printed and "torch reference" in printed
    assert "43% saved" in printed and "mla_fp8_decode" in printed
    assert f"{found[0]['sparse'].decode['FP8'].error:.1e}" in printed

    monkeypatch.setattr(demo.Report, "failures", lambda self, name: ["dense: off"])
    assert demo.main([]) == 1
    assert "WRONG" in capsys.readouterr().out

    monkeypatch.setattr(demo.Report, "failures", lambda self, name: [])
    wrong.append("V4: off")
    assert demo.main([]) == 1
    assert "WRONG:  V4: off" in capsys.readouterr().out
