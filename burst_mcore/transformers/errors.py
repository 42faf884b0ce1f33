"""The error of the adapters of Hugging Face: docs/deepspeed.md explains every refusal under its name."""

from __future__ import annotations

from typing import Any


class RefusedError(ValueError):
    """Refuses a model, a batch or a configuration that would train wrongly or not at all.

    `name` is the heading in docs/deepspeed.md.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"refused ({name}): {why}")
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.name, str(self))


def _again(name: str, text: str) -> RefusedError:
    error = RefusedError(name, "")
    error.args = (text,)
    return error
