"""`attn_implementation="cute"` on packed and padded batches gives each sequence what eager attention gives it alone.

The oracle is float32 with each sequence by itself; the measure is the error of eager attention in bfloat16.
"""

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")

from transformers import masking_utils

from cute_kernels.integrations import transformers as cute
from cute_kernels.integrations.transformers_packed import packed_borders
from tests.kit import packed_training, processes, tiny_models, training_ranks
from tests.kit.packed_training import LENGTHS, Batch, Gradients
from tests.kit.threads import one_thread as one_thread
from tests.kit.transformers_calls import counted
from tests.kit.transformers_calls import said as said

pytestmark = pytest.mark.xdist_group("transformers")


@pytest.fixture
def no_mask(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Iterator[None]:
    """Requires that no (tokens, tokens) mask is made and that plain torch does not run."""

    def refuse(**given: Any) -> None:
        raise AssertionError("a mask of (tokens, tokens)")

    monkeypatch.setattr(cute, "eager_mask", refuse)
    yield
    assert said == []


@pytest.mark.parametrize("name", ["gpt_oss", "llama"])
@pytest.mark.parametrize("kind", packed_training.KINDS)
def test_loss_and_gradients_are_those_of_each_sequence_alone(kind: str, name: str, no_mask: None) -> None:
    """The loss and the gradients of all parameters, sinks included, are compared."""
    batch = packed_training.batch(kind)
    packed_training.require_close(name, lambda model: packed_training.gradients(model, batch))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, no_mask: None) -> None:
    batch = packed_training.batch("positions")

    def run(model: Any) -> Gradients:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return packed_training.gradients(model, batch)

    packed_training.require_close("gpt_oss", run)


def test_frozen_parameters(no_mask: None) -> None:
    """LoRA needs no gradients of keys or sinks; the other gradients must stay."""
    batch = packed_training.batch("right")

    def run(model: Any, *, frozen: bool) -> Gradients:
        model.set_attn_implementation("cute")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or "q_proj" in name or "v_proj" in name)
        return packed_training.gradients(model, batch)

    everything = run(packed_training.model("gpt_oss"), frozen=False)
    some = run(packed_training.model("gpt_oss"), frozen=True)
    assert some.loss == everything.loss and 0 < len(some.of) < len(everything.of)
    for name, gradient in some.of.items():
        assert torch.equal(gradient, everything.of[name])


def test_autocast_over_float32_parameters(no_mask: None) -> None:
    """Trainer(bf16=True) passes q and k as float32, v as bfloat16."""
    batch = packed_training.batch("positions")

    def run(model: Any) -> Gradients:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return packed_training.gradients(model.float(), batch)

    packed_training.require_close("gpt_oss", run)


@pytest.mark.parametrize("name", ["gpt_oss", "llama"])
def test_compiled_models_with_cu_seq_lens(name: str, said: list[str]) -> None:
    torch._dynamo.reset()
    batch = packed_training.batch("kwargs")
    model = packed_training.model(name)
    model.set_attn_implementation("cute")
    eager = packed_training.gradients(model, batch)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=name == "llama")
    found = packed_training.gradients(model, batch, forward=compiled)
    assert said == []
    assert found.loss == pytest.approx(eager.loss, rel=1e-3)
    for key, gradient in found.of.items():
        torch.testing.assert_close(gradient, eager.of[key], rtol=2e-2, atol=2e-2 * eager.of[key].abs().max().item())


def test_compiled_models_refuse_packed_positions_alone(said: list[str]) -> None:
    """A graph cannot have another number of sequences, and gpt-oss has no mask for them: silence would be wrong."""
    torch._dynamo.reset()
    model = packed_training.model("gpt_oss")
    model.set_attn_implementation("cute")
    compiled = torch.compile(model, backend="eager")
    one = {"input_ids": tiny_models.sequences(1, 1, 24), "use_cache": False}
    torch.testing.assert_close(compiled(**one).logits, model(**one).logits, rtol=2e-2, atol=2e-2)
    with pytest.raises(RuntimeError, match=r"position_ids: got packed sequences.*needs cu_seq_lens_q"):
        packed_training.gradients(model, packed_training.batch("positions"), forward=compiled)


def test_the_page_on_training_runs_as_pasted(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    page = Path(__file__).parents[2] / "docs" / "users" / "training.md"
    names: dict[str, Any] = {}
    exec(compile(page.read_text(encoding="utf-8").split("```")[1], str(page), "exec"), names)
    losses = names["losses"]
    assert sum(losses[-3:]) / 3 < 0.8 * losses[0] and said == []


def test_fsdp2_over_two_ranks(tmp_path: Path) -> None:
    """The model is a tiny gpt-oss. Each rank has its own batch, and gradients are reduced in bfloat16."""
    found = processes.run(training_ranks.fully_sharded, tmp_path, 2)
    for rank in range(2):
        assert len(found[rank]["off"]) > 20 and max(found[rank]["off"].values()) < 2**-7, found[rank]


def test_once_a_forward_and_not_once_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed_training.model("gpt_oss", num_hidden_layers=6)
    model.set_attn_implementation("cute")
    found: list[Any] = []
    original = cute.sink_attention

    def attend(*tensors: Any, **options: Any) -> Any:
        found.append(options["cu_seqlens_q"])
        return original(*tensors, **options)

    monkeypatch.setattr(cute, "sink_attention", attend)
    count = counted(monkeypatch, (cute, "packed_borders"))
    for kind, masks in (("positions", 0), ("left", 2)):  # two kinds of layers, with and without a window
        packed_training.gradients(model, packed_training.batch(kind))
        assert len(found) == 6 and len({id(t) for t in found}) == max(1, masks)
        assert count.get("packed_borders", 0) == masks
        found.clear()


def test_what_no_kernel_takes_runs_sequence_by_sequence(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, plain torch computes each sequence, still without a mask of all tokens."""
    monkeypatch.setattr(cute, "eager_mask", None)
    for kind in packed_training.KINDS:
        batch = packed_training.batch(kind)
        alone = packed_training.alone(packed_training.model("gpt_oss").float(), "eager")
        model = packed_training.model("gpt_oss").float()
        model.set_attn_implementation("cute")
        found = packed_training.gradients(model, batch)
        assert found.loss == pytest.approx(alone.loss, rel=1e-5)
        for name, gradient in found.of.items():
            torch.testing.assert_close(
                gradient, alone.of[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert {reason.partition(":")[0] for reason in said} == {"queries of torch.float32"}


# ---- what is found to be packed


ROWS, TOKENS = 2, 12


def borders(mask: Callable[..., Any], padding: Any = None, window: int | None = None) -> list[int] | None:
    padding = None if padding is None else torch.tensor(padding, dtype=torch.bool)
    found = packed_borders(mask, padding, ROWS, TOKENS, window, torch.device("cpu"))
    return None if found is None else found.tolist()


def packed(positions: list[list[int]], window: int | None = None) -> Callable[..., Any]:
    """The mask function that transformers makes of positions."""
    ids = torch.tensor(positions)
    plain = masking_utils.causal_mask_function
    inner = plain if window is None else masking_utils.sliding_window_causal_mask_function(window)
    number = masking_utils.find_packed_sequence_indices(ids)
    remapped = masking_utils.remap_positions_for_packed_sequence(inner, ids)
    return masking_utils.and_masks(remapped, masking_utils.packed_sequence_mask_function(number))


CAUSAL = masking_utils.causal_mask_function
POSITIONS = [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
LEFT = [[0, 0, 0, *[1] * 9], [1] * 12]
RIGHT = [[1] * 12, [*[1] * 7, *[0] * 5]]


@pytest.mark.parametrize(
    "mask, padding, window, expected",
    [
        (packed(POSITIONS), None, None, [0, 4, 9, 10, 11, 12, 24]),
        (packed(POSITIONS, 3), None, 3, [0, 4, 9, 10, 11, 12, 24]),
        (CAUSAL, LEFT, None, [0, 3, 12, 24]),
        (CAUSAL, RIGHT, None, [0, 12, 19, 24]),
        (masking_utils.sliding_window_causal_mask_function(4), LEFT, 4, [0, 3, 12, 24]),
        (CAUSAL, None, None, [0, 12, 24]),
        (masking_utils.sliding_window_causal_mask_function(1), None, 1, list(range(25))),
        (masking_utils.chunked_causal_mask_function(5, torch.zeros(2, dtype=torch.int64)), None, 5,
         [0, 5, 10, 12, 17, 22, 24]),
        (CAUSAL, [[0] * 12, [1] * 12], None, [0, 12, 24]),
    ],
    ids=["positions", "positions and a window", "left", "right", "left and a window", "causal", "window of 1", "chunks",
         "a row of padding"],
)  # fmt: skip
def test_sequences_are_found(mask: Any, padding: Any, window: int | None, expected: list[int]) -> None:
    assert borders(mask, padding, window) == expected


def hides(query_: int, key_: int) -> Callable[..., Any]:
    """A causal mask with one more hidden key."""
    return lambda b, h, q, k: (k <= q) & ~((q == query_) & (k == key_))


@pytest.mark.parametrize(
    "mask, padding, window",
    [
        (masking_utils.bidirectional_mask_function, None, None),
        (masking_utils.sliding_window_causal_mask_function(4), None, None),
        (CAUSAL, None, 4),
        (CAUSAL, [[1, 1, 0, *[1] * 9], [1] * 12], None),
        (masking_utils.or_masks(CAUSAL, masking_utils.blockwise_overlay(torch.tensor([[-1, 0, 0, *[-1] * 9]] * 2))),
         None, None),
        (hides(7, 0), None, None),
        (hides(7, 7), None, None),
    ],
    ids=["both ways", "an unknown window", "no window", "padding inside", "a block", "no first key", "not itself"],
)  # fmt: skip
def test_other_masks_are_not_taken_for_sequences(mask: Any, padding: Any, window: int | None) -> None:
    assert borders(mask, padding, window) is None


def test_no_tokens() -> None:
    assert packed_borders(CAUSAL, None, 0, 12, None, torch.device("cpu")) is None


# ---- arguments


def request(tokens: int = 12) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, heads, tokens, 64, generator=gen).bfloat16() for heads in (4, 2, 2))


def attend(*tensors: torch.Tensor, mask: Any = None, **options: Any) -> torch.Tensor:
    return cute.cute_attention(torch.nn.Module(), *tensors, mask, **options)[0]


def test_cu_seq_lens_rule_over_the_mask() -> None:
    tensors, cu = request(), torch.tensor([0, 5, 9], dtype=torch.int32)
    expected = attend(*tensors, mask=torch.tensor([0, 5, 9, 12], dtype=torch.int32))
    for mask in (None, torch.zeros(1, 1, 12, 12), torch.tensor([0, 12], dtype=torch.int32)):
        for keys in ({}, {"cu_seq_lens_k": cu}):
            out = attend(*tensors, mask=mask, cu_seq_lens_q=cu, **keys)
            assert torch.equal(out[:, :9], expected[:, :9]) and (out[:, 9:] == 0).all()


@pytest.mark.parametrize(
    "cu, words",
    [
        ([0, 5, 4, 12], "cu_seqlens_q: got 4 after 5 at index 2; needs 0 first, no decrease"),
        ([0, 13], "cu_seqlens_q: got 13 last"),
        ([1, 12], "cu_seqlens_q: got 1 first"),
    ],
)
def test_wrong_borders_are_refused_in_words(cu: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        attend(*request(), cu_seq_lens_q=torch.tensor(cu, dtype=torch.int32))


def test_a_window_that_is_not_passed_on_is_refused() -> None:
    config = types.SimpleNamespace(layer_types=["sliding_attention"])
    module = types.SimpleNamespace(layer_idx=0, config=config)
    with pytest.raises(ValueError, match="sliding_window: got None from layer 0"):
        cute.cute_attention(module, *request(), torch.tensor([0, 12], dtype=torch.int32))


def test_a_padded_prompt_over_an_int8_cache(no_mask: None) -> None:
    """The prompt is short, and its keys are already codes in the cache."""
    model = tiny_models.untrained("gpt_oss").bfloat16().eval()
    model.set_attn_implementation("cute")
    ids = tiny_models.sequences(2, 2, 6)
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    positions = (padding.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        found, exact = (
            model(ids, attention_mask=padding, position_ids=positions, past_key_values=cache).logits.float()
            for cache in (cute.CuteInt8Cache(model.config), None)
        )
    assert (found - exact)[padding.bool()].norm() < 0.05 * exact[padding.bool()].norm()


def test_lengths() -> None:
    """The cases have a sequence of one token and one longer than the window."""
    assert min(LENGTHS) == 1 and max(LENGTHS) > tiny_models.WINDOW and isinstance(packed_training.batch("left"), Batch)
