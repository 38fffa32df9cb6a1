"""Stages of the GQA decode kernel are freed after they are read."""

import dataclasses

import pytest

from cute_kernels.gqa.spec import GqaDecodeSpec
from tests.kit import sass

SPEC = GqaDecodeSpec(q_dtype="bfloat16", kv_dtype="int8", d=128, columns=8)


@pytest.mark.parametrize(
    "spec",
    [
        dataclasses.replace(SPEC, k_scales="per_group_32", v_scales="per_group_32"),
        dataclasses.replace(SPEC, kv_dtype="float8_e4m3fn", k_scales="per_head", v_scales="per_head"),
        dataclasses.replace(SPEC, kv_dtype="bfloat16", d=64, columns=16),
        dataclasses.replace(SPEC, k_scales="per_token", v_scales="per_token", v_dtype="uint8"),
    ],
    ids=lambda spec: f"{spec.kv_dtype} {spec.v_dtype} {spec.k_scales}",
)
def test_no_load_is_under_way_when_a_stage_is_freed(spec: GqaDecodeSpec) -> None:
    """Loads that waited behind uncoalesced ones read the next tile: 1 of 70 calls was wrong on an H200 under load."""
    assert sass.arrivals_before_loads(spec) == []
