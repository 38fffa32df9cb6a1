"""Covering arrays: few rows in which every possible combination of three values of three factors occurs.

A row gives each factor a value. Rules say which values go together; whatever they leave is possible, and has to occur.
Factors of a second rank are covered in pairs alone, with one another and with those of the first.

`cover` is a greedy search: a row is made around a combination that no row has yet, and is the one among many candidates
with the most of such combinations. A model and a seed name an array exactly. `uncovered` says what an array lacks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

Row = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """Which values of some factors go together.

    names   of the factors
    holds   of their values, in this order
    """

    names: tuple[str, ...]
    holds: Callable[..., bool]


@dataclass(frozen=True)
class Model:
    """What there is to combine.

    factors  names and values. A search for a row that keeps the rules takes them in this order
    triples  factors that are covered in threes
    pairs    factors that are covered in twos, with those of `triples` too; any others just have a value in each row
    rules    what a row must keep
    usual    values that three rows in four have where nothing else is asked for: of factors with expensive values
    """

    factors: Mapping[str, tuple[Any, ...]]
    triples: tuple[str, ...]
    pairs: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    usual: tuple[tuple[str, Any], ...] = ()

    def combinations(self) -> list[tuple[str, ...]]:
        """The groups of factors whose combinations of values all have to occur."""
        pairs = itertools.combinations([*self.triples, *self.pairs], 2)
        return [*itertools.combinations(self.triples, 3), *(pair for pair in pairs if pair[1] in self.pairs)]

    @cached_property
    def _rules_of(self) -> dict[str, list[Rule]]:
        return {name: [rule for rule in self.rules if name in rule.names] for name in self.factors}

    def keeps_rules(self, row: Mapping[str, Any], name: str | None = None) -> bool:
        """Whether no rule is broken, or none about one factor; those about factors without a value are not looked at.

        Args:
            row: values of some factors.
            name: of the one.
        """
        for rule in self.rules if name is None else self._rules_of[name]:
            if all(other in row for other in rule.names) and not rule.holds(*[row[other] for other in rule.names]):
                return False
        return True

    def complete(self, given: Mapping[str, Any], rng: random.Random | None = None) -> Row | None:
        """A row with these values, or None where the rules leave none.

        Args:
            given: values of some factors.
            rng: for the other values; without one they are the first that will do.
        """
        row = dict(given)
        if self.keeps_rules(row) and self._fill(row, [name for name in self.factors if name not in row], rng):
            return {name: row[name] for name in self.factors}
        return None

    def _fill(self, row: Row, free: Sequence[str], rng: random.Random | None) -> bool:
        if not free:
            return True
        name = free[0]
        values = list(self.factors[name])
        if rng is not None:
            rng.shuffle(values)
            usual = dict(self.usual)
            if name in usual and rng.random() < 0.75:
                values.sort(key=lambda value: value != usual[name])
        for value in values:
            row[name] = value
            if self.keeps_rules(row, name) and self._fill(row, free[1:], rng):
                return True
        del row[name]
        return False


class _Places:
    """A number for each combination of values that has to occur, so that many rows are looked at together."""

    def __init__(self, model: Model) -> None:
        self.factors = model.factors
        self.groups = model.combinations()
        self.first: list[int] = []
        self.count = 0
        self._digit = {name: {value: i for i, value in enumerate(values)} for name, values in model.factors.items()}
        names = list(model.factors)
        self._weight = torch.zeros((len(names), len(self.groups)), dtype=torch.float64, device="cpu")
        for column, group in enumerate(self.groups):
            self.first.append(self.count)
            size = 1
            for name in reversed(group):
                self._weight[names.index(name), column] = size
                size *= len(model.factors[name])
            self.count += size
        self._first = torch.tensor(self.first, dtype=torch.int64, device="cpu")

    def of(self, rows: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """(rows, groups) int64."""
        digits = [[self._digit[name][row[name]] for name in self.factors] for row in rows]
        numbers = torch.tensor(digits, dtype=torch.float64, device="cpu") @ self._weight
        return numbers.long() + self._first  # below 2^53 and so exact

    def combination(self, place: int) -> Row:
        """The values that a number stands for."""
        group = max(i for i, first in enumerate(self.first) if first <= place)
        rest, found = place - self.first[group], {}
        for name in reversed(self.groups[group]):
            rest, digit = divmod(rest, len(self.factors[name]))
            found[name] = self.factors[name][digit]
        return found


def cover(
    model: Model,
    *,
    seed: int = 0,
    candidates: int = 30,
    start: Sequence[Mapping[str, Any]] = (),
    patterns: Sequence[Mapping[str, Any]] = (),
) -> list[Row]:
    """Rows that cover a model; each has a combination that no other has.

    Args:
        model: what to cover.
        seed: of the search.
        candidates: rows to choose the next one from.
        start: values of the first rows.
        patterns: values of which each row has all of one pattern, wherever that is possible.
    """
    rng = random.Random(seed)
    places = _Places(model)
    missing = torch.ones(places.count, dtype=torch.bool, device="cpu")
    rows: list[Row] = []

    def best(choices: Sequence[Row]) -> Row:
        gains = missing[places.of(choices)].sum(dim=1).tolist()
        return choices[gains.index(max(gains))]

    def improved(row: Row, fixed: Mapping[str, Any]) -> Row:
        """After a look at every other value of each factor."""
        usual = dict(model.usual)
        for name, values in model.factors.items():
            if name not in fixed and name not in usual:
                others = ({**row, name: value} for value in values if value != row[name])
                row = best([row, *(other for other in others if model.keeps_rules(other, name))])
        return row

    def add(wanted: Mapping[str, Any]) -> bool:
        fitting = [
            {**one, **wanted} for one in patterns if all(wanted.get(name, one[name]) == one[name] for name in one)
        ]
        rng.shuffle(fitting)
        for bases in (fitting, [dict(wanted)]):
            tries = max(candidates, len(bases)) if bases else 0
            found = [model.complete(bases[i % len(bases)], rng) for i in range(tries)]
            choices = [row for row in found if row is not None]
            if choices:
                rows.append(improved(best(choices), bases[0]))
                missing[places.of(rows[-1:])[0]] = False
                return True
        return False

    for one in start:
        add(one)
    for place in range(places.count):
        if missing[place] and not add(places.combination(place)):
            missing[place] = False  # impossible
    return _without_spare(rows, places)


def _without_spare(rows: list[Row], places: _Places) -> list[Row]:
    """The rows without those whose combinations all occur elsewhere."""
    combination_numbers = places.of(rows)
    count = torch.bincount(combination_numbers.flatten(), minlength=places.count)
    kept = []
    for row, own in zip(reversed(rows), combination_numbers.flip(0), strict=True):
        if int(count[own].min()) > 1:
            count[own] -= 1
        else:
            kept.append(row)
    return kept[::-1]


def uncovered(model: Model, rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The possible combinations that occur in no row: goes by the rules, and by nothing else that `cover` uses."""
    lacking = []
    for group in model.combinations():
        there = {tuple(row[name] for name in group) for row in rows}
        for values in itertools.product(*(model.factors[name] for name in group)):
            wanted = dict(zip(group, values, strict=True))
            if values not in there and model.complete(wanted) is not None:
                lacking.append(wanted)
    return lacking
