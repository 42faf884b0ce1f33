"""The sizes of a model.

sizes        the sizes themselves
mixers       layers with a recurrence or a short convolution
presets      models by name, of presets.json
config_json  from the config.json of Hugging Face, by the names and defaults in families.json
arguments    from Megatron's arguments
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from burst_plan.step.model.arguments import ArgumentParser, of_arguments
from burst_plan.step.model.config_json import from_config, of_file
from burst_plan.step.model.mixers import Mixer
from burst_plan.step.model.presets import PRESETS, named
from burst_plan.step.model.sizes import LARGEST, Model

__all__ = ["LARGEST", "PRESETS", "ArgumentParser", "Mixer", "Model", "from_config", "model_of", "named"]


def model_of(text: str) -> tuple[Model, dict[str, Any]]:
    """Return a model, and other settings in Megatron's arguments: "tp", "pp", "cp", "ep", "seq" and "batch".

    text: a preset by any of its names, a folder with config.json, or Megatron's arguments.

    Raises:
        ValueError: an unknown model, or illegal sizes.
    """
    if text in PRESETS:
        return PRESETS[text], {}
    if text.lstrip().startswith("--"):
        return of_arguments(text)
    path = Path(text)
    if path.is_dir() and (path / "config.json").is_file():
        return of_file(path / "config.json"), {}
    if (preset := named(text)) is not None:
        return preset, {}
    raise ValueError(
        f"unknown model {text!r}: give one of {', '.join(PRESETS)}, a folder with config.json, or arguments "
        "of Megatron that begin with --"
    )
