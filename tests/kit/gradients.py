"""Checks of operators that have no backward, with tensors that require gradients, on any device."""

from typing import Any

import pytest
import torch

from tests.kit.bad_input import TABLES

NAMES = [name for name in TABLES if not name.startswith("sink_attention")]
OPERATOR = {"flash_mla_with_kvcache": "mla_fp8_decode"}
RENAMED = {"k_cache": "kv_cache", "attn_sink": "s_aux"}  # names that compat.flash_mla uses in its errors


def candidates(device: str) -> list[tuple[str, str]]:
    """Each table with each tensor argument of its valid call that can require gradients."""
    return [
        (name, argument)
        for name in NAMES
        for argument, value in TABLES[name].right(device).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]


def expected_words(name: str, argument: str) -> str:
    """The message of the error that a call raises."""
    operator = OPERATOR.get(name, name.partition(",")[0])
    said = RENAMED.get(argument, argument) if name in OPERATOR else argument
    return (
        f"{said}: got a tensor that requires gradients; needs one that does not, or torch.no_grad(): "
        f"{operator} has no backward"
    )


def require_refused(name: str, argument: str, device: str) -> None:
    """Requires that with gradients enabled the call raises an error that says so, and writes nothing."""
    table, call = TABLES[name], TABLES[name].right(device)
    call[argument] = call[argument].requires_grad_()
    originals = {key: call[key].detach().clone() for key in table.outputs if isinstance(call.get(key), torch.Tensor)}
    with pytest.raises(ValueError) as error:
        table.function(**call)
    assert str(error.value) == expected_words(name, argument)
    for key, was in originals.items():
        assert torch.equal(call[key].detach().view(torch.uint8), was.view(torch.uint8)), "something was written"


def require_taken(name: str, argument: str, device: str) -> None:
    """Requires that with gradients disabled a tensor that requires gradients is an ordinary input, as in serving."""
    for mode in (torch.no_grad(), torch.inference_mode()):
        plain, call = TABLES[name].right(device), TABLES[name].right(device)
        call[argument] = call[argument].requires_grad_()
        with mode:
            expected, got = _results(name, plain), _results(name, call)
        for want, result in zip(expected, got, strict=True):
            assert torch.equal(result, want)


def _results(name: str, call: dict[str, Any]) -> list[torch.Tensor]:
    """The results of a call as detached tensors: what it returns and what it writes."""
    result = TABLES[name].function(**call)
    returned = result if isinstance(result, tuple) else (result,)
    written = [call[key] for key in TABLES[name].outputs if isinstance(call.get(key), torch.Tensor)]
    return [t.detach().clone() for t in (*returned, *written) if isinstance(t, torch.Tensor)]
