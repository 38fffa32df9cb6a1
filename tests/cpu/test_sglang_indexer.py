"""SGLang's sparse indexer with `index_decode`, and its choice of slots with `index_topk`, on stand-ins.

One test compares with the method of an installed SGLang, whose kernels plain torch replaces.
"""

import ast
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels import index_topk
from cute_kernels.integrations import on_import, sglang_indexer
from cute_kernels.integrations import sglang as plugin
from fp8_mla import reference_index_logits
from tests.cpu.test_sglang import ATTENTION, installed_package
from tests.kit.index_cases import logits_of, table_of
from tests.kit.sglang_index_call import TOPK, Call

COUNTS = {"decoding": [1, 1, 1], "verification": [3, 3, 3], "drafts of other lengths": [2, 3, 1], "many": [9, 9, 9]}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(sglang_indexer, "say_once", lines.append)
    return lines


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_slots_of_each_query(counts: list[int], heads: int, said: list[str]) -> None:
    call = Call(counts, heads, padding=2)
    found = call.run()
    assert found.dtype is torch.int32 and torch.equal(found, call.expected())
    assert said == ["the sparse indexer scores and chooses with index_decode: exact, in order of positions"]
    call.indexer.num_init_tokens, call.indexer.num_local_tokens = 3, 20
    assert torch.equal(call.run(), call.expected()) and not torch.equal(call.run(), found)


def test_a_request_reads_its_keys_once(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If all requests have the same number of queries, up to eight, each request is one row of `index_decode`."""
    asked: list[Any] = []
    original = sglang_indexer.index_decode

    def decode(q: torch.Tensor, *args: Any, **options: Any) -> Any:
        asked.append(tuple(q.shape[:2]))
        return original(q, *args, **options)

    monkeypatch.setattr(sglang_indexer, "index_decode", decode)
    for counts in COUNTS.values():
        Call(counts).run()
    assert asked == [(3, 1), (3, 3), (6, 1), (27, 1)]


@pytest.mark.parametrize("forced", [False, True], ids=["by an environment variable", "by the backend"])
def test_positions_where_the_attention_looks_up_slots(forced: bool, said: list[str]) -> None:
    call = Call([2, 2, 2], padding=1, fuses=forced)
    call.metadata.force_unfused_topk = forced
    assert torch.equal(call.run(), call.expected(positions=True))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (
            "call.metadata.topk_backend = type(call.metadata.topk_backend).TORCH",
            "--dsa-topk-backend torch asks for another kernel",
        ),
        (
            "call.metadata.topk_transform_method = type(call.metadata.topk_transform_method).RAGGED",
            "RAGGED: needs PAGED",
        ),
        ("call.metadata.attn_metadata.page_size = 1", "64 a page, and 1 latents"),
        ("call.keys = call.keys[:, :-4]", "keys in (12, 8444)"),
        ("call.table = call.table[:-1]", "3 queries, 3 of them real, with 2 tables and 3 lengths"),
        ("call.lengths = torch.zeros(4, dtype=torch.int32)", "with 3 tables and 4 lengths"),
        ("call.metadata.get_dsa_extend_len_cpu = lambda: []", "0 of them real"),
        ("call.metadata.get_dsa_extend_len_cpu = lambda: [1, 1, 2]", "4 of them real"),
        ("call.q, call.weights = call.q[:, :8], call.weights[:, :8]", "q: got 8 heads"),
        ("call.weights = call.weights[:, :8]", "weights of (3, 8, 1) and queries of (3, 16, 128)"),
        ("call.q = call.q[..., :64]", "queries of (3, 16, 64)"),
        ("call.weights = call.weights.bfloat16()", "weights: got"),
        ("call.lengths = call.lengths.long()", "cache_seqlens: got"),
        ("call.indexer.index_topk = 4096", "topk: got 4096"),
        ("call.indexer.num_local_tokens = 65", "first, last: got 65"),
        ("call.q = call.q.to('meta')", "device meta: kernels need an SM90 GPU"),
        ("del call.metadata.get_seqlens_expanded", "get_seqlens_expanded"),
        ("del call.metadata.topk_backend", "topk_backend"),
        ("del call.indexer._get_index_k_read_buffer", "_get_index_k_read_buffer"),
        ("del call.pool.index_page_size", "index_page_size"),
        ("del call.module.envs", "envs"),
    ],
)
def test_what_is_not_taken_stays_with_sglang(change: str, word: str, said: list[str]) -> None:
    call = Call([1, 1, 1])
    exec(change, {"call": call, "torch": torch})
    assert call.run() == call.arguments()
    assert len(said) == 1 and said[0].startswith("DeepGEMM scores the keys of the sparse indexer: ") and word in said[0]


def test_a_call_that_moved_stays_with_sglang(said: list[str]) -> None:
    call = Call([1, 1, 1])
    call.run()
    said.clear()
    assert call.module.Indexer()._get_topk_paged(extra=1, **call.arguments())["extra"] == 1
    assert len(said) == 1 and "extra" in said[0]
    said.clear()
    sglang_indexer.change_indexer(types.ModuleType("dsa_indexer"))
    assert said == [f"{sglang_indexer.SCORES_STAY}: this SGLang has no Indexer._get_topk_paged"]


# ---- logits of others


def changed(original: Callable[..., Any]) -> Any:
    module: Any = types.ModuleType("topk")
    module.topk_transform_paged_v2 = original
    for _ in range(2):
        sglang_indexer.change_topk(module)
    assert module.topk_transform_paged_v2.__wrapped__ is original
    return module.topk_transform_paged_v2


def rows() -> list[Any]:
    """Positional arguments as SGLang passes them; rows of logits are 1,024 bytes apart."""
    logits = torch.full((6, 512), torch.nan)[:, :300]
    logits.copy_(logits_of("integers", 6, 300))
    lengths = torch.tensor([300, 7, 128, 0, 200, 64], dtype=torch.int32)
    return [logits, lengths, table_of(6, 300, 64), torch.full((6, TOPK), -7, dtype=torch.int32), 64, None]


def test_slots_from_logits_of_others(said: list[str]) -> None:
    call = rows()
    assert changed(lambda *args: pytest.fail("SGLang's kernel was called"))(*call) is None
    assert torch.equal(call[3], index_topk(*call[:2], TOPK, block_table=call[2], page_size=64))
    assert said == ["the sparse indexer chooses with index_topk: exact, in order of positions"]


@pytest.mark.parametrize(
    ("place", "value", "word"),
    [
        (2, None, "positions are wanted"),
        (6, torch.zeros(6, TOPK, dtype=torch.int32), "positions are wanted"),
        (0, torch.zeros(6, 300).bfloat16(), "logits: got dtype torch.bfloat16"),
        (0, torch.zeros(6, 300, device="meta"), "device meta"),
        (7, None, "positional arguments"),
    ],
)
def test_rows_that_stay_with_sglang(place: int, value: Any, word: str, said: list[str]) -> None:
    call = [*rows(), None, None][: max(6, place + 1)]
    call[place] = value
    found = changed(lambda *args: args)(*call)
    assert len(found) == len(call) and all(a is b for a, b in zip(found, call, strict=True))
    assert (call[3] == -7).all()
    assert len(said) == 1 and said[0].startswith("slots of the indexer stay with SGLang: ") and word in said[0]


def test_a_kernel_that_moved_is_named(said: list[str]) -> None:
    sglang_indexer.change_topk(types.ModuleType("topk"))
    assert said == ["slots of the indexer stay with SGLang: this SGLang has no topk_transform_paged_v2"]


def test_the_indexer_is_changed_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(plugin, "change_on_import", asked.append)
    monkeypatch.setattr(plugin, "_add_backend", lambda: None)
    plugin.register()
    plugin.register(untested=True)
    assert asked == [plugin.CHANGES, plugin.CHANGES, sglang_indexer.CHANGES]
    assert on_import.change_on_import is not plugin.change_on_import


# ---- an installed SGLang


@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 3, 3]], ids=["decoding", "verification"])
def test_an_installed_sglangs_own_method_chooses_the_same(counts: list[int], said: list[str]) -> None:
    """`_get_topk_paged` is taken from the source; the reference's logits and choice replace its kernels."""
    text = (installed_package() / f"{ATTENTION}/dsa/dsa_indexer.py").read_text(encoding="utf-8")
    (cls,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Indexer"]
    (method,) = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "_get_topk_paged"]
    call = Call(counts, padding=2)
    modes = types.SimpleNamespace(is_target_verify=lambda: counts[0] > 1, is_draft_extend_v2=lambda: False)

    def logits(
        fn: Any, q: Any, keys: Any, weights: Any, lengths: Any, table: Any, plan: Any, width: int, *, q_offset: int,
        B: int = 0, next_n: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        assert plan == "a plan"
        return reference_index_logits(
            q[:q_offset].unsqueeze(1), weights[:q_offset].unsqueeze(1), keys, block_table=table,
            cache_seqlens=lengths.reshape(-1)
        ).flatten(0, 1)  # fmt: skip

    off = types.SimpleNamespace(is_cutedsl=lambda: False, is_aiter=lambda: False)
    names: dict[str, Any] = {
        "torch": torch, "TYPE_CHECKING": False, "_is_hip": False, "_is_xpu": False, "_is_cuda": True,
        "get_token_to_kv_pool": lambda: call.pool, "deepgemm_paged_mqa_logits_split": logits,
        "deepgemm_paged_mqa_logits_native": logits,
    }  # fmt: skip
    exec("from __future__ import annotations\n" + ast.unparse(method), names)
    call.indexer.paged_mqa_logits_backend, call.indexer.sm_count, call.indexer.n_heads = off, 132, 16
    call.indexer._mask_init_and_local_tokens = lambda logits, lengths: logits
    call.metadata.topk_transform = lambda logits, topk: index_topk(
        logits, call.lengths, topk, block_table=call.table, page_size=64
    )
    own = names["_get_topk_paged"](
        call.indexer, **{**call.arguments(), "forward_batch": types.SimpleNamespace(forward_mode=modes)}
    )
    assert torch.equal(call.run(names["_get_topk_paged"]), own) and said[-1].startswith("the sparse indexer scores")
