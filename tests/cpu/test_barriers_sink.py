"""Docstrings of the kernels of sink attention show the barriers that the kernels initialize."""

import inspect
from typing import Any

import pytest

from cute_kernels.runtime import arch

arch.pin()

from cute_kernels.device.barriers import Rings, table  # noqa: E402
from cute_kernels.sink.backward_spec import SinkBackwardSpec, SinkQueryGradSpec  # noqa: E402
from cute_kernels.sink.kernels.backward import SinkBackwardKernel  # noqa: E402
from cute_kernels.sink.kernels.barriers import key_barriers, query_barriers  # noqa: E402
from cute_kernels.sink.kernels.forward import SinkForwardKernel  # noqa: E402
from cute_kernels.sink.kernels.query_grad import SinkQueryGradKernel  # noqa: E402
from cute_kernels.sink.spec import SinkForwardSpec  # noqa: E402

GROUPED = SinkForwardSpec("bfloat16", 64, window=True, warpgroups=4, tile=64, turns=False, grouped=True)
SHOWN = [
    (SinkForwardKernel, query_barriers(SinkForwardSpec("bfloat16", 64, warpgroups=3))),
    (SinkForwardKernel, query_barriers(GROUPED)),
    (SinkQueryGradKernel, query_barriers(SinkQueryGradSpec("bfloat16", 64))),
    (SinkBackwardKernel, key_barriers(SinkBackwardSpec("bfloat16", 64))),
    (SinkBackwardKernel, key_barriers(SinkBackwardSpec("bfloat16", 128))),
]


@pytest.mark.parametrize(("kernel", "rings"), SHOWN)
def test_docstring_shows_the_barriers(kernel: Any, rings: Rings) -> None:
    assert table(rings) in (inspect.getdoc(kernel) or "")
