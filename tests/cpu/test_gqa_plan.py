"""Plans and schedule of `gqa_decode` in pure Python, which repeats the scheduler's arithmetic.

A plan must be right for any lengths, because only the device knows the lengths.
"""

import ast
import bisect
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cute_kernels import gqa
from cute_kernels.gqa.layouts import HEAD_DIMS
from cute_kernels.gqa.plan import cluster_for, columns_for, keys_for, plan_decode, warps_for, with_key_blocks
from cute_kernels.gqa.spec import MAX_RANGES, GqaDecodeSpec, shipped_specs
from tests.kit.mla_cases import ragged_lengths

SMS = 132
SPEC = GqaDecodeSpec("bfloat16", "int8", 128, 8, k_scales="per_head", v_scales="per_head")
KEYS = SPEC.keys_per_tile
INT32_MAX, NO_WINDOW = 2**31 - 1, 2**30


def int32(value: int) -> int:
    """Checks that a result of the device's 32-bit arithmetic does not overflow."""
    assert -(2**31) <= value <= INT32_MAX, "overflow"
    return value


# ---- the device's arithmetic


def extent(length: int, capacity: int, window: int, s_q: int) -> tuple[int, int, int]:
    length = min(max(length, 0), capacity)
    first = max(int32(int32(length - s_q - window) + 1), 0) // KEYS
    return length, first, max(-(-length // KEYS) - first, 1)


def range_start(r: int, total: int, ranges: int) -> int:
    return min(r, total) if total < ranges else int32(r * total) // ranges


def range_of(position: int, total: int, ranges: int) -> int:
    return int32(int32((position + 1) * min(ranges, total)) - 1) // total


def pieces(
    lengths: list[int], ranges: int, splits: int, *, capacity: int = 10**6, window: int = NO_WINDOW, s_q: int = 1
) -> list[tuple[int, int, int, int, int, int]]:
    """(range, sequence, first tile, end, first of the ranges that share it, how many), in the kernel's order."""
    tiles = [extent(length, capacity, window, s_q)[2] for length in lengths]
    lines = [0, *itertools.accumulate(tiles)]
    total, batch = lines[-1], len(lengths)
    done = []
    for r in range(splits * batch if splits else ranges):
        if splits:
            b, part = divmod(r, splits)
            offset = range_start(part, tiles[b], splits)
            left = range_start(part + 1, tiles[b], splits) - offset
        else:
            begin = range_start(r, total, ranges)
            left = range_start(r + 1, total, ranges) - begin
            b = bisect.bisect_right(lines, begin) - 1 if left else 0
            offset = begin - lines[b]
        while left > 0:
            stop = min(offset + left, tiles[b])
            left -= stop - offset
            if splits:
                first, count = b * splits, min(splits, tiles[b])
            else:
                first = range_of(lines[b], total, ranges)
                count = range_of(lines[b + 1] - 1, total, ranges) - first + 1
            done.append((r, b, offset, stop, first, count))
            offset, b = 0, b + 1
    return done


LENGTHS = {
    "one": [1],
    "one tile": [KEYS],
    "one long": [131_072],
    "equal": [8192] * 64,
    "ragged": ragged_lengths(300, 3000, 64, seed=1),
    "nothing": [0] * 74,
    "nothing but one": [0] * 7 + [20_000] + [0] * 9,
    "wild": [-5, INT32_MAX, 0, -(2**31), KEYS - 1, KEYS, KEYS + 1],
    "many": [1] * 600,  # each of the 256 ranges, the most that a call has, gets two or more whole sequences
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("window", [NO_WINDOW, 1, 300])
def test_each_tile_is_in_one_range(lengths, window):
    """Ranges that share a sequence must agree on which ranges these are, so that exactly one CTA merges."""
    for ranges, splits in ((1, 0), (2, 0), (16, 0), (132, 0), (256, 0), (1, 1), (1, 2), (1, 40), (1, 256)):
        done = pieces(lengths, ranges, splits, window=window, s_q=2)
        tiles = [extent(length, 10**6, window, 2)[2] for length in lengths]
        for b, mine in itertools.groupby(sorted(done, key=lambda piece: piece[1:3]), key=lambda piece: piece[1]):
            parts = list(mine)
            assert parts[0][2] == 0 and parts[-1][3] == tiles[b]
            assert all(one[3] == other[2] for one, other in itertools.pairwise(parts)), "a gap, or a tile done twice"
            if len(parts) > 1:
                assert [piece[0] for piece in parts] == list(range(parts[0][4], parts[0][4] + len(parts)))
                assert {piece[4:] for piece in parts} == {(parts[0][0], len(parts))}
            else:
                assert parts[0][2:4] == (0, tiles[b])
        assert {piece[1] for piece in done} == set(range(len(lengths))), "a sequence without a result"


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_range_has_two_partials_at_most(lengths):
    """A sequence that begins before the range and one that ends after it have partials in different slots."""
    for ranges, splits in ((2, 0), (16, 0), (132, 0), (256, 0), (1, 3), (1, 256)):
        places: Counter[tuple[int, bool]] = Counter()
        for r, b, start, stop, _, count in pieces(lengths, ranges, splits):
            whole = start == 0 and stop == extent(lengths[b], 10**6, NO_WINDOW, 1)[2]
            assert whole == (count == 1)
            if not whole:
                places[r, start == 0] += 1
        assert all(times == 1 for times in places.values())


def test_ranges_are_equal_to_a_tile():
    sizes: Counter[int] = Counter()
    for r, _, start, stop, _, _ in pieces(LENGTHS["ragged"], 16, 0):
        sizes[r] += stop - start
    assert len(sizes) == 16
    assert max(sizes.values()) - min(sizes.values()) <= 1


def test_tiles_before_a_window_are_not_read():
    for length in (1, 300, 301, 5000):
        for s_q in (1, 3):
            for window in (1, 100, KEYS, 1000):
                _, first, tiles = extent(length, 10**6, window, s_q)
                oldest = max(length - s_q - window + 1, 0)
                assert first == oldest // KEYS
                assert first + tiles == max(-(-length // KEYS), first + 1)


# ---- plans

SHAPES = [
    {"batch": batch, "h_kv": h_kv, "rows": rows, "max_keys": max_keys}
    for batch in (1, 3, 64, 1000)
    for h_kv in (1, 2, 8, 64)
    for rows in (1, 4, 8, 9, 64, 512)
    for max_keys in (1, KEYS, KEYS + 1, 8192, 2**20)
]


@pytest.mark.parametrize("num_splits", [None, 1, 2, 7, 256])
def test_plans_are_complete(num_splits):
    for shape in SHAPES:
        for spec in (SPEC, GqaDecodeSpec("bfloat16", "bfloat16", 256, 8, warps=4)):
            plan = plan_decode(spec, **shape, num_sms=SMS, num_splits=num_splits)
            tiles, blocks = -(-shape["max_keys"] // spec.keys_per_tile), -(-shape["rows"] // spec.columns)
            heads = shape["h_kv"] * blocks
            assert plan.counters >= shape["batch"] * heads
            assert plan.state_floats == spec.columns * (spec.d + 2)
            if num_splits is None:
                assert plan.splits == 0 and 1 <= plan.ranges <= min(MAX_RANGES, tiles * shape["batch"])
                work_tiles, shared = heads * plan.ranges, plan.ranges > 1
            else:
                assert plan.splits == min(num_splits, tiles)
                work_tiles, shared = heads * plan.splits * shape["batch"], plan.splits > 1
            assert plan.ctas == min(work_tiles, SMS), "one for each SM"
            assert plan.states >= (2 * work_tiles if shared else 0)
            # products that the device computes in 32 bits
            total = tiles * shape["batch"]
            assert max(work_tiles, plan.ranges * total, plan.splits * tiles) <= INT32_MAX


@pytest.mark.parametrize(
    ("batch", "max_keys"), [(1, 1), (1, 2**30 - 1), (3, 2**30 - 1), (5000, 2**20), (250, 2**30 - 1)]
)
def test_no_overflow_in_the_arithmetic_of_the_device(batch, max_keys):
    plan = plan_decode(SPEC, batch=batch, h_kv=1, rows=4, max_keys=max_keys, num_sms=SMS)
    total = batch * -(-max_keys // KEYS)
    for tiles in {1, total // 3, total - 1, total} - {0}:
        starts = [range_start(r, tiles, plan.ranges) for r in range(plan.ranges + 1)]
        assert (starts[0], starts[-1]) == (0, tiles)
        assert starts == sorted(starts)
        for r, (start, stop) in enumerate(itertools.pairwise(starts)):
            if start < stop:
                assert range_of(start, tiles, plan.ranges) == range_of(stop - 1, tiles, plan.ranges) == r


def test_the_same_shapes_give_the_same_plan():
    def plans() -> list[object]:
        return [plan_decode(SPEC, **shape, num_sms=SMS) for shape in SHAPES]

    first = plans()
    plan_decode.cache_clear()
    assert plans() == first


def upcoming(
    lengths: list[int], begin: tuple[int, int, int], turn: int, step: int
) -> tuple[list[tuple[int, int]], int]:
    """What `first_upcoming` and `skip_ended` find for warp `turn` at `step`: tiles, and the number that all have."""
    b, offset, left = begin

    def enter(b: int, left: int, offset: int = 0) -> tuple[int, int, int]:
        length, first, tiles = extent(lengths[b], 10**6, NO_WINDOW, 1)
        count = min(offset + left, tiles) - offset
        return first + offset, first + offset + (count if length > 0 else 0), left - count

    tile, stop, left = enter(b, left, offset)
    found: list[tuple[int, int]] = []
    past = turn
    while True:
        tile += past
        while tile >= stop and left > 0:
            past, b = tile - stop, b + 1
            tile, stop, left = enter(b, left)
            tile += past
        if tile >= stop:
            return found, turn + step * len(found) - (tile - stop)
        found.append((b, tile))
        past = step


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_a_scale_warp_is_never_two_uses_behind(stages):
    """Whatever a CTA's ranges hold, a warp may wait only for the use of a stage that follows the last one it saw."""
    step, counts = min(3, stages), [1, 0, 2, 5, 1, 1, 1, 4, 0, 0, 7, 3]
    taken: list[list[int]] = [[] for _ in range(step)]
    begun = 0
    for count in counts:
        for rank, own in enumerate(taken):
            own += range(begun + (rank + step - begun % step) % step, begun + count, step)
        begun += count
    assert sorted(tile for own in taken for tile in own) == list(range(begun))
    assert all(later - earlier <= stages for own in taken for earlier, later in itertools.pairwise(own))


@pytest.mark.parametrize("ranges", [1, 3, 16, 33])
def test_warps_that_take_tiles_in_turn_find_each_tile_with_keys_once(ranges):
    lengths = [0, 1, KEYS, 0, 0, 5 * KEYS + 1, KEYS + 1, 0, 300, 17 * KEYS, 0]
    per_range: dict[int, list[tuple[int, int, int, int, int, int]]] = {}
    for piece in pieces(lengths, ranges, 0):
        per_range.setdefault(piece[0], []).append(piece)
    for own in per_range.values():
        tiles = [(b, tile) for _, b, start, stop, _, _ in own if lengths[b] > 0 for tile in range(start, stop)]
        begin = own[0][1], own[0][2], sum(stop - start for _, _, start, stop, _, _ in own)
        for step in (1, 2, 3):
            by_turn = [upcoming(lengths, begin, turn, step) for turn in range(step)]
            assert [count for _, count in by_turn] == [len(tiles)] * step
            assert [found for found, _ in by_turn] == [tiles[turn::step] for turn in range(step)]


@pytest.mark.parametrize(
    ("batch", "max_keys", "h_kv", "ranges"), [(64, 8192, 8, 16), (8, 4096, 4, 32), (64, 8192, 2, 64)]
)
def test_ranges_end_where_sequences_do(batch, max_keys, h_kv, ranges):
    """A partial and its merge cost more than a few idle SMs (docs/journal/gqa_decode.md)."""
    plan = plan_decode(SPEC, batch=batch, h_kv=h_kv, rows=4, max_keys=max_keys, num_sms=SMS)
    assert plan.ranges == ranges


@pytest.mark.parametrize("h_kv", [1, 2, 8])
@pytest.mark.parametrize(("batch", "max_keys"), [(1, 131_072), (1, 1_000_000), (16, 8192), (64, 8192)])
def test_the_card_is_full(batch, max_keys, h_kv):
    plan = plan_decode(SPEC, batch=batch, h_kv=h_kv, rows=4, max_keys=max_keys, num_sms=SMS)
    assert 0.9 * SMS <= plan.ctas <= SMS
    # in one round, or in so many rounds that idle SMs in the last one do not matter
    work_tiles = plan.ranges * h_kv
    assert work_tiles <= SMS or work_tiles % SMS == 0 or work_tiles > 8 * SMS


def test_a_short_sequence_is_not_cut_below_its_tiles():
    plan = plan_decode(SPEC, batch=1, h_kv=8, rows=4, max_keys=KEYS, num_sms=SMS)
    assert (plan.ranges, plan.states, plan.ctas) == (1, 0, 8)


def test_columns_and_warps_of_kernels_can_be_built():
    kv_types = {"int8": 1, "float8_e4m3fn": 1, "bfloat16": 2}
    for d, (kv_dtype, itemsize), rows in itertools.product(HEAD_DIMS, kv_types.items(), (1, 8, 9, 16, 17, 512)):
        warps = warps_for(d, itemsize)
        columns = columns_for(rows, d, itemsize)
        spec = GqaDecodeSpec("bfloat16", kv_dtype, d, columns, warps=warps, box_rows=keys_for(d, warps))
        assert spec.can_implement() == []
        assert spec.stages >= 2
    assert all(spec.can_implement() == [] for spec in shipped_specs())


def test_heads_of_512_are_split_where_registers_and_shared_memory_need_it():
    spec = replace(SPEC, d=512, box_rows=32)
    assert (spec.teams, spec.keys_per_tile, columns_for(32, 512, 1), columns_for(32, 512, 2)) == (2, 32, 16, 8)
    plain = GqaDecodeSpec("bfloat16", "bfloat16", 512, 16, box_rows=32)
    assert plain.can_implement() == ["16 columns of 512; shared memory has no room for two stages beside them"]
    rotated = replace(spec, v_dtype="uint8", k_scales="per_token", v_scales="per_token")
    assert rotated.can_implement() == ["d is 512; that of a rotated vector is one of (64, 128, 256)"]


def test_a_warp_has_32_keys_of_4_bits_where_it_has_registers():
    four_bits = replace(SPEC, kv_dtype="uint8", v_dtype="uint8", k_scales="per_token", v_scales="per_token")
    for d, columns, blocks in ((64, 8, 2), (128, 8, 2), (64, 16, 1), (128, 16, 1), (256, 8, 1)):
        spec = with_key_blocks(replace(four_bits, d=d, columns=columns), 0)
        assert (spec.key_blocks, spec.keys_per_tile, spec.can_implement()) == (blocks, 128 * blocks, [])
    assert with_key_blocks(SPEC, 0) == SPEC
    paged = replace(four_bits, paged=True, box_rows=64)
    assert [with_key_blocks(paged, rows).box_rows for rows in (64, 256, 512)] == [64, 256, 256]
    for wrong in (replace(four_bits, key_blocks=3), replace(SPEC, key_blocks=2, box_rows=256)):
        assert wrong.can_implement()[0] == f"key_blocks is {wrong.key_blocks}; it is 1, or 2 of rotated keys"


def test_no_other_file_names_a_type_of_codes() -> None:
    """A type of codes is one class in gqa/codes.py. References and public texts say what callers may pass."""
    package = Path(gqa.__file__).parent
    said = ("codes.py", "reference.py", "request.py", "op.py", "append_op.py", "gather_op.py", "append.py")
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())) if file.name not in said else ():
            names = {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
            names |= {node.id} & {"Float8E4M3FN"} if isinstance(node, ast.Name) else set()
            assert not names & {"int8", "float8_e4m3fn", "Float8E4M3FN"}, f"{file.name}: {names}"


def test_one_or_two_key_tiles_need_no_cluster() -> None:
    """A cluster of four took 5.4 us on an H100 for what one CTA reads in 4.3."""
    found = {keys: cluster_for(SPEC, 1, 8, 4, keys, SMS) for keys in (1, KEYS, 2 * KEYS, 2 * KEYS + 1, 64 * KEYS)}
    assert list(found.values()) == [1, 1, 1, 8, 8]
    assert cluster_for(SPEC, 1, 8, 4, 64 * KEYS + 1, SMS) == 1
