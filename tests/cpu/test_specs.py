"""A spec that no kernel can be built from says why. Shipped specs are checked where they compile."""

from dataclasses import replace
from typing import Any

import pytest

from cute_kernels.gqa.append_spec import MAX_HELD, KvAppendSpec
from cute_kernels.gqa.gather_spec import KvGatherSpec
from cute_kernels.gqa.spec import GqaDecodeSpec
from cute_kernels.indexer.append_spec import IndexAppendSpec
from cute_kernels.indexer.score_spec import ScoreSpec
from cute_kernels.indexer.topk_spec import TopkSpec
from cute_kernels.merge.spec import MergeSpec
from cute_kernels.mla.append_spec import MlaAppendSpec
from cute_kernels.mla.crossover.spec import MlaCrossoverSpec
from cute_kernels.mla.spec import MlaDecodeSpec

MLA_APPEND = MlaAppendSpec()
KV_APPEND = KvAppendSpec("bfloat16", 128, "given", "given", "float32")
GATHER = KvGatherSpec("int8", "bfloat16", 128)
MERGE = MergeSpec(d=512, in_dtype="float32", out_dtype="bfloat16", has_sink=False, has_lse=True, lanes=128)
GQA = GqaDecodeSpec("bfloat16", "int8", 128, 8, k_scales="per_head", v_scales="per_head")
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (MLA_APPEND, {"tokens_per_warp": 3}, "tokens_per_warp is 3"),
    (MLA_APPEND, {"warps": 33}, "warps is 33"),
    (MLA_APPEND, {"cache_format": "v5"}, "cache_format is 'v5'"),
    (KV_APPEND, {"dtype": "float32"}, "dtype is 'float32'"),
    (KV_APPEND, {"d": 96}, "d is 96"),
    (KV_APPEND, {"k_scale": "per_tensor"}, "k_scale is 'per_tensor'"),
    (KV_APPEND, {"v_scale": "per_group_16"}, "v_scale is 'per_group_16'"),
    (KV_APPEND, {"scale_dtype": "bfloat16"}, "scale_dtype is 'bfloat16'"),
    (KV_APPEND, {"warps": 33}, "warps is 33"),
    (KV_APPEND, {"team": 4}, "team is 4; 8 lanes"),
    (KV_APPEND, {"team": 12}, "team is 12"),
    (KV_APPEND, {"held": 2}, "a head is 8 lanes of one piece"),
    (KV_APPEND, {"k_scale": "per_token", "held": MAX_HELD + 1}, f"held is {MAX_HELD + 1}"),
    (GATHER, {"kv_dtype": "bfloat16"}, "kv_dtype is 'bfloat16'"),
    (GATHER, {"dtype": "float32"}, "dtype is 'float32'"),
    (GATHER, {"d": 96}, "d is 96"),
    (GATHER, {"warps": 0}, "warps is 0"),
    (MERGE, {"d": 12}, "d is 12"),
    (MERGE, {"d": 520}, "d is 520"),
    (MERGE, {"in_dtype": "float64"}, "in_dtype is float64"),
    (MERGE, {"out_dtype": "int8"}, "out_dtype is int8"),
    (MERGE, {"lanes": 24}, "lanes is 24"),
    (MERGE, {"groups": 16}, "groups is 16"),
    (MERGE, {"lanes": 8}, "8 lanes leave 16 vectors"),
    (MERGE, {"d": 320, "block_scales": True}, "d is 320; with block scales it is a multiple of 256"),
    (GQA, {"kv_dtype": "int4"}, "kv_dtype is int4; it is int8, float8_e4m3fn or that of q, bfloat16"),
    (MlaDecodeSpec(sparse=True), {"merge_lanes": 0, "balanced": True},
     "balanced is True with merge_lanes 0; shares need a merge"),
    (MlaCrossoverSpec(sparse=True), {"exchange": "keys"}, "exchange is 'keys'; known are ('codes', 'values')"),
    (IndexAppendSpec("ue8m0"), {"scale": "amax"}, "scale is"),
    (IndexAppendSpec("ue8m0"), {"dtype": "float16"}, "dtype is"),
    (IndexAppendSpec("ue8m0"), {"warps": 0}, "warps is"),
    (ScoreSpec(16), {"heads": 8}, "heads is 8"),
    (ScoreSpec(16), {"queries": 5}, "queries is 5"),
    (ScoreSpec(16), {"stages": 1}, "stages is 1"),
    (TopkSpec(1), {"cluster": 3}, "cluster is 3"),
    (TopkSpec(1), {"quads": 99}, "quads is 99"),
    (TopkSpec(1), {"held": 3}, "held is 3"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "changes", "reason"), WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_spec_says_what_it_cannot_do(spec: Any, changes: dict[str, Any], reason: str) -> None:
    assert spec.can_implement() == []
    assert reason in replace(spec, **changes).can_implement()[0]
