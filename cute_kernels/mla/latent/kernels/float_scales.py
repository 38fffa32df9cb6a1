"""Roles of the latent decode kernel for keys with float32 scales: those of `mla.kernels`, rope part or not."""

from cute_kernels.mla.kernels.convert_q import QConverter
from cute_kernels.mla.kernels.pv import PvWarpgroups
from cute_kernels.mla.kernels.qk import QkWarpgroups
from cute_kernels.mla.kernels.softmax import SoftmaxWarpgroup
from cute_kernels.mla.latent.kernels.load import LatentLoader
from cute_kernels.mla.latent.kernels.scheduler import LatentScheduler
from cute_kernels.mla.latent.spec import LatentDecodeSpec


class RopelessQConverter(QConverter):
    """Device code for all threads of the QK warpgroups: `QConverter` for a Q of code columns alone."""

    rope_start = None


class FloatScaleQkWarpgroups(QkWarpgroups):
    """Device code for 128 threads, or 256; see `QkWarpgroups`."""

    def __init__(self, spec: LatentDecodeSpec):
        super().__init__(spec)
        self.scheduler = LatentScheduler(spec)
        self.has_rope = spec.has_rope
        if not spec.has_rope:
            self.q = RopelessQConverter(spec)


class FloatScaleSoftmaxWarpgroup(SoftmaxWarpgroup):
    """Device code for 128 threads; see `SoftmaxWarpgroup`."""

    def __init__(self, spec: LatentDecodeSpec):
        super().__init__(spec)
        self.loader = LatentLoader(spec)
        self.scheduler = LatentScheduler(spec)


class FloatScalePvWarpgroups(PvWarpgroups):
    """Device code for 2 x 128 threads; see `PvWarpgroups`."""

    def __init__(self, spec: LatentDecodeSpec):
        super().__init__(spec)
        self.scheduler = LatentScheduler(spec)
