"""The section "burst_attention" of DeepSpeed's JSON: its keys and its errors."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.checkpointing import Full, KeepAttention, Offload, Policy, Segment
from burst_mcore.config import SETTINGS, BurstConfig, Setting, setting, settings_of
from burst_mcore.words import REMOVED

KEY = "burst_attention"
FLAG = "true, false"


class SectionError(ValueError):
    """Refuses a section: names the key, its value, and the legal values."""


@dataclass(frozen=True)
class Checkpointing:
    """Which tensors of a layer are stored for backward, and which are computed again."""

    policy: str = setting(
        "none",
        ("none", "full", "attention", "segment"),
        "`none`: layers are not recomputed, unless the model was before. `full`: they are. "
        "`attention`: all but their attention is, of which O and LSE are kept. `segment`: O and LSE of the "
        "last part of the sequence are kept.",
    )
    keep: float | str = setting(
        0.5,
        "a number, auto",
        "Of `segment`: the share of the sequence, at its end, that is kept, from 0 to 1; `auto`: "
        "the largest that fits `memory_gb`.",
    )
    memory_gb: float | None = setting(
        None,
        "a number, null",
        "With `auto`: GB (10^9 bytes), above 0, that all that is kept on a rank may take.",
    )
    offload: bool = setting(
        False, FLAG, "Of `attention` and `segment`: what is kept waits in pinned host memory."
    )

    def recomputed(self) -> Policy | None:
        """Return the policy of checkpointed layers, if any. Raises ValueError as `Segment` does."""
        if self.policy == "none":
            return None
        policies = {"full": Full, "attention": KeepAttention}
        policy = policies[self.policy]() if self.policy in policies else Segment(self.keep, self.memory_gb)
        return Offload(policy) if self.offload else policy


@dataclass(frozen=True)
class Section:
    """The section "burst_attention", read: every field of BurstConfig, the fused loss, and recompute."""

    attention: BurstConfig = field(default_factory=BurstConfig)
    fused_loss: bool = True
    checkpointing: Checkpointing = Checkpointing()
    towers: str = "shared"


KEYS = {
    **SETTINGS,
    "kernel": SETTINGS["kernel"]._replace(legal=("auto", *KERNELS)),
    "fused_loss": Setting(True, FLAG, "Fuse the LM head with its loss: no logits in training."),
    "towers": Setting(
        "shared", ("shared", "whole"), "Features of an image: made by one rank, or by every rank."
    ),
    "checkpointing": Setting({}, "an object", "Recompute in backward, see below."),
}
RECOMPUTE = settings_of(Checkpointing)
ONLY_FOR = {"keep": ("segment",), "memory_gb": ("segment",), "offload": ("attention", "segment")}
"""Keys of "checkpointing" that only some policies take."""


def section_of(config: Mapping[str, Any]) -> Section:
    """Return the section of a configuration; all defaults if there is none. Raises SectionError."""
    for key in config:  # a typing error in the section's own name would turn all of it off
        is_similar = "burst" in key.lower() or difflib.get_close_matches(key, [KEY], cutoff=0.8)
        if KEY not in config and is_similar:
            raise SectionError(f'unknown section "{key}": did you mean "{KEY}"?')
    section = _object(config, KEY)
    recompute = _object(section, "checkpointing")
    problems = [
        *_problems(KEY, section, KEYS),
        *_problems(f"{KEY}.checkpointing", recompute, RECOMPUTE),
        *_of_other_policies(recompute),
    ]
    if problems:
        raise SectionError("; ".join(problems))
    try:
        checkpointing = Checkpointing(**recompute)
        checkpointing.recomputed()
        attention = BurstConfig(**{name: x for name, x in section.items() if name in SETTINGS})
        options = {name: section[name] for name in ("fused_loss", "towers") if name in section}
        return Section(attention, checkpointing=checkpointing, **options)
    except ValueError as error:
        raise SectionError(f'"{KEY}": {error}') from None


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, Mapping):
        raise SectionError(f'"{name}" must be a JSON object, got {section!r}')
    return section


def _problems(where: str, section: Mapping[str, Any], keys: Mapping[str, Setting]) -> Iterator[str]:
    """Yield a sentence for each key that is unknown, or whose value is none of the words.

    Other values are checked by the classes that they are for.
    """
    for name, value in section.items():
        if name not in keys:
            similar = difflib.get_close_matches(name, keys, 1, 0.6)
            advice = f': did you mean "{similar[0]}"?' if similar else "."
            if name in REMOVED:
                advice = f": {REMOVED[name]}."
            if name == "sequence_parallel_size":
                advice = f': write it beside "{KEY}", where DeepSpeed reads it.'
            yield f'unknown key "{where}.{name}"{advice} Legal: {", ".join(keys)}'
        elif (legal := keys[name].legal) == FLAG:
            if not isinstance(value, bool):
                yield f'"{where}.{name}" must be true or false, got {value!r}'
        elif isinstance(legal, tuple) and value not in legal:
            yield f'"{where}.{name}" must be one of: {", ".join(legal)}; got {value!r}'


def _of_other_policies(recompute: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each key of "checkpointing" that its policy does not take."""
    policy = recompute.get("policy", "none")
    for name, policies in ONLY_FOR.items():
        value = recompute.get(name)
        if value is not None and value is not False and policy not in policies:
            legal = " and ".join(f'"{each}"' for each in policies)
            yield f'"{KEY}.checkpointing": {name} is for policy {legal}, got it with "{policy}"'


def config_dict(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of DeepSpeed's configuration, from a path or a mapping.

    Raises:
        SectionError: there is no such file, or it is no JSON object, or has a key twice.
    """
    if isinstance(config, Mapping):
        return dict(config)
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys as no_key_twice

    try:
        settings = json.loads(Path(config).read_text(), object_pairs_hook=no_key_twice)
    except (OSError, TypeError, ValueError) as error:
        raise SectionError(f"config must be a JSON file or a dict, got {config!r}: {error}") from None
    if not isinstance(settings, dict):
        raise SectionError(f"config must hold a JSON object, {config} holds {type(settings).__name__}")
    return settings
