"""Python examples of README and docs/users: each block runs as pasted, on a CPU and on a GPU.

A line that an example prints is `what: number`; the number has to stay below `LIMITS[what]`. What requires gradients at
the end of an example has one.
"""

import contextlib
import io
import re
from pathlib import Path
from typing import Final

import torch

ROOT: Final = Path(__file__).resolve().parents[2]
README: Final = ROOT / "README.md"
USERS: Final = sorted((ROOT / "docs" / "users").glob("*.md"))
EXAMPLES: Final = {
    f"{page.stem}-{number}": (page, example)
    for page in [README, *USERS]
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
}
LIMITS: Final = {
    # rounding to bfloat16 costs 1.7e-3; two results rounded separately differ by up to 2.6e-3
    "relative error": 3e-3,
    "merged against whole, relative error": 5e-3,
    "ranks against one cache, relative error": 5e-3,
    "with a sink, relative error": 5e-3,
    "sparse against dense, relative error": 5e-3,
    "sink of 0, relative error": 5e-3,
    "BNSH against pages, relative error": 5e-3,
    "decoded against whole, relative error": 5e-3,
    "4-bit values against bfloat16, relative error": 0.15,  # 4 bits have 15 steps for the range of a vector
    "INT8 against bfloat16, relative error": 2e-2,  # quantization, scales per token and head
    "656 bytes against bfloat16, relative error": 4e-2,  # rounding to e4m3 costs up to 6e-2
    "FP4 against bfloat16, relative error": 0.15,  # rounding to e2m1 costs up to 0.25
    "two caches against merged, relative error": 5e-3,
    "v4, 584 bytes against bfloat16, relative error": 4e-2,
    "v4.1, 528 bytes against bfloat16, relative error": 4e-2,
    "v4.1_fp4, 288 bytes against bfloat16, relative error": 0.15,  # rounding to e2m1 costs up to 0.25
    "chunk against whole": 2**-6,  # one ulp of bfloat16, if a sum rounds differently
    "packed against batch": 2**-6,
    "chosen otherwise than in float64, share": 0.05,  # one or two of 128, where logits differ in their last bits
    "against torch.topk, difference": 1e-30,
}


def run(name: str) -> None:
    """Runs one example.

    Raises:
        AssertionError: a printed number is too large, or a gradient is missing or zero.
    """
    page, example = EXAMPLES[name]
    torch.manual_seed(0)
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(example, str(page), "exec"), names)
    for line in printed.getvalue().splitlines():
        what, _, value = line.rpartition(": ")
        assert float(value) < LIMITS[what], line
    for tensor in names.values():
        if isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.requires_grad:
            assert tensor.grad is not None and tensor.grad.abs().max() > 0
