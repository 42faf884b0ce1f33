"""DeepSpeed on a CPU, over gloo, without a compiler: parts that it would build are replaced or left out."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from burst_mcore.deepspeed.settings import part, zero

ADAMS = ("adam", "adamw")


def on_cpu() -> bool:
    """Return whether DeepSpeed's accelerator is the CPU."""
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().device_name() == "cpu")


def prepare_cpu() -> None:
    """Keep DeepSpeed from building a shared-memory all-reduce; before it initialises torch.distributed."""
    if not on_cpu():
        return
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.setdefault(
        "TORCH_EXTENSIONS_DIR", os.path.join(tempfile.gettempdir(), f"burst_mcore-{os.getuid()}")
    )


def without_builds(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with torch's Adam instead of one that DeepSpeed would compile."""
    settings = copy.deepcopy(dict(config))
    if not on_cpu():
        return settings
    optimizer = dict(part(settings, "optimizer"))
    if str(optimizer.get("type", "")).lower() in ADAMS:
        optimizer["params"] = {**part(optimizer, "params"), "torch_adam": True}
        settings["optimizer"] = optimizer
    settings["zero_allow_untested_optimizer"] = True
    if zero(settings).offload_optimizer:
        settings["zero_force_ds_cpu_optimizer"] = False
    return settings
