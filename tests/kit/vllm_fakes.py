"""Metadata, builders and layers of the installed vLLM, without an engine."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, NamedTuple

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import flashmla_sparse

import fp8_mla
from cute_kernels.integrations.vllm import gqa
from tests.kit.draws import generator, integers, normal, uniform
from tests.kit.vllm_batches import HEADS, KV_HEADS, Batch


def common(batch: Batch, padded_requests: int = 0, **changes: Any) -> Any:
    """A batch as vLLM's runner passes it to builders, padded as for a CUDA graph."""
    starts = torch.cat([batch.starts, batch.starts[-1:].expand(padded_requests)])
    lengths = torch.cat([batch.seq_lens, batch.seq_lens.new_zeros(padded_requests)])
    table = torch.cat([batch.block_table, batch.block_table.new_zeros(padded_requests, batch.block_table.shape[1])])
    given = {
        "query_start_loc": starts, "query_start_loc_cpu": starts.cpu(), "seq_lens": lengths,
        "num_reqs": len(lengths), "num_actual_tokens": batch.query.shape[0],
        "max_query_len": int(batch.starts.diff().max()), "max_seq_len": int(lengths.max()),
        "block_table_tensor": table, "slot_mapping": batch.slots, "seq_lens_cpu_upper_bound": lengths.cpu(),
    } | changes  # fmt: skip
    return CommonAttentionMetadata(**given)


def builder(drafts: int = 0, device: str = "cpu") -> gqa.CuteAttentionMetadataBuilder:
    """A builder for a model of one layer, made by vLLM's constructor."""
    speculative = types.SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False) if drafts else None
    layer = types.SimpleNamespace(impl=types.SimpleNamespace(num_heads=HEADS))
    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(
            get_num_attention_heads=lambda parallel: HEADS, get_num_kv_heads=lambda parallel: KV_HEADS,
            get_head_size=lambda: 64, rswa_window=None, max_model_len=512,
        ),
        parallel_config=types.SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=types.SimpleNamespace(
            cudagraph_mode=None, cudagraph_capture_sizes=[1, 8], static_forward_context={"layer": layer}
        ),
        scheduler_config=types.SimpleNamespace(max_num_seqs=8),
        speculative_config=speculative,
    )  # fmt: skip
    spec = types.SimpleNamespace(block_size=16, kv_quant_mode=None)
    return gqa.CuteAttentionMetadataBuilder(spec, ["layer"], config, torch.device(device))


def global_indices(req_id: torch.Tensor, block_table: torch.Tensor, indices: torch.Tensor, **options: Any) -> Any:
    """In plain torch, vLLM's Triton kernel that maps positions to slots."""
    size = options["BLOCK_SIZE"]
    page = block_table[req_id.long().unsqueeze(1), (indices.clamp(min=0) // size).long()]
    slots = torch.where(indices < 0, -1, page * size + indices % size)
    return (slots, (slots >= 0).sum(-1).int()) if options.get("return_valid_counts") else slots


class SparseMlaLayer(NamedTuple):
    """A layer of sparse MLA, with a batch of `requests` that decode two tokens each."""

    impl: Any
    q: torch.Tensor
    cache: torch.Tensor
    metadata: Any

    def forward(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """VLLM's own forward over the 656 bytes: out (tokens, heads, 512), and the log-sum-exp if it returns one."""
        mixed = self.metadata.fp8_use_mixed_batch
        impl = self.impl
        forward = impl._forward_fp8_kv_mixed_batch if mixed else impl._forward_fp8_kv_separate_prefill_decode
        out = forward(self.q, self.cache, impl.topk_indices_buffer, self.metadata)
        return out if isinstance(out, tuple) else (out, None)


def sparse_mla_layer(
    impl_cls: Any, heads: int, *, requests: int = 4, topk: int = 128, tokens: int = 100, device: str = "cpu"
) -> SparseMlaLayer:
    """A layer without an engine. Below 32 heads vLLM takes all tokens as one sequence, else each request by itself.

    Args:
        impl_cls: FlashMLASparseImpl, or ours.
        heads: heads of one GPU.
        requests: number of requests, with two query tokens each.
        topk: number of positions per query token, of which a hundredth are -1.
        tokens: tokens of each request.
    """
    gen = generator(0)
    impl: Any = object.__new__(impl_cls)
    impl.softmax_scale, impl.num_heads, impl.kv_cache_dtype = 0.1, heads, "fp8_ds_mla"
    impl.dcp_world_size, impl.need_to_return_lse_for_decode, impl.kv_lora_rank = 1, True, 512
    impl.fp8_decode_padded_heads = 64 if heads <= 64 else 128
    impl.index_group, impl.pcp_dcp_kv_gather = None, False  # 0.33
    count, pages = 2 * requests, -(-tokens // 64)
    positions = integers(0, tokens, (count, topk), gen, torch.int32)
    positions[uniform(positions.shape, gen) < 0.01] = -1
    impl.topk_indices_buffer = positions.to(device)
    impl._convert_logical_to_physical_topk = lambda indices, m, **options: global_indices(
        m.req_id_per_token, m.block_table, indices, BLOCK_SIZE=64, **options
    )
    latents = normal((64 * 9, 576), gen).bfloat16()
    some = fp8_mla.pack(latents.view(9, 64, 576))  # packing is slow, so the packed tokens are repeated in other pages
    cache = some[torch.arange(requests * pages + 1, dtype=torch.int64, device="cpu") % 9].to(device)
    metadata_cls = flashmla_sparse.FlashMLASparseMetadata
    lengths = torch.full((requests,), tokens, dtype=torch.int32, device=device)
    scheduler = flashmla_sparse.get_mla_metadata()[0] if device != "cpu" else None
    mixed = heads < flashmla_sparse.MIN_HEADS_FOR_BF16_PREFILL
    rows = 1 if mixed else requests
    table = torch.zeros(rows, 1, dtype=torch.int32, device=device)
    kernel = metadata_cls.FP8KernelMetadata(scheduler, table, lengths[:rows])
    separate = metadata_cls.FP8SeparatePrefillDecode
    extra: Any = kernel
    if not mixed:
        decode = separate.Decode(seq_lens=lengths, kernel_metadata=kernel, decode_query_len=2)
        extra = separate(num_decodes=requests, num_decode_tokens=count, decode=decode)
    order = torch.randperm(requests * pages, generator=gen, dtype=torch.int64, device="cpu").int() + 1
    starts = torch.arange(0, count + 2, 2, dtype=torch.int32, device=device)
    given = {
        "num_reqs": requests, "max_query_len": 2, "max_seq_len": tokens, "num_actual_tokens": count,
        "num_decodes": requests, "num_decode_tokens": count, "query_start_loc": starts, "topk_tokens": topk,
        "slot_mapping": torch.arange(count, dtype=torch.int64, device=device), "fp8_use_mixed_batch": mixed,
        "block_table": order.view(requests, pages).to(device), "fp8_extra_metadata": extra,
        "req_id_per_token": torch.arange(count, dtype=torch.int32, device=device) // 2,
    }  # fmt: skip
    fields = {field.name for field in dataclasses.fields(metadata_cls)}
    metadata = metadata_cls(**{name: value for name, value in given.items() if name in fields})
    q = normal((count, heads, 576), gen).bfloat16().to(device)
    return SparseMlaLayer(impl, q, cache, metadata)
