"""vLLM's sparse indexer with `index_decode` or `index_topk`, in modules that call as vLLM 0.26 and 0.33 do."""

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels import index_decode, index_topk
from cute_kernels.integrations.vllm import indexer
from fp8_mla import reference_index_logits
from tests.kit.index_cases import index_call, logits_of

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

    @functools.cache  # vLLM's function is cached, too, and therefore has a `__wrapped__`
    def get_indexer_topk(backend: str) -> Callable[..., None]:
        return lambda logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len: theirs.append(backend)

    module.get_indexer_topk = get_indexer_topk  # type: ignore[attr-defined]
    return module


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with rows 1024 bytes apart, as DeepGEMM's; lengths of two queries each; the result."""
    logits = torch.full((6, 512), torch.nan)[:, :300]
    logits.copy_(logits_of("integers", 6, 300))
    return logits, torch.tensor(LENGTHS, dtype=torch.int32).view(3, 2), torch.full((8, 80), -1, dtype=torch.int32)


@pytest.mark.parametrize("name", indexer.OPERATORS)
def test_operators_of_0_26(name: str, is_sm90: bool, said: list[str], theirs: list[str]) -> None:
    module: Any = as_0_26()
    indexer.change_indexer(module)
    indexer.change_indexer(module)  # a second change does nothing
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
    """Requires that either `index_topk` wrote its positions and nothing else, or vLLM's kernel was called."""
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


def as_scoring(theirs: list[str], module: types.ModuleType, ranks: int = 1) -> Any:
    """A module that also makes logits, as both versions do."""

    def logits(
        q: Any, kv_cache: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, meta: Any,
        max_model_len: int, clean_logits: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        theirs.append("logits")
        return reference_index_logits(
            q[0], weights.view(q[0].shape[:3]), kv_cache, block_table=table, cache_seqlens=lengths
        ).flatten(0, 1)[:, :max_model_len]

    changed: Any = module
    changed.fp8_fp4_paged_mqa_logits, changed.get_dcp_group = logits, lambda: types.SimpleNamespace(world_size=ranks)
    indexer.change_indexer(changed)
    indexer.change_indexer(changed)
    return changed


def ask(module: Any, call: dict[str, torch.Tensor], out: torch.Tensor, q_scale: torch.Tensor | None = None) -> None:
    """Makes logits, then chooses from them, as vLLM's indexer does."""
    lengths, width = call["cache_seqlens"], call["block_table"].shape[1] * 64
    logits = module.fp8_fp4_paged_mqa_logits(
        (call["q"], q_scale), call["k_cache"].unsqueeze(2), call["weights"].flatten(0, 1), lengths,
        call["block_table"], None, max_model_len=width, clean_logits=False,
    )  # fmt: skip
    assert logits.shape == (lengths.numel(), width) and logits.stride(0) % 4 == 0 and logits.dtype is torch.float32
    if hasattr(module, "choose"):
        module.choose("persistent_topk", logits, lengths, out, None, out.shape[1])
    else:
        module.get_indexer_topk("auto")(logits, lengths, lengths.shape[1], out, out.shape[1], width)


def scoring_call() -> dict[str, torch.Tensor]:
    call = index_call([300, 64, 130], s_q=2)
    call["cache_seqlens"] = torch.tensor([[299, 300], [0, 64], [129, 130]], dtype=torch.int32)
    return call


@pytest.mark.parametrize("version", ["0.26", "0.33"])
def test_logits_and_choice_in_one(version: str, is_sm90: bool, said: list[str], theirs: list[str]) -> None:
    module = as_scoring(theirs, as_0_26() if version == "0.26" else as_0_33(theirs))
    call, out = scoring_call(), torch.full((6, TOPK), -7, dtype=torch.int32)
    ask(module, call, out)
    if is_sm90:
        assert torch.equal(out.view(3, 2, TOPK), index_decode(**call, topk=TOPK, return_positions=True))
        assert theirs == [] and said == [
            "the sparse indexer scores and chooses with index_decode: exact, in order of positions"
        ]
    else:
        assert len(theirs) == 2 and theirs[0] == "logits" and (out == -7).all()
        assert said[0] == "DeepGEMM scores the keys of the sparse indexer: q: got a tensor on cpu; needs an SM90 GPU"


@pytest.mark.parametrize("kept", ["scales", "ranks", "weights"])
def test_logits_that_stay_with_vllm(
    kept: str, said: list[str], theirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer, "is_sm90", lambda device: True)
    module = as_scoring(theirs, as_0_26(), ranks=2 if kept == "ranks" else 1)
    call, out = scoring_call(), torch.full((6, TOPK), -7, dtype=torch.int32)
    if kept == "weights":  # rows of a wider tensor
        wide = torch.zeros(3, 2, 80)
        wide[..., :64] = call["weights"]
        call["weights"] = wide[..., :64]
    ask(module, call, out, torch.ones(1) if kept == "scales" else None)
    assert theirs == ["logits"] and "DeepGEMM scores" in said[0] and "chooses with index_topk" in said[1]
    assert torch.equal(out.view(3, 2, TOPK), index_decode(**call, topk=TOPK, return_positions=True))


def test_unmade_logits_are_made_once_for_whoever_reads_them(
    said: list[str], theirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader may be an operator of torch; `index_decode` refuses to write a result that is not contiguous."""
    monkeypatch.setattr(indexer, "is_sm90", lambda device: True)
    module = as_scoring(theirs, as_0_26())
    call, buffer = scoring_call(), torch.full((6, TOPK + 8), -7, dtype=torch.int32)
    ask(module, call, buffer[:, :TOPK])
    expected = index_decode(**call, topk=TOPK, return_positions=True)
    assert theirs == ["logits"] and torch.equal(buffer[:, :TOPK].view(3, 2, TOPK), expected)
    assert "DeepGEMM scores" in said[0] and "out: got strides" in said[0] and (buffer[:, TOPK:] == -7).all()
    made = iter([torch.ones(6, 320)])
    unmade = indexer.Unscored.of(index_decode, lambda: next(made), call["q"], 320)
    assert (unmade + 1).sum() == 2 * 6 * 320 and (unmade == 1).all()
