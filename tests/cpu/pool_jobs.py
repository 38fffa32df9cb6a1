"""Jobs for tests of bench/vllm_pool.py, which its processes import by name."""

from __future__ import annotations

import os
import time
from typing import Any

from bench.vllm_pool import Messages


def run(kind: str, options: dict[str, Any], messages: Messages) -> None:
    globals()[f"_{kind}"](options, messages)


def _say(options: dict[str, Any], messages: Messages) -> None:
    for text in options.get("events", ()):
        messages.send(text, options.get("data"))


def _fail(options: dict[str, Any], messages: Messages) -> None:
    messages.send("case", 1)
    print("in the log")
    raise RuntimeError("it failed")


def _die(options: dict[str, Any], messages: Messages) -> None:
    print("last words", flush=True)
    os._exit(3)


def _child(options: dict[str, Any], messages: Messages) -> None:
    """Starts a process that writes a file unless it is killed first."""
    import subprocess
    import sys

    code = f"import time, pathlib; time.sleep(2); pathlib.Path({options['file']!r}).write_text('')"
    with subprocess.Popen([sys.executable, "-c", code]):
        messages.send("began")
        time.sleep(30)
