"""The tools that judge kernels: a comparison must be able to fail, and inputs must be as adversarial as they claim."""

import dataclasses
import functools
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from fp8_mla import ROPE_OFFSET, SCALE_OFFSET, reference_decode, slots_from_block_table, unpack
from tests.kit.compare import (
    Comparison,
    bf16_yardstick,
    check_decode,
    compare,
    emulate_bf16_decode,
    relative_error,
    ulp,
)
from tests.kit.mla_cases import SCALE_KINDS, PoisonedOutput, dense_case, generator, latent_tokens, sparse_case

# --- compare


def judge(case: Any, out: torch.Tensor, lse: torch.Tensor) -> Comparison:
    return check_decode(out, lse, **case.arguments())


def decode_with_exact_keys(case: Any, *, draw: int = 0, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The arithmetic of `mla/kernels`, sparse and without an online softmax, which is as good as the emulation.

    Codes times powers of two stay exact. The rest of a scale, f, is applied in float32: to S in a chain over the tiles,
    and to P before it is rounded to bf16. With `draw` P of each row is rounded at its own size. The output is
    multiplied by `factor` before it is rounded.
    """
    gen = generator(draw)
    tokens = case.kv_cache.flatten(0, 1)
    out = torch.zeros((*case.q.shape[:3], 512), dtype=torch.bfloat16)
    lse = torch.full(case.q.shape[:3], -torch.inf)
    for query in product(*map(range, case.q.shape[:2])):
        slots = case.indices[query]
        if case.topk_length is not None:
            slots = slots[
                : max(0, int(case.topk_length.view(len(out), -1)[query[0], query[1] % case.topk_length[0].numel()]))
            ]
        slots = slots[(slots >= 0) & (slots < len(tokens))].long()
        if len(slots) == 0:
            continue
        keys, q = tokens[slots], case.q[query].float()
        mantissa, exponent = torch.frexp(keys[:, SCALE_OFFSET:ROPE_OFFSET].clone().view(torch.float32))
        f, power = 2 * mantissa, torch.exp2((exponent - 1).double()).float()
        codes = keys[:, :SCALE_OFFSET].view(torch.float8_e4m3fn).float().view(-1, 4, 128)
        tiles = (codes * power.unsqueeze(-1)).bfloat16().float().unbind(dim=1)
        scores = q[:, 512:] @ keys[:, ROPE_OFFSET:].clone().view(torch.bfloat16).float().T
        previous = torch.ones(len(slots))
        for j, tile in enumerate(tiles):
            scores = scores * (previous / f[:, j]) + q[:, 128 * j : 128 * (j + 1)] @ tile.T
            previous = f[:, j]
        scores *= previous * 576**-0.5
        row_max = scores.amax(dim=-1, keepdim=True)
        weights = torch.exp(scores - row_max)
        row_sum = weights.sum(dim=-1, keepdim=True)
        lse[query] = (row_max + row_sum.log()).squeeze(-1)
        round_p = torch.exp2(torch.rand((len(q), 1), generator=gen)) if draw else 1.0
        acc = [(weights * round_p * f[:, j]).bfloat16().float() @ tile for j, tile in enumerate(tiles)]
        share = 1 / row_sum if case.s_aux is None else torch.sigmoid(lse[query] - case.s_aux).unsqueeze(-1) / row_sum
        out[query] = (torch.cat(acc, dim=-1) / round_p * share * factor).bfloat16()
    return out, lse


@pytest.mark.parametrize("scales", SCALE_KINDS)
def test_the_arithmetic_of_the_kernel_passes_on_logits_of_usual_size(scales):
    case = sparse_case(batch=40, h_q=8, topk=200, scales=scales, outliers=True, lengths="batch", sink="inf")
    check = judge(case, *decode_with_exact_keys(case))
    assert check, str(check)
    assert check.worst < 0.7
    assert check.lse_err < 2e-5
    assert 1e-3 < check.rel_err < 2.7e-3


@pytest.mark.parametrize("scales", ["absmax", "power_of_two", "arbitrary"])
def test_another_draw_of_the_rounding_passes_where_channels_stand_out(scales):
    """Each case has 8,000 outlier elements. With the emulation's error as the only yardstick, up to 37 failed."""
    draws = 0
    for seed in range(3):
        case = sparse_case(
            batch=40, h_q=40, topk=64, scales=scales, outliers=True, invalid=False, seed=seed, query_size=1.0
        )
        out, lse = decode_with_exact_keys(case, draw=seed)
        expected, expected_lse = reference_decode(**case.arguments())
        yardstick = bf16_yardstick(**case.arguments())
        check = yardstick.compare(out, expected, lse=lse, expected_lse=expected_lse)
        assert check, str(check)
        assert check.worst < 0.9
        draws += not compare(out, expected, yardstick.out, gain=False)
    assert draws, "the case would have passed without the noise of the elements: it shows nothing"


@functools.cache
def case_of_outliers(scales: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A case and the result of the kernel's arithmetic, which passes."""
    case = sparse_case(batch=40, h_q=8, topk=192, scales=scales, outliers=True, invalid=False, query_size=1.0)
    out, lse = decode_with_exact_keys(case)
    assert judge(case, out, lse)
    return case, out, lse


def wrong_scale(case: Any, out: torch.Tensor) -> torch.Tensor:
    """Makes one outlier channel of one row use the next larger power of two for its keys."""
    out[7, :, :, 301] *= 2
    return out


def wrong_channel(case: Any, out: torch.Tensor) -> torch.Tensor:
    """Changes V by 1% in an outlier channel."""
    return out * torch.ones(512).index_fill(0, torch.tensor([200]), 1.01)


def wrong_ordinary_channel(case: Any, out: torch.Tensor) -> torch.Tensor:
    """Changes V by 1% in a channel whose group has an outlier, which hides the error of single elements."""
    return out * torch.ones(512).index_fill(0, torch.tensor([302]), 1.01)


def dropped_key(case: Any, out: torch.Tensor) -> torch.Tensor:
    """Leaves out the last key of every query."""
    return decode_with_exact_keys(dataclasses.replace(case, indices=case.indices[:, :, :-1]))[0]


def stale_tile(case: Any, out: torch.Tensor) -> torch.Tensor:
    """Replaces keys 64 to 127 by those of the previous tile."""
    indices = case.indices.clone()
    indices[:, :, 64:128] = indices[:, :, :64]
    return decode_with_exact_keys(dataclasses.replace(case, indices=indices))[0]


def swapped_channels(case: Any, out: torch.Tensor) -> torch.Tensor:
    """Swaps two neighbouring channels, one of them an outlier."""
    out[..., [500, 501]] = out[..., [501, 500]]
    return out


def short_denominator(case: Any, out: torch.Tensor) -> torch.Tensor:
    """Scales the output as if the sum of P lacked 0.12%."""
    return decode_with_exact_keys(case, factor=1.0012)[0]


def long_denominator(case: Any, out: torch.Tensor) -> torch.Tensor:
    """Scales the output as if the sum of P were 0.12% too large."""
    return decode_with_exact_keys(case, factor=0.9988)[0]


def noisy_channel(case: Any, out: torch.Tensor) -> torch.Tensor:
    """Rounds P to 6 bits for one outlier channel: errors of the right kind, four times as large."""
    gen = generator(9)
    noise = bf16_yardstick(**case.arguments()).noise[..., 3]
    out[..., 3] += (4 * noise * torch.randn(noise.shape, generator=gen)).bfloat16()
    return out


@pytest.mark.parametrize(
    "damage",
    [
        wrong_scale,
        wrong_channel,
        wrong_ordinary_channel,
        dropped_key,
        stale_tile,
        swapped_channels,
        short_denominator,
        long_denominator,
        noisy_channel,
    ],
    ids=lambda damage: damage.__name__,
)
@pytest.mark.parametrize("scales", ["absmax", "power_of_two"])
def test_damage_is_found_where_channels_stand_out(damage, scales):
    case, out, lse = case_of_outliers(scales)
    check = judge(case, damage(case, out.clone()), lse)  # the log-sum-exp is right: the output alone must show it
    assert any(problem.startswith("out: ") for problem in check.problems), str(check)


def test_a_channel_is_judged_over_all_rows_that_have_keys():
    expected = torch.randn((64, 2, 256), dtype=torch.float64, generator=generator(0))
    noise = 1e-3 * torch.ones_like(expected)
    damaged = expected.clone()
    damaged[..., 130] *= 1.01
    check = compare(damaged.bfloat16(), expected, expected + noise, noise=noise)
    assert "1 of 256 channels" in str(check)
    assert "worst is 130" in str(check)
    assert compare(damaged[:31].bfloat16(), expected[:31], expected[:31] + noise[:31], noise=noise[:31])
    damaged[31:] = expected[31:] = 0
    assert compare(damaged.bfloat16(), expected, expected + noise, noise=noise), "rows without keys count for nothing"


@pytest.mark.parametrize("sink", ["none", "finite"])
def test_the_noise_is_that_of_rounding_p(sink):
    """The noise is compared with its definition and with many draws of the rounding, over scales of 1e-30 to 1e30."""
    case: Any = sparse_case(batch=1, h_q=6, topk=300, invalid=False, scales="mixed", sink=sink, query_size=1.0)
    noise = bf16_yardstick(**case.arguments()).noise[0, 0]
    values = unpack(case.kv_cache.flatten(0, 1)[case.indices[0, 0].long()], torch.float64)
    scores = case.q[0, 0].double() @ values.T * 576**-0.5
    terms = scores.exp().sum(dim=-1) + (0.0 if case.s_aux is None else case.s_aux.double().exp())
    weights = scores.exp() / terms.unsqueeze(-1)
    # keys rounded to bf16 move a logit of size 1 by up to 6e-3, and the square of its weight by twice that
    torch.testing.assert_close(
        noise, 1.659e-3 * (weights.square() @ values[:, :512].square()).sqrt(), rtol=2e-2, atol=0
    )
    drawn = torch.zeros_like(noise)
    for scale in torch.logspace(0, 1, 33, base=2, dtype=torch.float64)[:-1]:
        rounded = (weights * scale).bfloat16().double() / scale
        drawn += ((rounded - weights) @ values[:, :512]).square() / 32
    ratio = (drawn.sqrt() / noise).median()
    assert 0.85 < ratio < 1.15


def test_noise_that_is_not_finite_excuses_nothing():
    expected = torch.ones((1, 128), dtype=torch.float64)
    for value in (math.nan, math.inf):
        assert not compare((expected * 1.05).bfloat16(), expected, expected, noise=torch.full_like(expected, value))


@pytest.mark.parametrize("scales", ["power_of_two", "mixed", "rare"])
def test_the_emulation_itself_passes(scales):
    case = sparse_case(batch=3, h_q=8, s_q=2, topk=130, scales=scales, lengths="query", sink="inf", query_size=0.05)
    out, _ = emulate_bf16_decode(**case.arguments())
    _, lse = reference_decode(**case.arguments())
    check = judge(case, out, lse.float())  # its own is off by 7e-5, with keys in bf16
    assert check, str(check)
    assert check.rel_err == check.rel_err_baseline
    assert 0 < check.rel_err < 4e-3


@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_the_oracle_passes_and_the_emulation_agrees_with_it(mode):
    if mode == "sparse":
        case = sparse_case(batch=4, h_q=5, s_q=2, topk=70, lengths="batch", sink="finite", query_size=0.5)
    else:
        case = dense_case(seqlens=[0, 1, 2, 65, 130], h_q=5, s_q=3, page_size=7, sink="finite", query_size=0.5)
    out, lse = reference_decode(**case.arguments())
    assert judge(case, out.bfloat16(), lse.float()).worst < 0.5
    emulated, emulated_lse = emulate_bf16_decode(**case.arguments())
    assert relative_error(emulated, out) < 4e-3
    torch.testing.assert_close(emulated_lse.double(), lse, rtol=0, atol=5e-3)


DAMAGES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], str]] = {
    "one element": (lambda out, lse: out[1, 0, 3, 17].add_(0.03 * out[1, 0, 3].abs().max()), "out: 1 of"),
    "swapped heads": (lambda out, lse: out[:, :, 2:4].copy_(out[:, :, [3, 2]]), "out: "),
    "a tile left out": (lambda out, lse: out[2, 0, 1, 256:384].zero_(), "out: "),
    "an unwritten element": (
        lambda out, lse: out[0, 0, 0, 511].fill_(math.nan),
        "out: NaN misplaced or missing in 1",
    ),
    "an infinity": (lambda out, lse: out[0, 0, 0, 0].fill_(math.inf), "out: +inf misplaced or missing in 1"),
    "the lse": (lambda out, lse: lse[1, 0, 2].add_(5e-5), "lse: 1 of"),
    "the lse of an empty row": (lambda out, lse: lse[3, 0, 0].fill_(math.inf), "lse: +inf misplaced or missing"),
    "an empty row": (lambda out, lse: out[3, 0, 0, 5].fill_(1e-30), "out: 1 of"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_found(damage, said):
    case = sparse_case(batch=4, h_q=4, topk=300, scales="power_of_two", query_size=1.0)  # query 3 has no valid key
    out, lse = emulate_bf16_decode(**case.arguments())
    assert judge(case, out, lse)
    damage(out, lse)
    check = judge(case, out, lse)
    assert not check
    assert said in str(check)
    with pytest.raises(AssertionError, match="mla_fp8_decode: "):
        check.require()


@pytest.mark.parametrize("topk", [2, 64, 2048])
def test_one_missing_key_is_found(topk):
    case: Any = sparse_case(batch=2, h_q=16, topk=topk, num_slots=5000, invalid=False, query_size=1.0)
    indices = case.indices.clone()
    indices[:, :, topk // 2] = -1
    check = judge(case, *emulate_bf16_decode(**dataclasses.replace(case, indices=indices).arguments()))
    assert any(problem.startswith("out: ") for problem in check.problems)


def test_a_wrong_scale_of_one_tile_is_found():
    case: Any = sparse_case(batch=1, h_q=4, topk=64, invalid=False, padded=False)
    cache = case.kv_cache.clone()
    tokens = cache.view(-1, cache.shape[-1])
    tokens[case.indices[0, 0, 0], SCALE_OFFSET + 2] ^= 0x40  # half of a binade in one scale
    check = judge(case, *emulate_bf16_decode(**dataclasses.replace(case, kv_cache=cache).arguments()))
    assert not check


def test_a_small_group_is_held_to_its_own_size():
    """An error in a group of small values is found, although it is tiny next to a group of large values."""
    expected = torch.cat([torch.full((1, 128), 1e30), torch.full((1, 128), 1e-30)], dim=1).double()
    damaged = expected.clone()
    damaged[0, 200] *= 1.1
    assert not compare(damaged.bfloat16(), expected, expected.bfloat16())


def test_nan_and_infinity_that_belong_there_pass():
    expected = torch.randn((2, 256), dtype=torch.float64, generator=generator(0))
    expected[0, 3], expected[0, 4], expected[1, 5] = float("nan"), float("inf"), -float("inf")
    assert compare(expected.bfloat16(), expected, expected.bfloat16())
    lse = torch.tensor([float("nan"), -float("inf")], dtype=torch.float64)
    assert compare(expected.float(), expected, expected, lse=lse, expected_lse=lse)
    swapped = expected.clone()
    swapped[0, 4], swapped[1, 5] = expected[1, 5], expected[0, 4]
    assert not compare(swapped.float(), expected, expected)


def test_a_broken_yardstick_excuses_nothing():
    expected = torch.ones((1, 128), dtype=torch.float64)
    broken = torch.full((1, 128), float("nan"))
    assert not compare((expected * 1.05).bfloat16(), expected, broken)


def test_shapes_must_be_equal():
    full = torch.zeros((2, 128), dtype=torch.float32)
    with pytest.raises(ValueError, match="three equal ones"):
        compare(full[:1], full, full)
    with pytest.raises(ValueError, match="noise"):
        compare(full, full, full, noise=full[:1])
    with pytest.raises(ValueError, match="lse"):
        compare(full, full, full, lse=torch.zeros(1), expected_lse=torch.zeros(2))
    with pytest.raises(ValueError, match="shared"):
        compare(full, full, full, shared=torch.zeros(1))
    with pytest.raises(ValueError, match=r"got torch.float64, needs one of torch.bfloat16"):
        compare(full.double(), full, full)


@pytest.mark.parametrize(("dtype", "infinity"), [(torch.bfloat16, 0x7F80), (torch.float16, 0x7C00)])
def test_ulp_is_the_spacing_of_numbers(dtype, infinity):
    patterns = torch.arange(infinity - 1, dtype=torch.int32).short()
    values, following = patterns.view(dtype).double(), (patterns + 1).view(dtype).double()
    assert torch.equal(ulp(values, dtype), following - values)
    assert torch.equal(ulp(-values, dtype), following - values)


def test_relative_error_of_zeros_and_nan():
    zero, one = torch.zeros(3), torch.ones(3)
    assert relative_error(zero, zero) == 0.0
    assert relative_error(one, zero) == math.inf
    assert relative_error(one * 1.5, one) == pytest.approx(0.5)
    assert math.isnan(relative_error(torch.full((3,), math.nan), one))
    assert math.isnan(relative_error(torch.full((3,), math.nan), zero))


# --- inputs


def is_poison(tokens: torch.Tensor) -> torch.Tensor:
    return (tokens == 0xFF).all(dim=-1)


@pytest.mark.parametrize(("lengths", "padded"), [*product(["none", "batch", "query"], [True, False])])
def test_sparse_lists_name_good_slots_and_lure_into_bad_ones(lengths, padded):
    case: Any = sparse_case(batch=9, h_q=2, s_q=2, topk=50, page_size=7, num_slots=300, lengths=lengths, padded=padded)
    pages, page_size, _ = case.kv_cache.shape
    indices = case.indices.long()
    valid = (indices >= 0) & (indices < pages * page_size)
    counted = torch.ones_like(valid)
    if case.topk_length is not None:
        assert {0, 1, 50, 55, -3} <= set(case.topk_length.flatten().tolist())
        counted = torch.arange(50) < case.topk_length.view(9, -1, 1)
    tokens = case.kv_cache[indices.clamp(0, pages * page_size - 1) // page_size, indices % page_size]
    assert not is_poison(tokens)[valid & counted].any()
    assert is_poison(tokens)[valid & ~counted].all()
    assert (valid & ~counted).any() == (lengths != "none")
    assert set(indices[counted & ~valid].tolist()) <= {
        -1,
        -(2**31),
        pages * page_size,
        pages * page_size + 1,
        2**31 - 1,
    }
    assert (~(valid & counted).any(dim=-1)).any(), "a query without any key"
    assert case.q.is_contiguous() == case.kv_cache.is_contiguous() == case.indices.is_contiguous() == (not padded)


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_dense_tables_name_good_slots_and_garbage_after_them(page_size):
    lengths = [0, 1, 6, 7, 8, 130]
    case = dense_case(seqlens=lengths, h_q=2, page_size=page_size)
    pages = case.kv_cache.shape[0]
    assert case.cache_seqlens is not None
    assert case.block_table is not None
    slots = slots_from_block_table(case.block_table, case.cache_seqlens, page_size, num_pages=pages)
    used = slots[slots >= 0]
    assert len(used) == len(used.unique()) == sum(lengths)
    poison = is_poison(case.kv_cache).flatten()
    assert not poison[used].any()
    assert int(poison.sum()) == pages * page_size - len(used)
    assert (case.block_table[0] < 0).any() or (case.block_table >= pages).any()


@pytest.mark.parametrize("scales", SCALE_KINDS)
def test_scales_are_what_their_name_says(scales):
    tokens = latent_tokens(2000, generator(1), scales=scales)
    scale = tokens[:, SCALE_OFFSET:ROPE_OFFSET].clone().view(torch.float32)
    assert (scale > 0).all()
    assert scale.isfinite().all()
    assert unpack(tokens, torch.float32).isfinite().all()
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all() == (scales == "power_of_two")
    if scales == "mixed":
        assert scale[:, 0].max() > 1e30
        assert scale[:, 0].min() < 1e-20
        assert scale[:, 1].max() < 1e-29
    if scales == "rare":
        assert 1 < int((scale > 128).any(dim=1).sum()) < 60
        assert (scale < 2.0**-25).any()


@pytest.mark.parametrize("scales", SCALE_KINDS)
def test_logits_have_the_size_that_queries_are_made_for(scales):
    """A rule about the log-sum-exp means something only if scores are neither all equal nor beyond float32."""
    case = sparse_case(batch=2, h_q=32, topk=1, invalid=False, scales=scales, query_size=1.0)
    _, lse = reference_decode(**case.arguments())
    assert 0.2 < lse.std() < 3


@pytest.mark.parametrize("padded", [True, False])
def test_poisoned_outputs_find_what_was_written_beside_them(padded):
    output = PoisonedOutput((2, 3, 4, 512), torch.bfloat16, "cpu", padded=padded)
    assert output.tensor.isnan().all()
    assert output.tensor.is_contiguous() == (not padded)
    output.tensor.zero_()
    output.require_no_stray_writes()
    assert (output.tensor == 0).all()
    output.poison()
    assert output.tensor.isnan().all()
    if padded:
        neighbour = output.tensor.as_strided((1,), (1,), output.tensor.storage_offset() + 512)
        neighbour.zero_()
        with pytest.raises(AssertionError, match="2 bytes around"):
            output.require_no_stray_writes()
