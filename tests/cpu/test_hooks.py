"""Helpers that hooks in serving stacks share."""

import functools
import types
from collections.abc import Callable

import pytest

from cute_kernels.integrations.hooks import SayOnce, or_original, replace


def test_lines_that_differ_in_numbers_are_said_once() -> None:
    said: list[str] = []
    say = SayOnce(said.append)
    for n in range(300):
        say(f"q: got shape ({n}, 8)")
        say(f"k: got shape ({n}, 8)")
        say(f"k: got shape ({n}, 8)")
    assert said == ["q: got shape (0, 8)", "k: got shape (0, 8)"] and len(say._said) == 2


def test_what_ours_refuses_the_original_gets_as_it_came() -> None:
    said: list[str] = []

    def ours(a: int, *, b: int = 0) -> str:
        if a < 0:
            raise ValueError("a: got a negative number")
        return "ours"

    def call(*args: object, **kwargs: object) -> object:
        return or_original(ours, lambda *args, **kwargs: (args, kwargs), said.append, *args, **kwargs)

    assert call(1, b=2) == "ours" and said == []
    assert call(-1, b=2) == ((-1,), {"b": 2}) and said == ["a: got a negative number"]
    assert call(1, 2) == ((1, 2), {}) and call(1, c=3) == ((1,), {"c": 3})
    assert "unexpected keyword argument 'c'" in said[-1]


def test_a_function_is_replaced_once_whoever_has_decorated_it() -> None:
    owner, made = types.SimpleNamespace(), []

    def around(original: Callable[[int], int]) -> Callable[[int], int]:
        made.append(original)
        return lambda n: 10 * original(n)

    def put() -> None:
        replace(owner, "double", around, pytest.fail)

    for decorate in (lambda f: f, functools.cache, lambda f: functools.wraps(f)(lambda n: f(n))):
        made.clear()
        owner.double = original = decorate(lambda n: 2 * n)
        put()
        put()
        assert owner.double(1) == 20 and made == [original]
        ours = owner.double
        owner.double = functools.wraps(ours)(lambda n: 1 + ours(n))  # noqa: B023  as another plugin does
        put()
        assert owner.double(1) == 21 and made == [original], "ours is in it"
        owner.double = original
        put()
        assert owner.double(1) == 20 and made == [original] * 2, "it was as before"
    missing: list[None] = []
    replace(owner, "triple", around, lambda: missing.append(None))
    assert missing == [None] and not hasattr(owner, "triple")
