"""`scripts/compile_ahead.py`: which kernels it compiles, and that it needs no GPU."""

from dataclasses import dataclass
from typing import Any

import pytest

from bench import gqa as bench_gqa
from bench import kernels_run
from scripts import compile_ahead
from tests.gpu import test_devices
from tests.kit import specs


@pytest.fixture(scope="module")
def wanted() -> list[Any]:
    return compile_ahead.wanted()


def test_all_that_ships_and_all_that_tests_ask_for(wanted: list[Any]) -> None:
    assert len(wanted) == len(set(wanted))
    assert set(wanted) >= {*kernels_run.shipped_specs(), *specs.of_tables()}
    assert set(wanted) >= set(test_devices.kernel_specs())
    with compile_ahead.planned_for(132):
        assert set(wanted) >= {bench.spec for bench in bench_gqa.DECODE_CASES}
    formats = {spec.cache_format for spec in wanted if type(spec).__name__ == "LatentDecodeSpec"}
    assert formats == {"v3.2", "v3.2_nope", "v4", "v4.1", "v4.1_fp4"}


def test_the_slowest_come_first(wanted: list[Any]) -> None:
    slow = [type(spec).__name__ in compile_ahead.SLOW for spec in wanted]
    assert slow == sorted(slow, reverse=True) and 100 < sum(slow) < len(slow)


@dataclass(frozen=True)
class FakeSpec:
    name: str


class FakeCode:
    """A store that knows what has been compiled."""

    def __init__(self) -> None:
        self.compiled: list[FakeSpec] = []
        self.root = "digests"

    def Store(self) -> "FakeCode":  # noqa: N802
        return self

    def knows(self, spec: FakeSpec) -> bool:
        return spec in self.compiled

    def precompile(self, missing: list[FakeSpec], store: Any, processes: int | None, progress: Any) -> None:
        assert store is self and processes == 3
        for number, spec in enumerate(missing, 1):
            self.compiled.append(spec)
            progress(number, len(missing))


def test_what_is_there_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, a, b = FakeCode(), FakeSpec("a"), FakeSpec("b")
    monkeypatch.setattr(compile_ahead, "wanted", lambda num_sms: [a, b] if num_sms == 114 else [])
    monkeypatch.setattr(compile_ahead.kernels_run, "machine_code", lambda: code)
    monkeypatch.setattr(compile_ahead, "entry_name", lambda spec: spec.name)
    monkeypatch.setattr(
        compile_ahead, "DiskCache", lambda root: type("Disk", (), {"exists": lambda self, name: name in "ab"})()
    )
    options = ["--sms", "114", "--processes", "3"]
    assert compile_ahead.main([*options, "--only", "'a'"]) == 0
    assert code.compiled == [a]
    assert compile_ahead.main([*options, "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [repr(b)]
    assert compile_ahead.main(options) == 0
    assert code.compiled == [a, b]
    assert "1 of 2 kernels to compile" in capsys.readouterr().err
