"""The part "run": card, versions, tests and ceilings of a record."""

from __future__ import annotations

from bench import records
from bench.report.cases import Record
from bench.report.markdown import plain


def run(record: Record) -> list[str]:
    """Card and versions, tests, sanitizers and ceilings; random calls."""
    tests, ceilings = record["tests"], record["ceilings"]
    tools = (*records.SANITIZER_TOOLS, *(tool for tool in records.MORE_TOOLS if tool in tests["sanitizer"]))
    sanitizer = ", ".join(
        f"{tool} {'not run' if tests['sanitizer'][tool] is None else tests['sanitizer'][tool]}" for tool in tools
    )
    tvm_ffi = f"tvm-ffi {record['tvm_ffi']}, " if "tvm_ffi" in record else ""
    peers = "".join(f" {name}: {version}." for name, version in record.get("peers", {}).items())
    return [
        f"{record['card']}, driver {record['driver']}, torch {record['torch']}, CuTe DSL {record['cutlass_dsl']}, "
        f"{tvm_ffi}{record['date']}. "
        f"Tests on the GPU: {plain(tests['passed'])} passed, {plain(tests['failed'])} failed, "
        f"{plain(tests['skipped'])} skipped; sanitizer errors: {sanitizer}. Ceilings of this card in the same run: "
        f"reads {ceilings['read_GBps']:.0f} GB/s, copies {ceilings['copy_GBps']:.0f} GB/s, bf16 matrix products "
        f"{ceilings['bf16_gemm_TFLOPs']:.0f} TFLOP/s.{peers}{several(record)}",
        *random_calls(record),
    ]


def several(record: Record) -> str:
    """How many cases are medians of several runs."""
    counts = [len(case["runs"]) for case in record["cases"] if "runs" in case]
    if not counts:
        return ""
    return f" {len(counts)} of {len(record['cases'])} cases are medians of {max(counts)} runs, all of which are kept."


def random_calls(record: Record) -> list[str]:
    """What random calls found, where the record has them."""
    entry = record.get("reliability")
    if entry is None:
        return []
    shapes = f", {entry['shapes']:,} shapes" if "shapes" in entry else ""
    rounds = ", ".join(f"{first} to {last}" for first, last in entry["rounds"])
    no_memory = f", {entry['out_of_memory']} not made for want of memory" if entry.get("out_of_memory") else ""
    return [
        f"Random calls of all operations, from many threads and in graphs: {entry['calls']:,} valid ones "
        f"({entry['kernels']} kernels{shapes}) and {entry['invalid_calls']:,} invalid ones in "
        f"{entry['seconds']:,.0f} s; {entry['wrong']} wrong, {entry['faults']} faults{no_memory}. Rounds {rounds}.",
    ]
