"""The README's example of an INT8 cache works as it stands there."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_example_can_be_pasted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (example,) = re.findall(r"```py\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    torch.manual_seed(0)
    exec(compile(example, str(README), "exec"), {})
    printed = re.fullmatch(r"INT8 against bfloat16: (\S+)\n", capsys.readouterr().out)
    assert printed and float(printed[1]) < 2e-2  # quantization, scales per token and head
