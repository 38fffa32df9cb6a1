"""A prepared launch of the latent kernel must still refuse memory that neither the key nor the kernel checks."""

from typing import Any

import pytest
import torch

from cute_kernels.mla import launch
from cute_kernels.mla import op as mla_op
from cute_kernels.mla.request import DECODE
from cute_kernels.runtime import workspace
from tests.kit import bad_input_latent
from tests.kit.prepared import prepare

Call = dict[str, Any]


def prepared(monkeypatch: pytest.MonkeyPatch, call: Call, caches_read: int) -> list[Any]:
    """A prepared launch for a call, and the list of its launches."""
    launched: list[Any] = []
    floats, length = torch.zeros(8), torch.zeros(1, dtype=torch.int32).expand(2, 2)
    need: Any = workspace.Need(torch.device("cpu"), 0, 0, None)
    caches = [call["kv_cache"], *([call["extra_kv_cache"]] if call.get("extra_kv_cache") is not None else [])]
    checked = len(caches) > caches_read or any(cache.stride(1) < cache.shape[2] for cache in caches)
    read = tuple(range(caches_read))

    def kernel(request: Any, **arguments: Any) -> None:
        launched.append(arguments)

    found = launch.PreparedLaunch(kernel, read, checked, need, floats, length, floats, floats, set())
    prepare(monkeypatch, launch, found, DECODE.request(**call))
    monkeypatch.setattr(launch, "_prepare", refuse)
    launched.clear()
    return launched


def refuse(key: Any, request: Any) -> None:
    """Stands for the preparation of a new call, which runs the checks."""
    launch.check(request)
    raise AssertionError("such a call would be prepared, and is not checked")


def planar(num_pages: int, num_bytes: int, page_stride: int = 4 * 584) -> torch.Tensor:
    """V4 pages of 4 tokens with this many bytes. Tokens overlap, so the tensor ends before its memory must."""
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    return memory.as_strided((num_pages, 4, 584), (page_stride, 500, 1))


V4 = bad_input_latent.planar_call("cpu")
NOPE = {**V4, "kv_cache": torch.zeros(3, 4, 528, dtype=torch.uint8), "cache_format": "v3.2_nope"}
TWO = {**bad_input_latent.two_caches_call("cpu"), "extra_cache_format": "v4.1_fp4"}
EMPTY = {**TWO, "extra_kv_cache": TWO["extra_kv_cache"][:0]}
CASES: dict[str, tuple[Call, Call, int]] = {
    "memory that ends early": ({**V4, "kv_cache": planar(3, 7008)}, {"kv_cache": planar(3, 6756)}, 1),
    "pages that overlap": ({**V4, "kv_cache": planar(1, 2336, 16)}, {"kv_cache": planar(3, 2368, 16)}, 1),
    "other bytes": (NOPE, {"kv_cache": NOPE["kv_cache"][..., 512:]}, 1),
    "other bytes of the second cache": (TWO, {"extra_kv_cache": TWO["extra_kv_cache"][..., 272:]}, 2),
    "indices of a cache without pages": (EMPTY, {"extra_indices": EMPTY["extra_indices"].long()}, 1),
    "lengths of a cache without pages": (EMPTY, {"extra_topk_length": 7}, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_prepared_launch_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, caches_read = CASES[name]
    launched = prepared(monkeypatch, right, caches_read)
    mla_op._decode_on_gpu(DECODE.request(**right))
    assert len(launched) == 1
    with pytest.raises((TypeError, ValueError)):
        mla_op._decode_on_gpu(DECODE.request(**{**right, **wrong}))
    assert len(launched) == 1
