"""The error of Hugging Face's adapters: docs/frameworks/hf-models.md explains each name."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version

SUPPORTED = {"deepspeed": ("0.19", "0.20"), "transformers": ("5", "6")}
"""By package, the first release that is tested and the first that is not."""


class UnsupportedError(ValueError):
    """The error of a model, a batch or a configuration that would train wrongly or not at all.

    `name` is in the table of docs/frameworks/hf-models.md.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name = name

    def __str__(self) -> str:
        return "unsupported ({}): {}".format(*self.args)


def refuse(name: str, reason: str | None) -> None:
    """Raise UnsupportedError if there is a reason."""
    if reason is not None:
        raise UnsupportedError(name, reason)


def refuse_versions(*packages: str) -> None:
    """Raise UnsupportedError if an installed package is of a release that is not tested; by default all."""
    for package in packages or SUPPORTED:
        first, end = SUPPORTED[package]
        actual = Version(version(package))
        if not Version(first) <= actual < Version(end):
            text = f"{package} {actual} is installed, tested are releases from {first} to below {end}"
            raise UnsupportedError("versions", text)
