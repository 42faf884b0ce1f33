"""The section "burst_attention" of DeepSpeed's JSON: its schema, its errors, its reference page."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.checkpointing import Full, KeepAttention, Offload, Policy, Segment
from burst_mcore.config import SETTINGS, BurstConfig

KEY = "burst_attention"


ONLY_FOR = {"keep": ("segment",), "memory_gb": ("segment",), "offload": ("attention", "segment")}
"""Keys of "checkpointing" that only some policies take."""


class SectionError(ValueError):
    """Refuses a section: names the key, its value, and the legal values."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Checkpointing(_Strict):
    """Which tensors of a layer are stored for backward, and which are computed again."""

    policy: Literal["none", "full", "attention", "segment"] = Field(
        "none",
        description="`none`: layers are not recomputed, unless the model was before. `full`: they are. "
        "`attention`: all but their attention is, of which O and LSE are kept. `segment`: O and LSE of the "
        "last part of the sequence are kept.",
    )
    keep: float | Literal["auto"] = Field(
        0.5,
        description="Of `segment`: the share of the sequence, at its end, that is kept, from 0 to 1; `auto`: "
        "the largest that fits `memory_gb`.",
    )
    memory_gb: float | None = Field(
        None,
        description="With `auto`: GB (10^9 bytes), above 0, that all that is kept on a rank may take.",
    )
    offload: bool = Field(
        False, description="Of `attention` and `segment`: what is kept waits in pinned host memory."
    )

    @model_validator(mode="after")
    def _is_for_its_policy(self) -> Checkpointing:
        for name, policies in ONLY_FOR.items():
            value = getattr(self, name)
            is_set = name in self.model_fields_set and value is not None and value is not False
            if is_set and self.policy not in policies:
                legal = " and ".join(f'"{policy}"' for policy in policies)
                raise ValueError(f'{name} is for policy {legal}, got it with "{self.policy}"')
        self.recomputed()
        return self

    def recomputed(self) -> Policy | None:
        """Return the policy of checkpointed layers; None where there are none.

        Raises:
            ValueError: keep and memory_gb are not legal, or not together.
        """
        match self.policy:
            case "none":
                return None
            case "full":
                return Full()
            case "attention":
                policy: Policy = KeepAttention()
            case "segment":
                policy = Segment(self.keep, self.memory_gb)
        return Offload(policy) if self.offload else policy


def _field(name: str) -> tuple[Any, Any]:
    """Return a field of BurstConfig as a key of the section: (type, default with description)."""
    default, legal, meaning = SETTINGS[name]
    words = ("auto", *KERNELS) if name == "kernel" else legal
    kind: Any = bool if isinstance(default, bool) else str
    if isinstance(default, int) and not isinstance(default, bool):
        kind = int | Literal["auto"] if "auto" in words else int
    elif isinstance(words, tuple):
        kind = Literal[words]
    else:
        meaning = f"{meaning[:-1]}: {words}." if kind is str else meaning
    return kind, Field(default, description=meaning)


_FIELDS: dict[str, Any] = {name: _field(name) for name in SETTINGS}
_Settings: Any = create_model("_Settings", __base__=_Strict, **_FIELDS)


class Section(_Settings):  # type: ignore[misc]
    """The section "burst_attention": every field of BurstConfig, the fused loss, and recompute."""

    fused_loss: bool = Field(True, description="Fuse the LM head with its loss: no logits in training.")
    checkpointing: Checkpointing = Field(
        default_factory=Checkpointing.model_construct, description="Recompute in backward, see below."
    )

    @model_validator(mode="after")
    def _the_ring_takes_it(self) -> Section:
        self.burst_config()
        return self

    def burst_config(self) -> BurstConfig:
        """Return the configuration of attention calls that the section asks for."""
        return BurstConfig(**{name: getattr(self, name) for name in SETTINGS})


def section_of(config: Mapping[str, Any]) -> Section:
    """Return the section of a DeepSpeed configuration; all defaults if there is none.

    Raises:
        SectionError: a key or a value is not legal.
    """
    written = config.get(KEY, {})
    if not isinstance(written, Mapping):
        raise SectionError(f'"{KEY}" must be a JSON object, got {written!r}')
    for key in config:  # a typing error in the section's own name would turn all of it off
        near = "burst" in key.lower() or difflib.get_close_matches(key, [KEY], cutoff=0.8)
        if KEY not in config and near:
            raise SectionError(f'unknown section "{key}": did you mean "{KEY}"?')
    try:
        section: Section = Section.model_validate(dict(written))
        return section
    except ValidationError as error:
        raise SectionError("; ".join(_words(error))) from None


def config_dict(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of DeepSpeed's configuration, from a path or a mapping.

    Raises:
        SectionError: there is no such file, or it is no JSON object, or has a key twice.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | Path):
        raise SectionError(f"config must be a JSON file or a dict, got {config!r}")
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys as no_key_twice

    try:
        settings = json.loads(Path(config).read_text(), object_pairs_hook=no_key_twice)
    except (OSError, ValueError) as error:
        raise SectionError(f"config must be a JSON file or a dict: {config}: {error}") from None
    if not isinstance(settings, dict):
        raise SectionError(f"config must hold a JSON object, {config} holds {type(settings).__name__}")
    return settings


def _words(error: ValidationError) -> Iterator[str]:
    """Yield a sentence for each illegal key. A key of several types has one error for each type."""
    by_path: dict[tuple[str, ...], list[Any]] = {}
    for first in error.errors():
        path = tuple(str(part) for part in first["loc"] if part not in ("int", "float", "literal['auto']"))
        by_path.setdefault(path, []).append(first)
    for path, errors in by_path.items():
        first, where = errors[0], ".".join([KEY, *path])
        owner = Checkpointing if path[:1] == ("checkpointing",) and len(path) > 1 else Section
        if first["type"] == "extra_forbidden":
            legal = [*owner.model_fields]
            near = difflib.get_close_matches(path[-1], legal, 1, 0.6)
            meant = f': did you mean "{near[0]}"?' if near else "."
            if path[-1] == "sequence_parallel_size":
                meant = f': write it beside "{KEY}", where DeepSpeed reads it.'
            yield f'unknown key "{where}"{meant} Legal: {", ".join(legal)}'
        elif first["type"] == "model_type":
            yield f'"{where}" must be a JSON object, got {first["input"]!r}'
        elif len(errors) > 1:
            kinds = _legal(owner.model_fields[path[-1]].annotation).replace("`", "")
            yield f'"{where}" must be one of: {kinds}; got {first["input"]!r}'
        else:
            words = first["msg"].removeprefix("Value error, ")
            came = "" if isinstance(first["input"], Mapping | BaseModel) else f", got {first['input']!r}"
            yield f'"{where}": {words}{came}'


def reference() -> str:
    """Return the reference page of the section, in Markdown, made from the schema."""
    lines = [
        f'# The section "{KEY}"',
        "",
        "Made from the schema (`burst-mcore doctor --reference`). Every key is optional; an unknown one is",
        "an error that lists the legal ones. Its purpose: [deepspeed.md](../frameworks/deepspeed.md).",
        "",
        *_table(Section),
        "",
        '## "checkpointing"',
        "",
        *_table(Checkpointing),
        "",
    ]
    return "\n".join(lines)


def _table(model: type[BaseModel]) -> Iterator[str]:
    yield "| key | legal | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in model.model_fields.items():
        default = "{}" if field.default_factory else json.dumps(field.default)
        yield f"| `{name}` | {_legal(field.annotation)} | `{default}` | {field.description} |"


def _legal(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f'`"{value}"`' for value in get_args(kind))
    if isinstance(kind, UnionType) or get_args(kind):
        return ", ".join(_legal(part) for part in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "an object"
    words = {str: "a word", bool: "`true`, `false`", int: "a whole number", float: "a number"}
    return {**words, type(None): "`null`"}[kind]
