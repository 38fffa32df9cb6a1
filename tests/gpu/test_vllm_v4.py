"""DeepSeek-V4's layers on a GPU, by a module like vLLM's, in CUDA graphs; with FlashMLA if vLLM is installed."""

import types
from typing import Any

import pytest
import torch

from cute_kernels.integrations.padded_heads import V4Decode, real_heads
from cute_kernels.integrations.vllm import v4
from fp8_mla import reference_decode
from tests.kit import flash_mla_of_v4
from tests.kit.compare import check_decode, relative_error
from tests.kit.v4_layers import REAL_HEADS, v4_call

DEVICE = "cuda"


@pytest.mark.parametrize("extra", [True, False], ids=["compressed", "window"])
@pytest.mark.parametrize("heads", REAL_HEADS)
def test_a_layer_in_a_graph_follows_its_indices(heads: int, extra: bool) -> None:
    module: Any = flash_mla_of_v4.load()
    v4.change_deepseek_v4(module)
    call = v4_call(heads, extra, device=DEVICE)
    case = call.case
    layer = module.DeepseekV4FlashMLAAttention(
        heads, case.softmax_scale, case.s_aux, case.kv_cache, case.extra_kv_cache
    )
    lists = types.SimpleNamespace(
        indices=case.indices, topk_length=case.topk_length, extra_indices=case.extra_indices,
        extra_topk_length=case.extra_topk_length,
    )  # fmt: skip
    output = call.output()
    _, lse = layer.forward_mqa(call.q, None, lists, output)
    lse = torch.where(lse.isinf(), -lse, lse).transpose(1, 2)  # FlashMLA's is +inf without keys
    check_decode(output[:, :heads].unsqueeze(1), lse, name="V4", **call.real().arguments())
    assert bool(output[:, heads:].isnan().all()) and module.CALLS == []

    replayed = call.output()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.forward_mqa(call.q, None, lists, replayed)
    call.q.copy_(call.q.flip(0))
    for tensor in vars(lists).values():
        if tensor is not None:
            tensor.copy_(tensor.flip(0))
    graph.replay()
    check_decode(replayed[:, :heads].unsqueeze(1), None, name="V4 replayed", **call.real().arguments())
    assert bool(replayed[:, heads:].isnan().all())


@pytest.mark.parametrize("extra", [True, False], ids=["compressed", "window"])
@pytest.mark.parametrize("heads", REAL_HEADS)
def test_v4_beside_flashmla(heads: int, extra: bool) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    call = v4_call(heads, extra, plain=True, device=DEVICE)
    case = call.case
    given: dict[str, Any] = {
        "q": case.q, "k_cache": case.kv_cache.unsqueeze(2), "block_table": None, "head_dim_v": 512,
        "cache_seqlens": None, "is_fp8_kvcache": True, "indices": case.indices, "softmax_scale": case.softmax_scale,
        "attn_sink": case.s_aux, "extra_indices_in_kvcache": case.extra_indices,
        "extra_k_cache": None if case.extra_kv_cache is None else case.extra_kv_cache.unsqueeze(2),
    }  # fmt: skip
    said: list[str] = []
    decode = V4Decode(flash_mla_with_kvcache, said.append)
    with real_heads(heads):
        ours, _ = decode(tile_scheduler_metadata=get_mla_metadata()[0], **given)
    theirs, _ = flash_mla_with_kvcache(tile_scheduler_metadata=get_mla_metadata()[0], **given)
    expected, _ = reference_decode(**call.real().arguments())
    errors = [relative_error(out[:, :, :heads].double(), expected) for out in (ours, theirs)]
    assert said == [f"DeepSeek-V4 decoding of {heads} heads runs on mla_fp8_decode"]
    assert errors[0] <= errors[1] * 1.1 <= 2e-2
