"""Cases of the latent formats, and the tolerance rule over two caches."""

import dataclasses
from typing import Any

import pytest
import torch

from cute_kernels import mla_fp8_decode
from fp8_mla import reference_decode
from tests.kit.compare import bf16_yardstick, check_decode
from tests.kit.mla_cases import FORMS, SIZE_KINDS, dense_case, sparse_case

EACH_FORM = pytest.mark.parametrize(("formats", "layout"), FORMS, ids=str)


def decode(case: Any) -> Any:
    return mla_fp8_decode(case.q, case.kv_cache, **case.options(), return_lse=True)


@EACH_FORM
@pytest.mark.parametrize("scales", SIZE_KINDS)
def test_sparse_cases_pass_the_rule(formats: tuple[str, ...], layout: str | None, scales: str) -> None:
    case: Any = sparse_case(
        formats=formats, cache_layout=layout, batch=4, h_q=3, s_q=2, topk=70, extra_topk=33, page_size=5,
        extra_page_size=2, num_slots=200, scales=scales, lengths="query", sink="inf", seed=1,
    )  # fmt: skip
    out, lse = decode(case)
    check_decode(out, lse, **case.arguments()).require()
    logits = reference_decode(**{**case.arguments(), "s_aux": None})[1]
    assert logits.isfinite().any() and not out.isnan().any(), "no query sees poison"
    without = {"extra_indices" if len(formats) == 2 else "indices": torch.full_like(case.indices[..., :1], -1)}
    wrong = check_decode(*decode(dataclasses.replace(case, **without)), **case.arguments())
    assert wrong.problems, "keys are missing"


@pytest.mark.parametrize(("formats", "layout"), [form for form in FORMS if len(form[0]) == 1], ids=str)
def test_dense_cases_pass_the_rule(formats: tuple[str, ...], layout: str | None) -> None:
    case: Any = dense_case(
        cache_format=formats[0], cache_layout=layout, seqlens=[9, 0, 31, 64], h_q=3, s_q=2, page_size=7, sink="finite"
    )
    out, lse = decode(case)
    check_decode(out, lse, **case.arguments()).require()
    assert not out.isnan().any()


def test_the_second_cache_is_in_the_yardstick() -> None:
    """Two caches of one format must equal one cache with all keys."""
    case: Any = sparse_case(
        formats=("v4", "v4"), batch=2, h_q=3, topk=20, extra_topk=30, page_size=64, extra_page_size=64, num_slots=128
    )
    both = torch.cat([case.kv_cache, case.extra_kv_cache])
    moved = torch.where((case.extra_indices >= 0) & (case.extra_indices < 128), case.extra_indices + 128, -1)
    first = torch.where(case.indices < 128, case.indices, -1)
    single = bf16_yardstick(case.q, both, indices=torch.cat([first, moved], dim=-1), cache_format="v4")
    double = bf16_yardstick(**case.arguments())
    torch.testing.assert_close(double.out, single.out)
    torch.testing.assert_close(double.lse, single.lse)
    torch.testing.assert_close(double.noise, single.noise)


def test_rows_of_a_case_are_rows_of_all_its_lists() -> None:
    case: Any = sparse_case(formats=("v4", "v4"), batch=3, h_q=2, topk=5, extra_topk=4, lengths="batch", num_slots=64)
    whole, part = decode(case), decode(case.rows([2, 0]))
    for one, other in zip(whole, part, strict=True):
        torch.testing.assert_close(one[[2, 0]], other)
