"""DeepSpeed on CPUs: its parts that it would compile are torch's, or are left out."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from burst_mcore.deepspeed.settings import part


def on_cpu() -> bool:
    """Return whether DeepSpeed's accelerator is the CPU."""
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().device_name() == "cpu")


def prepare_cpu() -> None:
    """Keep DeepSpeed from building a shared-memory all-reduce; before it initialises torch.distributed."""
    if on_cpu():
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False
        folder = os.path.join(tempfile.gettempdir(), f"burst_mcore-{os.getuid()}")
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", folder)


def without_builds(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the configuration, on CPUs with torch's Adam for one that DeepSpeed would compile."""
    settings = copy.deepcopy(dict(config))
    if on_cpu():
        optimizer = part(settings, "optimizer")
        if str(optimizer.get("type", "")).lower() in ("adam", "adamw"):
            settings["optimizer"] = {**optimizer, "params": {**part(optimizer, "params"), "torch_adam": True}}
        settings["zero_allow_untested_optimizer"] = True
        settings["zero_force_ds_cpu_optimizer"] = False
    return settings
