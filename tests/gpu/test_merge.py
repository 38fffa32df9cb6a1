"""`merge_states` on the GPU against float64."""

from itertools import product

import pytest
import torch

from cute_kernels import merge_states
from cute_kernels.distributed.exchange import Rows
from cute_kernels.merge.op import merge_request
from cute_kernels.merge.request import MERGE
from cute_kernels.merge.spec import MergeSpec
from cute_kernels.runtime.compile import precompile
from tests.kit.bits import require_same_bits
from tests.kit.merging import HALF_ULP, merge_problems
from tests.kit.mla_cases import generator

WIDTHS = (8, 64, 72, 128, 512)


@pytest.fixture(scope="module", autouse=True)
def compiled_for_all_dtypes(compiled: None) -> None:
    """Compiles the variants of `test_dtypes_and_sizes` in parallel; one after another they take almost a minute."""
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    precompile(
        MergeSpec.for_launch(rows=54, num_states=5, d=d, in_dtype=names[dtype], out_dtype=names[dtype])
        for dtype, d in product(HALF_ULP, WIDTHS)
    )


def states(
    shape: tuple[int, ...], d: int, dtype: torch.dtype, seed: int = 0, empty: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, ...) log-sum-exps and (n, ..., d) outputs; a fifth of the states is empty, with outputs full of NaN."""
    gen = generator(seed, "cuda")
    outs = torch.randn((*shape, d), generator=gen, device="cuda").to(dtype)
    lses = 5 * torch.randn(shape, generator=gen, device="cuda")
    if empty:
        drop = torch.rand(shape, generator=gen, device="cuda") < 0.2
        drop.flatten(1)[:, 1::11] = True  # rows without any key
        lses[drop] = -torch.inf
        outs[drop] = float("nan")
    return outs, lses


def check(
    out: torch.Tensor, lse: torch.Tensor, outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None = None
) -> None:
    assert not merge_problems(out, lse, outs, lses, sink)


@pytest.mark.parametrize(
    ("n", "rows"),
    [(n, rows) for n in (1, 2, 3, 8, 9, 64, 200) for rows in ((1, 1, 1), (2, 3, 7), (20, 2, 16))]
    + [(n, (64, 1, 128)) for n in (2, 8)],
)
def test_float32_states_into_bfloat16(n, rows):
    outs, lses = states((n, *rows), 512, torch.float32, seed=n)
    out = torch.full((*rows, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
    lse = torch.full(rows, float("nan"), device="cuda")
    got = merge_states(outs, lses, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    check(out, lse, outs, lses)


@pytest.mark.parametrize("dtype", list(HALF_ULP))
@pytest.mark.parametrize("d", WIDTHS)
def test_dtypes_and_sizes(dtype, d):
    outs, lses = states((5, 3, 2, 9), d, dtype, seed=d)
    check(*merge_states(outs, lses), outs, lses)


@pytest.mark.parametrize("rows", [(), (7,), (3, 7), (2, 3, 2, 7)])
def test_other_ranks(rows):
    outs, lses = states((3, *rows), 64, torch.float32, empty=False)
    check(*merge_states(outs, lses), outs, lses)


@pytest.mark.parametrize("n", [1, 4, 20])
def test_sinks_join_once(n):
    outs, lses = states((n, 4, 2, 6), 512, torch.float32, seed=n)
    sink = torch.tensor([-torch.inf, -3.0, 0.0, 2.0, 30.0, torch.inf], device="cuda")
    out, lse = merge_states(outs, lses, s_aux=sink)
    check(out, lse, outs, lses, sink)
    assert (out[:, :, 5] == 0).all()


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_below_the_least_normal_number(n, dtype):
    """Beside sinks of 80 to 112 all weights are 2^-115 to 2^-162. Values are large, so that their products are not."""
    outs, lses = states((n, 64, 2, 64), 512, torch.float32, seed=n)
    outs *= 2.0**18
    sink = torch.linspace(80, 112, 64, device="cuda")
    out = torch.full((64, 2, 64, 512), float("nan"), dtype=dtype, device="cuda")
    check(*merge_states(outs, lses / 8, s_aux=sink, out=out), outs, lses / 8, sink)


@pytest.mark.parametrize("sink", [None, 1.0])
@pytest.mark.parametrize(("n", "rows", "d", "dtype"), [
    (2, (64, 1, 128), 512, torch.bfloat16), (9, (3, 2, 7), 512, torch.float32), (64, (1, 1, 16), 128, torch.float32),
    (200, (2, 1, 5), 72, torch.float16),
])  # fmt: skip
def test_plus_infinity_is_no_keys_as_minus_infinity_is(n, rows, d, dtype, sink):
    outs, lses = states((n, *rows), d, dtype, seed=n)
    s_aux = None if sink is None else torch.full(rows[-1:], sink, device="cuda")
    out, lse = merge_states(outs, lses, s_aux=s_aux)
    empty = lses == -torch.inf
    every_other = empty & (torch.arange(n, device="cuda") % 2 == 0).view(n, 1, 1, 1)
    for marked in (empty, every_other):
        got, got_lse = merge_states(outs, lses.masked_fill(marked, torch.inf), s_aux=s_aux)
        assert torch.equal(got, out) and torch.equal(got_lse, lse)


@pytest.mark.parametrize(
    ("n", "dtype", "d"), [(2, torch.bfloat16, 512), (4, torch.float16, 64), (40, torch.bfloat16, 128)]
)
def test_rows_of_different_calls_become_nan(n, dtype, d):
    """Ranks receive such rows. If calls do not differ, the bits are those of `merge_states`."""
    shape = (6, 1, 8)
    received = [Rows.empty(shape, d, dtype, torch.device("cuda"), (1,)) for _ in range(n)]
    outs, lses = states((n, *shape), d, dtype, seed=n)
    for rank, rows in enumerate(received):
        rows.out.copy_(outs[rank])
        rows.lse.copy_(lses[rank])
    view = Rows.view(torch.stack([rows.bytes for rows in received]), d, dtype)
    want, want_lse = merge_states(view.out, view.lse)
    out, lse = merge_request(MERGE.request(outs=view.out, lses=view.lse, headers=True))
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    view.bytes[-1, 3, 0, 5, -12:] += 1  # one row of the last rank
    view.lse[:, 4] = -torch.inf
    view.bytes[0, 4, 0, 2, -12:] += 1  # and one of the first rank, where nobody has a key
    want, want_lse = merge_states(view.out, view.lse)
    out, lse = merge_request(MERGE.request(outs=view.out, lses=view.lse, headers=True))
    wrong = torch.zeros(shape, dtype=torch.bool, device="cuda")
    wrong[3, 0, 5] = wrong[4, 0, 2] = True
    assert lse[wrong].isnan().all() and out[3, 0, 5].isnan().all()
    assert torch.equal(out[~wrong], want[~wrong]) and torch.equal(lse[~wrong], want_lse[~wrong])


def test_log_sum_exps_of_very_different_size():
    outs, _ = states((4, 2, 2, 8), 512, torch.float32, empty=False)
    lses = torch.tensor([-1e4, 0.0, 80.0, 1e4], device="cuda").view(4, 1, 1, 1).expand(4, 2, 2, 8).contiguous()
    for offset in (0.0, -3e4, 3e4):
        check(*merge_states(outs, lses + offset), outs, lses + offset)


def test_strided_states_and_outputs():
    outs, lses = states((4, 6, 5, 8), 512, torch.bfloat16)
    wide = torch.full((4, 6, 5, 8, 640), float("nan"), dtype=torch.bfloat16, device="cuda")
    wide[..., :512] = outs
    out = torch.full((6, 5, 8, 640), float("nan"), dtype=torch.bfloat16, device="cuda")[..., :512]
    _, lse = merge_states(wide[..., :512], lses, out=out)
    check(out, lse, outs, lses)


def test_the_same_bits_on_20_runs():
    outs, lses = states((33, 4, 2, 128), 512, torch.float32)
    first = merge_states(outs, lses)
    for _ in range(19):
        require_same_bits(merge_states(outs, lses), first)
