"""Packed and padded batches in transformers on a GPU have the loss and gradients of each sequence alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")

from cute_kernels.integrations import transformers as cute
from tests.kit import packed_training, processes, training_ranks


@pytest.fixture(autouse=True)
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requires that plain torch does not run and that no (tokens, tokens) mask is made."""

    def refuse(*given: Any, **named: Any) -> None:
        raise AssertionError(f"plain torch or a mask: {given}")

    monkeypatch.setattr(cute, "_say_once", refuse)
    monkeypatch.setattr(cute, "eager_mask", refuse)


@pytest.mark.parametrize("name", ["gpt_oss", "llama"])
@pytest.mark.parametrize("kind", packed_training.KINDS)
def test_loss_and_gradients_are_those_of_each_sequence_alone(kind: str, name: str) -> None:
    batch = packed_training.batch(kind, "cuda")
    packed_training.require_close(name, lambda model: packed_training.gradients(model, batch), "cuda")


def test_autocast_and_checkpointing() -> None:
    batch = packed_training.batch("positions", "cuda")

    def run(model: Any) -> packed_training.Gradients:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return packed_training.gradients(model.float(), batch)

    packed_training.require_close("gpt_oss", run, "cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host")
def test_fsdp2_over_two_gpus(tmp_path: Path) -> None:
    found = processes.run(training_ranks.fully_sharded, tmp_path, 2, backend="nccl", timeout=300)
    for rank in range(2):
        assert len(found[rank]["off"]) > 20 and max(found[rank]["off"].values()) < 2**-6, found[rank]
