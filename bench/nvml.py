"""Clock and energy of the current GPU while it works: through NVML, whose library comes with the driver.

Everything here returns None where it cannot be known: a benchmark then has no clock, and runs all the same. nvidia-smi
says the same, but takes longer than the work whose clock is asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any, Final

import torch

LIBRARY: Final = "libnvidia-ml.so.1"
CLOCK_SM: Final = 1  # NVML_CLOCK_SM


class Sensors:
    """What NVML says of one GPU.

    Args:
        library: NVML, or what stands for it.
        uuid: of the GPU, "GPU-" and 36 characters; the order of indices may be another one than CUDA's.

    Raises:
        OSError: NVML does not start, or knows no such GPU.
    """

    def __init__(self, library: Any, uuid: str) -> None:
        self._library, self._handle = library, ctypes.c_void_p()
        for call, arguments in (
            ("nvmlInit_v2", ()),
            ("nvmlDeviceGetHandleByUUID", (ctypes.c_char_p(uuid.encode()), ctypes.byref(self._handle))),
        ):
            if code := getattr(library, call)(*arguments):
                raise OSError(f"{call}: error {code}")

    def sm_mhz(self) -> float | None:
        """SM clock now."""
        value = ctypes.c_uint()
        code = self._library.nvmlDeviceGetClockInfo(self._handle, ctypes.c_int(CLOCK_SM), ctypes.byref(value))
        return None if code else float(value.value)

    def joules(self) -> float | None:
        """Energy since the driver was loaded; differences over a second are good to some per cent."""
        value = ctypes.c_ulonglong()
        code = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(value))
        return None if code else value.value / 1e3


@functools.cache
def _sensors(uuid: str) -> Sensors | None:
    with contextlib.suppress(OSError, AttributeError):
        return Sensors(ctypes.CDLL(LIBRARY), uuid)
    return None


def uuid_of_current_device() -> str:
    """As NVML and nvidia-smi name the GPU that torch works on."""
    found = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return found if found.startswith("GPU-") else f"GPU-{found}"


def sm_mhz() -> float | None:
    """SM clock now, in MHz."""
    sensors = _sensors(uuid_of_current_device())
    return None if sensors is None else sensors.sm_mhz()


def joules() -> float | None:
    """Energy since the driver was loaded."""
    sensors = _sensors(uuid_of_current_device())
    return None if sensors is None else sensors.joules()
