"""Covering arrays: few rows in which every possible combination of three values of three factors occurs.

A row gives each factor a value. Rules say which values go together; whatever they leave is possible, and has to occur.
Factors of a second rank are covered in pairs alone, with one another and with those of the first.

`uncovered` says what an array lacks, and `extended` adds rows that have it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """Which values of some factors go together.

    names   names of the factors
    holds   takes their values in this order, and says whether they go together
    """

    names: tuple[str, ...]
    holds: Callable[..., bool]


@dataclass(frozen=True)
class Model:
    """Factors, their values, and which combinations must occur.

    factors  names and values. A search for a row that keeps the rules takes them in this order
    triples  factors whose combinations of three values all occur
    pairs    factors whose combinations of two values all occur, also with factors of `triples`; other factors are free
    rules    rules that every row keeps
    usual    values that three rows in four take for a factor with expensive values, unless another value is needed
    """

    factors: Mapping[str, tuple[Any, ...]]
    triples: tuple[str, ...]
    pairs: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    usual: tuple[tuple[str, Any], ...] = ()

    def combinations(self) -> list[tuple[str, ...]]:
        """The groups of factors whose combinations of values must all occur."""
        pairs = itertools.combinations([*self.triples, *self.pairs], 2)
        return [*itertools.combinations(self.triples, 3), *(pair for pair in pairs if pair[1] in self.pairs)]

    @cached_property
    def _rules_of(self) -> dict[str, list[Rule]]:
        return {name: [rule for rule in self.rules if name in rule.names] for name in self.factors}

    def keeps_rules(self, row: Mapping[str, Any], name: str | None = None) -> bool:
        """Whether a row breaks no rule, or no rule about one factor. Rules about factors without a value are skipped.

        Args:
            row: values of some factors.
            name: the factor that rules must be about.
        """
        for rule in self.rules if name is None else self._rules_of[name]:
            if all(other in row for other in rule.names) and not rule.holds(*[row[other] for other in rule.names]):
                return False
        return True

    def complete(self, given: Mapping[str, Any], rng: random.Random | None = None) -> Row | None:
        """A row with the given values, or None if the rules leave no such row.

        Args:
            given: values of some factors.
            rng: chooses the other values; without it they are the first ones that keep the rules.
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


def extended(model: Model, rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows that keep the rules, and more, each made around a missing combination, until none is missing."""
    rng = random.Random(0)
    kept = [dict(row) for row in rows if set(row) == set(model.factors) and model.keeps_rules(row)]
    while lacking := uncovered(model, kept):
        row = model.complete(lacking[0], rng)
        assert row is not None
        kept.append(row)
    return kept


def uncovered(model: Model, rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The combinations that the rules allow but that occur in no row."""
    lacking = []
    for group in model.combinations():
        there = {tuple(row[name] for name in group) for row in rows}
        for values in itertools.product(*(model.factors[name] for name in group)):
            wanted = dict(zip(group, values, strict=True))
            if values not in there and model.complete(wanted) is not None:
                lacking.append(wanted)
    return lacking
