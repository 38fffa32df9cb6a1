"""A call runs on the device of its tensors, whichever device is current, and all its tensors must be there."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_kernels import mla_fp8_decode
from tests.kit import specs
from tests.kit.bad_input import TABLES
from tests.kit.bits import require_same_bits
from tests.kit.mla_cases import sparse_case
from tests.kit.samples import LONG_SAMPLES, SAMPLES, copied

EVERY = {**SAMPLES, **LONG_SAMPLES}
EACH_SAMPLE = pytest.mark.parametrize("name", EVERY)
two_gpus = pytest.mark.usefixtures("second_gpu")


def kernel_specs() -> list[Any]:
    return [*specs.of_tables(), *specs.of_samples()]


@pytest.fixture
def second_gpu() -> None:
    found = torch.cuda.device_count()
    if found < 2:
        pytest.skip(f"needs two GPUs; found {found}")


@pytest.fixture(autouse=True)
def device_0_is_current() -> Iterator[None]:
    with torch.cuda.device(0):
        yield


@functools.cache
def arguments(name: str) -> dict[str, Any]:
    """Arguments of a sample on the CPU. Each device gets a copy of them."""
    return EVERY[name].inputs("cpu")


def on(name: str, device: str) -> dict[str, Any]:
    """The arguments on a device, strides kept."""
    moved = {}
    for key, value in copied(arguments(name)).items():
        if isinstance(value, torch.Tensor):
            storage = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
            value = storage.to(device).as_strided(value.shape, value.stride(), value.storage_offset())
        moved[key] = value
    return moved


def run(name: str, device: str) -> list[torch.Tensor]:
    """Results of a sample, checked to be on `device`, then moved to the CPU."""
    results = EVERY[name].run(**on(name, device))
    assert all(t.device == torch.device(device) for t in results)
    return [t.cpu() for t in results]


@two_gpus
@EACH_SAMPLE
def test_tensors_of_a_device_that_is_not_current(name):
    expected = run(name, "cuda:0")
    for _ in range(2):  # the first call plans, the second uses its plan
        require_same_bits(run(name, "cuda:1"), expected)
        assert torch.cuda.current_device() == 0
    require_same_bits(run(name, "cuda:0"), expected)


@two_gpus
@EACH_SAMPLE
def test_a_device_context_changes_nothing(name):
    expected = run(name, "cuda:0")
    with torch.cuda.device(1):
        require_same_bits(run(name, "cuda:0"), expected)
        assert torch.cuda.current_device() == 1
        require_same_bits(run(name, "cuda:1"), expected)


@EACH_SAMPLE
def test_a_call_runs_on_the_current_stream_of_its_device(name):
    """The call must see results of earlier work on that stream, and later work on it must wait for the call."""
    expected = run(name, "cuda:0")
    late = on(name, "cuda:0")
    torch.cuda.synchronize()
    tensors = {key: value for key, value in late.items() if isinstance(value, torch.Tensor)}
    values = {key: value.clone() for key, value in tensors.items()}
    for value in tensors.values():
        value.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(0)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms, in which a launch on any other stream would read zeros
        for key, value in values.items():
            tensors[key].copy_(value)
        results = EVERY[name].run(**late)
        got = [t.clone() for t in results]
    stream.synchronize()
    require_same_bits([t.cpu() for t in got], expected)


@two_gpus
@EACH_SAMPLE
def test_a_current_stream_of_another_device_is_not_used(name):
    """`torch.cuda.stream` with a stream of device 1 makes device 1 current; the stream of device 0 stays."""
    expected, call = run(name, "cuda:0"), on(name, "cuda:0")
    busy = torch.cuda.Stream(1)
    with torch.cuda.stream(busy):
        assert torch.cuda.current_device() == 1
        torch.cuda._sleep(500_000_000)  # about 300 ms
        end = torch.cuda.Event()
        end.record()
        result = EVERY[name].run(**call)
        torch.cuda.current_stream(0).synchronize()
        assert not end.query(), "the call waited for a stream of another device"
        require_same_bits([t.cpu() for t in result], expected)
    torch.cuda.synchronize(1)


@two_gpus
def test_workspaces_of_devices_are_apart():
    """Split calls run on two devices at once; each device must have its own partials and counters."""
    cases = [sparse_case(batch=2, h_q=128, topk=2048, seed=1, device=f"cuda:{i}") for i in range(2)]
    expected = [mla_fp8_decode(case.q, case.kv_cache, **case.options(), num_splits=8) for case in cases]
    for _ in range(50):
        got = [mla_fp8_decode(case.q, case.kv_cache, **case.options(), num_splits=8) for case in cases]
    for i in range(2):
        torch.cuda.synchronize(i)
        assert torch.equal(got[i], expected[i])


@two_gpus
@EACH_SAMPLE
def test_a_graph_on_another_device_than_the_first(name):
    if EVERY[name].backward or "packed" in name:
        return  # autograd, and a check that reads lengths, cannot be captured
    expected = run(name, "cuda:1")
    call = on(name, "cuda:1")
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            EVERY[name].run(**call)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # without a stream, torch captures on the device that the process first captured on
        with torch.cuda.graph(graph, stream=stream):
            results = EVERY[name].run(**call)
    for t in results:
        t.zero_()
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        graph.replay()
    torch.cuda.synchronize(1)
    require_same_bits([t.cpu() for t in results], expected)


def mixed() -> list[tuple[str, str]]:
    """Each table with each of its tensors except the first, which determines the device of the call."""
    return [
        (name, argument)
        for name, table in TABLES.items()
        for argument in [key for key, value in table.right("cpu").items() if isinstance(value, torch.Tensor)][1:]
    ]


@pytest.mark.parametrize("elsewhere", ["cpu", "cuda:1"])
@pytest.mark.parametrize(("name", "argument"), mixed(), ids=[", ".join(pair) for pair in mixed()])
def test_tensors_of_two_devices_are_refused(name, argument, elsewhere, request):
    if elsewhere == "cuda:1":
        request.getfixturevalue("second_gpu")
    table = TABLES[name]
    moved = dataclasses.replace(
        table, special=lambda device: {"moved": (argument, table.right(device)[argument].to(elsewhere))}
    )
    renamed = {"k_cache": "kv_cache", "attn_sink": "s_aux"} if name.startswith("flash_mla") else {}
    expected = f"{renamed.get(argument, argument)}: got a tensor on {elsewhere}; needs one on cuda:0, like the other"
    for prepared in (False, True):
        if prepared:
            table.function(**table.right("cuda:0"))
        assert str(moved.refusal("moved", "cuda:0")).startswith(expected)
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
