"""How calls of NVML fail: what is gone, what a device does not have, and what would help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def why_not(nvml: Any, code: int) -> str:
    """An error of NVML, and what would help."""
    if code == nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
        return "the driver is too old for it: newer drivers have it"
    if code == nvml.NVML_ERROR_INVALID_ARGUMENT:  # as driver 580 says of metrics that came after it
        return "the driver does not know it: newer drivers may"
    if code == nvml.NVML_ERROR_NOT_SUPPORTED:
        return "this device, or its driver, does not have it"
    if code == nvml.NVML_ERROR_NO_PERMISSION:
        return "it needs more rights: run the agent as root"
    return str(nvml.NVMLError(code))


def is_gone(nvml: Any, error: Any) -> bool:
    """Whether nothing else can be had of this device, or of any."""
    return error.value in (
        nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_UNINITIALIZED, nvml.NVML_ERROR_DRIVER_NOT_LOADED,
    )  # fmt: skip


def optional(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call gives; None where it cannot be had and the device is there nevertheless."""
    try:
        return call(*arguments)
    except nvml.NVMLError as error:
        if is_gone(nvml, error):
            raise
        return None
