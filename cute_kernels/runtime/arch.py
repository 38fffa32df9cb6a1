"""The one target, sm_90a: set before `import cutlass`, and required of the devices that tensors are on."""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING

from cute_kernels.runtime.threads import compiling, in_new_thread

if TYPE_CHECKING:
    import torch

ARCH = "sm_90a"
CAPABILITY = (9, 0)  # code for sm_90a runs on this compute capability only


def pin() -> None:
    """Makes sm_90a the target of the DSL.

    The DSL reads its environment once, when it is imported. Without this setting it silently chooses another target on
    a machine without a GPU, and wgmma operations built outside of `cute.compile` see no other setting.

    Raises:
        RuntimeError: cutlass is already imported for another target.
    """
    if "cutlass" not in sys.modules:
        os.environ["CUTE_DSL_ARCH"] = ARCH
        return
    from cutlass.cutlass_dsl import CuTeDSL

    target = CuTeDSL._get_dsl().envar.arch
    if target != ARCH:
        raise RuntimeError(
            f"cutlass was imported with the target {target} before cute_kernels compiled its first kernel; "
            f"set CUTE_DSL_ARCH={ARCH} in the environment, or import cutlass later"
        )


def import_dsl() -> None:
    """Imports the DSL with sm_90a as its target, in a thread that no interrupt reaches.

    Raises:
        RuntimeError: cutlass is already imported for another target.
    """

    def load() -> None:
        with compiling:
            pin()
            import cutlass.cute  # noqa: F401

    in_new_thread(load)


def device_capability(device: torch.device | int) -> tuple[int, int]:
    """Returns the compute capability (major, minor) of a CUDA device. The driver is asked once per device."""
    import torch

    device = torch.device("cuda", device) if isinstance(device, int) else device
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


def is_sm90(device: torch.device) -> bool:
    """Whether the device runs this package's kernels."""
    return device.type == "cuda" and device_capability(device) == CAPABILITY


def require_sm90(name: str, device: torch.device) -> None:
    """Checks that the tensor argument `name` is on a GPU that runs this package's kernels.

    Raises:
        ValueError: it is not; the message names its device.
    """
    if is_sm90(device):
        return
    found = str(device)
    if device.type == "cuda":
        import torch

        major, minor = device_capability(device)
        found += f", {torch.cuda.get_device_name(device)} with compute capability {major}.{minor}"
    raise ValueError(f"{name}: got a tensor on {found}; needs an SM90 GPU (Hopper, compute capability 9.0)")


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(index)
