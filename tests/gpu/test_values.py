"""Every family of values on the GPU, in each form of MLA decoding, under the tolerance rule."""

from typing import Any

import pytest
import torch

from cute_kernels import mla_fp8_decode
from cute_kernels.mla.plan import plan_decode
from tests.kit.compare import bits
from tests.kit.mla_cases import DecodeCase, dense_case, sparse_case
from tests.kit.values import FAMILIES, refill

EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)
SPARSE: dict[str, Any] = {"batch": 1, "s_q": 2, "topk": 1024, "num_slots": 4096, "invalid": False}
WITH_FORMATS: dict[str, Any] = {**SPARSE, "h_q": 64, "sink": "finite"}
FORMS: dict[str, dict[str, Any]] = {
    **{f"{heads} heads": {**SPARSE, "h_q": heads} for heads in (8, 16, 32, 64, 128)},
    "one query": {**SPARSE, "h_q": 64, "s_q": 1, "topk": 2048, "invalid": True},
    "4 splits": {**SPARSE, "h_q": 64, "num_splits": 4},
    "balanced": {**SPARSE, "h_q": 64, "batch": 3, "lengths": "batch", "topk": 900},
    "dense": {"seqlens": [1500, 70], "h_q": 64},
    "dense, few heads": {"seqlens": [700, 1200], "h_q": 16, "s_q": 2},
    "v3.2 without rope": {**WITH_FORMATS, "formats": ("v3.2_nope",)},
    "v3.2 without rope, dense": {"seqlens": [1500, 70], "h_q": 64, "cache_format": "v3.2_nope"},
    "v4": {**WITH_FORMATS, "formats": ("v4",)},
    "v4, few heads, 4 splits": {**WITH_FORMATS, "formats": ("v4",), "h_q": 16, "num_splits": 4},
    "v4.1": {**WITH_FORMATS, "formats": ("v4.1",)},
    "fp4": {**WITH_FORMATS, "formats": ("v4.1_fp4",)},
    "v3.2 twice": {**WITH_FORMATS, "formats": ("v3.2", "v3.2"), "topk": 128, "extra_topk": 700},
    "v4 twice": {**WITH_FORMATS, "formats": ("v4", "v4"), "topk": 128, "extra_topk": 700},
    "v4.1 twice": {**WITH_FORMATS, "formats": ("v4.1", "v4.1"), "topk": 128, "extra_topk": 700},
    "v4.1 and fp4": {**WITH_FORMATS, "formats": ("v4.1", "v4.1_fp4"), "topk": 128, "extra_topk": 700},
}
EACH_FORM = pytest.mark.parametrize("form", FORMS)


def made(form: str, family: str, seed: int = 0) -> tuple[DecodeCase, int | None]:
    """A decode of a form with values of a family, and its number of splits."""
    options = {**FORMS[form], "seed": seed, "device": "cuda"}
    num_splits = options.pop("num_splits", None)
    case = dense_case(**options) if "seqlens" in options else sparse_case(**options)
    return refill(case, family, seed=seed + 1), num_splits


def kernel_specs() -> list[Any]:
    """Kernels of the other formats, as the planner chooses them."""
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    specs = []
    for options in FORMS.values():
        formats = options.get("formats") or (options.get("cache_format", ""),)
        if not formats[0]:
            continue  # shipped specs are compiled in any case
        sparse = "topk" in options
        keys = options["topk"] if sparse else 1664  # what the table of the longest sequence can name
        plan = plan_decode(
            sparse=sparse,
            batch=options.get("batch", len(options.get("seqlens", ()))),
            s_q=options.get("s_q", 1),
            h_q=options["h_q"],
            max_keys=keys,
            num_sms=num_sms,
            ragged=not sparse,
            num_splits=options.get("num_splits"),
            cache_format=formats[0],
            extra_format=formats[1] if len(formats) > 1 else "",
            extra_keys=options.get("extra_topk", 0),
        )
        specs.append(plan.spec)
    return list(dict.fromkeys(specs))


@EACH_FAMILY
@EACH_FORM
def test_every_family_holds_the_tolerance(run_decode: Any, form: str, family: str) -> None:
    case, num_splits = made(form, family)
    run_decode(case, num_splits=num_splits)


@pytest.mark.parametrize("family", ["normal", "tokens", "tokens and tiles", "heads", "rising", "unwritten"])
@pytest.mark.parametrize("form", ["64 heads", "16 heads", "4 splits", "balanced", "dense", "v4", "v4.1 and fp4"])
def test_the_same_call_gives_the_same_bits(form: str, family: str) -> None:
    case, num_splits = made(form, family)

    def decode() -> Any:
        return mla_fp8_decode(case.q, case.kv_cache, **case.options(), num_splits=num_splits, return_lse=True)

    first = decode()
    for _ in range(20):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, decode(), strict=True))


@EACH_FAMILY
@pytest.mark.parametrize("form", ["64 heads", "v4"])
def test_splits_change_results_by_rounding_only(run_decode: Any, form: str, family: str) -> None:
    case, _ = made(form, family, seed=3)
    for num_splits in (1, 2, 16):
        run_decode(case, num_splits=num_splits)


@pytest.mark.parametrize("family", ["tokens", "tokens and tiles", "unwritten", "rising"])
@pytest.mark.parametrize("h_q", [16, 64])
def test_nothing_passes_from_one_work_tile_to_the_next(run_decode: Any, h_q: int, family: str) -> None:
    """A CTA has several queries. With few heads, which one kernel serves, each has the bits that it has alone."""
    case = refill(sparse_case(batch=300, h_q=h_q, topk=192, device="cuda"), family)
    run_decode(case, num_splits=1)
    out, lse = mla_fp8_decode(case.q, case.kv_cache, **case.options(), num_splits=1, return_lse=True)
    for row in (0, 131, 140, 299) if h_q == 16 else ():
        one = case.rows([row])
        alone = mla_fp8_decode(one.q, one.kv_cache, **one.options(), num_splits=1, return_lse=True)
        assert torch.equal(bits(alone[0][0]), bits(out[row])) and torch.equal(bits(alone[1][0]), bits(lse[row])), row
