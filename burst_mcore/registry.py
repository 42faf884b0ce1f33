"""The registry of values that cross a compiled graph as strings: an operator's schema cannot carry them."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

_REGISTERED: WeakValueDictionary[str, Any] = WeakValueDictionary()


class Registered:
    """A value that is looked up by its handle, which equal values may share."""

    handle: str

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_first"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register(self, self.handle)


def register(value: Registered, handle: str) -> None:
    """Give `value` its handle, by which it can be looked up for as long as it or an equal value lives."""
    first = _REGISTERED.setdefault(handle, value)
    object.__setattr__(value, "handle", handle)
    if first is not value:
        object.__setattr__(value, "_first", first)  # keeps it alive


def ensure(value: Registered) -> str:
    """Return the handle of `value`, after making sure that it can be looked up."""
    _REGISTERED.setdefault(value.handle, value)
    return value.handle


def lookup(handle: str) -> Any:
    """Return the value that has this handle.

    Raises:
        RuntimeError: no such value is alive.
    """
    try:
        return _REGISTERED[handle]
    except KeyError:
        raise RuntimeError(
            f"{handle!r} is no longer there: keep the topology, the mask and the config of a compiled call "
            f"alive as long as the call, for instance on the module that makes it"
        ) from None
