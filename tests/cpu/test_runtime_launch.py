"""Optimistic calls: what they try, what they hide and what they do not."""

from typing import NoReturn

import pytest

from cute_kernels.runtime import launch


def test_a_prepared_call_is_not_checked() -> None:
    calls = []

    def prepared(*arguments: object) -> bool:
        calls.append(arguments)
        return True

    launch.optimistic(prepared, pytest.fail)(1, "two")
    assert calls == [(1, "two")]


def test_what_is_not_prepared_is_checked() -> None:
    calls = []
    launch.optimistic(lambda *_: False, lambda *arguments: calls.append(arguments))(1, "two")
    assert calls == [(1, "two")]


@pytest.mark.parametrize("refusal", [ValueError, TypeError, AttributeError, RuntimeError])
def test_the_checks_word_the_error(refusal: type[Exception]) -> None:
    def refuse(value: int) -> bool:
        raise refusal("Mismatched")

    def check(value: int) -> None:
        raise ValueError(f"value: got {value}; needs another")

    with pytest.raises(ValueError, match="value: got 3") as raised:
        launch.optimistic(refuse, check)(3)
    assert raised.value.__context__ is None, "the user would read two errors"


def test_an_error_of_the_kernel_itself_is_seen() -> None:
    def kernel() -> NoReturn:
        raise RuntimeError("CUDA error: launch failed")

    with pytest.raises(RuntimeError, match="launch failed"):
        launch.optimistic(kernel, kernel)()


def test_an_interrupt_is_not_swallowed() -> None:
    def interrupted() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch.optimistic(interrupted, pytest.fail)()


def test_prepared_launches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_PREPARED", 3)
    prepared: dict[int, str] = {}
    for key in range(10):
        launch.remember(prepared, key, str(key))
        assert len(prepared) <= 3 and prepared[key] == str(key)
