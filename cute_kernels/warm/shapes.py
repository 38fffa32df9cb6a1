"""Which kernels the decode and prefill calls of a model ask for: pure Python, by the ops' own planners.

A shape has the facts that are the same in all calls of a model on one GPU; batch sizes and query tokens vary. Only the
planners know whether two batch sizes share a kernel, so they are asked for each: 256 batch sizes take up to 0.1 s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cute_kernels.gqa.append_spec import KvAppendSpec, sharing
from cute_kernels.gqa.block_table_spec import BlockTableSpec
from cute_kernels.gqa.blocks_plan import INDEX_BLOCKS, DecodeShape, decode_shape
from cute_kernels.gqa.codes import CODES, KINDS, ROTATED_KINDS, TYPES, WIDENED
from cute_kernels.gqa.gather_spec import KvGatherSpec
from cute_kernels.gqa.layouts import GROUP_SIZES, LAYOUTS, CacheSizes, ScaleKind
from cute_kernels.gqa.plan import MAX_S_Q, choose_spec
from cute_kernels.indexer.append_spec import SCALE_RULES, IndexAppendSpec
from cute_kernels.indexer.score_spec import HEADS as INDEX_HEADS
from cute_kernels.indexer.score_spec import ScoreSpec
from cute_kernels.indexer.topk_spec import MAX_WIDTH, TopkSpec
from cute_kernels.merge.spec import MergeSpec
from cute_kernels.mla.append_spec import MlaAppendSpec
from cute_kernels.mla.plan import plan_decode
from cute_kernels.runtime.cache import KernelSpec
from cute_kernels.sink.spec import SinkForwardSpec, SinkWorkListSpec
from fp8_mla.formats import FORMATS, PAIRS, V3_2

H100_SMS = 132
"""Streaming multiprocessors of an H100 SXM, H200 or H800; an H100 PCIe has 114. Plans depend on them."""
MAX_MLA_HEADS = 128
APPENDED_TOKENS = (1, 65536)
"""Tokens of an append call in decoding and in prefill."""
SCALES = {
    kind.name: kind
    for kind in (
        *map(ScaleKind, ("per_tensor", "per_head", "per_token", "per_token_head")),
        *(ScaleKind("per_group", size) for size in GROUP_SIZES),
    )
}


@dataclass(frozen=True)
class MlaShape:
    """A model's `mla_fp8_decode`, or FlashMLA's interface to it, and `mla_fp8_append`.

    heads       query heads of one GPU, 1 to 128
    topk        keys of a query's list; None: dense, by block tables
    lengths     sparse: whether calls have a `topk_length`
    max_tokens  dense: tokens that a block table can name, its width times the page size
    append      whether the model fills its cache with `mla_fp8_append`
    scores      None or "exact", as calls give it; both mean the same
    flash_mla   whether calls are those of `cute_kernels.compat.flash_mla`, which have kernels of their own
    cache_format  format of the cache: "v3.2", "v3.2_nope", "v4", "v4.1" or "v4.1_fp4"
    extra_cache_format  format of a second cache in the same softmax; None: one cache. Only sparse calls have two
    extra_topk  keys of a query's list in the second cache
    """

    heads: int
    topk: int | None = 2048
    lengths: bool = False
    max_tokens: int = 131_072
    append: bool = True
    scores: str | None = None
    flash_mla: bool = False
    cache_format: str = V3_2.name
    extra_cache_format: str | None = None
    extra_topk: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for heads, formats or keys that no kernel supports."""
        if not 1 <= self.heads <= MAX_MLA_HEADS:
            raise ValueError(f"heads: got {self.heads}; needs 1 to {MAX_MLA_HEADS}")
        if self.scores not in (None, "exact"):
            raise ValueError(f"scores: got {self.scores!r}; needs None or 'exact'")
        if self.cache_format not in FORMATS:
            raise ValueError(f"cache_format: got {self.cache_format!r}; needs one of {', '.join(FORMATS)}")
        extra = self.extra_cache_format
        if extra is not None and (self.cache_format, extra) not in PAIRS:
            pairs = ", ".join(f"{second} with {first}" for first, second in PAIRS)
            raise ValueError(f"extra_cache_format: got {extra!r} with {self.cache_format!r}; needs {pairs}")
        if (extra is None) != (self.extra_topk == 0) or self.extra_topk < 0 or (extra and self.topk is None):
            got = f"{self.extra_topk} with extra_cache_format {extra!r}, topk {self.topk}"
            raise ValueError(f"extra_topk: got {got}; needs keys of a second cache where there is one, of sparse calls")

    def specs(self, batch_sizes: Iterable[int], query_tokens: Iterable[int], num_sms: int) -> Iterator[KernelSpec]:
        """Yields the kernel of each call, in the order of the batch sizes, with repetitions."""
        sparse = self.topk is not None
        for s_q in query_tokens:
            for batch in batch_sizes:
                yield plan_decode(
                    sparse=sparse,
                    batch=batch,
                    s_q=s_q,
                    h_q=self.heads,
                    max_keys=self.max_tokens if self.topk is None else self.topk,
                    num_sms=num_sms,
                    ragged=self.lengths or not sparse,
                    cache_format=self.cache_format,
                    extra_format=self.extra_cache_format or "",
                    extra_keys=self.extra_topk,
                    inf_if_empty=self.flash_mla,
                ).spec
        if self.append:
            for name in dict.fromkeys((self.cache_format, self.extra_cache_format or self.cache_format)):
                for tokens in APPENDED_TOKENS:
                    yield MlaAppendSpec.for_launch(tokens, name)


@dataclass(frozen=True)
class GqaShape:
    """A model's `gqa_decode` and `kv_append`.

    heads        query heads of one GPU
    kv_heads     heads of the cache
    head_dim     64, 128, 256 or 512
    dtype        dtype of queries, outputs and new tokens: "bfloat16" or "float16"
    kv_dtype     "int8", "float8_e4m3fn" or `dtype`; or a kind of `kv_append` with float32 scales per token and head:
                 "fp8_per_token_head", "int8_k_int4_v", "int4"
    scales       scales of K and V: "per_tensor", "per_head", "per_token", "per_token_head", "per_group_32",
                 "per_group_64"; None: FP8 without scales. Ignored for a cache of 16-bit numbers
    scale_dtype  "float32" or "float16"
    layout       layout of the cache: "BNSH", "BSNH", "paged_NHD", "paged_HND", "paged_vllm"
    page_size    tokens of a page; ignored without pages
    max_tokens   most tokens of a sequence: the size of the cache, or the width of the block table times the page size
    softcap      whether scores are capped
    alibi        whether there are ALiBi slopes
    append       whether the model fills a cache of one of the kinds with `kv_append`
    blocks       length of the list (`indices`) of each query token and KV head; 0: no lists
    index_block  tokens of a block, 64 or 128
    """

    heads: int
    kv_heads: int
    head_dim: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str = "int8"
    scales: str | None = "per_token_head"
    scale_dtype: str = "float32"
    layout: str = "paged_NHD"
    page_size: int = 64
    max_tokens: int = 131_072
    softcap: bool = False
    alibi: bool = False
    append: bool = True
    blocks: int = 0
    index_block: int = 128

    def __post_init__(self) -> None:
        """Raises ValueError for arguments that otherwise only `gqa_decode` would refuse, before a spec is made."""
        _check_heads(self.heads, self.kv_heads)
        if self.blocks < 0 or self.index_block not in INDEX_BLOCKS:
            got = f"{self.blocks} of {self.index_block} tokens"
            raise ValueError(f"blocks: got {got}; needs 0 or more of {' or '.join(map(str, INDEX_BLOCKS))}")
        layout = LAYOUTS.get(self.layout)
        if layout is None:
            raise ValueError(f"layout: got {self.layout!r}; needs one of {', '.join(LAYOUTS)}")
        if layout.paged and not layout.accepts_page_size(self.page_size):
            raise ValueError(
                f"page_size: got {self.page_size}; layout {layout.name} needs {layout.accepted_page_sizes}"
            )
        if self.scales is not None and self.scales not in SCALES:
            raise ValueError(f"scales: got {self.scales!r}; needs None or one of {', '.join(SCALES)}")
        stored = dict.fromkeys((*WIDENED, self.dtype, *KINDS))
        if not (isinstance(self.kv_dtype, str) and self.kv_dtype in stored):
            known = ", ".join(stored)
            raise ValueError(f"kv_dtype: got {self.kv_dtype!r}; needs the name of one of {known}")
        fixed = self.kv_dtype in KINDS and self.kv_dtype not in CODES
        if fixed and (self.scales, self.scale_dtype) != ("per_token_head", "float32"):
            raise ValueError(
                f"scales: got {self.scale_dtype} {self.scales}; {self.kv_dtype} has float32 per_token_head"
            )
        if self.scales is None and TYPES[self._types[0]].needs_scales:
            raise ValueError(f"scales: got None; an int8 cache needs one of {', '.join(SCALES)}")

    @property
    def _types(self) -> tuple[str, str]:
        """The types of K and of V."""
        return KINDS.get(self.kv_dtype, (self.kv_dtype, self.kv_dtype))

    def specs(self, batch_sizes: Iterable[int], query_tokens: Iterable[int], num_sms: int) -> Iterator[KernelSpec]:
        """Yields the kernel of each call, in the order of the batch sizes, with repetitions."""
        layout = LAYOUTS[self.layout]
        kind = SCALES[self.scales] if self.scales and TYPES[self._types[0]].widened else None
        scale_dtype = self.scale_dtype if kind else "float32"
        for s_q in query_tokens:
            if s_q > MAX_S_Q:
                raise ValueError(f"query_tokens: got {s_q}; gqa_decode takes up to {MAX_S_Q}")
            for batch in batch_sizes:
                rows = self.page_size if layout.paged else self.max_tokens
                sizes = CacheSizes(batch, rows, self.kv_heads, self.head_dim)
                shape = DecodeShape(layout, sizes, (batch, s_q, self.heads), self.max_tokens)
                if self.blocks:
                    shape = decode_shape(
                        layout, sizes, shape.q_shape, self.index_block, self.kv_heads, self.blocks
                    )  # fmt: skip
                yield choose_spec(
                    shape,
                    (kind, kind),
                    q_dtype=self.dtype,
                    kv_dtype=self._types[0],
                    v_dtype=ROTATED_KINDS.get(self.kv_dtype),
                    scale_dtype=scale_dtype,
                    num_sms=num_sms,
                    alibi=self.alibi,
                    softcap=self.softcap,
                )
        if self.blocks:
            yield BlockTableSpec(layout.paged)
        if self.append and self.kv_dtype in KINDS and kind is not None:
            yield KvAppendSpec.for_launch(
                dtype=self.dtype,
                d=self.head_dim,
                h_kv=self.kv_heads,
                k_scale=sharing(kind),
                v_scale=sharing(kind),
                scale_dtype=scale_dtype,
                kind=self.kv_dtype,
                x_packed=layout.x_packed,
            )


@dataclass(frozen=True)
class PrefillShape:
    """A model's `sink_attention` without gradients, over more query tokens than a decode call has.

    heads     query heads of one GPU
    kv_heads  heads of keys and values
    head_dim  64 or 128
    dtype     "bfloat16" or "float16"
    windows   windows of the layers; None: a layer without a window
    packed    whether sequences are packed by cu_seqlens
    """

    heads: int
    kv_heads: int
    head_dim: int = 128
    dtype: str = "bfloat16"
    windows: tuple[int | None, ...] = (None,)
    packed: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for heads that no kernel can distribute."""
        _check_heads(self.heads, self.kv_heads)

    def specs(self, batch_sizes: Iterable[int], query_tokens: Iterable[int], num_sms: int) -> Iterator[KernelSpec]:
        """Yields the kernels of the calls, which batch sizes and query tokens do not change.

        A window that hides no key of a short prompt counts as None, so that kernel is included. Packed sequences are an
        exception: the kernel of one sequence does not follow from the tokens of others.
        """
        ratio = self.heads // self.kv_heads
        for window in dict.fromkeys(self.windows if self.packed else (*self.windows, None)):
            yield SinkForwardSpec.for_launch(self.dtype, self.head_dim, packed=self.packed, window=window, ratio=ratio)
        if self.packed:
            yield SinkWorkListSpec()


@dataclass(frozen=True)
class PromptShape:
    """Prompts over a quantized cache in the vLLM backend: copies of pages, and the merge of their parts.

    heads     query heads of one GPU
    head_dim  64, 128, 256 or 512
    dtype     dtype of queries: "bfloat16" or "float16"
    kv_dtype  type of the cache: a kind of `kv_append`, with scales of tokens, or "float8_e4m3fn" with one for all
    sink      whether layers have sinks
    merged    whether contexts are so long that they are split into parts
    """

    heads: int
    head_dim: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str = "int8"
    sink: bool = False
    merged: bool = False

    def specs(self, batch_sizes: Iterable[int], query_tokens: Iterable[int], num_sms: int) -> Iterator[KernelSpec]:
        """Yields the kernels of the calls, whatever the batch sizes and query tokens; for merges, the usual ones.

        Sinks join only the last merge of a context.
        """
        kv_dtype = KINDS[self.kv_dtype][0] if self.kv_dtype in KINDS else self.kv_dtype
        one_scale, v_dtype = self.kv_dtype not in KINDS, ROTATED_KINDS.get(self.kv_dtype)
        yield KvGatherSpec(kv_dtype, self.dtype, self.head_dim, one_scale, v_dtype)
        merges = itertools.product((64, 4096), (2, 3, 4), {False, self.sink}) if self.merged else ()
        for tokens, states, sink in merges:
            yield MergeSpec.for_launch(
                rows=tokens * self.heads, num_states=states, d=self.head_dim, in_dtype=self.dtype,
                out_dtype=self.dtype, has_sink=sink,
            )  # fmt: skip


@dataclass(frozen=True)
class IndexShape:
    """The indexer of sparse attention: `index_decode` or `index_topk`, and `index_append`.

    max_tokens  columns of the logits, as a server passes them
    slots       whether calls have a block table; without one they ask for positions, as vLLM does
    heads       heads of `index_decode` calls: 16, 32 or 64; None: `index_topk` alone
    append      whether the model fills its cache of keys with `index_append`
    scale       rule of the key scales, "float32" or "ue8m0"
    """

    max_tokens: int = 131_072
    slots: bool = True
    heads: int | None = None
    append: bool = True
    scale: str = "float32"

    def __post_init__(self) -> None:
        """Raises ValueError for rows that no kernel supports, or an unknown rule."""
        if not 0 < self.max_tokens <= MAX_WIDTH:
            raise ValueError(f"max_tokens: got {self.max_tokens}; needs 1 to {MAX_WIDTH}")
        if self.scale not in SCALE_RULES:
            raise ValueError(f"scale: got {self.scale!r}; needs one of {', '.join(SCALE_RULES)}")
        if self.heads is not None and self.heads not in INDEX_HEADS:
            raise ValueError(f"heads: got {self.heads}; needs None or one of {', '.join(map(str, INDEX_HEADS))}")

    def specs(self, batch_sizes: Iterable[int], query_tokens: Iterable[int], num_sms: int) -> Iterator[KernelSpec]:
        """Yields the kernel of each call, in the order of the batch sizes, with repetitions."""
        for s_q in query_tokens:
            for batch in batch_sizes:
                rows = batch * s_q
                yield TopkSpec.for_launch(rows, self.max_tokens, num_sms, has_table=self.slots, has_starts=False)
            if self.heads is not None:
                yield ScoreSpec.for_launch(self.heads, s_q)
        if self.append:
            yield IndexAppendSpec(self.scale)


def _check_heads(heads: int, kv_heads: int) -> None:
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"heads: got {heads} over {kv_heads} kv_heads; needs a multiple of them, at least one")


Shape = MlaShape | GqaShape | IndexShape | PrefillShape | PromptShape
