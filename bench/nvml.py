"""Clock and energy of the current GPU while it works: through NVML, whose library comes with the driver.

Every function returns None if the value cannot be known: a benchmark then has no clock, and runs all the same.
nvidia-smi reports the same, but takes longer than the work whose clock is needed.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

import torch

LIBRARY: Final = "libnvidia-ml.so.1"
CLOCK_SM: Final = 1  # NVML_CLOCK_SM


@functools.cache
def _sensors(device: int) -> tuple[Any, ctypes.c_void_p] | None:
    """Returns NVML, and its handle of a CUDA device: NVML's own indices may have another order."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    name, handle = f"GPU-{uuid.removeprefix('GPU-')}".encode(), ctypes.c_void_p()
    try:
        library = ctypes.CDLL(LIBRARY)
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(ctypes.c_char_p(name), ctypes.byref(handle))
    except (AttributeError, OSError):
        return None
    return None if failed else (library, handle)


def sm_mhz() -> float | None:
    """Returns the SM clock now, in MHz."""
    sensors, value = _sensors(torch.cuda.current_device()), ctypes.c_uint()
    if sensors is None or sensors[0].nvmlDeviceGetClockInfo(sensors[1], ctypes.c_int(CLOCK_SM), ctypes.byref(value)):
        return None
    return float(value.value)


def joules() -> float | None:
    """Returns the energy since the driver was loaded; differences over a second are good to some per cent."""
    sensors, value = _sensors(torch.cuda.current_device()), ctypes.c_ulonglong()
    if sensors is None or sensors[0].nvmlDeviceGetTotalEnergyConsumption(sensors[1], ctypes.byref(value)):
        return None
    return value.value / 1e3
