"""Every function on CPU tensors gives the same bits in the environments of real programs.

A model sets torch's default dtype, loads weights under a default device of meta, serves in inference mode and compiles.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import fp8_mla
from tests.kit.environments import default_dtype
from tests.kit.samples import SAMPLES, Sample, copied

ENVIRONMENTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    **{
        str(dtype): lambda dtype=dtype: default_dtype(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)
    },
    "meta": lambda: torch.device("meta"),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}
EVERYWHERE = pytest.mark.parametrize("environment", ENVIRONMENTS)
EACH_SAMPLE = pytest.mark.parametrize("name", SAMPLES)
_clean: dict[str, tuple[dict[str, Any], tuple[torch.Tensor, ...]]] = {}


def clean(name: str) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    """Arguments and results of a sample in a process that has set nothing."""
    if name not in _clean:
        arguments = SAMPLES[name].inputs("cpu")
        _clean[name] = arguments, SAMPLES[name].run(**copied(arguments))
    return _clean[name]


def differences(got: Any, expected: Any) -> list[str]:
    """Descriptions of the results that differ in a bit."""
    found = []
    for i, (ours, want) in enumerate(zip(got, expected, strict=True)):
        kinds = [(t.dtype, t.device, t.shape) for t in (ours, want)]
        if kinds[0] != kinds[1]:
            found.append(f"{i}: {kinds[0]} instead of {kinds[1]}")
        elif not torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (ours, want))):
            found.append(f"{i}: other bits")
    return found


def skipped(sample: Sample, environment: str) -> bool:
    return sample.backward and environment in ("inference_mode", "no_grad")


@EVERYWHERE
@EACH_SAMPLE
def test_results_are_the_same(name: str, environment: str) -> None:
    if skipped(SAMPLES[name], environment):
        return  # that environment disables gradients
    arguments, expected = clean(name)
    with ENVIRONMENTS[environment]():
        got = SAMPLES[name].run(**copied(arguments))
        again = SAMPLES[name].run(**copied(arguments))
    assert differences(got, expected) == []
    assert differences(again, expected) == []
    # nothing of that environment is kept
    assert differences(SAMPLES[name].run(**copied(arguments)), expected) == []


@EVERYWHERE
@EACH_SAMPLE
def test_inputs_are_the_same(name: str, environment: str) -> None:
    """Tests and benchmarks run in these environments, too, and must draw the same inputs."""
    arguments, _ = clean(name)
    with ENVIRONMENTS[environment]():
        made = SAMPLES[name].inputs("cpu")
    assert made.keys() == arguments.keys()
    pairs = [(made[key], value) for key, value in arguments.items() if isinstance(value, torch.Tensor)]
    assert differences(*zip(*pairs, strict=True)) == []
    assert all(made[key] == value for key, value in arguments.items() if not isinstance(value, torch.Tensor))


def compiled_ways() -> Iterator[tuple[str, bool | None, str]]:
    """The samples of an operator alternate between two ways. An operator with one sample takes both."""
    ways = [(None, "torch.float64"), (True, "meta")]
    for _, names in itertools.groupby(sorted(SAMPLES), key=lambda name: name.partition(",")[0]):
        samples = list(names)
        for name, way in zip(samples * 2 if len(samples) == 1 else samples, itertools.cycle(ways), strict=False):
            yield name, *way


@pytest.mark.parametrize(("name", "dynamic", "environment"), list(compiled_ways()))
def test_compiled_calls_are_the_same(name: str, dynamic: bool | None, environment: str) -> None:
    torch._dynamo.reset()
    sample = SAMPLES[name]
    arguments, expected = clean(name)
    # torch.compile does not trace autograd.grad: that graph break comes from torch
    compiled = torch.compile(sample.run, fullgraph=not sample.backward, dynamic=dynamic, backend="aot_eager")
    with ENVIRONMENTS[environment]():
        assert differences(compiled(**copied(arguments)), expected) == []
    assert differences(compiled(**copied(arguments)), expected) == []
    torch._dynamo.reset()


@EVERYWHERE
def test_the_token_format(environment: str) -> None:
    """Covers what `fp8_mla` has besides the oracle."""

    def results() -> list[torch.Tensor]:
        gen = torch.Generator(device="cpu").manual_seed(0)
        kv = torch.randn((2, 3, 576), generator=gen, dtype=torch.float32, device="cpu")
        packed = fp8_mla.pack(kv)
        table = torch.tensor([[4, 1], [-1, 0]], dtype=torch.int32, device="cpu")
        lengths = torch.tensor([5, 9], dtype=torch.int32, device="cpu")
        return [
            packed,
            fp8_mla.pack(kv.bfloat16()),
            *(fp8_mla.unpack(packed, dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)),
            fp8_mla.slots_from_block_table(table, lengths, 4, num_pages=5),
            fp8_mla.slots_from_positions(table, table, 4, cache_seqlens=lengths),
            fp8_mla.valid_slots(table, 3),
        ]

    expected = results()
    with ENVIRONMENTS[environment]():
        assert differences(results(), expected) == []


def test_every_public_function_has_a_sample() -> None:
    import cute_kernels

    assert {name.partition(",")[0] for name in SAMPLES} == {*cute_kernels.__all__, "flash_mla_with_kvcache"}
