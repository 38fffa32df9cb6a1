"""The README's examples work as they stand there."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.parametrize(
    ("fence", "says", "limit"),
    [
        ("python", "relative error", 3e-3),  # one rounding to bfloat16: 1.7e-3
        ("py", "INT8 against bfloat16:", 2e-2),  # quantization, scales per token and head
    ],
)
def test_an_example_can_be_pasted(
    fence: str, says: str, limit: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (example,) = re.findall(rf"```{fence}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    torch.manual_seed(0)
    exec(compile(example, str(README), "exec"), {})
    printed = re.fullmatch(rf"{says} (\S+)\n", capsys.readouterr().out)
    assert printed and float(printed[1]) < limit
