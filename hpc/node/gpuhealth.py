"""What the driver knows against a GPU (NVML), without starting CUDA: memory errors, retired pages, remapped rows, heat."""

from __future__ import annotations

from typing import Any


def ask() -> tuple[list[dict[str, Any]], str]:
    """What is known of each GPU of this node that NVML shows, and why nothing is, if so.

    A dictionary has "name" and "faults": a list of what makes the GPU unfit, in words.
    Source: NVML API Reference, nvmlDeviceGetTotalEccErrors, nvmlDeviceGetRetiredPages, nvmlDeviceGetRemappedRows,
    nvmlDeviceGetCurrentClocksEventReasons.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # no pynvml, no library, no driver
        return [], f"no NVIDIA driver to ask: {error or type(error).__name__}"
    try:
        count = pynvml.nvmlDeviceGetCount()
        return [_one(pynvml, index) for index in range(count)], ""
    except pynvml.NVMLError as error:
        return [], f"the NVIDIA driver does not answer: {error}"
    finally:
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            pass  # it answered before: that counts


def _one(pynvml: Any, index: int) -> dict[str, Any]:
    faults = []
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = pynvml.nvmlDeviceGetName(handle)
        name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    except pynvml.NVMLError as error:
        return {"name": f"GPU {index}", "faults": [f"GPU {index} cannot be asked: {error}"]}
    for look in (_ecc, _retired, _remapped, _slowed):
        try:
            faults += [f"GPU {index}: {fault}" for fault in look(pynvml, handle)]
        except (pynvml.NVMLError, AttributeError, TypeError):
            continue  # not every GPU, and not every pynvml, tells of it
    return {"name": name, "faults": faults}


def _ecc(pynvml: Any, handle: Any) -> list[str]:
    kind, since = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    errors = int(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))
    return [f"{errors} uncorrected ECC errors since the driver was loaded"] if errors else []


def _retired(pynvml: Any, handle: Any) -> list[str]:
    pending = int(pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
    return ["memory pages wait to be retired (a reset of the GPU is due)"] if pending else []


def _remapped(pynvml: Any, handle: Any) -> list[str]:
    _, _, pending, failed = pynvml.nvmlDeviceGetRemappedRows(handle)
    found = ["memory rows could not be remapped (the GPU is to be replaced)"] if failed else []
    return [*found, "memory rows wait to be remapped (a reset of the GPU is due)"] if pending else found


def _slowed(pynvml: Any, handle: Any) -> list[str]:
    reasons = int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    words = {
        "nvmlClocksThrottleReasonHwThermalSlowdown": "slowed down by heat",
        "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "slowed down for want of power",
    }
    return [text for name, text in words.items() if reasons & int(getattr(pynvml, name))]
