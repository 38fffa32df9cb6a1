"""compute-sanitizer: what its output means, and that its workers call what they say."""

CLEAN = f"{sanitize.WORKER_DONE}\n========= ERROR SUMMARY: 0 errors\n"
SANITIZER_OUTPUTS: dict[str, tuple[str, str, int, int | None]] = {
    "clean": ("memcheck", CLEAN, 0, 0),
    "errors": ("memcheck", f"{sanitize.WORKER_DONE}\n========= ERROR SUMMARY: 12 errors\n", 99, 12),
    "clean races": (
        "racecheck",
        f"{sanitize.WORKER_DONE}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
        0,
        0,
    ),
    "races": (
        "racecheck",
        f"{sanitize.WORKER_DONE}\n========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n",
        0,
        3,
    ),
    "one error": ("synccheck", f"{sanitize.WORKER_DONE}\n========= ERROR SUMMARY: 1 error\n", 99, 1),
    "an error without a summary": ("synccheck", "gone\n", 99, 1),
    "a tool that refuses the device": ("memcheck", "========= Error: Device not supported\n", 1, None),
    "a worker that did not finish": ("memcheck", "Traceback\n========= ERROR SUMMARY: 0 errors\n", 1, None),
    "a tool that says nothing": ("memcheck", "", 0, None),
    "only the worker": ("memcheck", f"{sanitize.WORKER_DONE}\n", 0, None),
}


@pytest.mark.parametrize(("tool", "output", "status", "errors"), SANITIZER_OUTPUTS.values(), ids=SANITIZER_OUTPUTS)
def test_sanitizer_outputs(tool, output, status, errors):
    finding = sanitize.parse(tool, output, status)
    assert finding.errors == errors
    assert bool(finding.reason) == (errors is None)


def test_what_parts_of_the_calls_found_is_added_up():
    found = [sanitize.Finding("racecheck", 2, output="a"), sanitize.Finding("racecheck", 0, output="b")]
    assert sanitize.join("racecheck", found) == sanitize.Finding("racecheck", 2, output="a\nb")
    unseen = sanitize.Finding("racecheck", None, "gqa: not done after 240 s")
    assert sanitize.join("racecheck", [*found, unseen]).errors is None
    assert sanitize.join("racecheck", [*found, unseen]).reason == "gqa: not done after 240 s"


def test_a_missing_sanitizer_is_a_reason_and_no_zero(monkeypatch):
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: None)
    finding = sanitize.run_tool("memcheck", "mla")
    assert finding.errors is None
    record = gpu_check.sanitizer_record([finding, sanitize.Finding("racecheck", 0), sanitize.Finding("synccheck", 2)])
    assert record == {
        "memcheck": None,
        "racecheck": 0,
        "synccheck": 2,
        "reasons": {"memcheck": "compute-sanitizer is not installed"},
    }
    json.dumps(record)
