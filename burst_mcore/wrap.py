"""Functions of a framework replaced at run time, without an edit of its files."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")
_BELOW = {"torch", "triton", "sympy", "mpmath", "networkx", "numpy"}
"""Packages that import no framework, skipped for speed: most loaded modules are theirs."""


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `owner.name` by `make(original)`. Idempotent for each `make`."""
    original = getattr(owner, name)
    if make not in _makers(original):
        wrapper = functools.wraps(original)(make(original))
        wrapper._burst_makers = (*_makers(original), make)  # type: ignore[attr-defined]
        setattr(owner, name, wrapper)


def wrap_everywhere(module: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function like `wrap`, also in modules that imported the function by name."""
    original = vars(module)[name]
    wrap(module, name, make)
    wrapper = vars(module)[name]
    modules = [] if wrapper is original else list(sys.modules.items())  # to look at all takes 20 ms
    for importer in [each for place, each in modules if place.split(".")[0] not in _BELOW]:
        for key in [key for key, value in [*getattr(importer, "__dict__", {}).items()] if value is original]:
            setattr(importer, key, wrapper)


def around(function: Callable[..., T]) -> Callable[[Callable[..., Any]], Callable[..., T]]:
    """Return a `make` for `wrap`: the replacement calls `function` with the original and its arguments."""

    def make(original: Callable[..., Any]) -> Callable[..., T]:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> T:
            return function(original, *args, **kwargs)

        return wrapped

    return make


class Replaced:
    """Temporary replacements of names in other packages, restored in any order."""

    _layers: ClassVar[dict[tuple[Any, str], tuple[Any, dict[Replaced, Callable[[Any], Any]]]]] = {}
    """By (owner, name): the original value, and the function of each `Replaced`, lowest layer first."""

    def __bool__(self) -> bool:
        return any(self in makes for _, makes in self._layers.values())

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by `make(original)`. Idempotent, also for several instances."""
        _, makes = self._layers.setdefault((owner, name), (getattr(owner, name), {}))
        if self not in makes:
            if make not in makes.values():
                setattr(owner, name, make(getattr(owner, name)))
            makes[self] = make

    def restore(self) -> None:
        """Restore every name to the value that it would have without this instance."""
        for (owner, name), (value, makes) in list(self._layers.items()):
            if makes.pop(self, None) is not None:
                for make in dict.fromkeys(makes.values()):
                    value = make(value)
                setattr(owner, name, value)
            if not makes:
                del self._layers[owner, name]


@contextmanager
def while_set(thing: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an instance within the context: its methods and submodules are shadowed."""
    attributes = vars(thing)
    originals = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        attributes.update(originals)
        for name in values.keys() - originals.keys():
            del attributes[name]


def _makers(function: Callable[..., Any]) -> tuple[Any, ...]:
    return tuple(getattr(function, "_burst_makers", ()))
