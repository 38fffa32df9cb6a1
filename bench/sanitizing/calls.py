"""Calls of every kernel on small shapes, which run under compute-sanitizer. Each is compared with its oracle.

Inputs are made on the CPU: every kernel of torch that runs here is one more for the tools to follow. They and the
oracles are float32 whatever the default dtype, which holds while ops are called.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import cute_kernels
from bench import timing
from bench.sanitizing.tools import WORKER_DONE
from cute_kernels.gqa.gather_op import gather_pages
from cute_kernels.mla.plan import EXCHANGES
from cute_kernels.runtime import workspace
from tests.kit.append_pages import FORMS, AppendPages, slots_for
from tests.kit.block_lists import listed_case
from tests.kit.compare import check_decode
from tests.kit.draws import generator, normal
from tests.kit.environments import default_dtype
from tests.kit.gather_pages import KINDS as GATHERED
from tests.kit.gather_pages import gather_cache
from tests.kit.gqa_cases import FOUR_BITS, GqaCase, check_gqa, gqa_case
from tests.kit.mla_cases import DecodeCase, dense_case, sparse_case, strided
from tests.kit.samples import SAMPLES, copied
from tests.kit.sink_cases import SinkCase, SinkExpectation, sink_case

GRAPHS = 8
POISONED_FLOATS, COUNTERS = 1 << 22, 1 << 12  # more than any call here needs, so the workspace does not grow again


def worker(part: str, default_dtype: str = "float32") -> None:
    """Makes the calls of a part, and prints that they came to their end."""
    _poison_workspace()
    PARTS[part](Calls(part, getattr(torch, default_dtype)))
    torch.cuda.synchronize()
    print(WORKER_DONE)


def _on_gpu(case: DecodeCase | GqaCase | SinkCase) -> dict[str, Any]:
    """Returns the arguments of a call, by name."""
    return {
        name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in case.arguments().items()
    }


def _poison_workspace() -> None:
    """Fills the scratch memory of this thread's launches with NaN.

    A merge reads the partials of splits without keys before it knows that they are empty, and drops them. initcheck
    would report those intended reads. With NaN in that memory the oracle detects a value that is not dropped.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        workspace.addresses(workspace.reserve(device, POISONED_FLOATS, COUNTERS))
        for kept in workspace.kept():
            kept.values.fill_(math.nan)
        torch.cuda.synchronize()


class Calls:
    """Makes calls under a default dtype of torch, which it restores, and checks their results."""

    def __init__(self, part: str, dtype: torch.dtype) -> None:
        self.part, self.dtype = part, dtype
        self.generator = generator(0)

    def call(self, op: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Calls `op` and returns its results."""
        with default_dtype(self.dtype):
            return op(*arguments, **options)

    def decode(self, case: DecodeCase, name: str, num_splits: int | None, exchanges: Sequence[str | None]) -> None:
        """Decodes over latent caches, with each of some exchanges, and compares with the oracle."""
        for exchange in exchanges:
            forced: dict[str, Any] = {"num_splits": num_splits, "exchange": exchange}
            out, lse = self.call(cute_kernels.mla_fp8_decode, **_on_gpu(case), **forced, return_lse=True)
            form = f"{name}, {num_splits or 'planned'} splits, exchange of {exchange}"
            print(check_decode(out.cpu(), lse.cpu(), name=form, **case.arguments()).require())

    def gqa(self, name: str, *, splits: Sequence[int | None] = (None, 1), **options: Any) -> None:
        """Decodes over a K and V cache, and compares with the oracle; with `n`, lists of n blocks."""
        made = listed_case if "n" in options else gqa_case
        case = made(**{"seqlens": [0, 1, 65, 300], "h_q": 8, "h_kv": 2, **options})
        for num_splits in splits:
            forced: dict[str, Any] = {"num_splits": num_splits}
            out, lse = self.call(cute_kernels.gqa_decode, **_on_gpu(case), **forced, return_lse=True)
            print(check_gqa(out.cpu(), lse.cpu(), case, name=f"{name}, {num_splits or 'planned'} splits").require())

    def sink(self, name: str, *, deterministic: bool = False, **options: Any) -> None:
        """Runs forward and backward of sink attention, and compares with the oracle."""
        case = sink_case(**options, padded=False, device="cpu")
        expected = SinkExpectation.of(case)
        call: dict[str, Any] = _on_gpu(case)
        inputs = [call[key].requires_grad_() for key in ("q", "k", "v", "s_aux")]
        out, lse = self.call(cute_kernels.sink_attention, **call, deterministic=deterministic, return_lse=True)
        self._known_to_initcheck(out)
        gradients = self.call(torch.autograd.grad, out, inputs, case.d_out.cuda())
        self._known_to_initcheck(*gradients)
        print(expected.check_forward(out.detach().cpu(), lse.cpu(), name=f"sink_attention, {name}").require())
        expected.require_gradients(*(gradient.cpu() for gradient in gradients))

    def append_latent(self) -> None:
        """Appends to pages of every format, some slots negative; compares bit for bit."""
        for cache_format, cache_layout in FORMS:
            pages = AppendPages.random(cache_format, cache_layout, (8, 16), device="cpu").cuda()
            kv = strided(normal((100, 512), self.generator).bfloat16())
            slots = slots_for(100, pages.num_slots, seed=1)
            expected = pages.expected(kv, slots)
            self.call(cute_kernels.mla_fp8_append, kv.cuda(), pages.view, slots.cuda(), **pages.options)
            if not torch.equal(pages.buffer.cpu(), expected):
                raise AssertionError(f"mla_fp8_append, {cache_format}, {cache_layout}: differs from fp8_mla.pack")

    def samples(self, *names: str) -> None:
        """Runs the samples of some functions, and compares with the same calls on a CPU."""
        for name, sample in SAMPLES.items():
            if not name.startswith(names):
                continue
            inputs = sample.inputs("cpu")
            expected = sample.run(**copied(inputs))
            moved = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
            for got, want in zip(self.call(sample.run, **moved), expected, strict=True):
                self._known_to_initcheck(got)
                exact = not want.is_floating_point() or want.dtype.itemsize == 1
                near: dict[str, Any] = {} if exact else {"rtol": 0.02, "atol": 0.02}
                torch.testing.assert_close(got.cpu(), want, equal_nan=True, **near)
            print(f"{name}: as on a CPU")

    def gather(self) -> None:
        """Copies pages, some of which the cache does not have; compares bit for bit."""
        pages = torch.tensor([4, 0, 7, -1, 2], dtype=torch.int32)
        for kind in GATHERED:
            cache = gather_cache(kind, "HND", 64)
            found = self.call(gather_pages, *(t.cuda() for t in cache), pages.cuda(), torch.bfloat16)
            exact = gather_pages(*cache, pages, torch.bfloat16)
            if not all(torch.equal(a.cpu(), b) for a, b in zip(found, exact, strict=True)):
                raise AssertionError(f"gather_pages, {kind}: differs from the reference")

    def _known_to_initcheck(self, *stored: torch.Tensor) -> None:
        """Copies what TMA stored to the host and back, which initcheck sees."""
        if self.part == "few sinks":
            for tensor in stored:
                tensor.data.copy_(tensor.detach().cpu())
            torch.cuda.synchronize()  # without, one of two runs had reports of the next kernel


def _mla(calls: Calls) -> None:
    # 130 keys: two whole tiles of 64 and a rest; 96 heads: one CTA of 64 and one half empty
    sparse = sparse_case(
        batch=2, h_q=96, s_q=2, topk=130, num_slots=512, page_size=61, lengths="query", sink="finite", padded=False
    )
    dense = dense_case(seqlens=[0, 1, 65, 200], h_q=16, s_q=2, page_size=16, padded=False)
    wild = sparse_case(batch=1, h_q=64, topk=70, num_slots=256, scales="mixed", padded=False)
    for num_splits in (1, 3, None):
        exchanges = EXCHANGES if num_splits else (None,)  # shares if no splits are requested
        calls.decode(sparse, "sparse", num_splits, exchanges)
        calls.decode(dense, "dense", num_splits, exchanges)
    calls.decode(dataclasses.replace(wild, s_aux=torch.zeros(64)), "scales of very different size", 1, EXCHANGES)
    calls.samples("mla_fp8_append", "merge_states", "index")


def _latent(calls: Calls) -> None:
    # a window of two tiles and a rest of a third one; sizes "rare" have scales and rope parts out of range of float16
    window: dict[str, Any] = {"batch": 2, "topk": 130, "num_slots": 256, "lengths": "query", "padded": False}
    one: dict[str, Any] = {**window, "sink": "finite", "page_size": 6}
    for formats, h_q, num_splits, sizes in (
        (("v4",), 64, 1, "rare"),
        (("v4", "v4"), 16, 3, "absmax"),
        (("v4", "v4"), 96, None, "rare"),
        (("v4.1",), 32, 3, "rare"),
        (("v4.1", "v4.1_fp4"), 64, 1, "rare"),
        (("v4.1", "v4.1_fp4"), 16, None, "absmax"),
        (("v3.2_nope",), 64, 1, "mixed"),
        (("v3.2_nope", "v3.2_nope"), 8, 3, "absmax"),
        (("v3.2", "v3.2"), 64, None, "absmax"),
    ):
        case = sparse_case(formats=formats, h_q=h_q, extra_topk=70 if len(formats) > 1 else 0, scales=sizes, **one)
        calls.decode(case, f"{' and '.join(formats)}, {h_q} heads", num_splits, (None,))
    dense = dense_case(cache_format="v4.1_fp4", seqlens=[0, 1, 65, 200], h_q=16, s_q=2, page_size=16, padded=False)
    calls.decode(dense, "dense v4.1_fp4", None, (None,))
    calls.append_latent()


def _gqa(calls: Calls) -> None:
    # tiles are of 128 keys: three of the longest sequence, which three CTAs merge
    scales: dict[str, Any] = {
        "k_scales": "per_token_head",
        "v_scales": "per_token_head",
        "scale_dtype": torch.float16,
    }
    heads: dict[str, Any] = {"k_scales": "per_head", "v_scales": "per_tensor"}
    groups: dict[str, Any] = {"k_scales": "per_group_32", "v_scales": "per_group_64"}
    calls.gqa("int8, scales of tokens", **scales, splits=(None, 1, 3))
    calls.gqa("int8, three queries", **scales, s_q=3)
    calls.gqa("int8, pages", **heads, layout="paged_NHD", page_size=16, bad_entries=True, splits=(None, 1, 3))
    calls.gqa("int8, packed pages", **heads, layout="paged_vllm", page_size=8)
    calls.gqa("fp8, scales of groups", **groups, kv_dtype="fp8")
    for kind in FOUR_BITS:
        calls.gqa(kind, kv_dtype=kind, s_q=2, splits=(None, 1, 3))
    pages: dict[str, Any] = {"layout": "paged_HND", "page_size": 16}
    calls.gqa("int4, pages, left padding", kv_dtype="int4", d=64, starts=(0, 0, 3, 270), **pages)
    calls.gqa("bfloat16, window", kv_dtype="bf16", window=100, sink="inf")
    modifiers: dict[str, Any] = {"s_q": 3, "softcap": 15.0, "alibi": "batch", "q_dtype": torch.float16}
    calls.gqa("int8, softcap and ALiBi", **heads, **modifiers)
    calls.gqa("int8, blocks", **scales, n=3, s_q=2, layout="paged_HND", page_size=16, splits=(None, 1, 3))
    calls.gqa("int4, blocks", kv_dtype="int4", n=3, layout="paged_NHD", page_size=64, splits=(None, 1, 3))
    calls.gqa("bfloat16, many blocks", kv_dtype="bf16", n=40, layout="paged_HND", page_size=128, own=False)
    calls.gqa("bfloat16, blocks without pages", kv_dtype="bf16", n=3, seqlens=[256, 256], whole=True)
    # parts of S change hands in shared memory, and their two buffers take turns
    calls.gqa("int8, d 512", **scales, d=512, h_q=32, splits=(None, 1, 3), **pages)
    calls.gqa("bfloat16, d 512, two queries", kv_dtype="bf16", d=512, s_q=2, splits=(None, 1, 3))
    calls.samples("kv_int8_append")
    calls.samples("kv_append")
    calls.gather()


def _sample(calls: Calls) -> None:
    # split and not, with sinks and without, with lse and without: absent arguments are replaced by constants
    calls.samples("")


def _index(calls: Calls) -> None:
    calls.samples("index")


def _few_sinks(calls: Calls) -> None:
    calls.sink("whole", lengths=[(70, 80)], h_q=2, h_kv=1)
    calls.sink("packed, window, deterministic", lengths=[(3, 70), (64, 64)], packed=True, window=40, deterministic=True)


def _tma_stores(calls: Calls) -> None:
    # the forward stores its output by TMA; a copy to the host reads it
    stored = sink_case(lengths=[(200, 260)], padded=False, device="cpu")
    arguments: dict[str, Any] = _on_gpu(stored)
    out, lse = cute_kernels.sink_attention(**arguments, return_lse=True)
    print(SinkExpectation.of(stored).check_forward(out.cpu(), lse.cpu(), name="stored by TMA").require())


def _votes(calls: Calls) -> None:
    """Makes key tiles whose flags change from tile to tile, so that a lane that reads too late reads others."""
    case = sparse_case(batch=2, h_q=64, topk=640, num_slots=1024, padded=False, scales="mixed")
    arguments = _on_gpu(case)
    out, lse = cute_kernels.mla_fp8_decode(**arguments, num_splits=1, return_lse=True)
    print(check_decode(out.cpu(), lse.cpu(), name="flags of each tile", **case.arguments()).require())
    for _ in range(20):
        again = cute_kernels.mla_fp8_decode(**arguments, num_splits=1, return_lse=True)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def _sink(calls: Calls) -> None:
    # several blocks of rows and of keys, gradients added up in memory and apart, two heads to a head of the keys
    ragged = [(1, 1), (130, 260), (0, 5), (64, 0), (3, 70)]
    calls.sink("whole", lengths=[(200, 260)] * 2)
    calls.sink("deterministic", lengths=[(200, 260)], deterministic=True)
    calls.sink("deterministic, d 128", lengths=[(200, 260)], d=128, deterministic=True)
    calls.sink("window", lengths=[(300, 300)], window=70, sinks="extreme")
    calls.sink("wide window", lengths=[(100, 700)], d=128, window=600)
    calls.sink("packed", lengths=ragged, packed=True)
    calls.sink("packed, window", lengths=ragged, packed=True, d=128, window=70)


def _graphs(calls: Calls) -> None:
    """Captures graphs of three ops each, keeps all, and replays them two at a time on two streams.

    Every replay must write the bits of eager calls, which are compared with the oracle.
    """
    names = ("mla out", "mla lse", "gqa out", "gqa lse", "sink out", "sink lse")
    graphs: list[tuple[torch.cuda.CUDAGraph, list[Any], timing.Expected]] = []
    inputs: list[Any] = []  # kept alive: graphs hold nothing but addresses
    for seed in range(GRAPHS):
        # 130 keys in three splits, 300 in three: both merge, with counters that are 0 between launches
        mla = sparse_case(batch=2, h_q=64, topk=130, num_slots=256, sink="finite", padded=False, seed=seed)
        lengths: dict[str, Any] = {"seqlens": [1, 65, 300], "h_q": 8, "h_kv": 2, "kv_dtype": "bf16"}
        gqa = gqa_case(**lengths, padded=False, seed=seed)
        sink = sink_case(lengths=[(70, 130)], padded=False, seed=seed, device="cpu")
        arguments = [_on_gpu(case) for case in (mla, gqa, sink)]

        def three_ops(inputs_of_ops: list[dict[str, Any]] = arguments) -> tuple[torch.Tensor, ...]:
            return (
                *cute_kernels.mla_fp8_decode(**inputs_of_ops[0], num_splits=3, return_lse=True),
                *cute_kernels.gqa_decode(**inputs_of_ops[1], num_splits=3, return_lse=True),
                *cute_kernels.sink_attention(**inputs_of_ops[2], return_lse=True),
            )

        expected = timing.Expected.of(names, [three_ops])
        out, lse, gqa_out, gqa_lse, sink_out, sink_lse = (t.cpu() for t in expected.results[0])
        check_decode(out, lse, name="mla_fp8_decode", **mla.arguments()).require()
        check_gqa(gqa_out, gqa_lse, gqa).require()
        SinkExpectation.of(sink).check_forward(sink_out, sink_lse, name="sink_attention").require()
        inputs.append(arguments)
        graph, results = timing.capture([three_ops])
        graphs.append((graph, results, expected))

    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for first in range(GRAPHS):
        pair = [graphs[first], graphs[(first + 1 + first % 3) % GRAPHS]]
        for _, results, _ in pair:
            timing.poison(results[0])
        torch.cuda.synchronize()
        for _ in range(2):
            for (graph, _, _), own in zip(pair, streams, strict=True):
                with torch.cuda.stream(own):
                    graph.replay()
        torch.cuda.synchronize()
        for _, results, expected in pair:
            if problems := expected.problems(results):
                raise AssertionError("; ".join(problems))
    print(f"{GRAPHS} graphs, replayed two at a time")


PARTS: dict[str, Callable[[Calls], None]] = {
    "mla": _mla,
    "latent": _latent,
    "gqa": _gqa,
    "sample": _sample,
    "index": _index,
    "few sinks": _few_sinks,
    "graphs": _graphs,
    "tma-stores": _tma_stores,
    "votes": _votes,
    "sink": _sink,
}
