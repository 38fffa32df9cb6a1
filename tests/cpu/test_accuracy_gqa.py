"""The accuracy table of docs/users/gqa_decode.md is up to date, and finer scales are more accurate."""

import pytest

from bench import gqa_accuracy
from bench.gqa_accuracy import KINDS, SETS
from bench.report import markdown

SHARED = ("per_tensor", "per_head")
TOKEN_SCALES = [name for name in KINDS if name not in SHARED]


@pytest.fixture(scope="module")
def found():
    return {name: gqa_accuracy.errors(name) for name in SETS}


def test_the_page_is_up_to_date(found):
    fresh = gqa_accuracy.table(found)
    _, recorded, _ = markdown.split(gqa_accuracy.PAGE.read_text(encoding="utf-8"), gqa_accuracy.BLOCK)
    assert gqa_accuracy.same(recorded, fresh), f"run python -m bench.gqa_accuracy; the table is now\n{fresh}"


@pytest.mark.parametrize("name", SETS)
def test_a_scale_that_covers_less_loses_less(found, name):
    """In each chain a scale covers part of what the previous one covers. 5% allows for noise of equal errors."""
    errors = found[name]
    for chain in (
        ("per_tensor", "per_head", "per_token_head", "per_group, 64", "per_group, 32", "none, bfloat16"),
        ("per_tensor", "per_token", "per_token_head"),
    ):
        for coarse, fine in zip(chain, chain[1:], strict=False):
            for field in ("out", "lse"):
                assert getattr(errors[fine], field) < 1.05 * getattr(errors[coarse], field), (coarse, fine, field)


def test_normal_numbers_need_no_fine_scales(found):
    assert found["normal"]["per_tensor"].out < 0.04
    assert found["normal"]["per_token_head"].out < 0.02


def test_outlier_channels_need_scales_of_heads_and_groups(found):
    errors = found["channels"]
    assert errors["per_token_head"].out < 0.5 * min(errors[name].out for name in (*SHARED, "per_token"))
    assert errors["per_group, 32"].out < 0.75 * errors["per_token_head"].out


def test_outlier_tokens_need_scales_of_tokens(found):
    errors = found["tokens"]
    for field in ("out", "lse"):
        coarse = min(getattr(errors[name], field) for name in SHARED)
        assert max(getattr(errors[name], field) for name in TOKEN_SCALES) < coarse / 10
