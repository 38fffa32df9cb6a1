"""Operators in environments of real programs: other defaults of torch, pools, inference mode, torch.compile, graphs.

A sample of every operator and split form must give the bits of a plain process, even if the package runs for the first
time there, with no launch prepared and no constant made.
"""

import contextlib
import dataclasses
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import cute_kernels.gqa.append_op
import cute_kernels.gqa.op
import cute_kernels.merge.op
import cute_kernels.mla.append_op
import cute_kernels.mla.op
import cute_kernels.sink.launch
from cute_kernels import gqa_decode, merge_states, mla_fp8_decode, sink_attention
from cute_kernels.gqa.launch import decode_spec
from cute_kernels.gqa.request import DECODE
from cute_kernels.runtime import counters, launch, memory, workspace
from cute_kernels.runtime.launch import PreparedLaunches
from tests.kit import specs
from tests.kit.bits import same_bits
from tests.kit.environments import default_dtype
from tests.kit.gqa_cases import gqa_case
from tests.kit.graphs import nodes
from tests.kit.mla_cases import dense_case, sparse_case
from tests.kit.samples import LONG_SAMPLES, SAMPLES, copied
from tests.kit.sink_cases import sink_case

Results = tuple[torch.Tensor, ...]


EVERY = {**SAMPLES, **LONG_SAMPLES}


def kernel_specs() -> list[Any]:
    paged: dict[str, Any] = {"h_q": 8, "h_kv": 2, "layout": "paged_NHD", "padded": False, "device": "cpu"}
    cases = [gqa_case(**paged, seqlens=seqlens) for seqlens in ([70] * 40, [700, 300], [700, 3, 64, 300])]
    requests = [DECODE.request(**case.arguments(), num_splits=num_splits) for case in cases for num_splits in (None, 3)]
    for batch in (4, 2):  # `sink_attention` runs this kernel for one query token
        sink = sink_case([(1, 260)] * batch, padded=False, device="cpu")
        given = {"q": sink.q, "k_cache": sink.k, "v_cache": sink.v, "layout": "BSNH", "causal": True}
        requests.append(DECODE.request(**given))
    return [*dict.fromkeys(map(decode_spec, requests)), *specs.of_samples()]


def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the package into its state right after import, except compiled kernels and memory that graphs hold."""
    mla, gqa = cute_kernels.mla, cute_kernels.gqa
    for one in (mla.launch, mla.append_op, gqa.launch, gqa.append_op, cute_kernels.merge.op):
        monkeypatch.setattr(one, "_prepared", PreparedLaunches())
    for module, name in (
        (memory, "constants"),
        (mla.launch, "_zero_row"),
        (cute_kernels.sink.launch, "_need"),
    ):
        make: Any = getattr(module, name)
        monkeypatch.setattr(module, name, memory.once_per_device(make.__wrapped__))
    monkeypatch.setattr(workspace, "slab", memory.once_per_device(counters.CounterSlab))
    monkeypatch.setattr(workspace, "_this_thread", workspace._ThreadWorkspaces())
    monkeypatch.setattr(memory, "_unread", memory._Unread())


@functools.cache
def arguments(name: str) -> dict[str, Any]:
    """The arguments of a sample. No call writes to them."""
    return EVERY[name].inputs("cuda")


def results(name: str) -> Results:
    """The results of a sample over a copy of its arguments."""
    with torch.inference_mode(False):
        given = copied(arguments(name))
    return EVERY[name].run(**given)


@pytest.fixture(scope="module")
def expected() -> dict[str, Results]:
    """For each sample, the results in a plain process."""
    return {name: tuple(t.clone() for t in results(name)) for name in EVERY}


def require_same(expected: dict[str, Results], where: str) -> None:
    """Makes each call twice: the first call prepares the launch, the second uses it."""
    for name, wanted in expected.items():
        for turn in ("first", "second"):
            for n, (got, want) in enumerate(zip(results(name), wanted, strict=True)):
                assert same_bits(got, want), f"{where}: {name}, {turn} call, result {n}"


@contextlib.contextmanager
def private_pool() -> Iterator[None]:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        yield


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """In this mode torch also fills what `torch.empty` returns with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


ENVIRONMENTS: dict[str, Callable[[], Any]] = {
    "bfloat16": functools.partial(default_dtype, torch.bfloat16),
    "float16": functools.partial(default_dtype, torch.float16),
    "float64": functools.partial(default_dtype, torch.float64),
    "device cuda": functools.partial(torch.device, "cuda"),
    "device meta": functools.partial(torch.device, "meta"),
    "inference mode": torch.inference_mode,
    "a private pool": private_pool,
    "deterministic algorithms": deterministic_algorithms,
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_same_bits_in(name, expected, monkeypatch):
    """The bits must also be the same in a later plain environment, which uses the launches prepared here."""
    cold(monkeypatch)
    with ENVIRONMENTS[name]():
        require_same(expected, name)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    require_same(expected, f"after {name}")


def test_what_is_kept_lies_outside_of_a_private_pool(expected, monkeypatch):
    cold(monkeypatch)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        for name in expected:
            results(name)
        probe = torch.empty(1, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    ranges = [(one["address"], one["address"] + one["total_size"]) for one in pool.snapshot()]

    def in_pool(address: int) -> bool:
        return any(first <= address < end for first, end in ranges)

    assert in_pool(probe.data_ptr()), "the test looks at the wrong pool"
    device = torch.device("cuda", torch.cuda.current_device())
    constants = memory.constants(device)
    kept = [constants.no_sink, constants.no_length, cute_kernels.mla.launch._zero_row(device)]
    kept += [t for made in workspace.kept() for t in (made.values, made.counters)]
    kept += [*workspace.slab(device)._slabs, *memory._unread._buffers[device]]
    assert len(kept) >= 7 and not any(in_pool(t.data_ptr()) for t in kept)


# --- torch.compile

MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")


def compiled_functions() -> dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]]:
    """Functions to compile, and their arguments for a batch size. The first tensor has the batch size."""

    def mla(q: torch.Tensor, indices: torch.Tensor, cache: torch.Tensor) -> Any:
        out, lse = mla_fp8_decode(q * 0.5, cache, indices=indices, num_splits=4, return_lse=True)
        alone: Any = mla_fp8_decode(q, cache, indices=indices)
        return (*merge_states(torch.stack([out, out]), torch.stack([lse, lse])), alone + 1)

    def of_mla(batch: int) -> tuple[Any, ...]:
        case: Any = sparse_case(batch=batch, h_q=64, topk=300, num_slots=2048, padded=False, device="cuda")
        return case.q, case.indices, case.kv_cache

    def gqa(q: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, *stores: torch.Tensor) -> Any:
        paged: dict[str, Any] = {"layout": "paged_NHD", "cache_seqlens": lengths, "block_table": table}
        out, lse = gqa_decode(q * 0.5, *stores, **paged, return_lse=True)
        return out + 1, lse, gqa_decode(q, *stores, **paged, num_splits=3)

    def of_gqa(batch: int) -> tuple[Any, ...]:
        seqlens = [700, 3, 64, 300, 9, 500][:batch]
        case = gqa_case(seqlens=seqlens, h_q=8, h_kv=2, layout="paged_NHD", padded=False, device="cuda")
        return case.q, case.cache_seqlens, case.block_table, case.k_cache, case.v_cache, case.k_scale, case.v_scale

    def sink(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s_aux: torch.Tensor) -> Any:
        out, lse = sink_attention(q * 0.5, k, v, s_aux, return_lse=True)
        return out + 1, lse, sink_attention(q[:, -1:], k, v, s_aux)

    def of_sink(batch: int) -> tuple[Any, ...]:
        case = sink_case([(200, 260)] * batch, padded=False)
        return case.q, case.k, case.v, case.s_aux

    return {"mla": (mla, of_mla), "gqa": (gqa, of_gqa), "sink": (sink, of_sink)}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mla", "gqa", "sink"])
def test_torch_compile(name, mode, dynamic, monkeypatch):
    """CUDA-graph trees warm up, record and replay within four calls of a shape. No launch is prepared before."""
    function, arguments = compiled_functions()[name]
    sets = [arguments(batch) for batch in ((4, 2) if dynamic else (4,))]
    expected = [[t.clone() for t in function(*one)] for one in sets]
    cold(monkeypatch)
    torch._dynamo.reset()
    compiled = torch.compile(function, mode=mode, dynamic=dynamic, fullgraph=True)
    with torch.no_grad():
        for turn in range(4):
            for one, wanted in zip(sets, expected, strict=True):
                torch.compiler.cudagraph_mark_step_begin()
                for got, want in zip(compiled(*one), wanted, strict=True):
                    assert same_bits(got, want), f"call {turn}, batch {len(one[0])}"
    eager = [[t.clone() for t in function(*one)] for one in sets]
    for got_set, wanted in zip(eager, expected, strict=True):
        assert all(map(same_bits, got_set, wanted)), "an eager call after the compiled ones"


def test_torch_compile_of_gradients_with_graphs(monkeypatch):
    case = sink_case([(200, 260)] * 2, padded=False)
    leaves = [getattr(case, name).clone().requires_grad_() for name in ("q", "k", "v", "s_aux")]

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s_aux: torch.Tensor) -> Any:
        out: Any = sink_attention(q, k, v, s_aux, deterministic=True)
        return (out.float() * case.d_out).sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    cold(monkeypatch)
    torch._dynamo.reset()
    compiled = torch.compile(loss, mode="reduce-overhead", fullgraph=True)
    for turn in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        got = torch.autograd.grad(compiled(*leaves), leaves)
        for one, want in zip(got, expected, strict=True):
            assert same_bits(one, want), f"call {turn}"


# --- graphs

LAYERS = 61


def mla_layer(batch: int) -> Any:
    return dense_case(seqlens=[700 + 9 * n for n in range(batch)], h_q=64, s_q=1, padded=False, device="cuda")


def attend(case: Any, q: torch.Tensor) -> torch.Tensor:
    """A layer whose query depends on the previous layer."""
    out: Any = mla_fp8_decode(q, case.kv_cache, **case.options())
    return torch.cat([out, q[..., 512:]], dim=-1)


def capture(call: Callable[[], Any], **options: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph(**options)
    with torch.cuda.graph(graph):
        made = call()
    return graph, made


def test_graphs_of_61_layers_with_shapes_that_alternate():
    """Each shape has five live graphs, replayed in turn and two at once on two streams."""
    cases = {batch: mla_layer(batch) for batch in (2, 5)}

    def model(batch: int) -> torch.Tensor:
        case = cases[batch]
        q = case.q
        for _ in range(LAYERS):
            q = attend(case, q)
        return q

    expected = {batch: model(batch).clone() for batch in cases}
    graphs = [(batch, *capture(functools.partial(model, batch))) for _ in range(5) for batch in cases]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(3):
        for (batch, graph, result), (other_batch, other, other_result) in zip(graphs, graphs[1:], strict=False):
            result.fill_(float("nan"))
            other_result.fill_(float("nan"))
            torch.cuda.synchronize()
            for stream, one in zip(streams, (graph, other), strict=True):
                with torch.cuda.stream(stream):
                    one.replay()
            torch.cuda.synchronize()
            assert same_bits(result, expected[batch]) and same_bits(other_result, expected[other_batch])


def test_graphs_record_kernels_alone_and_give_their_counters_back():
    """A memset before a launch would prevent the overlap with the previous launch."""
    from cuda.bindings import runtime

    case: Any = mla_layer(4)
    gqa = gqa_case(seqlens=[700, 300], h_q=8, h_kv=2, layout="paged_NHD", padded=False, device="cuda")
    sink = sink_case([(200, 260)], padded=False).arguments()

    def layers() -> None:
        for _ in range(20):
            mla_fp8_decode(case.q, case.kv_cache, **case.options())
            gqa_decode(**gqa.arguments(), num_splits=3)
            sink_attention(**sink)

    slab = workspace.slab(torch.device("cuda", torch.cuda.current_device()))
    gc.collect()
    torch.cuda.synchronize()
    before = slab.borrowed()
    graphs = []
    for _ in range(20):
        layers()
        graphs.append(capture(layers, keep_graph=True)[0])
    per_graph = (slab.borrowed() - before) / len(graphs)
    assert per_graph >= 60 * 32, "each launch with counters holds a place"
    for graph in graphs:
        kinds = nodes(graph)
        assert kinds and set(kinds) == {runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel}
        graph.instantiate()
        graph.replay()
    del graph
    graphs.clear()
    gc.collect()
    torch.cuda.synchronize()
    assert slab.borrowed() == before, "counters of graphs that are gone are still lent"


def test_a_graph_without_lse_writes_to_nothing_of_others(monkeypatch):
    """Other shapes evict the prepared launch, and the graph still writes to the LSE that it was captured with."""
    cold(monkeypatch)
    monkeypatch.setattr(launch, "MAX_PREPARED", 4)
    case: Any = dense_case(seqlens=[70] * 40, h_q=64, padded=False, device="cuda")
    gqa: Any = gqa_case(seqlens=[70] * 40, h_q=8, h_kv=2, layout="paged_NHD", padded=False, device="cuda")

    def both() -> None:
        mla_fp8_decode(case.q, case.kv_cache, **case.options())
        gqa_decode(**gqa.arguments())

    both()
    graph, _ = capture(both)
    for batch in range(1, 12):
        few = dataclasses.replace(
            case, q=case.q[:batch], block_table=case.block_table[:batch], cache_seqlens=case.cache_seqlens[:batch]
        )
        mla_fp8_decode(few.q, few.kv_cache, **few.options())
        options = {**gqa.arguments(), "q": gqa.q[:batch]}
        options.update(cache_seqlens=gqa.cache_seqlens[:batch], block_table=gqa.block_table[:batch])
        gqa_decode(**options)
    gc.collect()
    torch.cuda.synchronize()
    # the allocator would give memory that the package had freed to tensors of this size
    sizes = [40 * 64, 40 * 8, 40 * 64 * 2]
    victims = [torch.full((n,), 7.0, dtype=torch.float32, device="cuda") for n in sizes for _ in range(300)]
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool((victim == 7.0).all()) for victim in victims)


def test_the_first_call_under_capture_is_refused_in_words(monkeypatch):
    cold(monkeypatch)
    case: Any = mla_layer(2)
    with pytest.raises(RuntimeError, match="call the op once"):
        capture(lambda: mla_fp8_decode(case.q, case.kv_cache, **case.options()))
    torch.cuda.synchronize()
    mla_fp8_decode(case.q, case.kv_cache, **case.options())


def test_a_new_shape_under_capture_belongs_to_the_graph(monkeypatch):
    """The kernel is compiled but the shape is new. The call's memory must belong to the graph, and none may be kept."""
    cold(monkeypatch)
    case: Any = mla_layer(5)
    want: Any = mla_fp8_decode(case.q, case.kv_cache, **case.options())
    cute_kernels.mla.launch._prepared.clear()
    memory._unread._buffers.clear()
    graph, got = capture(lambda: mla_fp8_decode(case.q, case.kv_cache, **case.options()))
    assert not cute_kernels.mla.launch._prepared and not any(memory._unread._buffers.values())
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(got, want)


# --- threads and streams


def test_memory_of_threads_that_have_ended_is_freed():
    case: Any = sparse_case(batch=8, h_q=128, topk=2048, padded=False, device="cuda")
    mla_fp8_decode(case.q, case.kv_cache, indices=case.indices, num_splits=16)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            mla_fp8_decode(case.q, case.kv_cache, indices=case.indices, num_splits=16)
            torch.cuda.current_stream().synchronize()

    for _ in range(5):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


def test_threads_that_meet_the_package_cold(expected, monkeypatch):
    """Six threads, each on its own stream, run all operators at once with no launch prepared."""
    cold(monkeypatch)
    names = [name for name in EVERY if not EVERY[name].backward]
    wrong: list[str] = []
    start = threading.Barrier(6)
    torch.cuda.synchronize()

    def run(first: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                start.wait()
                for n in range(3 * len(names)):
                    name = names[(first + n) % len(names)]
                    got = results(name)
                    torch.cuda.current_stream().synchronize()
                    if not all(map(same_bits, got, expected[name])):
                        wrong.append(f"thread {first}: {name}, call {n}")
        except Exception as error:
            wrong.append(f"thread {first}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
