"""Arguments that launches of sink attention pass to kernels. Stand-ins for kernels run the reference."""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels.runtime import memory
from cute_kernels.sink import backward_spec, launch, op, plan, spec
from cute_kernels.sink.reference import reference_sink_attention, reference_sink_attention_backward
from cute_kernels.sink.request import FORWARD, Request
from tests.kit.mla_cases import strided
from tests.kit.prepared import declared_by, refusal
from tests.kit.sink_cases import SinkCase, reference_gradients, sink_case

SMS = 132
RAGGED = [(1, 1), (130, 300), (0, 5), (64, 0), (3, 200), (70, 60)]

CASES: dict[str, dict[str, Any]] = {
    "batch": {"lengths": [(200, 330)] * 2},
    "one token of one head": {"lengths": [(1, 1)], "h_q": 1, "h_kv": 1},
    "window": {"lengths": [(200, 330)] * 2, "window": 64, "d": 128, "sinks": "extreme"},
    "wide window": {"lengths": [(10, 700)], "window": 600, "dtype": torch.float16},
    "no sinks": {"lengths": [(100, 90)] * 3, "sinks": "absent", "causal": False},
    "packed": {"lengths": RAGGED, "packed": True},
    "packed, window": {"lengths": RAGGED, "packed": True, "window": 40, "d": 128, "sinks": "absent"},
    "one packed token": {"lengths": [(1, 1)], "packed": True, "h_q": 3, "h_kv": 1},
}
EVERY = pytest.mark.parametrize("options", CASES.values(), ids=CASES)


class Kernels:
    """Stands for compiled kernels: compares arguments with those of the compilation, and runs the reference."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[Any] = []
        self.rows: dict[str, torch.Tensor] = {}
        self.sections: list[int] = []
        constants = memory.Constants(SMS, torch.full((launch.MAX_HEADS,), -math.inf), torch.zeros(1))
        monkeypatch.setattr(launch.memory, "constants", lambda _: constants)
        monkeypatch.setattr(launch, "_counters", lambda _: 4096)
        monkeypatch.setattr(launch, "get_kernel", self.get)

    def get(self, wanted: Any) -> Callable[..., None]:
        assert wanted.can_implement() == []
        kind = type(wanted).__name__.removeprefix("Sink").removesuffix("Spec")

        def call(*arguments: Any) -> None:
            assert refusal(declared_by(wanted), arguments) == ""
            self.launched.append(wanted)
            getattr(self, kind)(wanted, *arguments)

        return call

    def Forward(self, wanted, q, k, v, sink, out, lse, cu_q, cu_k, work, scale, window, causal, section, ctas,
                counters):  # fmt: skip
        self.of_schedule(wanted, q, k, cu_q, cu_k, work, wanted.rows, section, q.shape[-2])
        assert (ctas, counters) == (SMS, 4096)
        options = self.options(wanted, scale, window, causal, cu_q, cu_k)
        for target, result in zip((out, lse), reference_sink_attention(q, k, v, sink, **options), strict=True):
            self.write(target, result, cu_q)

    def write(self, target: torch.Tensor, result: torch.Tensor, cu_seqlens: torch.Tensor | None) -> None:
        """Writes only the rows of sequences, as kernels do."""
        rows = slice(None if cu_seqlens is None else int(cu_seqlens[-1]))
        target[rows] = result[rows].to(target.dtype)

    def WorkList(self, wanted, cu_q, cu_k, work, rows, window, causal, tokens, other_tokens, queries, lses, keys,
                 values, query_words, heads, key_words):  # fmt: skip
        listed, other = (cu_k, cu_q) if wanted.keys else (cu_q, cu_k)
        blocks = [(b, i) for b, n in enumerate(listed.diff().tolist()) for i in range(-(-n // rows))]
        assert listed[-1] <= tokens and other[-1] <= other_tokens and tokens // rows + len(listed) <= len(work)
        tokens_q, tokens_k = (other_tokens, tokens) if wanted.keys else (tokens, other_tokens)
        for address, words, value, cu, all_rows in (
            (queries, query_words, 0.0, cu_q, tokens_q), (lses, heads, -math.inf, cu_q, tokens_q),
            (keys, key_words, 0.0, cu_k, tokens_k), (values, key_words, 0.0, cu_k, tokens_k),
        ):  # fmt: skip
            if address:
                size = (all_rows - int(cu[-1])) * words
                filled = (ctypes.c_float * size)(*[value] * size)
                ctypes.memmove(address + 4 * int(cu[-1]) * words, filled, 4 * size)
        work[: len(blocks) + 1] = torch.tensor([(len(blocks), 0), *blocks])

    def Prepare(self, wanted, out, d_out, lse, given, sink, stats, parts, cu_q, sums):
        batch, s_q = out.shape[:2] if cu_q is None else (len(cu_q) - 1, 0)
        rows = out.shape[0] if cu_q is not None else batch * s_q
        blocks = -(-(stats.shape[2] if wanted.packed else s_q) // wanted.rows)
        assert parts.shape[1] == (blocks if wanted.packed else batch * blocks)
        assert stats.shape[2] % 64 == 0 and stats.shape[2] >= rows + 128 * batch
        if wanted.fused:  # the memory is there
            ctypes.memset(sums, 0, 4 * stats.shape[1] * stats.shape[2] * wanted.d)
        assert wanted.given == (given is not None)
        delta = (out.double() * d_out.double()).sum(-1) if given is None else given.double()
        share = torch.where(lse == -math.inf, 0.0, torch.sigmoid(sink - lse.double()))
        parts.zero_()
        parts[:, -1] = -torch.where(share == 0, 0.0, share * delta).flatten(0, -2).sum(0)
        self.rows = {"out": out, "lse": lse, "d_out": d_out, "sink": sink, "stats": stats}

    def Backward(self, wanted, q, k, v, d_out, stats, dk, dv, cu_q, cu_k, work, sums, scale, window, causal, section,
                 ctas, counters):  # fmt: skip
        self.of_schedule(wanted, q, k, cu_q, cu_k, work, wanted.keys, section, k.shape[-2])
        assert (ctas, counters) == (SMS, 4096) and stats is self.rows["stats"] and d_out is self.rows["d_out"]
        assert (sums != 0) == wanted.fused
        options = self.options(wanted, scale, window, causal, cu_q, cu_k)
        dq, *others, _ = reference_gradients(d_out, q, k, v, self.rows["sink"], **options)
        self.rows["dq"] = dq
        for target, result in zip((dk, dv), others, strict=True):
            self.write(target, result, cu_k)

    def Finish(self, wanted, dq, cu_q, sums, positions, scale):
        assert sums and positions == self.rows["stats"].shape[2]
        self.write(dq, self.rows["dq"], cu_q)

    def QueryGrad(self, wanted, q, k, v, d_out, stats, dq, cu_q, cu_k, work, scale, window, causal, section, ctas,
                  counters):  # fmt: skip
        self.of_schedule(wanted, q, k, cu_q, cu_k, work, wanted.rows, section, q.shape[-2])
        assert (ctas, counters) == (SMS, 4096) and stats is self.rows["stats"]
        self.write(dq, self.rows["dq"], cu_q)

    def options(self, wanted, scale, window, causal, cu_q, cu_k):
        assert causal in (0, 1) and (wanted.window or window == 2**30)
        return {"softmax_scale": scale, "window": window, "causal": bool(causal),
                "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}  # fmt: skip

    def of_schedule(self, wanted, q, k, cu_q, cu_k, work, rows, section, heads):
        if not wanted.packed:
            assert cu_q is None and cu_k is None and work is None
            assert section > 0 and q.shape[0] * heads % section == 0
            self.sections.append(section)
            return
        listed = cu_k if isinstance(wanted, backward_spec.SinkBackwardSpec) else cu_q
        assert work[0, 0] == sum(-(-n // rows) for n in listed.diff().tolist()) < len(work)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


def request_of(case: SinkCase, deterministic: bool = False) -> Request:
    call = FORWARD.request(**case.arguments(), deterministic=deterministic, differentiable=True)
    op.check(call)
    return op._launchable(call)


def run(case: SinkCase, deterministic: bool = False, delta: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """The launches' out, lse and gradients, written into poison."""
    request = request_of(case, deterministic)
    out = torch.full_like(case.q, math.nan, memory_format=torch.contiguous_format)
    lse = torch.full(case.q.shape[:-1], math.nan)
    launch.launch_forward(request, out, lse)
    gradients = [torch.full_like(t, math.nan, memory_format=torch.contiguous_format) for t in (case.q, case.k, case.v)]
    ds_aux = torch.empty(0) if case.s_aux is None else torch.full_like(case.s_aux, math.nan)
    rows = launch.BackwardRows(op._plain(case.d_out), out, lse, delta)
    launch.launch_backward(request, rows, launch.Gradients(*gradients, ds_aux))
    return (out, lse, *gradients, *([] if case.s_aux is None else [ds_aux]))


def require_right(case: SinkCase, results: tuple[torch.Tensor, ...]) -> None:
    expected = [*reference_sink_attention(**case.arguments())]
    gradients = reference_sink_attention_backward(case.d_out, out=results[0], lse=results[1], **case.arguments())
    expected += [t for t in gradients if t is not None]
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got, want.to(got.dtype), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("deterministic", [False, True])
@EVERY
def test_kernels_get_what_they_were_compiled_for(options, deterministic, kernels):
    case = sink_case(**options, device="cpu")
    require_right(case, run(case, deterministic))
    kinds = [type(one) for one in kernels.launched]
    separate = deterministic or (case.window or 1000) <= spec.SMALL_WINDOW
    assert (backward_spec.SinkQueryGradSpec in kinds) == separate
    assert (backward_spec.SinkFinishSpec in kinds) != separate
    assert kinds.count(spec.SinkWorkListSpec) == (0 if not case.packed else 3 if separate else 2)
    assert all(one.window == (case.window is not None) for one in kernels.launched if hasattr(one, "window"))


@pytest.mark.parametrize("deterministic", [False, True])
@EVERY
def test_a_delta_that_is_given_reaches_the_kernel(options, deterministic, kernels):
    case = sink_case(**options, device="cpu")
    out, _ = reference_sink_attention(**case.arguments())
    delta = (out * case.d_out.double()).sum(-1).float()
    require_right(case, run(case, deterministic, delta))
    assert [one.given for one in kernels.launched if isinstance(one, backward_spec.SinkPrepareSpec)] == [True]


@pytest.mark.parametrize("lengths", [RAGGED, [(0, 0)], [(3, 0), (0, 7)]], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_rows_past_the_last_sequence_are_filled(d, deterministic, lengths, kernels):
    """Results are poison before. Kernels write rows of sequences; the launch that makes their list fills the others."""
    case = sink_case(lengths, d=d, packed=True, device="cpu")
    tokens_q, tokens_k = case.q.shape[0], case.k.shape[0]
    for name, rows in (("q", 5), ("k", 3), ("v", 3), ("d_out", 5)):
        t = getattr(case, name)
        setattr(case, name, torch.cat([t, torch.full((rows, *t.shape[1:]), math.nan, dtype=t.dtype)]))
    results = run(case, deterministic)
    require_right(case, results)
    out, lse, dq, dk, dv, ds_aux = results
    assert (out[tokens_q:] == 0).all() and (lse[tokens_q:] == -math.inf).all() and (dq[tokens_q:] == 0).all()
    assert (dk[tokens_k:] == 0).all() and (dv[tokens_k:] == 0).all() and ds_aux.isfinite().all()


def test_dimensions_of_one_may_have_any_stride(kernels):
    case = sink_case([(1, 1)], 1, 1, device="cpu")
    case.q, case.k, case.v, case.d_out = (t.as_strided(t.shape, (3, 0, 5, 1)) for t in (case.q, case.k, case.v, case.q))
    case.s_aux = torch.zeros(4)[::3][:1]
    require_right(case, run(case))


def test_tensors_that_require_gradients_are_handed_on_without(kernels, monkeypatch):
    case = sink_case([(30, 40)], device="cpu")
    assert case.s_aux is not None
    for t in (case.q, case.k, case.v, case.s_aux):
        t.requires_grad_()
    accepted = []
    monkeypatch.setattr(
        kernels, "Forward", lambda wanted, *arguments: accepted.extend(arguments[:4])
    )  # fmt: skip
    launch.launch_forward(request_of(case), torch.empty_like(case.q), torch.empty(case.q.shape[:-1]))
    assert not any(t.requires_grad for t in accepted)


def test_tensors_are_not_copied(kernels, monkeypatch):
    case = sink_case([(30, 40)] * 2, device="cpu")
    seen: list[Any] = []
    monkeypatch.setattr(kernels, "Forward", lambda wanted, *arguments: seen.extend(arguments))
    launch.launch_forward(request_of(case), torch.empty_like(case.q), torch.empty(case.q.shape[:-1]))
    assert seen[0] is case.q and seen[1] is case.k and seen[2] is case.v


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-40])
def test_scales_that_kernels_do_not_take_run_plain_torch(scale, kernels):
    case = sink_case([(30, 40)], device="cpu")
    case.softmax_scale = scale
    results = run(case)
    assert not kernels.launched
    if math.isfinite(scale):
        require_right(case, results)


def test_more_heads_than_constants(kernels, monkeypatch):
    monkeypatch.setattr(launch, "MAX_HEADS", 2)
    case = sink_case([(30, 40)], sinks="absent", device="cpu")
    require_right(case, run(case))


def test_every_variant_of_bfloat16_is_shipped(kernels):
    """Tests compile shipped kernels only; together the masks need these."""
    for d in (64, 128):
        for packed in (False, True):
            for window in (None, 64, 600):
                for ratio in (1, spec.GROUPED_RATIO):
                    case = sink_case([(70, 700)], 2 * ratio, d=d, packed=packed, window=window, device="cpu")
                    run(case)
                    run(case, deterministic=True)
    shipped = [*spec.shipped_specs(), *backward_spec.shipped_specs()]
    assert len(set(shipped)) == len(shipped)
    assert set(kernels.launched) == {wanted for wanted in shipped if getattr(wanted, "dtype", None) != "float16"}


@pytest.mark.parametrize("batch", [1, 3, 4, 7])
@pytest.mark.parametrize(("h_q", "h_kv"), [(64, 8), (32, 8), (5, 5), (14, 2)])
@pytest.mark.parametrize("window", [None, 128, 4096])
@pytest.mark.parametrize("s_k", [100, 4096, 16384])
def test_sections_divide_the_pairs(batch, h_q, h_kv, window, s_k):
    sizes = {"batch": batch, "s_k": s_k, "h_kv": h_kv, "window": window}
    for d in (64, 128):
        assert batch * h_q % plan.forward_section(**sizes, h_q=h_q, d=d) == 0
        assert batch * h_kv % plan.backward_section(**sizes, d=d) == 0


def test_sections_are_the_best_that_were_measured():
    full = {"window": None, "h_kv": 8}
    assert plan.forward_section(**full, batch=4, s_k=16384, h_q=64, d=64) == 8
    assert plan.forward_section(**full, batch=4, s_k=16384, h_q=32, d=128) == 4
    assert plan.forward_section(**full, batch=16, s_k=4096, h_q=32, d=128) == 16 * 32
    assert plan.forward_section(batch=4, s_k=16384, h_q=32, h_kv=8, d=128, window=4096) == 32
    assert plan.backward_section(**full, batch=4, s_k=16384, d=64) == 16
    assert plan.backward_section(**full, batch=4, s_k=16384, d=128) == 4
    assert plan.backward_section(**full, batch=16, s_k=4096, d=128) == 16
    assert plan.backward_section(**full, batch=3, s_k=4096, d=64) == 12
    assert plan.backward_section(batch=4, s_k=16384, h_kv=8, d=128, window=4096) == 1


def test_gradients_of_small_windows_take_two_kernels():
    for window, deterministic, fused in (
        (128, False, False),
        (spec.SMALL_WINDOW + 1, False, True),
        (None, False, True),
        (None, True, False),
    ):
        for d in (64, 128):
            wanted = backward_spec.SinkBackwardSpec.for_launch(
                "bfloat16", d, packed=False, window=window, deterministic=deterministic
            )
            assert wanted.fused == fused


def test_views_reach_the_kernels_as_they_are(kernels):
    case = sink_case([(30, 40)] * 2, device="cpu", padded=False)
    case.k, case.v = strided(case.k), strided(case.v)
    require_right(case, run(case))
