"""Launches that are prepared before a test, as if an earlier call on a GPU had done it."""

from typing import Any

import pytest

from cute_kernels.runtime.launch import PreparedLaunches


class _Learning(dict[Any, Any]):
    """Returns the same value for every key, and records the keys."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def get(self, key: Any, default: Any = None) -> Any:
        self[key] = self._value
        return self._value


def prepare(
    monkeypatch: pytest.MonkeyPatch, op: Any, launch: Any, *calls: tuple[Any, ...], launched_by: Any = None
) -> None:
    """Prepares `launch` in the module of an op, for the arguments of some calls and for no others.

    Launches it once for each call, from which it learns the key; with `op._launch`, or another function.
    """
    learned = _Learning(launch)
    monkeypatch.setattr(op, "_prepared", learned)
    for arguments in calls:
        (launched_by or op._launch)(*arguments)
    prepared: PreparedLaunches[Any, Any] = PreparedLaunches(learned)
    assert len(prepared) == len(calls)
    monkeypatch.setattr(op, "_prepared", prepared)
