"""The meaning of compute-sanitizer's output: a tool that did not run has not found 0 errors."""

import json

import pytest

from bench.sanitizing import tools
from bench.sanitizing.tools import Finding, Known, Part
from scripts import gpu_check

CLEAN = f"{tools.WORKER_DONE}\n========= ERROR SUMMARY: 0 errors\n"
SANITIZER_OUTPUTS: dict[str, tuple[str, str, int, int | None]] = {
    "clean": ("memcheck", CLEAN, 0, 0),
    "errors": ("memcheck", f"{tools.WORKER_DONE}\n========= ERROR SUMMARY: 12 errors\n", 99, 12),
    "clean races": (
        "racecheck",
        f"{tools.WORKER_DONE}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
        0,
        0,
    ),
    "races": (
        "racecheck",
        f"{tools.WORKER_DONE}\n========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n",
        0,
        3,
    ),
    "one error": ("synccheck", f"{tools.WORKER_DONE}\n========= ERROR SUMMARY: 1 error\n", 99, 1),
    "an error without a summary": ("synccheck", "gone\n", 99, 1),
    "a tool that refuses the device": ("memcheck", "========= Error: Device not supported\n", 1, None),
    "a worker that did not finish": ("memcheck", "Traceback\n========= ERROR SUMMARY: 0 errors\n", 1, None),
    "a tool that says nothing": ("memcheck", "", 0, None),
    "only the worker": ("memcheck", f"{tools.WORKER_DONE}\n", 0, None),
}


@pytest.mark.parametrize(("tool", "output", "status", "errors"), SANITIZER_OUTPUTS.values(), ids=SANITIZER_OUTPUTS)
def test_sanitizer_outputs(tool, output, status, errors):
    finding = tools.parse(tool, output, status)
    assert finding.errors == errors
    assert bool(finding.reason) == (errors is None)


def test_what_parts_of_the_calls_found_is_added_up():
    found = [tools.Finding("racecheck", 2, output="a"), tools.Finding("racecheck", 0, output="b")]
    assert tools.join("racecheck", found) == tools.Finding("racecheck", 2, output="a\nb")
    unseen = tools.Finding("racecheck", None, "gqa: not done after 240 s")
    assert tools.join("racecheck", [*found, unseen]).errors is None
    assert tools.join("racecheck", [*found, unseen]).reason == "gqa: not done after 240 s"


def test_a_missing_sanitizer_is_a_reason_and_no_zero(monkeypatch):
    monkeypatch.setattr(tools, "find_sanitizer", lambda: None)
    finding = tools.run_tool("memcheck", Part("mla"))
    assert finding.errors is None
    record = gpu_check.sanitizer_record([finding, tools.Finding("racecheck", 0), tools.Finding("synccheck", 2)])
    assert record == {
        "memcheck": None,
        "racecheck": 0,
        "synccheck": 2,
        "reasons": {"memcheck": "compute-sanitizer is not installed"},
    }
    json.dumps(record)


INITCHECK = """========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at kernel_of_torch+0x70
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7f is 4 bytes into allocation 0x7f of size 512
=========
========= Uninitialized __global__ memory read of size 2 bytes
=========     at void at::native::copy_kernel+0x90
=========     by thread (1,0,0) in block (0,0,0)
=========
========= Uninitialized __global__ memory read of size 2 bytes
=========     at void at::native::copy_kernel+0x90
=========     by thread (2,0,0) in block (0,0,0)
=========
{done}
========= ERROR SUMMARY: 3 errors
"""
COPIES = {"copies": Known("initcheck", r"at void at::native::copy_kernel", "written by TMA", "tma-stores", ("mla",))}


def test_false_reports_that_are_listed_are_counted_apart(monkeypatch):
    output = INITCHECK.format(done=tools.WORKER_DONE)
    assert tools.parse("initcheck", output, 99).errors == 3
    monkeypatch.setattr(tools, "KNOWN", COPIES)
    found = tools.parse("initcheck", output, 99, "mla")
    assert (found.errors, found.known) == (1, {"copies": 2})
    assert tools.parse("initcheck", output, 99, "gqa").errors == 3, "known of the calls of another part"
    assert tools.parse("memcheck", output, 99, "mla") == Finding("memcheck", 3, output=output)
    every = {**COPIES, "all": Known("initcheck", "kernel_of_torch", "", "tma-stores", ("mla",))}
    monkeypatch.setattr(tools, "KNOWN", every)
    clean = tools.parse("initcheck", output, 99, "mla")
    assert (clean.errors, clean.known) == (0, {"copies": 2, "all": 1})
    unfinished = tools.parse("initcheck", INITCHECK.format(done=""), 99, "mla")
    assert unfinished.errors == 1, "a worker that did not finish is not clean"
    both = tools.join("initcheck", [found, clean, Finding("initcheck", 0)])
    assert (both.errors, both.known) == (1, {"copies": 4, "all": 1})
    record = gpu_check.sanitizer_record([both, Finding("memcheck", 0)])
    assert (record["initcheck"], record["memcheck"], record["racecheck"]) == (1, 0, None)
    assert record["known"] == {"initcheck": {"copies": 4, "all": 1}}
    json.dumps(record)


READ_BACK = """========= Host API memory access error at host access to 0x7f6c02947200 of size 34,304 bytes
=========     Uninitialized access to 0x7f6c0294f720 on access by cudaMemcpy source
========= 
========= Uninitialized __global__ memory read of size 16 bytes
=========     at kernel_cutlass_kernel_cute_kernelssinkkernelsprepareSinkPrepareKernel_object_at+0x360
=========     by thread (96,0,0) in block (0,0,0)
========= 
{done}
========= ERROR SUMMARY: 2 errors
"""  # noqa: W291


def test_reads_back_of_what_tma_stored_are_known_and_kernels_that_read_it_are_findings():
    output = READ_BACK.format(done=tools.WORKER_DONE)
    found = tools.parse("initcheck", output, 99, "few sinks")
    assert (found.errors, found.known) == (1, {"host reads what TMA stored": 1})
    assert tools.parse("initcheck", output, 99, "mla").errors == 2
    first, second = tools.kinds(output + output.replace("0x7f6c0294f720", "0x7f6c0294f740"))
    assert first.startswith("2 x Host API memory access error at host access to ... of size 34,304 bytes, Uninit")
    assert second.startswith("2 x Uninitialized __global__ memory read of size 16 bytes, at kernel_cutlass")


RACES = """========= Warning: Race reported between Read access at kernel_mlakernelsdecodeMlaDecodeKernel_object+0x43c0
=========     and Write access at kernel_mlakernelsdecodeMlaDecodeKernel_object+0x49c0 [224 hazards]
=========
========= {second} between Write access at kernel_mlakernelsdecodeMlaDecodeKernel_object+0x43c0
=========     and Read access at kernel_mlakernelsdecodeMlaDecodeKernel_object+0x49c0 [2 hazards]
=========
{done}
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


@pytest.mark.parametrize("second", ["Error: Race reported", "Warning: Race reported"])
def test_lanes_that_a_vote_joins_are_known_and_other_races_are_findings(second):
    output = RACES.format(done=tools.WORKER_DONE, second=second)
    found = tools.parse("racecheck", output, 99, "mla")
    assert (found.errors, found.known) == (1, {"lanes that a vote joins": 1})
    assert tools.parse("racecheck", output, 99, "gqa").errors == 2


def test_every_known_false_report_has_calls_that_show_it():
    names = {part.name for part in tools.PARTS} | set(tools.SHOWS)
    for name, entry in tools.KNOWN.items():
        assert entry.show in tools.SHOWS and entry.tool in tools.TOOLS and entry.why, name
        assert entry.show in entry.parts and set(entry.parts) <= names
