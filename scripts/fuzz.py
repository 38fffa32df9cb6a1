"""Random calls of all public operators: valid ones against float64 and each other, invalid ones against their refusal.

    python scripts/fuzz.py                         100,000 calls and 20,000 invalid ones; fewer without a GPU
    python scripts/fuzz.py --first-round 100000    other calls
    python scripts/fuzz.py --only sink_gradients --calls 20000      calls of one kind
    python scripts/fuzz.py --round 4711            a round again, in this process
    python scripts/fuzz.py --round 4711 --shrink   the simplest call that is wrong alone, if one of the round is

A round draws its calls from `bench.fuzzing.strategies`; its seed determines them exactly on one kind of device. Each
valid call is made alone into poisoned outputs, and a few of its rows are compared with the float64 oracle (appends: all
bytes with the packing in plain torch). Then seven threads of each worker process, with streams of their own, make the
calls of a round in random order and in all modes, eagerly and as replays of CUDA graphs, and all bits must equal the
first call's. Invalid calls come from `tests.kit.bad_input`. Kernels are compiled before, from a fixed list of specs.

Exit status 1 if anything was wrong, a call found no memory, a worker died, or fewer calls than requested were made.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

import torch  # noqa: E402

from bench import records  # noqa: E402
from bench.fuzzing import processes, strategies  # noqa: E402
from bench.fuzzing.rounds import THREADS, Outcome, Work, run_round, shrink  # noqa: E402
from cute_kernels.runtime.arch import is_sm90  # noqa: E402
from cute_kernels.runtime.compile import precompile  # noqa: E402

CALLS_OF_ROUND: Final = 48
TURNS: Final = {"cuda": 300, "cpu": 3}
"""Turns of each of seven threads in a round: on a GPU about 50 calls for each one that the oracle checks."""
SHOWN: Final = 20
LINE_S: Final = 10.0
"""Seconds between two lines of progress."""
RESULT: Final = ROOT / "build" / "fuzz.json"


class Plan(NamedTuple):
    """The calls to make.

    calls        least number of valid calls
    invalid      least number of invalid calls
    workers      number of processes; 0: this one
    first_round  number of the first round; disjoint runs need disjoint rounds
    only         the one of `strategies.MAKERS` that makes the calls
    """

    calls: int
    invalid: int
    workers: int = 12
    first_round: int = 0
    only: str | None = None


PLANS: Final = {
    ("cuda", False): Plan(100_000, 20_000),
    ("cuda", True): Plan(6000, 1500, workers=6),
    ("cpu", False): Plan(600, 3000, workers=2),
    ("cpu", True): Plan(60, 256, workers=0),
}
"""Default plans, by device and whether the run is a short one."""


def rounds_of(plan: Plan, device: torch.device) -> Iterator[Work]:
    """Yields the rounds of a plan, which together have at least its calls."""
    turns = TURNS[device.type]
    rounds = max(1, -(-plan.calls // (CALLS_OF_ROUND + turns * (THREADS + 1))))  # a replay has at least one call
    invalid = -(-plan.invalid // rounds)
    for number in range(rounds):
        yield Work(plan.first_round + number, CALLS_OF_ROUND, invalid, turns, plan.only)


def run(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Compiles missing kernels, makes all calls and returns the result: counts, rounds, and what was wrong."""
    specs = strategies.kernel_specs()
    if device.type == "cuda":
        precompile(specs)
    started = last = time.monotonic()

    def report(total: processes.Total) -> None:
        nonlocal last
        if time.monotonic() - last > LINE_S:
            last = time.monotonic()
            print(f"{last - started:6.1f} s  {_counts(total.outcome)}, {len(total.faults)} faults", flush=True)

    total = processes.run_rounds(rounds_of(plan, device), device, plan.workers, report=report)
    findings = total.outcome.findings
    no_memory = sum(finding.no_memory for finding in findings)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "date": records.today(),
        "calls": total.outcome.calls,
        "invalid_calls": total.outcome.invalid_calls,
        "wrong": len(findings) - no_memory,
        "out_of_memory": no_memory,
        "faults": len(total.faults),
        "seconds": round(time.monotonic() - started, 1),
        "rounds": total.ranges(),
        "shapes": len(total.outcome.shapes),
        "kernels": len(specs),
        "findings": [finding._asdict() for finding in findings[:1000]],
        "fault_reports": total.faults,
        **({} if plan.only is None else {"only": plan.only}),
    }


def _counts(done: Outcome) -> str:
    return (
        f"{done.calls:,} calls, {done.invalid_calls:,} invalid, {len(done.shapes):,} shapes, {len(done.findings)} wrong"
    )


def short(first_round: int = 0) -> dict[str, Any]:
    """Runs the short form, for checks that have more to do."""
    device = default_device()
    return run(PLANS[device.type, True]._replace(first_round=first_round), device)


def sound(result: dict[str, Any], plan: Plan) -> bool:
    """Returns whether nothing was wrong and all requested calls were made."""
    enough = result["calls"] >= plan.calls and result["invalid_calls"] >= plan.invalid
    return enough and not any(result[name] for name in ("wrong", "faults", "out_of_memory"))


def default_device() -> torch.device:
    """Returns the GPU if it is an SM90, else the CPU."""
    usable = torch.cuda.is_available() and is_sm90(torch.device("cuda"))
    return torch.device("cuda", torch.cuda.current_device()) if usable else torch.device("cpu")


def show_result(result: dict[str, Any]) -> None:
    """Prints the counts, then what was wrong, with commands that repeat it."""
    print(", ".join(f"{key} {value}" for key, value in result.items() if key not in ("findings", "fault_reports")))
    only = f" --only {result['only']}" if "only" in result else ""
    for finding in result["findings"][:SHOWN]:
        kind = "no memory" if finding["no_memory"] else "wrong"
        print(f"\n{kind}: {finding['said']}\n  python scripts/fuzz.py --round {finding['seed']}{only}")
    for fault in result["fault_reports"]:
        print(f"\nfault: {fault}")


def again(seed: int, device: torch.device, only: str | None, simplest: bool) -> int:
    """Makes a round again, or looks for the simplest wrong call; returns the number of findings."""
    work = Work(seed, CALLS_OF_ROUND, turns=TURNS[device.type], only=only)
    if simplest:
        shrink(work, device)
        print("no call of the round is wrong alone")
        return 0
    findings = run_round(work, device).findings
    print("\n".join([*(finding.said for finding in findings), f"{len(findings)} wrong"]))
    return len(findings)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, metavar="N", help="valid calls, at least")
    parser.add_argument("--invalid-calls", type=int, metavar="N", dest="invalid", help="invalid calls, at least")
    parser.add_argument("--workers", type=int, metavar="N", help="processes; 0: this one")
    parser.add_argument("--first-round", type=int, metavar="N", default=0, help="disjoint runs need disjoint rounds")
    parser.add_argument("--only", choices=list(strategies.MAKERS), help="what all calls are")
    parser.add_argument("--round", type=int, metavar="N", help="make a round again")
    parser.add_argument("--shrink", action="store_true", help="of that round, look for the simplest wrong call")
    parser.add_argument("--out", type=pathlib.Path, default=RESULT, help=f"default: {RESULT.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    device = default_device()
    if options.round is not None:
        return int(again(options.round, device, options.only, options.shrink) > 0)
    given = {name: getattr(options, name) for name in Plan._fields if getattr(options, name) is not None}
    plan = PLANS[device.type, False]._replace(**given)
    result = run(plan, device)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show_result(result)
    print(f"written to {options.out}")
    return int(not sound(result, plan))


if __name__ == "__main__":
    sys.exit(main())
