"""The command `burst-mcore doctor`: a report on a configuration of DeepSpeed or Megatron on a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.deepspeed.section import config_dict
from burst_mcore.rates import default_rates
from burst_mcore.transformers.models.supported import use_burst
from burst_plan.doctor.configured import NotPredictedError, Options, number, of_deepspeed, of_megatron
from burst_plan.doctor.review import predicted, review
from burst_plan.doctor.section import examine, quiet
from burst_plan.machines import MACHINES, machine_of
from burst_plan.step.figures import Cluster
from burst_plan.step.model import Model, model_of, named
from burst_plan.step.planned import recommendation
from burst_plan.step.search import search
from burst_plan.words import mask_of

DEFAULT_MODEL = "llama3-8b"
HERE = "here"
"""The name of this machine's device, in addition to the names of machines."""


def checkup(config: Path | None, model: str | None, options: Options) -> Iterator[str]:
    """Yield a report on a configuration: its behaviour, its memory, and faster plans.

    Args:
        config: DeepSpeed's JSON; without it Megatron's arguments in `model`, or no configuration at all.

    Raises:
        ValueError: illegal or contradictory options; also errors of `initialize`.
    """
    if config is not None:
        yield from _of_json(config, model or DEFAULT_MODEL, options)
    elif model is not None:
        yield from _of_model(model, options)
    else:
        raise ValueError(
            "no configuration given; pass DeepSpeed's JSON file: burst-mcore doctor ds.json, or Megatron's "
            "arguments as --model"
        )
    yield installed()


OPTIONAL = {
    "Megatron-Core": "megatron", "DeepSpeed": "deepspeed", "transformers": "transformers",
    "flash-attn 2 or 4": "flash_attn", "flash-attn 3": "flash_attn_interface", "Triton": "triton",
    "TransformerEngine": "transformer_engine", "apex's weight gradient": "fused_weight_gradient_mlp_cuda",
}  # fmt: skip
"""The modules of optional packages that change the behaviour; docs/frameworks/megatron.md explains them."""


def installed() -> str:
    """Return the optional packages that this Python has, and those that it lacks, without an import."""
    present = {name: find_spec(module) is not None for name, module in OPTIONAL.items()}
    here, absent = (", ".join(name for name in OPTIONAL if present[name] == is_in) for is_in in (True, False))
    return f"packages here: {here or 'none'}; not here: {absent or 'none'}"


def _of_json(config: Path, model: str, options: Options) -> Iterator[str]:
    """Yield the report on DeepSpeed's JSON, with the step's model if it supports all settings."""
    quiet()
    settings = config_dict(config)
    sizes, degrees, family = _sizes(model)
    if others := ", ".join(name.upper() for name in degrees if name != "seq"):
        raise ValueError(f"{others} of Megatron's arguments contradict DeepSpeed's JSON: leave them out")
    length = options.length(degrees.get("seq"))
    world = options.world or max(1, number(settings, "sequence_parallel_size"))
    mask = sizes.mask(length)
    yield from examine(settings, sizes, length, mask_of(mask, length), world, options)
    try:
        if family is not None:
            raise NotPredictedError(family)
        plan, attention = of_deepspeed(settings, world, sizes, length)
        place, unknown = _place(world, options)
        batch = number(settings, "train_micro_batch_size_per_gpu")
        if batch > 1:
            unknown = "steps are predicted with a train_micro_batch_size_per_gpu of 1"
        step = predicted(sizes, plan, attention, length, place, mask, batch)
    except NotPredictedError as error:
        size_of = "" if family else f" for {sizes.parameters / 1e9:.3g} billion parameters"
        yield f"memory of a rank, and its step: not predicted{size_of}: {error}"
    else:
        yield from review(step, attention, unknown)


def _of_model(model: str, options: Options) -> Iterator[str]:
    """Yield the review of Megatron's arguments, or a recommendation for a model without a configuration."""
    sizes, degrees = model_of(model)
    length = options.length(degrees.pop("seq", None))
    configured = model.lstrip().startswith("--")
    if options.world is None and not configured:
        raise ValueError("give --world: the ranks that are to train the model")
    world = options.world or math.prod(degrees.get(name, 1) for name in ("tp", "cp", "pp"))
    try:
        place, unknown = _place(world, options)
        if unknown is not None:
            raise NotPredictedError(unknown)
        if not configured:
            yield from recommendation(search(sizes, length, 1, place, mask=sizes.mask(length)))
            return
        plan, attention = of_megatron(model, world, degrees, sizes.layers)
        yield from review(predicted(sizes, plan, attention, length, place), attention)
    except NotPredictedError as error:
        raise ValueError(f"no step is predicted: {error}") from None


def _sizes(model: str) -> tuple[Model, Mapping[str, int], str | None]:
    """Return the sizes of a model, other settings in Megatron's arguments, and why its layers have no step.

    A folder is read by transformers, too, which reports what it does not support; no weight is loaded. The
    reason is None if the step's model supports the layers.

    Raises:
        UnsupportedError: attention over shards does not support the model.
        ValueError: an unknown model.
    """
    if model.lstrip().startswith("--") or (named(model) and not Path(model).is_dir()):
        return *model_of(model), None
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(Path(model), local_files_only=True)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise ValueError(f"no causal LM in {model}: {str(error).splitlines()[0]}") from None
    use_burst(network, 2)
    try:
        return *model_of(model), None
    except ValueError as error:
        text: Any = config.get_text_config()
        heads = getattr(text, "num_attention_heads", 1)
        dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        return Model(
            layers=text.num_hidden_layers, hidden=text.hidden_size, heads=heads, head_dim=dim, value_dim=dim,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads, vocab=text.vocab_size,
            ffn=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        ), {}, str(error)  # fmt: skip


def _place(world: int, options: Options) -> tuple[Cluster, str | None]:
    """Return the cluster, and the reason if its speed is unknown; "here" has this machine's devices.

    Raises:
        NotPredictedError: ranks that do not fill whole nodes.
    """
    kind, per_node = options.machine, options.node(world)
    cuda = torch.cuda.is_available()
    if world > per_node and world % per_node:
        raise NotPredictedError(f"{world} ranks do not fill nodes of {per_node}")
    ranks = Ranks(world, min(world, per_node))
    if kind is None and cuda:
        kind = MACHINES.get(machine_of(torch.cuda.get_device_name()) or "")
    if kind is None:
        unknown = "no known GPU is here: name a machine by --device, such as h100, or describe it by --gpu"
        rates = options.rates or default_rates("cuda" if cuda else "cpu")
        memory = torch.cuda.get_device_properties(0).total_memory if cuda else math.inf
        return Cluster(ranks=ranks, rates=rates, peak=math.inf, memory=memory), unknown
    return Cluster.of(kind, ranks, f"{kind.name} x {world}", options.rates), None
