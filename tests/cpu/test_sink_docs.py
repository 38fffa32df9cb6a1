"""The example of docs/sink_attention.md works as it stands there."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sink_attention.md"


def test_the_example_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    torch.manual_seed(0)
    names: dict[str, torch.Tensor] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    printed = re.fullmatch(r"chunk against whole: (\S+)\npacked against batch: (\S+)\n", capsys.readouterr().out)
    assert printed and all(float(error) <= 2**-6 for error in printed.groups())  # a bit, should a sum round differently
    for name in ("q", "k", "v", "sinks"):
        gradient = names[name].grad
        assert gradient is not None and gradient.abs().max() > 0
