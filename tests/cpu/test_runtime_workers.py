"""Processes that compile import what their parent imports, end with it, and report what went wrong."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cute_kernels.runtime import workers
from tests.kit.kernel_place import ROOT

# what new interpreters import, and what a warm start does
FOREIGN = (
    "cute_kernels",
    "json",
    "multiprocessing",
    "pickle",
    "sitecustomize",
    "struct",
    "subprocess",
    "tests",
    "torch",
)


def living(variable: str) -> list[int]:
    """Processes that have this variable in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if variable.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                pass  # it has just ended
    return found


def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


PRECOMPILE = """
from cute_kernels.runtime.compile import precompile
from tests.cpu.tiny_spec import TinySpec
print(len(precompile([TinySpec(32)])))
"""
WARM_VLLM = """
from cute_kernels.integrations.vllm import warming
from cute_kernels.runtime.compile import missing
from tests.cpu.tiny_spec import TinySpec
warming.kernel_specs = lambda *shapes, **calls: [TinySpec(32)]
warming.compile_shapes((), (1,), (1,), 132)
print(1 - len(missing([TinySpec(32)])))
"""


@pytest.mark.parametrize("code", [PRECOMPILE, WARM_VLLM], ids=["precompile", "vllm"])
def test_files_of_the_current_directory_are_not_run(tmp_path: Path, code: str) -> None:
    """The server's own script does not look there, whatever is in the directory where it is started."""
    here, elsewhere, proof = tmp_path / "here", tmp_path / "elsewhere", tmp_path / "proof"
    here.mkdir()
    elsewhere.mkdir()
    for name in FOREIGN:
        (here / f"{name}.py").write_text(f"open({str(proof)!r}, 'a').write({name!r} + ' ')\n")
    (elsewhere / "server.py").write_text(code)
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUTE_KERNELS_CACHE_DIR": str(tmp_path / "cache")}
    env.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, str(elsewhere / "server.py")]
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=120)
    assert not proof.exists(), f"ran as this user: {proof.read_text()}"
    assert done.stdout == "1\n", done.stderr


def test_new_interpreters_start_in_one_place() -> None:
    """Everything else that starts an interpreter looks in the current directory first."""
    starts = re.compile(r"sys\.executable|get_context|ProcessPoolExecutor|os\.exec|os\.spawn")
    found = [file for file in (ROOT / "cute_kernels").rglob("*.py") if starts.search(file.read_text(encoding="utf-8"))]
    assert found == [Path(workers.__file__)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_their_parent(number: signal.Signals) -> None:
    variable = f"WORKERS_OF_A_TEST={os.getpid()}.{number}"
    name, _, value = variable.partition("=")
    code = "import time\nfrom cute_kernels.runtime.workers import call_each\ncall_each(time.sleep, [1.5] * 9, 2, print)"
    env = os.environ | {"PYTHONPATH": str(ROOT), name: value}
    parent = subprocess.Popen([sys.executable, "-c", code], env=env)
    until(lambda: len(living(variable)) == 3)
    time.sleep(0.5)  # they are at work
    parent.send_signal(number)
    assert parent.wait() == -number
    until(lambda: not living(variable))


def test_each_item_is_done_once_and_told() -> None:
    done: list[float] = []
    items = [0.01 * n for n in range(12)]
    workers.call_each(time.sleep, items, 3, done.append)
    assert sorted(done) == items


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_after_the_time_limit_nothing_is_left() -> None:
    done: list[float] = []
    before = children()
    start = time.monotonic()
    workers.call_each(time.sleep, [0.0, 60.0], 2, done.append, timeout_s=4)
    assert done == [0.0] and time.monotonic() - start < 40 and children() == before


def test_an_interrupt_leaves_no_process() -> None:
    def interrupt(item: float) -> None:
        raise KeyboardInterrupt

    before = children()
    with pytest.raises(KeyboardInterrupt):
        workers.call_each(time.sleep, [0.0, 60.0], 2, interrupt)
    assert children() == before


@pytest.mark.parametrize(
    "function, item, error, words",
    [
        (int, "x", ValueError, "invalid literal"),
        (os.stat, "/gone", RuntimeError, "FileNotFoundError: .*/gone"),
        (os._exit, 3, RuntimeError, "ended with status 3"),
    ],
)
def test_what_went_wrong_is_raised(function: Any, item: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        workers.call_each(function, [item], 1, lambda item: None)


def test_what_a_call_prints_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    workers.call_each(print, ["of the compiler"], 1, lambda item: None)
    assert capfd.readouterr() == ("", "of the compiler\n")
