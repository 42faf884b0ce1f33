"""The command `burst-mcore doctor`: a configuration of DeepSpeed or Megatron on a cluster, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from burst_mcore.attention.candidates import Ranks
from burst_mcore.deepspeed.config.section import config_dict
from burst_mcore.rates import Rates, default_rates
from burst_mcore.transformers.models.served import use_burst
from burst_plan.doctor.configured import NotPredictedError, of_deepspeed, of_megatron
from burst_plan.doctor.review import predicted, review
from burst_plan.doctor.section import examine, quiet
from burst_plan.explain.predict import MOST_RANKS
from burst_plan.machines import MACHINES, Machine, machine_of
from burst_plan.step.figures import Cluster
from burst_plan.step.model import Model, model_of, named
from burst_plan.step.planned import length_of, recommendation
from burst_plan.step.search import search
from burst_plan.words import mask_of

DEFAULT_LENGTH, DEFAULT_MODEL = "128K", "llama3-8b"
HERE = "here"
"""The device that this machine has, as a word beside the names of machines."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a command line asks besides a configuration and a model. Raises ValueError for illegal numbers."""

    seq: str | None
    world: int | None
    per_node: int | None
    machine: Machine | None
    """Whose GPUs run it; None is this machine's device."""
    rates: Rates | None

    def __post_init__(self) -> None:
        for name, number in (("--world", self.world), ("--per-node", self.per_node)):
            if number is not None and not 1 <= number <= MOST_RANKS:
                raise ValueError(f"{name} must be at least 1 and at most {MOST_RANKS}, got {number}")

    def length(self, megatrons: int | None) -> int:
        """Return the tokens of a sequence; megatrons: the --seq-length of Megatron's arguments."""
        return length_of(self.seq or (DEFAULT_LENGTH if megatrons is None else None), megatrons)

    def node(self, world: int) -> int:
        """Return the ranks of a node."""
        return self.per_node or min(world, 8)


def checkup(config: Path | None, model: str | None, asked: Asked) -> Iterator[str]:
    """Yield what a configuration will do, whether it fits, and what would be faster.

    Args:
        config: DeepSpeed's JSON; without it the arguments of Megatron in `model`, or no configuration at all.

    Raises:
        ValueError: words that are not legal, or contradict each other; what `initialize` would refuse.
    """
    if config is not None:
        return chain(_of_json(config, model or DEFAULT_MODEL, asked), [installed()])
    if model is None:
        raise ValueError(
            "no configuration given; pass DeepSpeed's JSON file: burst-mcore doctor ds.json, or Megatron's "
            "arguments as --model"
        )
    return chain(_of_model(model, asked), [installed()])


OPTIONAL = {
    "Megatron-Core": "megatron", "DeepSpeed": "deepspeed", "transformers": "transformers",
    "flash-attn 2 or 4": "flash_attn", "flash-attn 3": "flash_attn_interface", "Triton": "triton",
    "TransformerEngine": "transformer_engine", "apex's weight gradient": "fused_weight_gradient_mlp_cuda",
}  # fmt: skip
"""The modules of packages that change what runs; docs/frameworks/megatron.md says what."""


def installed() -> str:
    """Name the optional packages that this Python has, and the packages that it lacks, without an import."""
    here = {name for name, module in OPTIONAL.items() if find_spec(module) is not None}
    there, lacks = (
        ", ".join(name for name in OPTIONAL if (name in here) == is_in) for is_in in (True, False)
    )
    return f"packages here: {there or 'none'}; not here: {lacks or 'none'}"


def _of_json(config: Path, model: str, asked: Asked) -> Iterator[str]:
    """Yield what DeepSpeed's JSON will do; the part of the step's model where it knows all settings."""
    quiet()
    settings, length = config_dict(config), asked.length(_length_alone(model).get("seq"))
    sizes, family = _sizes(model)
    size = settings.get("sequence_parallel_size", 1)
    world = asked.world or (size if isinstance(size, int) and size > 0 else 1)
    mask = sizes.mask(length)
    yield from examine(
        config, world=world, per_node=asked.node(world), model=sizes, seq=length, machine=asked.machine,
        rates=asked.rates, mask=mask_of(mask, length),
    )  # fmt: skip
    try:
        if family is not None:
            raise NotPredictedError(family)
        way, attention = of_deepspeed(settings, world, sizes, length)
        place, unknown = _place(world, asked)
        micro = settings.get("train_micro_batch_size_per_gpu", 1)
        batch = micro if isinstance(micro, int) else 1  # "auto" is the Trainer's to say
        if batch > 1:
            unknown = "steps are predicted with a train_micro_batch_size_per_gpu of 1"
        told = [*review(predicted(sizes, way, attention, length, place, mask, batch), attention, unknown)]
    except NotPredictedError as error:
        size_of = "" if family else f" for {sizes.parameters / 1e9:.3g} billion parameters"
        told = [f"memory of a rank, and its step: not predicted{size_of}: {error}"]
    yield from told


def _of_model(model: str, asked: Asked) -> Iterator[str]:
    """Yield the review of Megatron's arguments, or a recommendation for a model without a configuration."""
    sizes, degrees = model_of(model)
    length = asked.length(degrees.pop("seq", None))
    configured = model.lstrip().startswith("--")
    if asked.world is None and not configured:
        raise ValueError("give --world: the ranks that are to train the model")
    world = asked.world or math.prod(degrees.get(name, 1) for name in ("tp", "cp", "pp"))
    try:
        place, unknown = _place(world, asked)
        if unknown is not None:
            raise NotPredictedError(unknown)
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


def _sizes(model: str) -> tuple[Model, str | None]:
    """Return the sizes of a model, and why the step's model does not know its layers; None if it does.

    A folder is read by transformers, too, which says what is refused; no weight is loaded.

    Raises:
        RefusedError: attention over shards cannot serve the model.
        ValueError: there is no such model.
    """
    if model.lstrip().startswith("--") or (named(model) and not Path(model).is_dir()):
        return model_of(model)[0], None
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(Path(model), local_files_only=True)
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise ValueError(f"no causal LM in {model}: {str(error).splitlines()[0]}") from None
    use_burst(whole, 2)
    try:
        return model_of(model)[0], None
    except ValueError as error:
        text: Any = config.get_text_config()
        heads = getattr(text, "num_attention_heads", 1)
        dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        return Model(
            layers=text.num_hidden_layers, hidden=text.hidden_size, heads=heads, head_dim=dim, value_dim=dim,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads, vocab=text.vocab_size,
            ffn=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        ), str(error)  # fmt: skip


def _place(world: int, asked: Asked) -> tuple[Cluster, str | None]:
    """Return the cluster, and why its speed is not known; "here" is a cluster of this machine's devices.

    Raises:
        NotPredictedError: ranks that do not fill nodes.
    """
    kind, per_node, unknown = asked.machine, asked.node(world), None
    if world > per_node and world % per_node:
        raise NotPredictedError(f"{world} ranks do not fill nodes of {per_node}")
    ranks = Ranks(world, min(world, per_node))
    if kind is None and torch.cuda.is_available():
        name = machine_of(torch.cuda.get_device_name())
        kind = None if name is None else MACHINES[name]
    if kind is None:
        unknown = "no known GPU is here: name a machine by --device, such as h100, or describe it by --gpu"
        cuda = torch.cuda.is_available()
        rates = asked.rates or default_rates("cuda" if cuda else "cpu")
        there = torch.cuda.get_device_properties(0).total_memory if cuda else math.inf
        return Cluster(ranks=ranks, rates=rates, peak=math.inf, memory=there), unknown
    return Cluster.of(kind, ranks, f"{kind.name} x {world}", asked.rates), None
