"""vLLM's sparse indexer with `index_topk` in it, by modules that ask for kernels as vLLM 0.26 and 0.33 do."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels import index_topk
from cute_kernels.integrations.vllm import indexer
from tests.kit.index_cases import logits_of

LENGTHS, TOPK = [300, 7, 128, 0, 200, 64], 64


@pytest.fixture(params=[True, False], ids=["SM90", "another GPU"])
def is_sm90(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(indexer, "is_sm90", lambda device: request.param)
    return request.param


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(indexer, "say_once", lines.append)
    return lines


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of vLLM's kernels that were called; they write nothing."""
    called: list[str] = []

    def operator(name: str) -> Callable[..., None]:
        return lambda *arguments: called.append(name)

    fake = types.SimpleNamespace(**{name: operator(name) for name in (*indexer.OPERATORS, "other")})
    monkeypatch.setattr(torch.ops, "_C", fake, raising=False)
    return called


OF_0_26 = """
import torch

def choose(name, logits, seq_lens, topk_indices, workspace, topk):
    assert isinstance(logits, torch.Tensor)
    getattr(torch.ops._C, name)(logits, seq_lens, topk_indices, workspace, topk, logits.shape[1])
"""


def as_0_26() -> types.ModuleType:
    module = types.ModuleType("sparse_attn_indexer")
    exec(OF_0_26, module.__dict__)
    return module


def as_0_33(theirs: list[str]) -> types.ModuleType:
    module = types.ModuleType("sparse_attn_indexer")

    def get_indexer_topk(backend: str) -> Callable[..., None]:
        return lambda logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len: theirs.append(backend)

    module.get_indexer_topk = get_indexer_topk  # type: ignore[attr-defined]
    return module


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits as DeepGEMM's, whose rows are 1024 bytes apart; lengths of two queries each; the result."""
    logits = torch.full((6, 512), torch.nan)[:, :300]
    logits.copy_(logits_of("integers", 6, 300))
    return logits, torch.tensor(LENGTHS, dtype=torch.int32).view(3, 2), torch.full((8, 80), -1, dtype=torch.int32)


@pytest.mark.parametrize("name", indexer.OPERATORS)
def test_operators_of_0_26(name: str, is_sm90: bool, said: list[str], theirs: list[str]) -> None:
    module: Any = as_0_26()
    indexer.change_indexer(module)
    indexer.change_indexer(module)  # a second time changes nothing
    logits, lengths, buffer = rows()
    module.choose(name, logits, lengths, buffer[:6, :TOPK], None, TOPK)
    check(buffer, logits, is_sm90, said, theirs, name)
    module.choose("other", logits, lengths, buffer, None, TOPK)
    assert theirs[-1] == "other"
    assert module.torch.float32 is torch.float32 and module.torch.ops.aten is torch.ops.aten


def test_the_function_of_0_33(is_sm90: bool, said: list[str], theirs: list[str]) -> None:
    module: Any = as_0_33(theirs)
    indexer.change_indexer(module)
    changed = module.get_indexer_topk
    indexer.change_indexer(module)
    assert module.get_indexer_topk is changed
    logits, lengths, buffer = rows()
    module.get_indexer_topk("cooperative")(logits, lengths, 2, buffer[:6, :TOPK], TOPK, 300)
    check(buffer, logits, is_sm90, said, theirs, "cooperative")


def check(
    buffer: torch.Tensor, logits: torch.Tensor, is_sm90: bool, said: list[str], theirs: list[str], name: str
) -> None:
    """Either `index_topk` has written its positions, and nothing else, or vLLM's kernel was called."""
    assert len(said) == 1 and (buffer[6:] == -1).all() and (buffer[:, TOPK:] == -1).all()
    if is_sm90:
        expected = index_topk(logits, torch.tensor(LENGTHS, dtype=torch.int32), TOPK)
        assert torch.equal(buffer[:6, :TOPK], expected) and theirs == []
        assert said[0].startswith("the sparse indexer chooses with index_topk")
    else:
        assert theirs == [name] and (buffer == -1).all()
        assert said[0].startswith("the sparse indexer stays with vLLM's top-k: logits: got a tensor on cpu; needs")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seq_lens": torch.ones(3, dtype=torch.int32)}, "seq_lens: got (3,) for 6 rows"),
        ({"seq_lens": torch.ones(6, dtype=torch.int64)}, "lengths: got dtype torch.int64"),
        ({"topk": 4096}, "topk: got 4096"),
        ({"logits": torch.zeros(6, 300).bfloat16()}, "logits: got dtype torch.bfloat16"),
    ],
)
def test_what_is_not_taken_stays_with_vllm(
    changes: dict[str, Any], reason: str, said: list[str], theirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer, "is_sm90", lambda device: True)
    module: Any = as_0_26()
    indexer.change_indexer(module)
    logits, lengths, buffer = rows()
    call = {"logits": logits, "seq_lens": lengths, "topk": TOPK, **changes}
    out = torch.zeros(6, call["topk"], dtype=torch.int32)
    module.choose("persistent_topk", call["logits"], call["seq_lens"], out, None, call["topk"])
    assert theirs == ["persistent_topk"] and reason in said[0] and not out.any()


def test_a_module_without_kernels_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    module = types.ModuleType("sparse_attn_indexer")
    indexer.change_indexer(module)
    assert "stays as it is" in caplog.text and set(vars(module)) == set(vars(types.ModuleType("m")))
