"""The docstring of the MLA crossover kernel shows its barriers as they are."""

from cute_kernels.mla.crossover.spec import MlaCrossoverSpec, shipped_specs
from cute_kernels.runtime import arch


def test_docstring_has_the_table_of_barriers() -> None:
    arch.pin()
    from cute_kernels.device.barriers import table
    from cute_kernels.mla.crossover.kernels import decode
    from cute_kernels.mla.crossover.kernels.barriers import barriers

    assert table(barriers(MlaCrossoverSpec(sparse=True, exchange="values"))) in (decode.__doc__ or "")


def test_bytes_cross_on_one_barrier() -> None:
    arch.pin()
    from cute_kernels.mla.crossover.kernels.barriers import barriers

    for spec in shipped_specs():
        crossing = {
            barrier.name: barrier.bytes for (barrier,) in barriers(spec) if barrier.bytes and barrier.copies > 1
        }
        assert crossing == ({"full": 36_864} if spec.exchange == "values" else {"codes_full": 20_480})
