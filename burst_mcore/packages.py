"""Kernels of other packages, calls that fit the signatures of their versions, and what a GPU can do."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

ALIASES = (("causal", "is_causal"), ("window_size", "window_size_left"), ("window_size", "window_size_right"))
"""Names of one argument in different versions."""


@lru_cache
def loaded(module: str, package: str, at_least: str = "0", below: str = "1000") -> Any:
    """Return the module, or a string with the reason why not; `package` names the distribution."""
    try:
        found = importlib.import_module(module)
    except Exception as error:  # also a build for another torch or CUDA
        return f"{package} is not usable here ({type(error).__name__}: {error})"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        of = found if hasattr(found, "__version__") else sys.modules.get(package.replace("-", "_"))
        version = str(getattr(of, "__version__", "unknown"))
    if not (_number(at_least) <= _number(version) < _number(below)):
        return f"{package} {version} is not from {at_least} on and below {below}"
    return found


def missing(module: Any) -> str | None:
    """Return the reason that `loaded` gave in the place of a module; None if the module is there."""
    return module if isinstance(module, str) else None


def _number(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        numbers.append(int(digits) if digits else 0)
    return tuple(numbers)


def capability() -> tuple[int, int] | None:
    """Compute capability of the current GPU, None without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def shared_memory() -> int | None:
    """Bytes of shared memory that a block of the current GPU may have, None without one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return getattr(properties, "shared_memory_per_block_optin", None)  # older torch does not tell


def not_on(architectures: Sequence[int]) -> str | None:
    """Why a kernel for GPUs of these major compute capabilities cannot serve here, if there is a GPU."""
    found = capability()
    if found is None or found[0] in architectures:
        return None
    return f"it is for compute capability {', '.join(f'{a}.x' for a in architectures)}, this GPU has {found}"


def call(
    function: Callable[..., Any], *args: Any, if_there: Mapping[str, Any] | None = None, **given: Any
) -> Any:
    """function(*args, **given), where required arguments that are not given become None.

    Arguments whose names differ between versions (`ALIASES`) are given under all of them; those of `if_there`
    are left out where a version does not have them.

    Raises:
        TypeError: the function has no place for an argument that would change what it does.
    """
    known = parameters(function)[len(args) :]
    wanted = {**(if_there or {}), **given}
    taken = {name: wanted.get(name) for name, required in known if required or name in wanted}
    for name, value in given.items():
        aliases = {name}.union(*(group for group in ALIASES if name in group))
        if aliases.isdisjoint(taken) and value not in (None, False, 0.0):
            raise TypeError(f"{function} has no argument {name!r}, which should be {value!r}")
    return function(*args, **taken)


def parameters(function: Callable[..., Any]) -> list[tuple[str, bool]]:
    """Return (name, whether it is required) of each argument; of custom ops, of the wrapped function."""
    signature = inspect.signature(getattr(function, "_init_fn", function))
    return [(name, p.default is inspect.Parameter.empty) for name, p in signature.parameters.items()]


def has(function: Callable[..., Any], name: str) -> bool:
    """Return whether the function takes an argument of this name."""
    return any(known == name for known, _ in parameters(function))


def refuse_capture(name: str) -> None:
    """Refuse a call on CUDA while a graph is captured on the current stream.

    Ranks agree on each call and the host reads plans and labels; a replay does neither.

    Raises:
        RuntimeError: the stream is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} cannot be captured in a CUDA graph: capture the layers around it, "
            "or compile in torch.compile's default mode"
        )
