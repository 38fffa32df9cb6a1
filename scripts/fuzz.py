"""Random calls of all public ops: valid ones against float64 and each other, invalid ones against their refusal.

    python scripts/fuzz.py                         100,000 calls and 20,000 invalid ones; fewer where there is no GPU
    python scripts/fuzz.py --short                 6,000 and 1,500
    python scripts/fuzz.py --minutes 20 --first-seed 1000000
    python scripts/fuzz.py --seed 4711             the call of one seed again, alone and from all threads
    python scripts/fuzz.py --seeds 4704 4752       a whole round again, in this process

A seed names a call exactly on one kind of device, sizes, options and numbers; from 10^12 on it names an invalid call.
Each valid call is made alone into poisoned outputs and a few of its rows are held to the float64 oracle (appends: all
bytes to the packing in plain torch). Then seven threads of each worker process, with streams of their own, make the
calls of a round in random order and in all modes, eagerly and as replays of CUDA graphs, and all bits must be those of
the first call. Invalid calls have one argument wrong; they must raise ValueError or TypeError with its name and leave
all outputs as they are. Kernels are compiled before, from a fixed list of specifications.

Exit status 1 when anything was wrong, a call found no memory, a worker died, or fewer calls were made than asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

import torch  # noqa: E402

from bench import kernels_run  # noqa: E402
from bench.fuzzing import invalid, processes  # noqa: E402
from bench.fuzzing.generate import MAX_SPECS, kernel_specs  # noqa: E402
from bench.fuzzing.rounds import THREADS, Finding, Work, run_round  # noqa: E402
from cute_kernels.runtime.arch import is_sm90  # noqa: E402

SEEDS_OF_ROUND: Final = 48
TURNS: Final = {"cuda": 300, "cpu": 3}
"""Of each of seven threads in a round: on a GPU about 50 calls for each seed, which is what the oracle costs there."""
SHOWN: Final = 20
LINE_S: Final = 10.0
"""Between two lines of progress where there is no terminal."""
RESULT: Final = ROOT / "build" / "fuzz.json"


@dataclass(frozen=True)
class Plan:
    """What to make.

    calls          valid calls, at least
    invalid_calls  at least
    minutes        instead of `calls`: begin rounds for so long
    workers        processes; 0: this one
    first_seed     disjoint runs begin further apart than the number of their calls
    """

    calls: int
    invalid_calls: int
    minutes: float | None = None
    workers: int = 12
    first_seed: int = 0


FULL: Final = Plan(100_000, 20_000)
SHORT: Final = Plan(6000, 1500, workers=6)
WITHOUT_GPU: Final = Plan(600, 3000, workers=2)
SHORT_WITHOUT_GPU: Final = Plan(60, 256, workers=0)


def default_plan(short: bool, device: torch.device) -> Plan:
    """What a run makes unless it is told otherwise."""
    if device.type == "cuda":
        return SHORT if short else FULL
    return SHORT_WITHOUT_GPU if short else WITHOUT_GPU


def rounds_of(plan: Plan, device: torch.device) -> Iterator[Work]:
    """The rounds of a plan, which have at least its calls together; with `minutes`, rounds until they are over."""
    started, turns = time.monotonic(), TURNS[device.type]
    calls_of_round = SEEDS_OF_ROUND + turns * (THREADS + 1)  # a replay is one call at least
    rounds = max(1, -(-plan.calls // calls_of_round))
    wrong = min(-(-plan.invalid_calls // rounds), SEEDS_OF_ROUND * invalid.PER_CALL)
    number = 0
    while number < rounds if plan.minutes is None else time.monotonic() - started < plan.minutes * 60:
        first = plan.first_seed + number * SEEDS_OF_ROUND
        base = invalid.FIRST + plan.first_seed * invalid.PER_CALL + number * wrong
        yield Work(first, first + SEEDS_OF_ROUND, base, base + wrong, turns)
        number += 1


def run(plan: Plan, device: torch.device, *, show: bool = True) -> dict[str, Any]:
    """Compiles what is missing, makes all calls and returns the result: counts, seeds, and what was wrong."""
    specs = kernel_specs()
    if len(specs) > MAX_SPECS:
        raise RuntimeError(f"{len(specs)} specifications; at most {MAX_SPECS}")
    code = kernels_run.machine_code()
    if device.type == "cuda":
        code.precompile(specs)
    started = time.monotonic()
    with progress(plan, show) as report:
        total = processes.run_rounds(rounds_of(plan, device), device, plan.workers, report=report)
    found = processes.first_findings(total, most=1000)
    no_memory = sum(finding.no_memory for finding in total.outcome.findings)
    ran = kernels_run.machine_code_of(specs, code) if device.type == "cuda" else {}
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "calls": total.outcome.calls,
        "invalid_calls": total.outcome.invalid_calls,
        "wrong": len(total.outcome.findings) - no_memory,
        "out_of_memory": no_memory,
        "faults": len(total.faults),
        "seconds": round(time.monotonic() - started, 1),
        "seeds": total.seeds(),
        "shapes": len(total.outcome.shapes),
        "specifications": len(specs),
        "findings": [finding._asdict() for finding in found],
        "fault_reports": total.faults,
        **ran,
    }


def short(device: torch.device | None = None, first_seed: int = 0) -> dict[str, Any]:
    """The short form, for checks that have more to do; the result is that of `run`."""
    device = device or default_device()
    plan = default_plan(True, device)
    return run(Plan(plan.calls, plan.invalid_calls, None, plan.workers, first_seed), device, show=False)


def sound(result: dict[str, Any], plan: Plan) -> bool:
    """Whether nothing was wrong and all was made that was asked for."""
    enough = plan.minutes is not None or (
        result["calls"] >= plan.calls and result["invalid_calls"] >= plan.invalid_calls
    )
    return enough and not any(result.get(name) for name in ("wrong", "faults", "out_of_memory"))


def again(seed: int, device: torch.device) -> list[Finding]:
    """Makes the call of one seed again: an invalid one with and without the valid one before it."""
    if seed < invalid.FIRST:
        return run_round(Work(seed, seed + 1, turns=TURNS[device.type]), device).findings
    found = []
    for prepared in (False, True):
        _, problems = invalid.run_invalid(seed, seed + 1, device, prepared=prepared)
        found += [Finding(*problem) for problem in problems]
    return found


def default_device() -> torch.device:
    """The GPU if it is an SM90, else the CPU."""
    usable = torch.cuda.is_available() and is_sm90(torch.device("cuda"))
    return torch.device("cuda", torch.cuda.current_device()) if usable else torch.device("cpu")


@contextlib.contextmanager
def progress(plan: Plan, show: bool) -> Iterator[Any]:
    """A function that shows how far a run is: a live line where rich is installed, plain lines elsewhere."""
    started = time.monotonic()

    def said(total: processes.Total) -> str:
        done = total.outcome
        text = f"{done.calls:,} calls, {done.invalid_calls:,} invalid, {len(done.shapes):,} shapes"
        return f"{time.monotonic() - started:6.1f} s  {text}, {len(done.findings)} wrong, {len(total.faults)} faults"

    if not show:
        yield quiet
        return
    last = started

    def say(total: processes.Total) -> None:
        nonlocal last
        if time.monotonic() - last > LINE_S:
            last = time.monotonic()
            print(said(total), flush=True)

    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ImportError:
        yield say
        return
    if not Console().is_terminal:
        yield say
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%")) as bar:
        task = bar.add_task("starting", total=1.0)

        def report(total: processes.Total) -> None:
            seconds = time.monotonic() - started
            share = total.outcome.calls / plan.calls if plan.minutes is None else seconds / 60 / plan.minutes
            bar.update(task, completed=min(share, 1.0), description=said(total))

        yield report


def quiet(total: processes.Total) -> None:
    """Shows nothing."""


def show_result(result: dict[str, Any]) -> None:
    """The counts as a table, and below it what was wrong with the commands that make it again."""
    keys = (
        "device",
        "calls",
        "invalid_calls",
        "wrong",
        "out_of_memory",
        "faults",
        "shapes",
        "specifications",
        "seconds",
    )
    for key in keys:
        print(f"{key:>15}  {result[key]}")
    for first, last in result["seeds"]:
        print(f"{'seeds':>15}  {first} to {last}")
    for finding in result["findings"][:SHOWN]:
        kind = "no memory" if finding["no_memory"] else "wrong"
        print(f"\n{kind}: {finding['said']}\n  python scripts/fuzz.py --seed {finding['seed']}")
    for fault in result["fault_reports"]:
        print(f"\nfault: {fault}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few calls")
    parser.add_argument("--calls", type=int, metavar="N", help="valid calls, at least")
    parser.add_argument("--invalid-calls", type=int, metavar="N", help="invalid calls, at least")
    parser.add_argument("--minutes", type=float, help="begin rounds for so long, whatever their number")
    parser.add_argument("--workers", type=int, metavar="N", help="processes; 0: this one")
    parser.add_argument("--first-seed", type=int, metavar="N", default=0, help="disjoint runs need disjoint seeds")
    parser.add_argument("--seed", type=int, metavar="N", help="make the call of one seed again")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), help="make a round again")
    parser.add_argument("--out", type=pathlib.Path, default=RESULT, help=f"default: {RESULT.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    device = default_device()

    if options.seed is not None or options.seeds is not None:
        if options.seed is not None:
            found = again(options.seed, device)
        else:
            first, end = options.seeds
            found = run_round(Work(first, end, turns=TURNS[device.type]), device).findings
        for finding in found:
            print(f"seed {finding.seed}: {finding.said}")
        print(f"{len(found)} wrong")
        return int(bool(found))

    usual = default_plan(options.short, device)
    plan = Plan(
        usual.calls if options.calls is None else options.calls,
        usual.invalid_calls if options.invalid_calls is None else options.invalid_calls,
        options.minutes,
        usual.workers if options.workers is None else options.workers,
        options.first_seed,
    )
    result = run(plan, device)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show_result(result)
    print(f"written to {options.out}")
    return int(not sound(result, plan))


if __name__ == "__main__":
    sys.exit(main())
