"""DeepSpeed's own settings, and their checks for shards."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from burst_mcore.deepspeed.section import KEY
from burst_mcore.transformers.errors import UnsupportedError

SIZE = "sequence_parallel_size"
"""DeepSpeed's own key: how many ranks share a sequence."""


def part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object of the configuration; an empty one where there is none, of which DeepSpeed judges."""
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def zero(config: Mapping[str, Any]) -> Any:
    """Return the part "zero_optimization" as DeepSpeed's DeepSpeedZeroConfig: "3" is 3, and true is ZeRO-1.

    What says "auto" is left at DeepSpeed's default: Accelerate fills it in later, and none of it is asked
    for here.
    """
    from deepspeed.runtime.zero.config import get_zero_config

    section = config.get("zero_optimization", {})
    if isinstance(section, Mapping):
        section = {name: x for name, x in section.items() if x != "auto"}
    return get_zero_config({**config, "zero_optimization": section})


def sequence_parallel_size(config: Mapping[str, Any], world: int) -> int:
    """Return "sequence_parallel_size" for `world` ranks; 1 in a configuration without it and our section.

    Raises:
        UnsupportedError: the section "burst_attention" is there, the size is not, or under another name; or
            the size does not divide the ranks.
    """
    similar = difflib.get_close_matches(SIZE, config, 1, 0.85)
    if SIZE not in config and similar:  # a misspelt or missing key would give every rank its own sequence
        raise UnsupportedError(SIZE, f'unknown key "{similar[0]}": did you mean "{SIZE}"?')
    if SIZE not in config and KEY in config:
        text = f'the JSON has the section "{KEY}" and no "{SIZE}": write how many ranks share a sequence'
        raise UnsupportedError(SIZE, f"{text} (under Accelerate, its sp_size)")
    size = config.get(SIZE, 1)
    if type(size) is not int or size < 1 or world % size:
        legal = [d for d in range(1, world + 1) if world % d == 0]
        raise UnsupportedError(SIZE, f"it must divide the {world} ranks: one of {legal}, got {size!r}")
    return size


def refuse_config(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for settings that are wrong with sharded sequences, whatever the groups."""
    if "data_parallel_size" in config:
        text = '"data_parallel_size" makes ZeRO leave gradients unreduced over the CP groups'
        raise UnsupportedError("mesh", f'{text}: give "{SIZE}" alone')
    if part(config, "pipeline").get("stages") not in (None, "auto", 1):
        raise UnsupportedError("pipeline", "pipeline stages are not supported beside CP groups")
    tensor = part(config, "tensor_parallel").get("autotp_size", 0)
    if tensor and tensor > 1:
        raise UnsupportedError("tensor_parallel", f'"autotp_size": {tensor} is unsupported beside CP groups')


def refuse_autos(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for values "auto", which DeepSpeed lets through and Accelerate alone fills."""
    unknown = [path for path in _autos(config) if path != "pipeline.stages"]
    if unknown:
        text = f'"auto" is filled in by the Trainer and Accelerate alone: give {", ".join(unknown)} a value'
        raise UnsupportedError("configuration", f"{text}, or leave them out")


def _autos(part: Any, path: str = "") -> Iterator[str]:
    """Yield the keys of a configuration whose value is "auto", outside our own section."""
    if part == "auto":
        yield path
    elif isinstance(part, Mapping):
        for name in part.keys() - {KEY}:
            yield from _autos(part[name], f"{path}.{name}".lstrip("."))
