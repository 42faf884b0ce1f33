"""Kernels of other packages, calls for the signatures of their versions, and properties of the GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

ALIASES = (("causal", "is_causal"), ("window_size", "window_size_left"), ("window_size", "window_size_right"))
"""Names of one argument in different versions."""


@lru_cache
def loaded(module: str, package: str, at_least: str = "0", below: str = "1000") -> Any:
    """Return the module, or a string with the reason why not; `package` names the distribution."""
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # also a build for another torch or CUDA
        return f"{package} is not usable here ({type(error).__name__}: {error})"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        of = imported if hasattr(imported, "__version__") else sys.modules.get(package.replace("-", "_"))
        version = str(getattr(of, "__version__", "unknown"))
    if not (_number(at_least) <= _number(version) < _number(below)):
        return f"{package} {version} is not from {at_least} on and below {below}"
    return imported


def missing(module: Any) -> str | None:
    """Return the reason from `loaded` for a missing module; None if the module is loaded."""
    return module if isinstance(module, str) else None


def _number(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        numbers.append(int(digits) if digits else 0)
    return tuple(numbers)


def capability() -> tuple[int, int] | None:
    """Return the compute capability of the current GPU, None without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def shared_memory() -> int | None:
    """Return the maximum bytes of shared memory of a thread block on the current GPU, None without a GPU."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return getattr(properties, "shared_memory_per_block_optin", None)  # missing in older torch


def not_on(architectures: Sequence[int]) -> str | None:
    """Return why the current GPU, if any, is not of these major compute capabilities; None if it is."""
    actual = capability()
    if actual is None or actual[0] in architectures:
        return None
    return f"it is for compute capability {', '.join(f'{a}.x' for a in architectures)}, this GPU has {actual}"


def call(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call function(*args, **keywords); missing required arguments become None.

    Arguments with several names in different versions (`ALIASES`) are passed under every name.

    Raises:
        TypeError: the function lacks an argument with a value that would change the result.
    """
    arguments = parameters(function)[len(args) :]
    selection = {name: keywords.get(name) for name, required in arguments if required or name in keywords}
    for name, value in keywords.items():
        aliases = {name}.union(*(group for group in ALIASES if name in group))
        if aliases.isdisjoint(selection) and value not in (None, False, 0.0):
            raise TypeError(f"{function} has no argument {name!r}, which should be {value!r}")
    return function(*args, **selection)


def parameters(function: Callable[..., Any]) -> list[tuple[str, bool]]:
    """Return (name, whether required) of each argument; for custom ops, of the wrapped function."""
    signature = inspect.signature(getattr(function, "_init_fn", function))
    return [(name, p.default is inspect.Parameter.empty) for name, p in signature.parameters.items()]


def refuse_capture(name: str) -> None:
    """Raise RuntimeError if the current CUDA stream is being captured in a graph.

    Ranks agree on each call and the host reads plans and labels; a replay of a graph does neither.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} cannot be captured in a CUDA graph: capture the layers around it, "
            "or compile in torch.compile's default mode"
        )
