"""SGLang's sparse indexer: V3.2 and GLM-5 score and choose on `index_decode`; V4 only chooses, on `index_topk`.

The choice is exact, in ascending order, and the same in all tensor-parallel ranks, so that none needs rank 0's choice.
This serves only decoding, verification and drafts; prompts keep SGLang's kernels. Written against SGLang 0.5.23;
imports no SGLang.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.indexer.decode_op import MAX_S_Q, index_decode
from cute_kernels.indexer.topk_op import index_topk
from cute_kernels.integrations.hooks import or_original, replace, say_once
from cute_kernels.integrations.padded_heads import device_refusal
from fp8_mla.formats import INDEX_KEY

INDEXER_CLASS, INDEXER_METHOD = "Indexer", "_get_topk_paged"
TOPK = "topk_transform_paged_v2"
SCORES_STAY, CHOICE_STAYS = "DeepGEMM scores the keys of the sparse indexer", "slots of the indexer stay with SGLang"


def change_indexer(module: types.ModuleType) -> None:
    """Puts `choose_keys` around `Indexer._get_topk_paged`."""

    def scores_stay(reason: str) -> None:
        say_once(f"{SCORES_STAY}: {reason}")

    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(or_original, functools.partial(choose_keys, module), method, scores_stay)

    missing = f"this SGLang has no {INDEXER_CLASS}.{INDEXER_METHOD}"
    replace(getattr(module, INDEXER_CLASS, None), INDEXER_METHOD, around, lambda: scores_stay(missing))


def choose_keys(
    module: Any,
    indexer: Any,
    forward_batch: Any,
    layer_id: int,
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    metadata: Any,
) -> torch.Tensor:
    """Scores and chooses; raises if `index_decode` does not take the call.

    Args:
        module: SGLang's module, which knows the pool of this forward pass.
        indexer: the layer's indexer.
        forward_batch: not read: the metadata have a row for each query, whatever is decoded.
        layer_id: number of the layer in the pool.
        q_fp8: (tokens, heads, 128) float8_e4m3fn. Tokens past the real ones are padding.
        weights: (tokens, heads, 1) float32.
        metadata: tables, repeated for each query, and each query's number of keys.

    Returns:
        (tokens, topk) int32: slots, or positions if the attention looks up slots itself; -1 for none and in padding.
    """
    reason = refusal(metadata, q_fp8)
    if reason is not None:
        raise ValueError(reason)
    pool = module.get_token_to_kv_pool()
    keys, page_size = indexer._get_index_k_read_buffer(pool, layer_id), pool.index_page_size
    table, lengths = metadata.get_page_table_64(), metadata.get_seqlens_expanded()
    query_tokens = metadata.get_dsa_extend_len_cpu()  # query tokens of each request, on the host
    (tokens, heads, d), real = q_fp8.shape, sum(query_tokens)
    if d != INDEX_KEY.d_qk or weights.shape != (tokens, heads, 1):
        raise ValueError(f"weights of {tuple(weights.shape)} and queries of {tuple(q_fp8.shape)}: needs one a head")
    if not 0 < real == len(table) == len(lengths) <= tokens:
        raise ValueError(f"{tokens} queries, {real} of them real, with {len(table)} tables and {len(lengths)} lengths")
    if metadata.attn_metadata.page_size != page_size or keys.shape[1:] != (page_size * INDEX_KEY.token_bytes,):
        latents = metadata.attn_metadata.page_size
        raise ValueError(f"keys in {tuple(keys.shape)}, {page_size} a page, and {latents} latents: needs as many")
    s_q = query_tokens[0] if len(set(query_tokens)) == 1 and query_tokens[0] <= MAX_S_Q else 1
    batch, topk = real // s_q, indexer.index_topk
    positions = metadata.force_unfused_topk or not module.envs.SGLANG_DSA_FUSE_TOPK.get()
    out = torch.full((tokens, topk), -1, dtype=torch.int32, device=q_fp8.device)
    index_decode(
        q_fp8[:real].reshape(batch, s_q, heads, d),
        weights[:real].reshape(batch, s_q, heads),
        keys.unflatten(1, (page_size, INDEX_KEY.token_bytes)),
        block_table=table[::s_q],  # a request's queries have equal tables
        cache_seqlens=lengths.reshape(batch, s_q),
        topk=topk,
        first=indexer.num_init_tokens,
        last=indexer.num_local_tokens,
        return_positions=positions,
        out=out[:real].view(batch, s_q, topk),
    )
    say_once("the sparse indexer scores and chooses with index_decode: exact, in order of positions")
    return out


def refusal(metadata: Any, q: torch.Tensor) -> str | None:
    """Returns in words why `index_decode` does not take a call; None if it may. The device is checked first."""
    reason = device_refusal(q.device)
    if reason is not None:
        return reason
    if not metadata.topk_backend.is_sgl_kernel():
        return f"--dsa-topk-backend {metadata.topk_backend.value} asks for another kernel"
    if metadata.topk_transform_method.name != "PAGED":
        return f"positions of all sequences together, {metadata.topk_transform_method.name}: needs PAGED"
    return None


def change_topk(module: types.ModuleType) -> None:
    """Replaces the kernel that chooses slots from given logits by `choose_slots`."""

    def choice_stays(reason: str) -> None:
        say_once(f"{CHOICE_STAYS}: {reason}")

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(or_original, choose_slots, original, choice_stays)

    replace(module, TOPK, around, lambda: choice_stays(f"this SGLang has no {TOPK}"))


def choose_slots(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor | None,
    out_page_indices: torch.Tensor,
    page_size: int,
    metadata: torch.Tensor,
    out_raw_indices: torch.Tensor | None = None,
) -> None:
    """Writes the slots of the highest logits of each row; raises if `index_topk` does not take the call.

    Args:
        scores: (rows, width) float32.
        seq_lens: (rows,) int32.
        page_tables: (rows, pages) int32; None, with which V4.1 chooses blocks, is refused.
        out_page_indices: (rows, topk) int32 to write to.
        page_size: page size of the tables.
        metadata: a plan, which only SGLang's own kernel needs.
        out_raw_indices: positions, which prompts also want: refused.
    """
    reason = device_refusal(scores.device)
    if reason is not None:
        raise ValueError(reason)
    if page_tables is None or out_raw_indices is not None:
        raise ValueError("positions are wanted")
    index_topk(
        scores, seq_lens, out_page_indices.shape[1], block_table=page_tables, page_size=page_size, out=out_page_indices
    )
    say_once("the sparse indexer chooses with index_topk: exact, in order of positions")


CHANGES = {
    "sglang.srt.layers.attention.dsa.dsa_indexer": change_indexer,
    "sglang.kernels.ops.attention.dsv4.topk": change_topk,  # other modules import the name from it, later
}
"""The change of each module, made once SGLang has imported it."""
