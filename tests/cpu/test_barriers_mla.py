"""The table of mbarriers in the MLA decode kernel's docstring is that of its initialization."""

import pytest

from cute_kernels.mla.spec import MlaDecodeSpec
from cute_kernels.runtime import arch

arch.pin()

from cute_kernels.device.barriers import table  # noqa: E402
from cute_kernels.mla.kernels import decode  # noqa: E402
from cute_kernels.mla.kernels.barriers import barriers  # noqa: E402


@pytest.mark.parametrize("spec", [MlaDecodeSpec(sparse=False), MlaDecodeSpec(sparse=True, heads=16)], ids=str)
def test_docstring_has_the_table(spec: MlaDecodeSpec) -> None:
    assert decode.__doc__ is not None
    assert table(barriers(spec)) in decode.__doc__
