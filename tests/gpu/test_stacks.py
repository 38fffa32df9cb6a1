"""Warm start, FlashAttention's interface and transformers on a GPU give the CPU's results, in graphs, too."""

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from cute_kernels import gqa_decode, mla_fp8_decode
from cute_kernels.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from cute_kernels.gqa import launch as gqa_launch
from cute_kernels.mla import launch as mla_launch
from cute_kernels.runtime import compile
from cute_kernels.runtime.cache import KernelSpec
from cute_kernels.runtime.launch import PreparedLaunches
from cute_kernels.warm import GqaShape, MlaShape, warm
from cute_kernels.warm import kernel_specs as specs_of
from tests.kit import tiny_models
from tests.kit.transformers_calls import counted_on, generate

DEVICE = "cuda"
BATCHES = (1, 3, 16, 100, 140)
GQA = GqaShape(heads=16, kv_heads=2, head_dim=64, kv_dtype="bfloat16", max_tokens=4096)
MLA = MlaShape(heads=16, append=False)


def num_sms() -> int:
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


def kernel_specs() -> list[KernelSpec]:
    indexed = MlaShape(heads=4, topk=64)  # the tiny models pad lists to 64
    return specs_of(GQA, MLA, indexed, batch_sizes=BATCHES, num_sms=num_sms())


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cpu").bfloat16()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu().float(), expected.float(), rtol=2**-7, atol=2**-7)


# ---- warm start


def test_a_warmed_model_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm start must predict the names of the kernels that calls of these batch sizes use."""
    report = warm(GQA, MLA, batch_sizes=BATCHES, num_sms=num_sms(), progress=False)
    assert report.missing == ()

    def refuse(spec: KernelSpec, *options: object, **more: object) -> NoReturn:
        raise AssertionError(f"{spec} was not warmed")

    monkeypatch.setattr(compile, "_compile", refuse)
    monkeypatch.setattr(compile, "_kernels", {})
    for op in (gqa_launch, mla_launch):
        monkeypatch.setattr(op, "_prepared", PreparedLaunches())
    pages = torch.zeros(GQA.max_tokens // 64, 64, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    latents = torch.zeros(8, 64, 656, dtype=torch.uint8, device=DEVICE)
    for batch in BATCHES:
        q = draw(batch, 1, 16, 64).to(DEVICE)
        table = torch.zeros(batch, len(pages), dtype=torch.int32, device=DEVICE)
        lengths = torch.full((batch,), 100, dtype=torch.int32, device=DEVICE)
        gqa_decode(q, pages, pages, layout="paged_NHD", cache_seqlens=lengths, block_table=table)
        indices = torch.zeros(batch, 1, 2048, dtype=torch.int32, device=DEVICE)
        mla_fp8_decode(draw(batch, 1, 16, 576).to(DEVICE), latents, indices=indices)
    torch.cuda.synchronize()


# ---- FlashAttention's interface


def on_both(function: Callable[..., Any], tensors: dict[str, torch.Tensor], **others: Any) -> None:
    """Compares a call on the GPU with the same call on the CPU."""
    expected = function(**tensors, **others)
    found = function(**{name: t.to(DEVICE) for name, t in tensors.items()}, **others)
    for a, b in zip(found, expected, strict=True):
        close(a, b)


def test_flash_attention_of_a_batch() -> None:
    torch.manual_seed(0)
    tensors = {"q": draw(2, 100, 8, 64), "k": draw(2, 120, 2, 64), "v": draw(2, 120, 2, 64), "s_aux": draw(8)}
    on_both(flash_attn_func, tensors, causal=True, window_size=(30, 0), return_attn_probs=True)
    few = {name: t[:, :3] if name == "q" else t for name, t in tensors.items()}
    on_both(flash_attn_func, few, causal=True, softcap=5.0, return_attn_probs=True)


def test_flash_attention_of_packed_sequences() -> None:
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, 40, 41, 100], dtype=torch.int32, device="cpu")
    tensors = {"q": draw(100, 8, 64), "k": draw(100, 2, 64), "v": draw(100, 2, 64)}
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    on_both(
        flash_attn_varlen_func, tensors | lengths, max_seqlen_q=59, max_seqlen_k=59, causal=True, return_attn_probs=True
    )


def test_flash_attention_stores_and_decodes_in_a_graph() -> None:
    """Lengths and new tokens change between replays; the cache is written in place."""
    torch.manual_seed(0)
    q, new = draw(3, 1, 8, 64), draw(3, 1, 2, 64)
    table = torch.arange(12, dtype=torch.int32, device="cpu").view(3, 4)
    on_cpu = [q, draw(12, 16, 2, 64), draw(12, 16, 2, 64), new, new.clone(), torch.tensor([5, 63, 64]).int(), table]
    on_gpu = [t.to(DEVICE) for t in on_cpu]

    def call(tensors: list[torch.Tensor]) -> Any:
        q, k_cache, v_cache, k, v, lengths, table = tensors
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, page_table=table, causal=True, return_softmax_lse=True
        )

    call([t.clone() for t in on_gpu])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(on_gpu)
    for lengths in ([5, 63, 64], [6, 20, 0]):
        changes = {0: draw(3, 1, 8, 64), 3: draw(3, 1, 2, 64), 4: draw(3, 1, 2, 64), 5: torch.tensor(lengths).int()}
        for i, tensor in changes.items():
            on_cpu[i].copy_(tensor)
            on_gpu[i].copy_(tensor)
        graph.replay()
        expected, expected_lse = call(on_cpu)
        close(out, expected)
        close(lse, expected_lse)
        assert torch.equal(on_gpu[1].cpu(), on_cpu[1]) and torch.equal(on_gpu[2].cpu(), on_cpu[2])


# ---- transformers


@pytest.mark.parametrize("int8", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_tokens_of_transformers(name: str, int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")
    from cute_kernels.integrations import transformers as cute

    said: list[str] = []
    monkeypatch.setattr(cute, "_say_once", said.append)
    model, ids = tiny_models.trained(name), tiny_models.sequences(30, 4, 30)
    try:
        model.to(DEVICE)
        found, _ = generate(model, "cute", ids.to(DEVICE), cute.CuteInt8Cache(model.config) if int8 else None)
    finally:
        model.to("cpu")
    assert torch.equal(found.cpu(), counted_on(ids)) and said == []


@pytest.mark.parametrize("fp8_index", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_tokens_of_sparse_latent_attention(name: str, fp8_index: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents are 656-byte tokens, prompts have padding, and the cache grows, as in the test for a CPU."""
    pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")
    from cute_kernels.integrations import transformers as cute
    from cute_kernels.integrations import transformers_cache, transformers_mla

    said: list[str] = []
    monkeypatch.setattr(transformers_mla, "_say_once", said.append)
    monkeypatch.setattr(transformers_cache, "FIRST_CAPACITY", 16)
    model, ids = tiny_models.trained(name), tiny_models.sequences(2030, 4, 30)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    cpu_cache = cute.CuteMlaCache(model.config, fp8_index=fp8_index)
    expected, expected_logits = generate(model, "cute_mla", ids, cpu_cache, attention_mask=mask)
    try:
        model.to(DEVICE)
        cache = cute.CuteMlaCache(model.config, fp8_index=fp8_index)
        found, logits = generate(model, "cute_mla", ids.to(DEVICE), cache, attention_mask=mask.to(DEVICE))
    finally:
        model.to("cpu")
    assert torch.equal(found.cpu(), expected) and said == []
    differences = (logits.cpu() - expected_logits).norm(dim=-1) / expected_logits.norm(dim=-1)
    assert differences.median() < 0.012 and cache.layers[0].keys.shape == (4, 64, 656)
