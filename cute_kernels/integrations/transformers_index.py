"""Index keys of DeepSeek V3.2 and GLM-5 in FP8, for `CuteMlaCache(fp8_index=True)`: 132 bytes a token, not 256.

`index_decode` scores steps of up to 8 tokens from these bytes. The model's own indexer scores a prompt, over its keys
after a round trip through FP8.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import torch

from cute_kernels.indexer.append_op import index_append
from cute_kernels.indexer.decode_op import MAX_S_Q, index_decode
from cute_kernels.indexer.score_spec import HEADS
from cute_kernels.indexer.topk_op import index_topk
from cute_kernels.indexer.topk_spec import MAX_TOPK
from cute_kernels.integrations.transformers_cache import FIRST_CAPACITY, Positions
from fp8_mla import INDEX_KEY, read_pages, unpack_index_keys

PAGE_SIZE = 64
INDEXERS = {"DeepseekV32Indexer": "apply_rotary_pos_emb", "GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave"}
"""Indexer classes, and the functions of their modules that rotate the first elements of queries and keys."""
CHANGED = "_cute_fp8_index"
"""Attribute of an indexer's `forward` that reads pages."""
SMALLEST = 1e-4
"""The smallest magnitude that a scale of queries or keys is computed from."""


class IndexPages:
    """The keys of a layer, (batch, pages, 64, 132) uint8, equally many tokens of each sequence."""

    def __init__(self, positions: Positions, max_length: int | None = None) -> None:
        self._positions, self._max_length = positions, max_length
        self.pages: torch.Tensor | None = None
        self.length = 0

    def append(self, k: torch.Tensor) -> None:
        """Quantizes and stores new keys, (batch, tokens, 128) in 16 or 32 bits, after norm and rotary encoding."""
        batch, tokens, d = k.shape
        pages = self._room(batch, self.length + tokens, k.device)
        slots = self._positions.slots(batch, self.length, tokens, pages.shape[1] * PAGE_SIZE, k.device)
        rows = k.reshape(-1, d)
        index_append(rows if rows.dtype is torch.bfloat16 else rows.float(), pages.flatten(0, 1), slots)
        self.length += tokens

    def _room(self, batch: int, length: int, device: torch.device) -> torch.Tensor:
        old, needed = self.pages, -(-length // PAGE_SIZE)
        if old is not None and (old.shape[0], old.device) != (batch, device):
            old = None  # the pages belong to another batch, whose tokens are forgotten
        if old is not None and needed <= old.shape[1]:
            return old
        count = -(-(self._max_length or FIRST_CAPACITY) // PAGE_SIZE) if old is None else old.shape[1]
        while count < needed:
            count *= 2
        self.pages = torch.zeros((batch, count, PAGE_SIZE, INDEX_KEY.token_bytes), dtype=torch.uint8, device=device)
        if old is not None:
            self.pages[:, : old.shape[1]] = old
        return self.pages

    def keys(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns all keys, dequantized: (batch, tokens, 128)."""
        assert self.pages is not None
        batch, count = self.pages.shape[:2]
        slots = self._positions.slots(batch, 0, self.length, count * PAGE_SIZE, self.pages.device)
        rows = read_pages(self.pages.flatten(0, 1), slots, token_format=INDEX_KEY)
        return unpack_index_keys(rows, torch.float32).to(dtype).view(batch, self.length, -1)

    def choose(self, q: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor, topk: int) -> torch.Tensor:
        """Returns the tokens with the highest scores, ascending.

        Args:
            q: (batch, s_q, heads, 128), after rotary encoding; s_q up to 8.
            weights: (batch, s_q, heads) float32, with all factors but the scale of q.
            mask: (batch or 1, s_q, tokens), bool or additive.
            topk: number of tokens to choose; no more than exist.

        Returns:
            (batch, s_q, topk) int32. Hidden tokens come last, and are chosen if there are too few others.
        """
        assert self.pages is not None
        batch, s_q = q.shape[:2]
        count = self.pages.shape[1]
        scale = q.float().abs().amax(-1).clamp(min=SMALLEST) / torch.finfo(torch.float8_e4m3fn).max
        codes = (q.float() / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
        lengths = self._positions.lengths(batch * s_q, self.length, q.device)
        logits = torch.empty((batch, s_q, count * PAGE_SIZE), dtype=torch.float32, device=q.device)
        index_decode(
            codes,
            weights * scale,
            self.pages.flatten(0, 1),
            block_table=self._positions.table(batch, count, q.device),
            cache_seqlens=lengths.view(batch, s_q),  # any mask is allowed, so it alone says what a query sees
            topk=0,  # only logits
            logits=logits,
        )
        seen = logits[..., : self.length]
        if mask.dtype is torch.bool:
            seen.masked_fill_(~mask, -torch.inf)
        else:
            seen.add_(mask)
        return index_topk(logits.flatten(0, 1), lengths, topk).view(batch, s_q, topk)

    def select(self, indices: torch.Tensor) -> None:
        """Gives each sequence another's keys, or keeps or repeats some."""
        if self.pages is not None:
            self.pages = self.pages[indices.to(self.pages.device)]

    def move(self, device: torch.device) -> None:
        """Moves all keys to another device."""
        if self.pages is not None:
            self.pages = self.pages.to(device, non_blocking=True)


def check_index(config: Any) -> None:
    """Raises for a model whose indexer `index_decode` does not support."""
    found = config.index_n_heads, config.index_head_dim, config.index_topk
    if found[0] not in HEADS or found[1] != INDEX_KEY.d_qk or found[2] > MAX_TOPK:
        raise ValueError(
            f"config: got index_n_heads {found[0]}, index_head_dim {found[1]} and index_topk {found[2]}; with fp8_index"
            f" needs one of {', '.join(map(str, HEADS))}, {INDEX_KEY.d_qk}, and up to {MAX_TOPK}"
        )


def index_by_pages(modeling: types.ModuleType) -> None:
    """Makes a model's indexer score steps of few tokens by `index_decode`, if its cache has FP8 keys."""
    indexer: Any = next((getattr(modeling, name) for name in INDEXERS if hasattr(modeling, name)), None)
    original = getattr(indexer, "forward", None)
    if original is None or hasattr(original, CHANGED):
        return

    @functools.wraps(original)
    def forward(
        self: Any, hidden_states: torch.Tensor, q_resid: torch.Tensor, position_embeddings: Any,
        attention_mask: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        cache = args[0] if args else kwargs.get("cache", kwargs.get("past_key_values"))  # 5.24 and before
        index = None if cache is None else getattr(cache.layers[self.layer_idx], "index", None)
        given = hidden_states, q_resid, position_embeddings, attention_mask
        if not isinstance(index, IndexPages) or hidden_states.shape[1] > MAX_S_Q:
            return original(self, *given, position_ids, *args, **kwargs)
        with torch.no_grad():
            return _choose(self, index, *given)

    setattr(forward, CHANGED, True)
    indexer.forward = forward


def _choose(
    indexer: Any,
    index: IndexPages,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
) -> torch.Tensor:
    """Computes over pages what the indexer's `forward` computes."""
    rope = getattr(sys.modules[type(indexer).__module__], INDEXERS[type(indexer).__name__])
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    first = slice(indexer.qk_rope_head_dim)
    q_rot, k_rot = rope(q[..., first], k[..., first], *position_embeddings, unsqueeze_dim=2)
    q, k = (torch.cat([rot, t[..., first.stop :]], dim=-1) for rot, t in ((q_rot, q), (k_rot, k)))
    index.append(k.squeeze(2))
    gates = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    weights = gates * indexer.softmax_scale * indexer.n_heads**-0.5
    return index.choose(q, weights, mask, min(indexer.index_topk, index.length))
