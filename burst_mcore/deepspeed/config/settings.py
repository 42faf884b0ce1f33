"""DeepSpeed's own settings, read as DeepSpeed reads them: "3" is 3 there, and true is ZeRO-1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from burst_mcore.transformers.errors import RefusedError


def part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object of the configuration; an empty one if it is missing.

    Raises:
        RefusedError: it is no object.
    """
    section = config.get(name, {})
    if not isinstance(section, Mapping):
        text = f'"{name}" must be a JSON object, got {section!r}: correct it, or leave it out'
        raise RefusedError("configuration", text)
    return section


def zero(config: Mapping[str, Any]) -> Any:
    """Return the part "zero_optimization" as DeepSpeed's DeepSpeedZeroConfig.

    What says "auto" is left at DeepSpeed's default: Accelerate fills it in later, and none of it is asked
    for here.

    Raises:
        RefusedError: DeepSpeed does not take it.
    """
    from deepspeed.runtime.zero.config import get_zero_config

    section = config.get("zero_optimization", {})
    if not isinstance(section, bool):
        section = {name: x for name, x in part(config, "zero_optimization").items() if x != "auto"}
    try:
        return get_zero_config({**config, "zero_optimization": section})
    except ValidationError as error:
        words = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise RefusedError("configuration", f'"zero_optimization": {words}') from None
    except (TypeError, ValueError) as error:
        raise RefusedError("configuration", f'"zero_optimization": {error}') from None
