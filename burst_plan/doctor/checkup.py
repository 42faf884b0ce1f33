"""The command `burst-mcore doctor`: a configuration of DeepSpeed or Megatron on a cluster, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from burst_mcore.attention.autotune.ways import Ranks
from burst_mcore.deepspeed.config.refusals import sequence_parallel_size
from burst_mcore.deepspeed.config.section import config_dict
from burst_mcore.machines import MACHINES, machine, machine_of
from burst_mcore.rates import Rates
from burst_plan.doctor.configured import NotPredictedError, of_deepspeed, of_megatron
from burst_plan.doctor.memory import Shape, shape_of
from burst_plan.doctor.review import predicted, review
from burst_plan.doctor.section import HERE, examine, quiet
from burst_plan.step.figures import Place
from burst_plan.step.model import LARGEST, PRESETS, Model, model_of
from burst_plan.step.planned import length_of, recommendation
from burst_plan.step.search import search
from burst_plan.words import mask_of

DEFAULT_LENGTH = "128K"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a command line asks besides a configuration and a model. Raises ValueError for illegal numbers."""

    seq: str | None
    world: int | None
    per_node: int | None
    device: str
    rates: Rates | None

    def __post_init__(self) -> None:
        for name, number in (("--world", self.world), ("--per-node", self.per_node)):
            if number is not None and not 1 <= number <= LARGEST:
                raise ValueError(f"{name} must be at least 1 and at most {LARGEST}, got {number}")

    def length(self, megatrons: int | None) -> int:
        """Return the tokens of a sequence; megatrons: the --seq-length of Megatron's arguments."""
        return length_of(self.seq or (DEFAULT_LENGTH if megatrons is None else None), megatrons)

    def node(self, world: int) -> int:
        """Return the ranks of a node."""
        return self.per_node or min(world, 8)


def checkup(config: Path | None, model: str | None, shape: Shape, asked: Asked) -> Iterator[str]:
    """Yield what a configuration will do, whether it fits, and what would be faster.

    Args:
        config: DeepSpeed's JSON; without it the arguments of Megatron in `model`, or no configuration at all.
        shape: of the model where `model` is None.

    Raises:
        ValueError: words that are not legal, or contradict each other; what `initialize` would refuse.
    """
    if config is not None:
        return _of_json(config, model, shape, asked)
    if model is None:
        raise ValueError(
            "no configuration given; pass DeepSpeed's JSON file: burst-mcore doctor ds.json, or Megatron's "
            "arguments as --model"
        )
    return _of_model(model, asked)


def _of_json(config: Path, model: str | None, shape: Shape, asked: Asked) -> Iterator[str]:
    """Yield what DeepSpeed's JSON will do; the planner's part where it knows all settings."""
    quiet()
    settings = config_dict(config)
    if model is not None:
        shape = _shape(model, asked.length(_length_alone(model).get("seq")))
    size = settings.get("sequence_parallel_size", 1)
    world = asked.world or (size if isinstance(size, int) and size > 0 else 1)
    told: list[str] | NotPredictedError
    mask = "causal"
    try:
        sequence_parallel_size(settings, world)
        sizes = _sizes(model, shape)
        mask = sizes.mask(shape.seq)
        way, attention = of_deepspeed(settings, world, sizes, shape.seq)
        place = _place(world, asked)
        told = [*review(predicted(sizes, way, attention, shape.seq, place, mask), attention)]
    except NotPredictedError as error:
        told = error
    yield from examine(
        config, world=world, per_node=asked.node(world), shape=shape, device=asked.device, rates=asked.rates,
        mask=mask_of(mask, shape.seq), with_memory=isinstance(told, NotPredictedError),
    )  # fmt: skip
    yield from [f"step: not predicted: {told}"] if isinstance(told, NotPredictedError) else told


def _of_model(model: str, asked: Asked) -> Iterator[str]:
    """Yield the review of Megatron's arguments, or a recommendation for a model without a configuration."""
    sizes, degrees = model_of(model)
    length = asked.length(degrees.pop("seq", None))
    configured = model.lstrip().startswith("--")
    if asked.world is None and not configured:
        raise ValueError("give --world: the ranks that are to train the model")
    world = asked.world or math.prod(degrees.get(name, 1) for name in ("tp", "cp", "pp"))
    try:
        place = _place(world, asked)
        if not configured:
            yield from recommendation(search(sizes, length, 1, place, mask=sizes.mask(length)))
            return
        way, attention = of_megatron(model, world, degrees)
        yield from review(predicted(sizes, way, attention, length, place), attention)
    except NotPredictedError as error:
        raise ValueError(f"no step is predicted: {error}") from None


def _length_alone(model: str) -> Mapping[str, int]:
    """Return the settings in the arguments of Megatron; only a length goes with DeepSpeed's JSON."""
    settings = model_of(model)[1] if model.lstrip().startswith("--") else {}
    degrees = ", ".join(name.upper() for name in settings if name != "seq")
    if degrees:
        raise ValueError(f"{degrees} of Megatron's arguments contradict DeepSpeed's JSON: leave them out")
    return settings


def _shape(model: str, seq: int) -> Shape:
    """Return the shape of a model: by transformers for a folder, which also says what is refused."""
    if model not in PRESETS and not model.lstrip().startswith("--"):
        return shape_of(Path(model), seq)
    sizes = model_of(model)[0]
    return Shape(
        seq=seq, layers=sizes.layers, heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim,
        vocabulary=sizes.vocab, hidden=sizes.hidden, intermediate=sizes.ffn, counted=sizes.parameters,
    )  # fmt: skip


def _sizes(model: str | None, shape: Shape) -> Model:
    """Return the planner's sizes of a model."""
    try:
        if model is not None:
            return model_of(model)[0]
        return Model(
            layers=shape.layers, hidden=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads,
            head_dim=shape.head_dim, value_dim=shape.head_dim, ffn=shape.intermediate, vocab=shape.vocabulary,
        )  # fmt: skip
    except ValueError as error:
        raise NotPredictedError(str(error)) from None


def _place(world: int, asked: Asked) -> Place:
    """Return the cluster; "here" is one of this machine's GPU.

    Raises:
        ValueError: an unknown machine, or ranks that do not fill nodes.
        NotPredictedError: no GPU is here, or an unknown one.
    """
    if asked.device == HERE:
        name = machine_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        if name is None:
            raise NotPredictedError("no known GPU is here: name a machine by --device, such as h100")
    else:
        name = machine(asked.device).name
    kind, per_node = MACHINES[name], asked.node(world)
    if world > per_node and world % per_node:
        raise NotPredictedError(f"{world} ranks do not fill nodes of {per_node}")
    return Place(
        ranks=Ranks(world, min(world, per_node)),
        rates=asked.rates or kind.rates,
        peak=kind.tflops * 1e12,
        memory=kind.memory,
        name=f"{name} x {world}",
    )
