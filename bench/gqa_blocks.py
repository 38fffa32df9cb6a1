"""Benchmarks of block-sparse GQA decoding: MiniMax-M3's heads; each query token and KV head has a list of 16 blocks.

Times are of a whole call, including the kernel that makes tables.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

import torch

from bench.gqa import SCALE_BYTES, GqaDecodeCase, Pool, scales_of_token
from cute_kernels.gqa.block_table_spec import BlockTableSpec
from cute_kernels.gqa.blocks_plan import decode_shape
from cute_kernels.gqa.layouts import LAYOUTS, CacheSizes
from cute_kernels.gqa.plan import choose_spec
from tests.kit.draws import generator, uniform
from tests.kit.gqa_cases import KV_DTYPES, SCALE_NAMES, GqaCase


@dataclass(frozen=True)
class GqaBlocksCase(GqaDecodeCase):
    """A decode with a list of blocks for each query token and KV head, distinct and in random order.

    blocks       length of a list, which includes the sequence's last block
    index_block  tokens of a block
    """

    blocks: int = 16
    index_block: int = 128

    @property
    def key(self) -> dict[str, Any]:
        """The entries of a record that identify the case."""
        return {**super().key, "blocks": self.blocks, "index_block": self.index_block}

    @property
    def pairs(self) -> int:
        """Number of query tokens x KV heads x keys."""
        return self.batch * self.s_q * self.h_kv * self.blocks * self.index_block

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes of a call: codes and scales of listed keys, the lists, their page numbers, q and out.

        Queries of a sequence may share few blocks or many; here each counts its own.
        """
        scales = scales_of_token(self.scales, self.h_kv, self.d) // self.h_kv * SCALE_BYTES
        key = 2 * (self.d * KV_DTYPES[self.kv_dtype].itemsize + scales)
        rows = self.batch * self.s_q
        return self.pairs * key + 4 * rows * self.h_q * self.d + 8 * rows * self.h_kv * self.blocks

    @property
    def flops(self) -> int:
        """FLOP of both products."""
        return 4 * self.d * self.h_q // self.h_kv * self.pairs

    def specs(self, num_sms: int) -> list[Any]:
        """Returns the kernel of the decode, and the one that makes tables."""
        kind = SCALE_NAMES.get(self.scales)
        layout, sizes = LAYOUTS[self.layout], CacheSizes(1, self.page_size, self.h_kv, self.d)
        q_shape = (self.batch, self.s_q, self.h_q)
        shape = decode_shape(layout, sizes, q_shape, self.index_block, self.h_kv, self.blocks)
        spec = choose_spec(
            shape, (kind, kind), q_dtype="bfloat16", kv_dtype=str(KV_DTYPES[self.kv_dtype]).removeprefix("torch."),
            num_sms=num_sms, scale_dtype="float16" if kind else "float32",
        )  # fmt: skip
        return [spec, BlockTableSpec(paged=True)]

    def inputs(self, pool: Pool) -> list[GqaCase]:
        """Makes the rotated input sets, over one cache."""
        gen = generator(self.blocks, pool.device)
        shape = (self.batch, self.s_q, self.h_kv)
        most = -(-self.s_k // self.index_block) - 1
        found = []
        for case in super().inputs(pool):
            order = uniform((*shape, most), gen).argsort(dim=-1)
            lists = torch.cat([order[..., : self.blocks - 1], torch.full_like(order[..., :1], most)], dim=-1).int()
            found.append(dataclasses.replace(case, indices=lists, index_block=self.index_block))
        return found

    def some_rows(self, case: GqaCase, number: int) -> tuple[slice, GqaCase]:
        """Returns evenly spaced batch rows, the last one included, and the call for these rows only."""
        assert case.indices is not None
        rows, chosen = super().some_rows(case, number)
        return rows, dataclasses.replace(chosen, indices=case.indices[rows])


M3: Final[dict[str, Any]] = {"layout": "paged_HND", "page_size": 128, "h_q": 64, "h_kv": 4}
"""MiniMax-M3 on one GPU; an engine's page is a block."""
CASES: Final = tuple(
    GqaBlocksCase(batch, 8192, scales, kv_dtype=kv_dtype, s_q=s_q, **M3, must=must)
    for kv_dtype, scales in (("bf16", "none"), ("int8", "per_token_head"))
    for batch, s_q, must in ((64, 1, {"read_fraction": 0.75}), (8, 1, {}), (1, 1, {}), (64, 2, {}))
)
