"""Import once per node what every worker needs, before the workers are forked.

The import must not start CUDA: a driver initialised before the fork is dead in the child. The check for GPUs that
torch makes at import goes through NVML instead, and what was imported is looked at afterwards.
Source: PyTorch documentation, "Multiprocessing best practices", "CUDA in multiprocessing", and
torch.cuda.is_available's note on PYTORCH_NVML_BASED_CUDA_CHECK.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable, Sequence

from hpc.errors import NeverStarted

TORCH = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",  # DDP imports it when it is first used: 800 modules
)


def import_modules(modules: Sequence[str], optional: Sequence[str], note: Callable[[str], None]) -> bool:
    """Import torch, `modules` (which must exist) and `optional` ones (which may fail: the worker will say why).

    Returns True when workers may be forked from this process.

    Raises:
        NeverStarted: one of `modules` cannot be imported.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    collecting = gc.isenabled()
    gc.disable()  # nearly all that an import makes stays: looking for garbage in it took a quarter of the time
    try:
        _import(modules, optional, note)
        gc.freeze()  # what is imported stays in pages that the workers share
    finally:
        if collecting:
            gc.enable()
    return _may_fork(note)


def _import(modules: Sequence[str], optional: Sequence[str], note: Callable[[str], None]) -> None:
    for name in (*TORCH, *optional):
        try:
            importlib.import_module(name)
        except Exception as error:
            if name == "torch":
                note(f"torch cannot be imported here ({error}); workers start without it")
                break
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise NeverStarted(
                f"launch.preload: {name} cannot be imported ({type(error).__name__}: {error}); take it out or mend it"
            ) from error


def _may_fork(note: Callable[[str], None]) -> bool:
    """Whether what was imported left this process in a state that a fork bears."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        note(
            "a preloaded module has started CUDA, which a forked worker cannot use: starting fresh interpreters instead"
        )
        return False
    if threading.active_count() > 1:
        others = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        note(f"a preloaded module has started threads ({others}): starting fresh interpreters instead")
        return False
    return True
