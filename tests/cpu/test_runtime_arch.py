"""Devices without kernels are named before any launch, and each device is asked for its architecture once."""

from typing import Any

import pytest
import torch

from cute_kernels.runtime import arch


def test_cpu_is_not_sm90() -> None:
    assert not arch.is_sm90(torch.device("cpu"))
    with pytest.raises(ValueError, match="^q: got a tensor on cpu; needs an SM90 GPU"):
        arch.require_sm90("q", torch.device("cpu"))


@pytest.mark.parametrize(
    "name, capability", [("NVIDIA A100", (8, 0)), ("NVIDIA B200", (10, 0)), ("NVIDIA L4", (8, 9)), ("next", (9, 1))]
)
def test_other_gpus_are_named(name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {1: (name, capability)})
    assert arch.device_capability(1) == capability
    assert not arch.is_sm90(torch.device("cuda:1"))
    found = f"{name} with compute capability {capability[0]}.{capability[1]}"
    with pytest.raises(ValueError, match=f"^kv_cache: got a tensor on cuda:1, {found}; needs an SM90 GPU"):
        arch.require_sm90("kv_cache", torch.device("cuda:1"))


def test_each_device_is_asked_once_and_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch, {0: ("NVIDIA H200", (9, 0)), 1: ("NVIDIA A100", (8, 0))})
    for _ in range(3):
        arch.require_sm90("q", torch.device("cuda:0"))
        assert not arch.is_sm90(torch.device("cuda:1"))
    assert sorted(asked) == [0, 1]


def test_a_device_without_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {0: ("NVIDIA H200", (9, 0)), 1: ("NVIDIA A100", (8, 0))})
    for current, expected in ((0, True), (1, False), (0, True)):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=current: index)
        assert arch.is_sm90(torch.device("cuda")) == expected


def pretend(monkeypatch: pytest.MonkeyPatch, gpus: dict[int, tuple[str, tuple[int, int]]]) -> list[int]:
    """Makes torch report these GPUs; returns the list of indices that it was asked about."""
    asked: list[int] = []

    def capability(index: int) -> tuple[int, int]:
        asked.append(index)
        return gpus[index][1]

    arch._capability.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpus[device.index][0])
    return asked


@pytest.fixture(autouse=True)
def forget_devices() -> Any:
    yield
    arch._capability.cache_clear()
