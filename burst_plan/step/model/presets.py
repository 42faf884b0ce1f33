"""Models that have a name, and common spellings of these names."""

from __future__ import annotations

import json
import re
from importlib.resources import files

from burst_plan.step.model.config_json import from_config
from burst_plan.step.model.sizes import Model

SUFFIXES = re.compile(r"(-(hf|base|chat|instruct|thinking|v0\.\d|\d{4}|\dk))+$")
"""Ends of names of trained models, which do not change sizes."""
SAME_SIZES = re.compile(r"^(llama-?3)\.[13]|^(deepseek-v3)\.1")
"""Releases with the sizes of an older one: Llama 3.1 and 3.3, DeepSeek-V3.1."""


def named(text: str) -> Model | None:
    """Return the preset of a name, in any case or as Hugging Face spells it; None for an unknown name."""
    return PRESETS.get(text) or SPELLED.get(_spelled(text))


def _spelled(text: str) -> str:
    name = SUFFIXES.sub("", text.lower().rpartition("/")[2].removeprefix("meta-"))
    return re.sub("[-_ ]", "", SAME_SIZES.sub(lambda found: found[1] or found[2], name))


_TEXT = files("burst_plan.step.model").joinpath("presets.json").read_text(encoding="utf-8")
PRESETS = {name: from_config(config, name) for name, config in json.loads(_TEXT).items()}
"""Models by name, from presets.json: 7b, 14b and GPT as in papers, the others as in makers' config.json.

Biases and sinks of attention are not counted. Tests compare the parameters with the makers' numbers."""
SPELLED = {_spelled(name): model for name, model in PRESETS.items()}
