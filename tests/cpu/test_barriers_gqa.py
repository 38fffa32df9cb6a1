"""The docstring of the GQA decode kernel shows its barriers as they are."""

from cute_kernels.gqa.spec import shipped_specs
from cute_kernels.runtime import arch


def test_docstring_has_the_table_of_barriers() -> None:
    arch.pin()
    from cute_kernels.device.barriers import table
    from cute_kernels.gqa.kernels import decode
    from cute_kernels.gqa.kernels.barriers import NamedBarrier, barriers

    spec = shipped_specs()[1]
    assert (spec.kv_dtype, spec.d, spec.k_scales, spec.v_scales) == ("int8", 128, "token", "token")
    assert table(barriers(spec)) in (decode.__doc__ or "")
    assert f"Named barrier {NamedBarrier.CONSUMERS:d}, CONSUMERS: {32 * spec.warps}" in (decode.__doc__ or "")


def test_every_spec_has_barriers_for_each_stage() -> None:
    arch.pin()
    from cute_kernels.gqa.kernels.barriers import barriers

    for spec in shipped_specs():
        ((full, empty),) = barriers(spec)
        assert full.copies == empty.copies == spec.stages
        assert full.arrivals == 1 + 32 * spec.scale_warps and full.bytes == spec.copied_bytes
        assert empty.arrivals == 32 * spec.warps
