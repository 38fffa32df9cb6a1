"""The order of instructions that makes the forward of sink attention fast, which ptxas decides. No GPU is needed."""

import itertools

from cute_kernels.sink.spec import SinkForwardSpec
from tests.kit.sass import listings


def test_softmax_stands_between_the_two_waits() -> None:
    """After the wait that leaves PV in flight, all exponentials of a tile come before the wait for PV."""
    specs = [
        SinkForwardSpec.for_launch("bfloat16", d, packed=False, window=window, ratio=ratio)
        for d, window, ratio in itertools.product([64, 128], [None, 128, 4096], [1, 8])
    ]
    for spec, lines in zip(specs, listings(specs), strict=True):
        start = next(i for i, line in enumerate(lines) if "DEPBAR.LE gsb0, 0x1" in line)
        end = next(i for i, line in enumerate(lines) if i > start and "DEPBAR.LE gsb0, 0x0" in line)
        overlapped = lines[start:end]
        assert sum("MUFU.EX2" in line for line in overlapped) >= spec.tile // 2, spec
        assert not any("HGMMA" in line for line in overlapped), spec
        # the first tile, the loop, and two for the sink: no copy that the compiler made of a tile's exponentials
        assert sum("MUFU.EX2" in line for line in lines) <= 2 * (spec.tile // 2 + 2) + 2, spec
