"""A cache directory for a test and its child processes, and a count of the kernels compiled."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def printed(code: str) -> str:
    """What a new Python process in the checkout prints. The process must succeed."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclasses.dataclass
class Place:
    """A cache directory and a log of every compilation of a tiny kernel."""

    directory: Path
    log: Path

    def start(self, code: str, **environment: str) -> "subprocess.Popen[str]":
        """A Python process that runs `code` with this cache, outside the checkout, from which `python -c` would import.

        If the code does not name torch, tvm_ffi cannot import it either, which saves 1.2 s.
        """
        if "torch" not in code:
            code = f"import sys; sys.modules['torch'] = None\n{code}"
        env = os.environ | {"CUTE_KERNELS_CACHE_DIR": str(self.directory), "TINY_KERNEL_LOG": str(self.log)}
        env |= {"PYTHONPATH": str(ROOT)} | environment
        command, output = [sys.executable, "-c", code], subprocess.PIPE
        return subprocess.Popen(command, cwd=self.log.parent, env=env, stdout=output, stderr=output, text=True)

    def run(self, code: str, **environment: str) -> str:
        """Runs such a process, which must succeed, and returns what it prints."""
        process = self.start(code, **environment)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out

    def compilations(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def files(self) -> list[str]:
        """Names of the files in the directory, without locks."""
        return sorted(path.name for path in self.directory.iterdir() if path.suffix != ".lock")
