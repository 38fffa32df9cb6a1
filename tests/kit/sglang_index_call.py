"""Stand-ins for the objects of SGLang 0.5.23's sparse indexer in a step that decodes, verifies or drafts."""

import enum
import types
from typing import Any

import torch

from cute_kernels.integrations import sglang_indexer
from fp8_mla import reference_index_decode
from tests.kit.index_cases import index_call

TOPK, LENGTHS = 64, [300, 65, 130]


class TopkBackend(enum.Enum):
    SGL_KERNEL, TORCH = "sgl-kernel", "torch"

    def is_sgl_kernel(self) -> bool:
        return self is TopkBackend.SGL_KERNEL


class TopkTransformMethod(enum.IntEnum):
    PAGED, RAGGED = 1, 2


class Call:
    """The queries of a step as SGLang has them, each with a row of tables and a length, followed by rows of padding."""

    def __init__(
        self, counts: list[int], heads: int = 16, padding: int = 0, fuses: bool = True, device: str = "cpu"
    ) -> None:
        made = index_call(LENGTHS, heads=heads, max_pages=6, exact=True)
        tokens, self.real = sum(counts) + padding, sum(counts)
        queries = index_call([1] * tokens, heads=heads, exact=True, seed=1)
        self.q, self.weights = queries["q"].squeeze(1).to(device), queries["weights"].transpose(1, 2).to(device)
        self.keys = made["k_cache"].flatten(1).to(device)
        self.table = (
            made["block_table"].repeat_interleave(torch.tensor(counts, dtype=torch.int64, device="cpu"), 0).to(device)
        )
        last = [length - count + 1 + i for length, count in zip(LENGTHS, counts, strict=True) for i in range(count)]
        self.lengths = torch.tensor(last, dtype=torch.int32, device=device)
        self.metadata = types.SimpleNamespace(
            get_page_table_64=lambda: self.table, get_seqlens_expanded=lambda: self.lengths,
            get_seqlens_int32=lambda: made["cache_seqlens"], get_dsa_extend_len_cpu=lambda: counts,
            force_unfused_topk=False, topk_backend=TopkBackend.SGL_KERNEL, paged_mqa_schedule_metadata="a plan",
            topk_transform_method=TopkTransformMethod.PAGED, attn_metadata=types.SimpleNamespace(page_size=64),
        )  # fmt: skip
        self.pool = types.SimpleNamespace(index_page_size=64, get_index_k_with_scale_buffer=lambda layer_id: self.keys)
        switch = types.SimpleNamespace(get=lambda: fuses)
        self.module: Any = types.ModuleType("dsa_indexer")
        vars(self.module).update(
            get_token_to_kv_pool=lambda: self.pool, envs=types.SimpleNamespace(SGLANG_DSA_FUSE_TOPK=switch)
        )
        self.indexer: Any = types.SimpleNamespace(
            index_topk=TOPK, num_init_tokens=0, num_local_tokens=0,
            _get_index_k_read_buffer=lambda pool, layer_id: pool.get_index_k_with_scale_buffer(layer_id=layer_id),
        )  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        return {
            "forward_batch": None, "layer_id": 5, "q_fp8": self.q, "weights": self.weights, "metadata": self.metadata
        }  # fmt: skip

    def run(self, original: Any = None) -> Any:
        """The hook's result, or `original`'s result if the hook does not take the call."""
        self.module.Indexer = type("Indexer", (), {"_get_topk_paged": original or (lambda *args, **kwargs: kwargs)})
        for _ in range(2):
            sglang_indexer.change_indexer(self.module)
        method = self.module.Indexer._get_topk_paged
        assert not hasattr(method.__wrapped__, "__wrapped__")
        return method(self.indexer, **self.arguments())

    def expected(self, positions: bool = False) -> torch.Tensor:
        """The result for each query by the definition."""
        found = reference_index_decode(
            self.q[: self.real, None].cpu(), self.weights[: self.real].squeeze(2)[:, None].cpu(),
            self.keys.unflatten(1, (64, 132)).cpu(), block_table=self.table.cpu(), cache_seqlens=self.lengths.cpu(),
            topk=TOPK,
            first=self.indexer.num_init_tokens, last=self.indexer.num_local_tokens,
        )[int(positions)].flatten(0, 1)  # fmt: skip
        padding = torch.full((len(self.q) - self.real, TOPK), -1, dtype=torch.int32, device="cpu")
        return torch.cat([found, padding])
