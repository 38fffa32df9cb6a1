"""SGLang's plugin on a GPU with stand-ins for its objects: eager as on a CPU, and in CUDA graphs."""

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_kernels import mla_fp8_decode
from cute_kernels.integrations import sglang as plugin
from tests.kit.graphs import capture
from tests.kit.sglang_index_call import Call
from tests.kit.sglang_stand_ins import Case, installed, sparse_backend, sparse_call

DEVICE = "cuda"


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    with installed(monkeypatch) as modules:
        yield modules


@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("tokens", [1, 5, 200])
def test_sparse_mla_in_a_graph_follows_its_page_table(tokens: int, heads: int) -> None:
    call, backend = sparse_call(tokens, heads, DEVICE), sparse_backend()
    graph, out = capture(lambda: plugin.sparse_mla(None, backend, **call))
    call["page_table_1"].copy_(call["page_table_1"].flip(0).roll(1, 1))
    graph.replay()
    cache = call["kv_cache"].view(torch.uint8).view(2, 64, 656)
    q, indices = call["q_all"].view(tokens, 1, heads, 576), call["page_table_1"].unsqueeze(1)
    expected: Any = mla_fp8_decode(q, cache, indices=indices, softmax_scale=0.1)
    assert torch.equal(out, expected)
    on_cpu: Any = mla_fp8_decode(q.cpu(), cache.cpu(), indices=indices.cpu(), softmax_scale=0.1)
    assert (out.cpu().float() - on_cpu.float()).norm() <= 4e-3 * on_cpu.float().norm()


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("d", [64, 128])
def test_a_decode_in_a_graph_follows_lengths_and_pages(d: int, fp8: bool, sglang: types.SimpleNamespace) -> None:
    case = Case(sglang, d, fp8, DEVICE)
    sinks = torch.arange(8, dtype=torch.float32, device=DEVICE).bfloat16() / 4
    case.layer.sliding_window_size = 39
    graph, out = capture(lambda: case.decode(sinks=sinks, save_kv_cache=False))
    case.lengths.copy_(torch.tensor([48, 17], dtype=torch.int32))
    case.table.copy_(case.table.flip(0))
    graph.replay()
    torch.testing.assert_close(out.double(), case.expected(window=40, sinks=sinks), rtol=2**-7, atol=2**-7)


def test_new_tokens_are_stored_in_a_graph(sglang: types.SimpleNamespace) -> None:
    case = Case(sglang, device=DEVICE)
    graph, out = capture(case.decode)
    case.k.copy_(case.k.flip(0))
    case.v.neg_()
    graph.replay()
    torch.testing.assert_close(out.double(), case.expected(), rtol=2**-7, atol=2**-7)
    assert torch.equal(case.pool.k[case.batch.out_cache_loc], case.k)


@pytest.mark.parametrize("counts", [[1, 1, 1], [4, 4, 4], [2, 3, 1]], ids=["decoding", "verification", "drafts"])
def test_the_indexer_chooses_in_a_graph(counts: list[int]) -> None:
    """The graph is captured at full length and replayed at others. Slots must be the definition's on a CPU."""
    call = Call(counts, padding=2, device=DEVICE)
    graph, found = capture(call.run)
    for less in (0, 1, 60, 400):
        call.lengths.sub_(less)
        graph.replay()
        assert torch.equal(found.cpu(), call.expected())
