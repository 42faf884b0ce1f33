"""`Latest`, a dictionary of bounded size."""

from __future__ import annotations

from typing import Any


class Latest(dict[Any, Any]):
    """A dictionary of the entries that were made last."""

    MOST = 1024

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > self.MOST:
            del self[next(iter(self))]
