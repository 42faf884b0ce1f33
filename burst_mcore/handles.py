"""Values that cross a compiled graph by name, since an operator's schema cannot carry them."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

_KNOWN: WeakValueDictionary[str, Any] = WeakValueDictionary()


class Named:
    """A value with a handle, which equal values may share."""

    handle: str

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_first"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        introduce(self, self.handle)


def introduce(value: Named, handle: str) -> None:
    """Give `value` its handle, by which it is found for as long as it or an equal one lives."""
    first = _KNOWN.setdefault(handle, value)
    object.__setattr__(value, "handle", handle)
    if first is not value:
        object.__setattr__(value, "_first", first)  # keeps it alive


def known(value: Named) -> str:
    """The handle of `value`, after making sure that it is found by it."""
    _KNOWN.setdefault(value.handle, value)
    return value.handle


def find(handle: str) -> Any:
    """What has this handle.

    Raises:
        RuntimeError: it is gone.
    """
    try:
        return _KNOWN[handle]
    except KeyError:
        raise RuntimeError(
            f"{handle!r} is no longer there: keep the topology, the mask and the config of a compiled call "
            f"alive as long as the call, for instance on the module that makes it"
        ) from None
