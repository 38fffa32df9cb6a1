"""FlashAttention 3 as vLLM calls it, in float64 on any device."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from cute_kernels.gqa.reference import reference_gqa_decode


@dataclass
class FlashStandIn:
    """`flash_attn_varlen_func` of vLLM for the arguments that our backend passes; it records each call's arguments.

    Rows of pages that a query does not see may hold NaN.
    """

    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Attention of packed queries. `k` and `v` are packed, too, or pages with a `block_table`."""
        table = options["block_table"] if cu_seqlens_k is None else None
        given = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "k": k, **options}
        self.calls.append(given)
        starts = cu_seqlens_q.tolist()
        assert cu_seqlens_q.dtype is torch.int32 and starts[0] == 0
        assert max(b - a for a, b in pairwise(starts)) <= max_seqlen_q
        assert q.dtype == k.dtype == v.dtype and options["fa_version"] == 3
        assert options["s_aux"] is None or options["s_aux"].dtype is torch.bfloat16
        assert options["s_aux"] is None or not options["return_softmax_lse"], (
            "FlashAttention's would have the sink in it"
        )
        out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
        lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64, device=q.device)
        for i, (a, b) in enumerate(pairwise(starts)):
            if table is None:
                assert cu_seqlens_k is not None and seqused_k is None
                rows = slice(*cu_seqlens_k[i : i + 2].tolist())
                keys, values = k[rows], v[rows]
            else:
                assert seqused_k is not None and seqused_k.dtype is torch.int32 and table.dtype is torch.int32
                length, size = int(seqused_k[i]), k.shape[1]
                assert length <= table.shape[1] * size, "a length beyond the table"
                pages = table[i, : -(-length // size)].long()
                keys, values = (t[pages].flatten(0, 1)[:length] for t in (k, v))
            assert len(keys) <= max_seqlen_k
            if b > a:
                left, _ = options["window_size"]
                (out[a:b],), (own_lse,) = reference_gqa_decode(
                    q[a:b].unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), layout="BSNH", s_aux=options["s_aux"],
                    causal=options["causal"], window=None if left < 0 else left + 1,
                    softcap=options["softcap"] or None, softmax_scale=options["softmax_scale"],
                )  # fmt: skip
                lse[:, a:b] = own_lse.transpose(0, 1)
        result = out.to(q.dtype)
        if options["out"] is not None:
            result = options["out"].copy_(result)
        return (result, lse.float()) if options["return_softmax_lse"] else result
