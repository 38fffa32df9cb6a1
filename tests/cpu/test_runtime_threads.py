"""After an interrupt, a fork or an exit during a compilation, a process can compile, and the kernel is kept."""

import threading
from pathlib import Path
from typing import Any

import pytest

from cute_kernels.runtime import cache, compile
from tests.cpu.tiny_spec import TinySpec
from tests.kit.kernel_place import Place

START = """
import os, signal, sys, threading, time
from cute_kernels.runtime import compile, threads
from tests.cpu.tiny_spec import TinySpec

class Interrupt(BaseException):
    pass

def interrupt(*_):
    raise Interrupt

signal.signal(signal.SIGALRM, interrupt)

def interrupted(spec, seconds):
    '''Whether `seconds` ended a call that asks for a kernel.'''
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        compile.get_kernel(spec)
        return False
    except Interrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)

def until(condition):
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)

def is_compiling():
    return any("cute_kernels" in thread.name for thread in threading.enumerate())
"""


def test_an_interrupt_at_any_moment_leaves_a_process_that_compiles(place: Place) -> None:
    """A kernel takes 0.2 s to compile; the first one also imports the DSL, which takes longer."""
    code = """
import random
ends = [interrupted(TinySpec(32), 0.5)]
assert ends[0] and is_compiling(), "the import of the DSL was not interrupted"
random = random.Random(4)
ends += [interrupted(TinySpec(32 * n), random.uniform(0.001, 1.0)) for n in range(2, 10)]
assert sum(ends) > 2
for n in range(1, 11):
    assert callable(compile.get_kernel(TinySpec(32 * n)))
print("all there")
"""
    assert place.run(START + code) == "all there\n"
    assert len(place.files()) == place.compilations() == 10


def test_what_an_interrupted_call_compiles_is_kept(place: Place) -> None:
    """The process ends meanwhile and waits for the compilation."""
    code = "compile.arch.import_dsl()\nprint(interrupted(TinySpec(), 0.05), is_compiling())"
    assert place.run(START + code) == "True True\n"
    assert place.compilations() == len(place.files()) == 1


def test_a_process_may_end_while_it_imports_the_compiler(place: Place) -> None:
    """Python refuses some imports by then, so there may be no kernel, but the process ends without an error."""
    assert place.run(START + "print(interrupted(TinySpec(), 0.3), is_compiling())") == "True True\n"


def test_compile_kernel_goes_on_as_well(place: Place) -> None:
    """Tools call it without the cache."""
    code = """
compile.get_kernel = compile.compile_kernel
print([interrupted(TinySpec(32 * n), 0.05) for n in (1, 2)], compile.compile_kernel(TinySpec(96)) is not None)
"""
    assert place.run(START + code) == "[True, True] True\n"


@pytest.mark.parametrize("who", ["after an interrupt", "in another thread"])
def test_a_fork_while_a_kernel_is_compiled_can_compile(place: Place, who: str) -> None:
    """The child has neither the thread that compiles nor one that waits for it."""
    code = """
if sys.argv[1:] == [] and "thread" in os.environ["WHO"]:
    threading.Thread(target=compile.get_kernel, args=(TinySpec(32),)).start()
    until(is_compiling)
    time.sleep(0.2)
else:
    assert interrupted(TinySpec(32), 0.5)
assert is_compiling()
child = os.fork()
if child == 0:
    signal.alarm(60)
    for width in (64, 32):
        compile.get_kernel(TinySpec(width))
    os._exit(0)
compile.get_kernel(TinySpec(96))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert place.run(START + code, WHO=who) == "0\n"
    assert place.compilations() == len(place.files()) == 3


def test_a_kernel_is_loaded_in_the_thread_that_asks(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calling thread has a current device; the thread that compiles has another one."""
    seen: dict[str, list[threading.Thread]] = {"load": [], "compile": []}
    load, make = cache._LOADERS[".so"], compile._compile

    def load_here(path: Path, symbol: str) -> Any:
        seen["load"].append(threading.current_thread())
        return load(path, symbol)

    def compile_here(spec: TinySpec, **options: Any) -> Any:
        seen["compile"].append(threading.current_thread())
        return make(spec, **options)

    monkeypatch.setitem(cache._LOADERS, ".so", load_here)
    monkeypatch.setattr(compile, "_compile", compile_here)
    compile.get_kernel(TinySpec())
    assert seen["load"] == [threading.current_thread()]
    assert len(seen["compile"]) == 1 and seen["compile"] != seen["load"]


def test_an_error_and_its_frames_are_not_kept() -> None:
    """The thread's result holds the error, whose frames would hold the result and the caller's tensors."""
    import gc
    import weakref

    from cute_kernels.runtime.threads import in_new_thread

    class Large:
        pass

    def fail(kept: Large) -> None:
        raise ValueError("of the work")

    def call() -> weakref.ref[Large]:
        large = Large()
        with pytest.raises(ValueError, match="of the work"):
            in_new_thread(lambda: fail(large))
        return weakref.ref(large)

    gc.collect()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()
