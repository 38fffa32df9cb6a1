"""The docstring of the crossover kernel shows its barriers as they are."""

from cute_kernels.mla.crossover.spec import MlaCrossoverSpec
from cute_kernels.runtime import arch


def test_docstring_has_the_table_of_barriers() -> None:
    arch.pin()
    from cute_kernels.device.barriers import table
    from cute_kernels.mla.crossover.kernels import decode
    from cute_kernels.mla.crossover.kernels.barriers import NamedBarrier, barriers

    text = decode.__doc__ or ""
    assert table(barriers(MlaCrossoverSpec(sparse=True, exchange="values"))) in text
    codes = {ring.name: ring.bytes for (ring,) in barriers(MlaCrossoverSpec(sparse=True, exchange="codes"))}
    assert codes["full"] == 0 and f'exchange "codes": full has no bytes, codes_full {codes["codes_full"]:,}.' in text
    assert "Named barriers: " + ", ".join(f"{barrier:d} {barrier.name}" for barrier in NamedBarrier) in text
