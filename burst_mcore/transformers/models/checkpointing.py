"""Attaches a recompute policy to the layers of a model of transformers."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from burst_mcore.checkpointing import Policy
from burst_mcore.transformers.errors import RefusedError


def attach_checkpointing(model: Any, policy: Policy | None) -> None:
    """Make the layers of a model of transformers recompute by a policy instead of their own setting.

    With None the model has again what its user had set (`gradient_checkpointing_enable`), or nothing.

    Raises:
        RefusedError: the model does not support checkpointing.
    """
    for path, (on, function) in _USERS.pop(model, {}).items():
        module: Any = model.get_submodule(path)
        module.gradient_checkpointing = on
        module._gradient_checkpointing_func = function
    if policy is None:
        return
    if not model.supports_gradient_checkpointing:
        raise RefusedError(
            "checkpointing",
            f"{type(model).__name__} does not support gradient checkpointing: leave the policy at none",
        )
    _USERS[model] = {
        path: (module.gradient_checkpointing, getattr(module, "_gradient_checkpointing_func", None))
        for path, module in model.named_modules()
        if hasattr(module, "gradient_checkpointing")
    }
    with warnings.catch_warnings():  # its newer name is not in all releases that are supported
        warnings.filterwarnings("ignore", ".*gradient_checkpointing_enable. is deprecated", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": policy.contexts})


_USERS: WeakKeyDictionary[nn.Module, dict[str, tuple[bool, Any]]] = WeakKeyDictionary()
"""By model and path of a module, its state before ours: (whether it is checkpointed, by which function)."""
