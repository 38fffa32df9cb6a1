"""Families of values, and which of them leave the fast path of MLA decoding over float32 scales."""

import dataclasses
from typing import Any

import pytest
import torch

from cute_kernels import mla_fp8_decode
from fp8_mla import FORMATS, read_pages, unpack
from tests.kit.compare import check_decode
from tests.kit.mla_cases import POISON_BYTE, DecodeCase, dense_case, generator, sparse_case
from tests.kit.slow_tiles import KEYS, SlowTiles, key_tiles, needs_second_way, scales_of, slow_tiles
from tests.kit.values import FAMILIES, SLOW, fill_pages, keys, query, refill, tokens

EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)
USUAL = 2.0**-7
"""A scale of N(0,1) tokens."""


def usual_scales(number: int = 4 * KEYS, tiles: int = 4) -> torch.Tensor:
    return USUAL * (1 + torch.rand((number, tiles), generator=generator(3)))


def along_their_order(scores: torch.Tensor) -> float:
    """The correlation of numbers with their positions."""
    return float(torch.corrcoef(torch.stack([scores, torch.arange(len(scores)).float()]))[0, 1])


# ---- families


@EACH_FAMILY
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_of_every_format_are_finite_and_drawn_from_the_seed(family: str, name: str) -> None:
    packed, again = (tokens(family, 130, name, generator(2)) for _ in range(2))
    assert torch.equal(packed, again)
    unpacked = unpack(packed, torch.float32, token_format=name)
    assert unpacked.isfinite().all() and unpacked.count_nonzero() > 0.5 * unpacked.numel()


def test_families_are_what_they_say() -> None:
    gen, shape = generator(0), (4096, 512)
    made = {family: keys(family, shape, 128, gen, quantized=448 // 128 * 128) for family in FAMILIES}
    size = {family: x.square().mean(dim=1).sqrt() for family, x in made.items()}
    assert (size["few small"] < 0.02).sum() == 64 and (size["one small"] < 0.02).sum() == 2
    assert 0.025 < size["small"].mean() < 0.035 and 290 < size["large"].mean() < 310
    assert size["tokens"].max() > 200 and size["tokens"].min() < 0.006
    assert made["channel"][:, 5].std() > 50 > made["channel"][:, 6].std() * 40
    assert (size["zeros"] == 0).sum() == (size["unwritten"] == 0).sum() == 512
    assert size[SLOW].log2().std() > size["tokens"].log2().std() > 4
    of_tile = made["tiles"][:, :384].unflatten(1, (3, 128)).square().mean(dim=(0, 2)).sqrt().log2()
    assert (of_tile - torch.tensor([-6.0, 0.0, 6.0])).abs().max() < 0.1
    assert made["tiles"][:, 384:].std() < 1.1, "elements that are not quantized are left alone"


def test_queries_are_what_they_say() -> None:
    size = {family: query(family, (3, 64, 576), generator(1)).float().std(dim=-1).mean(dim=0) for family in FAMILIES}
    assert size["heads"][0] < 2**-9 and size["heads"][-1] > 7
    assert size["small q"].max() < 2e-4 and 5.5 < size["sharp"].mean() < 6.5
    assert (size["small head"] < 2e-3).tolist() == [head == 32 for head in range(64)]
    assert query("heads", (1, 1, 576), generator(1)).isfinite().all()


@EACH_FAMILY
def test_unwritten_tokens_alone_are_bytes_of_zeros(family: str) -> None:
    for name in FORMATS:
        empty = (tokens(family, 256, name, generator(0)) == 0).all(dim=1).sum()
        assert empty == (32 if family == "unwritten" else 0)


@pytest.mark.parametrize(("family", "sign"), [("rising", 1), ("falling", -1)])
def test_scores_of_sorted_families_rise_or_fall(family: str, sign: int) -> None:
    """The order is that of index lists, and that of a sequence's tokens."""
    sparse = sparse_case(batch=2, h_q=4, s_q=2, topk=200, lengths="query", seed=1)
    dense = dense_case(seqlens=[200, 130], h_q=4, page_size=16)
    for case in (sparse, dense):
        refill(case, family)
    assert sparse.indices is not None and sparse.topk_length is not None
    assert dense.block_table is not None
    lists = [
        (sparse.q[row, one], sparse.indices[row, one, : max(0, int(sparse.topk_length[row, one]))])
        for row in range(2)
        for one in range(2)
    ]
    for row, length in enumerate((200, 130)):
        slots = dense.block_table[row].repeat_interleave(16) * 16 + torch.arange(16).repeat(dense.block_table.shape[1])
        lists.append((dense.q[row, 0], slots[:length]))
    for (q, slots), case in zip(lists, [sparse] * 4 + [dense] * 2, strict=True):
        slots = slots[(slots >= 0) & (slots < case.kv_cache.shape[0] * case.kv_cache.shape[1])]
        if len(slots) < 2:
            continue
        scores = q.float() @ unpack(read_pages(case.kv_cache, slots), torch.float32).T
        assert sign * along_their_order(scores.mean(dim=0)) > 0.9


def test_a_filled_cache_is_sorted_within_its_contexts() -> None:
    for run in (64, 192):
        cache = fill_pages(torch.zeros(6, 64, 656, dtype=torch.uint8), "rising", "v3.2", run=run)
        q = query("rising", (1, 576), generator(0)).float()
        scores = (unpack(cache, torch.float32).flatten(0, 1) @ q[0]).unflatten(0, (-1, run))
        assert all(along_their_order(row) > 0.9 for row in scores) and scores[1, 0] < scores[0, -1]


@EACH_FAMILY
def test_refilled_cases_pass_the_rule_and_stay_poisoned(family: str) -> None:
    options: dict[str, Any] = {"h_q": 5, "page_size": 16, "seed": 2}
    lists: dict[str, Any] = {"batch": 3, "topk": 70, "num_slots": 512, "lengths": "batch"}
    made: list[DecodeCase] = [
        sparse_case(**options, **lists, sink="finite"),
        dense_case(**options, seqlens=[70, 0, 33]),
        sparse_case(formats=("v4",), **options, **lists),
        sparse_case(formats=("v4.1", "v4.1_fp4"), cache_layout="interleaved", extra_topk=40, **options, **lists),
        dense_case(cache_format="v3.2_nope", **options, seqlens=[70, 0, 33]),
    ]
    for case in made:
        poison = (case.kv_cache == POISON_BYTE).all(dim=-1).sum()
        refill(case, family, seed=5)
        assert (case.kv_cache == POISON_BYTE).all(dim=-1).sum() == poison
        out, lse = mla_fp8_decode(case.q, case.kv_cache, **case.options(), return_lse=True)
        check_decode(out, lse, **case.arguments()).require()


# ---- which path they take


@EACH_FAMILY
def test_which_families_take_the_slow_path(family: str) -> None:
    """Only the key tiles of "tokens and tiles" are slow, in PV. Units move once, if scales are above 2."""
    case = refill(sparse_case(batch=1, h_q=64, topk=2048, num_slots=6000, invalid=False), family, seed=1)
    found = slow_tiles(scales_of(case, 0, 0), case.q[0, 0])
    assert found.tiles == 32 and found.qk == 0
    if family == SLOW:
        assert found.pv >= 30
    elif family in ("large", "tokens"):
        assert found.pv == 0 and 1 <= found.moved <= 2
    else:
        assert found == SlowTiles(qk=0, pv=0, moves=0, moved=0, tiles=32)


@EACH_FAMILY
def test_weights_of_fast_key_tiles_are_in_their_window(family: str) -> None:
    """Units exist for this: s 2^(6 - E) of a nonzero scale is in 2^-14 .. 2^7, where float16 numbers are normal."""
    scales = scales_of(refill(sparse_case(batch=1, h_q=1, topk=1024, invalid=False), family), 0, 0)
    for tile, part in zip(key_tiles(scales), scales.split(KEYS), strict=True):
        weights = (part.double() * torch.exp2(6.0 - tile.e_j))[part > 0]
        inside = (weights >= 2.0**-14) & (weights < 2.0**7)
        assert tile.pv_slow == (not inside.all())


def test_the_model_has_the_numbers_of_the_kernel() -> None:
    from cute_kernels.mla.kernels import convert_q, qk, value_units
    from tests.kit import slow_tiles as model

    units = value_units.WINDOW, value_units.HEADROOM, value_units.MAX_EXPONENT, value_units.MAX_FALL
    assert units == (model.WINDOW, model.ROOM, model.LARGEST_E, model.DROP)
    assert (value_units.WEIGHT_EXPONENT, qk.MAX_SCALE) == (model.WEIGHT_EXPONENT, model.LARGEST_QK_SCALE)
    powers = convert_q.TOP_EXPONENT, convert_q.ROPE_EXPONENT, convert_q.MAX_EXPONENT
    assert powers == (model.Q_PEAK_EXPONENT, model.Q_ROPE_EXPONENT, model.Q_LARGEST_POWER)
    assert convert_q.QUIET_EXPONENT == model.Q_QUIET_EXPONENT


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s, (0, 0, 0)),
        (lambda s: s[70].mul_(0), (0, 0, 0)),
        (lambda s: s[70].mul_(2.0**-12), (0, 0, 0)),
        (lambda s: s[70].mul_(2.0**-25), (0, 1, 0)),
        (lambda s: s[70, 1:2].mul_(2.0**-25), (0, 1, 0)),
        (lambda s: s[70, 1:2].mul_(2.0**30), (0, 1, 2)),
        (lambda s: s[70].mul_(2.0**10), (0, 0, 4)),
        (lambda s: s[70:].mul_(2.0**-40), (0, 1, 4)),
        (lambda s: s[70, :1].fill_(-1.0), (1, 0, 0)),
        (lambda s: s[70, :1].fill_(torch.nan), (1, 1, 2)),
        (lambda s: s[70, 2:3].fill_(2.0**41), (1, 1, 2)),
        (lambda s: s.fill_(0.0), (0, 0, 0)),
        (lambda s: s[:64].fill_(0.0), (0, 0, 0)),
    ],
)
def test_single_scales_decide_for_their_key_tile_alone(change: Any, expected: tuple[int, int, int]) -> None:
    scales = usual_scales()
    change(scales)
    found = slow_tiles(scales)
    assert (found.qk, found.pv, found.moves) == expected


def test_one_power_of_a_head_is_enough_unless_a_tile_of_it_is_far_smaller() -> None:
    q = torch.randn((4, 576), generator=generator(0))
    q[1] *= 1e-30
    q[2, :128] *= 2.0**-20
    q[3, :128] = 0.0
    assert not needs_second_way(q).any()
    q[3, :128] = 1e-9
    assert needs_second_way(q).tolist() == [False, False, False, True]
    assert slow_tiles(usual_scales(), q).qk == 4 and slow_tiles(usual_scales(), q[:3]).qk == 0


def test_masked_keys_have_no_scale() -> None:
    case = sparse_case(batch=1, h_q=1, topk=64, invalid=False)
    assert case.indices is not None
    masked = case.indices.clone()
    masked[..., 3], masked[..., 5] = -1, 2**31 - 1
    case = dataclasses.replace(case, indices=masked, topk_length=torch.tensor([60], dtype=torch.int32))
    assert ((scales_of(case, 0, 0) == 0).all(dim=1).nonzero().flatten().tolist()) == [3, 5, 60, 61, 62, 63]
