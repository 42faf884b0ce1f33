"""The peak memory of a call, and the largest tensor that it makes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_meter(call: Callable[[], object], device: str) -> dict[str, float]:
    """Return the peak memory of a call beyond the memory before it, as a meter; none if unknown.

    On CPU the kernel counts it, for the whole process: memory of libraries, not only tensors.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return {"peak": float(torch.cuda.max_memory_allocated() - before)}
    if not _reset_high_water():
        call()
        return {}
    before = of_process("status", "VmRSS")
    call()
    return {"peak": 1024.0 * max(0, of_process("status", "VmHWM") - before)}


def _reset_high_water() -> bool:
    with contextlib.suppress(OSError, AttributeError):  # another system, or C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # else the call reuses freed memory, uncounted
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def of_process(file: str, name: str) -> int:
    """Return a counter that Linux keeps for this process: bytes in "io", kilobytes in "status"."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


class LargestMade(TorchDispatchMode):
    """Records the elements of the largest tensor that any operator makes, or has a view of."""

    def __init__(self, old: Iterable[Tensor]) -> None:
        """old: tensors from before, which do not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._old = {x.untyped_storage().data_ptr() for x in old}
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self._old:
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result
