"""Three-way covering arrays of `gqa_decode` and `mla_fp8_decode`: rows, the calls that they stand for, their kernels.

`GqaRow.call` and `MlaRow.call` make tensors of a row, `check` runs them into poisoned outputs and holds the results to
the tolerance rule, on any device. `short=True` keeps dtypes, layouts and modifiers of a row and cuts its sizes, so that
a CPU has it in milliseconds.

The rows are in covering_gqa.csv and covering_mla.csv. `python -m tests.kit.covering` adds those that are missing after
a change of a model; tests/cpu/test_covering.py says when that is due.
"""

from __future__ import annotations

import csv
import dataclasses
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from cute_kernels import gqa_decode, mla_fp8_decode
from cute_kernels.gqa import plan as gqa_plan
from cute_kernels.gqa.blocks_plan import DecodeShape
from cute_kernels.gqa.codes import KINDS, ROTATED_KINDS
from cute_kernels.gqa.layouts import LAYOUTS, X_PACKED, CacheSizes
from cute_kernels.gqa.spec import GqaDecodeSpec
from cute_kernels.mla import plan as mla_plan
from cute_kernels.mla.crossover.spec import MlaCrossoverSpec
from cute_kernels.mla.plan import EXCHANGES
from cute_kernels.mla.spec import MlaDecodeSpec
from fp8_mla import V_DIM
from tests.kit.arrays import Model, Row, Rule, extended
from tests.kit.compare import Comparison, check_decode
from tests.kit.gqa_cases import SCALE_NAMES, VALUES, GqaCase, check_gqa, gqa_case
from tests.kit.mla_cases import SCALE_KINDS, DecodeCase, dense_case, ragged_lengths, sparse_case

NUM_SMS: Final = 132
SHORT: Final = 300  # tokens: more than a single CTA reads
LONG: Final = 131_072
MOST_CLUSTERS: Final = 15
"""Clusters of eight CTAs that the plan can place on `NUM_SMS` SMs."""
MOST_PAIRS: Final = 66
"""Clusters of two CTAs that the plan can place there."""
SINKS: Final = ("none", "finite", "inf")
Q_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE_DTYPES: Final = {"float32": torch.float32, "float16": torch.float16}
PAGE_SIZES: Final = {"none": 0, "smallest": 1, "small": 16, "large": 64, "tiles": 256}
PACKED_PAGE_SIZES: Final = dict(zip(("smallest", "small", "large"), X_PACKED.page_sizes, strict=True))
"""Tokens of a page. A copy brings a page or 128 tokens, whichever is less; a page of "tiles" is several copies."""


def _room(longest: int, page_size: int) -> int:
    """Number of tokens that the block tables of `gqa_case` and `dense_case` can name."""
    return (-(-longest // page_size) + 2) * page_size


# ---- gqa_decode


@dataclass(frozen=True)
class GqaRow:
    """One row of the array of `gqa_decode`.

    k_scales, v_scales, scale_dtype  "none" if there are no scales
    page       one of `PAGE_SIZES`, or of `PACKED_PAGE_SIZES` for packed layouts
    ratio      query heads per head of the cache
    splits     "cluster" or "ranges" for a call whose plan has these; otherwise the argument `num_splits`
    longest    tokens of the longest sequence
    """

    kv_dtype: str
    q_dtype: str
    k_scales: str
    v_scales: str
    scale_dtype: str
    layout: str
    page: str
    ratio: int
    d: int
    s_q: int
    window: int | None
    softcap: float | None
    alibi: str
    sink: str
    causal: bool
    splits: str | int
    h_kv: int
    longest: int
    values: str
    bad_entries: bool
    padded: bool

    @property
    def page_size(self) -> int:
        """Tokens of a page; 0 if there are no pages."""
        return (PACKED_PAGE_SIZES if LAYOUTS[self.layout].x_packed else PAGE_SIZES)[self.page]

    @property
    def num_splits(self) -> int | None:
        """The `num_splits` argument of `gqa_decode`."""
        return self.splits if isinstance(self.splits, int) else None

    @property
    def batch(self) -> int:
        """The batch size at which the plan uses clusters, or at which it does not."""
        if self.longest == LONG:
            return 2
        rows = self.ratio * self.s_q
        heads = self.h_kv * -(-rows // gqa_plan.columns_for(rows, self.d, _itemsize(self.kv_dtype)))
        if self.splits == "cluster":
            return min(4, max(1, MOST_CLUSTERS // heads))
        return max(3, MOST_PAIRS // heads + 1) if self.splits == "ranges" else 3

    def seqlens(self, short: bool = False) -> list[int]:
        """Tokens of each sequence: the longest, then lengths around borders of tiles and pages, and random ones."""
        longest, batch = (40, min(self.batch, 2)) if short else (self.longest, self.batch)
        others = ragged_lengths(batch - 1, min(longest, 2500), max(self.page_size, 1), seed=self.seed)
        return [longest, *others]

    @property
    def seed(self) -> int:
        """The seed of the inputs: the row's index in the array. Rows with 4-bit codes follow the others."""
        return [*GQA_ROWS, *FOUR_BIT_ROWS].index(self)

    def capacity(self) -> int:
        """Number of tokens that a sequence can have."""
        return _room(self.longest, self.page_size) if self.page_size else self.longest + 3

    def spec(self) -> GqaDecodeSpec:
        """The kernel that the row launches on a card with `NUM_SMS` SMs."""
        kv_dtype = _DTYPES_OF_SPEC.get(self.kv_dtype) or KINDS[self.kv_dtype][0]
        sizes = CacheSizes(self.batch, self.page_size, self.h_kv, self.d)
        return gqa_plan.choose_spec(
            DecodeShape(LAYOUTS[self.layout], sizes, (self.batch, self.s_q, self.ratio * self.h_kv), self.capacity()),
            (SCALE_NAMES.get(self.k_scales), SCALE_NAMES.get(self.v_scales)),
            q_dtype=_DTYPES_OF_SPEC[self.q_dtype],
            kv_dtype=kv_dtype,
            scale_dtype="float32" if self.scale_dtype == "none" else self.scale_dtype,
            num_sms=NUM_SMS,
            num_splits=self.num_splits,
            alibi=self.alibi != "none",
            softcap=self.softcap is not None,
            v_dtype=ROTATED_KINDS.get(self.kv_dtype),
        )

    def plan(self) -> gqa_plan.DecodePlan:
        """The plan of the row on a card with `NUM_SMS` SMs."""
        return gqa_plan.plan_decode(
            self.spec(),
            batch=self.batch,
            h_kv=self.h_kv,
            rows=self.ratio * self.s_q,
            max_keys=self.capacity(),
            num_sms=NUM_SMS,
            num_splits=self.num_splits,
        )

    def options(self) -> dict[str, Any]:
        """The arguments of `gqa_case`, without lengths, seed and device."""
        same = ("d", "s_q", "h_kv", "layout", "kv_dtype", "values", "causal", "window", "softcap", "alibi", "sink")
        return {
            **{name: getattr(self, name) for name in (*same, "bad_entries", "padded")},
            "h_q": self.ratio * self.h_kv,
            "page_size": max(self.page_size, 1),
            "q_dtype": Q_DTYPES[self.q_dtype],
            "k_scales": None if self.k_scales == "none" else self.k_scales,
            "v_scales": None if self.v_scales == "none" else self.v_scales,
            "scale_dtype": SCALE_DTYPES.get(self.scale_dtype, torch.float32),
        }

    def call(self, device: torch.device | str, *, short: bool = False) -> GqaCase:
        return gqa_case(seqlens=self.seqlens(short), **self.options(), seed=self.seed, device=device)

    def check(self, device: torch.device | str, *, short: bool = False) -> Comparison:
        case = self.call(device, short=short)
        out, lse = case.outputs(padded=self.padded)
        gqa_decode(**case.arguments(), num_splits=self.num_splits, out=out.tensor, lse=lse.tensor)
        checked = check_gqa(out.tensor, lse.tensor, case).require()
        out.require_no_stray_writes()
        lse.require_no_stray_writes()
        return checked


_DTYPES_OF_SPEC: Final = {"int8": "int8", "fp8": "float8_e4m3fn", "bf16": "bfloat16", "fp16": "float16"}


def _itemsize(kv_dtype: str) -> int:
    return 2 if kv_dtype in Q_DTYPES else 1


def _page_exists(layout: str, page: str) -> bool:
    return (page == "none") != LAYOUTS[layout].paged and (not LAYOUTS[layout].x_packed or page != "tiles")


def _cache_has_scales(kv_dtype: str, scales: str) -> bool:
    """FP8 caches may have scales, int8 caches must, and 16-bit caches must not."""
    return kv_dtype == "fp8" or (scales == "none") == (kv_dtype in Q_DTYPES)


def _cluster_is_planned(kv_dtype: str, d: int, ratio: int, s_q: int, h_kv: int, splits: str | int) -> bool:
    if splits != "cluster":
        return True
    itemsize, rows = _itemsize(kv_dtype), ratio * s_q
    columns, warps = gqa_plan.columns_for(rows, d, itemsize), gqa_plan.warps_for(d, itemsize)
    spec = GqaDecodeSpec("bfloat16", _DTYPES_OF_SPEC[kv_dtype], d, columns, warps=warps)
    return gqa_plan.cluster_for(spec, 1, h_kv, rows, SHORT, NUM_SMS) > 1


def _both_or_none(one: str, other: str) -> bool:
    return (one == "none") == (other == "none")


GQA: Final = Model(
    factors={
        "kv_dtype": ("int8", "fp8", "bf16", "fp16"),
        "d": (64, 128, 256, 512),
        "ratio": (1, 4, 7, 16, 64),
        "s_q": (1, 2, 5, 8),
        "h_kv": (2, 1, 3),
        "splits": ("cluster", "ranges", 1, 3, 64, 128, 256),
        "longest": (SHORT, 1500, LONG),
        "q_dtype": ("bf16", "fp16"),
        "k_scales": ("none", *SCALE_NAMES),
        "v_scales": ("none", *SCALE_NAMES),
        "scale_dtype": ("none", *SCALE_DTYPES),
        "layout": tuple(LAYOUTS),
        "page": tuple(PAGE_SIZES),
        "bad_entries": (False, True),
        "window": (None, 1, 100),
        "softcap": (None, 15.0),
        "alibi": ("none", "head", "batch"),
        "sink": SINKS,
        "causal": (True, False),
        "values": VALUES,
        "padded": (True, False),
    },
    triples=(
        "kv_dtype", "q_dtype", "k_scales", "v_scales", "scale_dtype", "layout", "page", "ratio", "d", "s_q",
        "window", "softcap", "alibi", "sink", "causal",
    ),
    pairs=("h_kv", "splits", "longest", "bad_entries", "values", "padded"),
    rules=(
        Rule(("kv_dtype", "q_dtype"), lambda kv, q: kv not in Q_DTYPES or kv == q),
        Rule(("kv_dtype", "k_scales"), _cache_has_scales),
        Rule(("kv_dtype", "v_scales"), _cache_has_scales),
        Rule(("kv_dtype", "scale_dtype"), _cache_has_scales),
        Rule(("k_scales", "v_scales"), _both_or_none),
        Rule(("k_scales", "scale_dtype"), _both_or_none),
        Rule(("v_scales", "scale_dtype"), _both_or_none),
        Rule(("layout", "page"), _page_exists),
        Rule(("layout", "bad_entries"), lambda layout, bad: LAYOUTS[layout].paged or not bad),
        Rule(("page", "bad_entries"), lambda page, bad: page != "none" or not bad),
        Rule(("splits", "longest"), lambda splits, longest: longest < LONG or splits != "cluster"),
        Rule(("kv_dtype", "d", "ratio", "s_q", "h_kv", "splits"), _cluster_is_planned),
    ),
    usual=(("longest", SHORT),),
)  # fmt: skip

# ---- mla_fp8_decode

KEYS: Final = {"tile": 64, "some": 333, "many": 2048, "long": 65_536}
MOST_PARTIALS: Final = 2**19
"""The most rows of partial results that a call may need: 556 MB."""
SAMPLED_KEYS: Final = 2**18
SAMPLED_SCORES: Final = 2**24
"""Keys, and scores or output elements, of the requests and heads that are compared: 134 MB as float64."""


@dataclass(frozen=True)
class MlaRow:
    """One row of the array of `mla_fp8_decode`.

    keys      number of keys of a list or a sequence: one of `KEYS`; a long sequence has `LONG`
    lengths   "all": every query has every key; "ragged": each request has a length; "query": each query has one
    queries   "few" requests; "1024": as many requests as have at most 1024 queries, the most for which the plan makes
              shares; or "more"
    causal    for dense decoding only
    """

    mode: str
    h_q: int
    s_q: int
    page_size: int
    keys: str
    lengths: str
    splits: int | None
    sink: str
    exchange: str | None
    queries: str
    causal: bool
    scales: str
    outliers: bool
    padded: bool

    @property
    def seed(self) -> int:
        return MLA_ROWS.index(self)

    @property
    def batch(self) -> int:
        if self.queries != "few":
            return mla_plan.MAX_BALANCED // self.s_q + (self.queries == "more")
        return 2 if self.keys == "long" else _few(self.s_q)

    @property
    def longest(self) -> int:
        """Number of entries of a list, or of tokens of the longest sequence."""
        return LONG if self.mode == "dense" and self.keys == "long" else KEYS[self.keys]

    def plan(self) -> mla_plan.DecodePlan:
        """The plan of the row on a card with `NUM_SMS` SMs."""
        room = self.longest if self.mode == "sparse" else _room(self.longest, self.page_size)
        return mla_plan.plan_decode(
            sparse=self.mode == "sparse",
            batch=self.batch,
            s_q=self.s_q,
            h_q=self.h_q,
            max_keys=room,
            num_sms=NUM_SMS,
            ragged=self.mode == "dense" or self.lengths != "all",
            num_splits=self.splits,
            exchange=self.exchange,
        )

    def spec(self) -> MlaDecodeSpec | MlaCrossoverSpec:
        return self.plan().spec

    def call(self, device: torch.device | str, *, short: bool = False) -> DecodeCase:
        batch, longest = (min(self.batch, 2), min(self.longest, 20)) if short else (self.batch, self.longest)
        options: dict[str, Any] = {
            "h_q": self.h_q,
            "s_q": self.s_q,
            "page_size": self.page_size,
            "scales": self.scales,
            "outliers": self.outliers,
            "sink": self.sink,
            "padded": self.padded,
            "seed": self.seed,
            "device": device,
        }
        if self.mode == "sparse":
            lengths = {"all": "none", "ragged": "batch", "query": "query"}[self.lengths]
            num_slots = 300 if short else max(20_000, 2 * longest)
            return sparse_case(batch=batch, topk=longest, lengths=lengths, num_slots=num_slots, **options)
        seqlens = [longest] * batch
        if self.lengths == "ragged":
            seqlens[1:] = ragged_lengths(batch - 1, min(longest, 5000), self.page_size, self.seed)
        return dense_case(seqlens=seqlens, causal=self.causal, **options)

    def check(self, device: torch.device | str, *, short: bool = False) -> Comparison:
        """Runs the row and applies the tolerance rule to its requests and heads, or to a sample if they are many."""
        case = self.call(device, short=short)
        out, lse = case.outputs(padded=self.padded)
        forced: dict[str, Any] = {"num_splits": self.splits, "exchange": self.exchange}
        mla_fp8_decode(case.q, case.kv_cache, **case.options(), **forced, out=out.tensor, lse=lse.tensor)
        rows, heads = self._sample(case)
        some = case.rows(rows)
        some = dataclasses.replace(some, q=some.q[:, :, heads], s_aux=None if some.s_aux is None else some.s_aux[heads])
        checked = check_decode(
            out.tensor[rows][:, :, heads], lse.tensor[rows][:, :, heads], **some.arguments()
        ).require()
        if out.tensor.isnan().any() or lse.tensor.isnan().any():
            raise AssertionError("a row or head that was not compared has NaN, or was not written")
        out.require_no_stray_writes()
        lse.require_no_stray_writes()
        return checked

    def _sample(self, case: DecodeCase) -> tuple[list[int], list[int]]:
        """Requests and heads to compare; the longest request is among them."""
        batch, s_q, h_q, _ = case.q.shape
        keys = case.indices.shape[-1] * s_q if case.indices is not None else self.longest
        rng = random.Random(self.seed)
        count = min(batch, 48, max(1, SAMPLED_KEYS // keys))  # beyond 32 rows channels are judged, too
        rows = [0, *rng.sample(range(1, batch), count - 1)]
        width = max(self.longest, V_DIM)
        heads = rng.sample(range(h_q), min(h_q, max(1, SAMPLED_SCORES // (count * s_q * width))))
        return sorted(rows), sorted(heads)


def _few(s_q: int) -> int:
    """Number of requests of a small batch."""
    return {1: 5, 2: 3}.get(s_q, 2)


def _partials_fit(queries: str, s_q: int, h_q: int, splits: int | None) -> bool:
    """Whether partial results fit in a few gigabytes. The operator has no such limit, but tests share a card."""
    return queries == "few" or (mla_plan.MAX_BALANCED + s_q) * h_q * (splits or 1) <= MOST_PARTIALS


MLA: Final = Model(
    factors={
        "mode": ("sparse", "dense"),
        "h_q": (1, 8, 16, 32, 64, 96, 128),
        "s_q": (1, 2, 3, 8),
        "splits": (None, 1, 3, 64, 128, 256),
        "queries": ("few", "1024", "more"),
        "keys": tuple(KEYS),
        "page_size": (1, 61, 64, 256),
        "lengths": ("all", "ragged", "query"),
        "sink": SINKS,
        "exchange": (None, *EXCHANGES),
        "causal": (True, False),
        "scales": SCALE_KINDS,
        "outliers": (False, True),
        "padded": (True, False),
    },
    triples=("mode", "h_q", "s_q", "page_size", "keys", "lengths", "splits", "sink", "exchange"),
    pairs=("queries", "causal", "scales", "outliers", "padded"),
    rules=(
        Rule(("mode", "lengths"), lambda mode, lengths: mode == "sparse" or lengths != "query"),
        Rule(("queries", "keys"), lambda queries, keys: queries == "few" or keys in ("tile", "some")),
        Rule(("queries", "s_q", "h_q", "splits"), _partials_fit),
    ),
    usual=(("queries", "few"),),
)


# ---- rows


def _file(op: str) -> Path:
    return Path(__file__).with_name(f"covering_{op}.csv")


def _read(op: str, model: Model) -> list[Row]:
    values = {name: {str(value): value for value in choices} for name, choices in model.factors.items()}
    with _file(op).open(newline="", encoding="utf-8") as stream:
        return [{name: values[name][text] for name, text in line.items()} for line in csv.DictReader(stream)]


def _write(op: str, rows: list[Row]) -> None:
    with _file(op).open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: str(value) for name, value in row.items()} for row in rows)


def _four_bit_rows(kind: str) -> list[GqaRow]:
    """Three rows of INT8 caches in which 4-bit codes of one kind take the place of INT8."""
    scales = {"k_scales": "per_token_head", "v_scales": "per_token_head", "scale_dtype": "float32"}
    rows = [dataclasses.replace(row, kv_dtype=kind, **scales) for row in GQA_ROWS if row.kv_dtype == "int8"]
    return [row for row in rows if not row.spec().can_implement()][:3]


def all_specs() -> list[GqaDecodeSpec | MlaDecodeSpec | MlaCrossoverSpec]:
    gqa = [row.spec() for row in (*GQA_ROWS, *FOUR_BIT_ROWS)]
    return list(dict.fromkeys([*gqa, *(row.spec() for row in MLA_ROWS)]))


if __name__ == "__main__":
    for op, model in (("gqa", GQA), ("mla", MLA)):
        _write(op, extended(model, _read(op, model)))
else:
    GQA_ROWS: Final = [GqaRow(**row) for row in _read("gqa", GQA)]
    FOUR_BIT_ROWS: Final = [row for kind in ROTATED_KINDS for row in _four_bit_rows(kind)]
    MLA_ROWS: Final = [MlaRow(**row) for row in _read("mla", MLA)]
