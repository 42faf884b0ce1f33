"""Checks of configurations before anything is built: each refusal is a RefusedError with a name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from burst_mcore.deepspeed.config.section import KEY
from burst_mcore.deepspeed.config.settings import part, zero
from burst_mcore.transformers.errors import RefusedError

SIZE = "sequence_parallel_size"
"""DeepSpeed's own key: how many ranks share a sequence."""


def sequence_parallel_size(config: Mapping[str, Any], world: int) -> int:
    """Return "sequence_parallel_size" for `world` ranks; 1 in a configuration without it and our section.

    Raises:
        RefusedError: the section "burst_attention" is there and the size is not, or under another name; or
            the size does not divide the ranks.
    """
    near = difflib.get_close_matches(SIZE, config, 1, 0.85)
    if SIZE not in config and near:  # a misspelt or missing key would give every rank its own sequence
        raise RefusedError(SIZE, f'unknown key "{near[0]}": did you mean "{SIZE}"?')
    if SIZE not in config and KEY in config:
        raise RefusedError(
            SIZE,
            f'the JSON has the section "{KEY}" and no "{SIZE}": write beside the section how many ranks '
            f'share a sequence ("{SIZE}": 1 for one)',
        )
    size = config.get(SIZE, 1)
    if type(size) is not int or size < 1 or world % size:
        legal = [d for d in range(1, world + 1) if world % d == 0]
        raise RefusedError(SIZE, f"it must divide the {world} ranks: one of {legal}, got {size!r}")
    return size


def refuse_config(config: Mapping[str, Any], mesh_param: Any = None) -> None:
    """Raise RefusedError for settings that are wrong with sharded sequences, whatever the groups."""
    if mesh_param is not None or "data_parallel_size" in config:
        raise RefusedError(
            "mesh",
            '"data_parallel_size" (or mesh_param) makes DeepSpeed build a device mesh: then ZeRO leaves '
            'gradients unreduced over the CP groups: give "sequence_parallel_size" alone',
        )
    if part(config, "pipeline").get("stages") not in (None, "auto", 1):
        raise RefusedError("pipeline", "pipeline stages are not supported beside CP groups")
    tensor = part(config, "tensor_parallel").get("autotp_size", 0)
    if tensor and tensor > 1:
        raise RefusedError("tensor_parallel", f'"autotp_size": {tensor} is not supported beside CP groups')


def refuse_autos(config: Mapping[str, Any]) -> None:
    """Raise RefusedError for values "auto" that only the Trainer and Accelerate fill in."""
    unknown = [path for path in _autos(config) if path not in (KEY, "pipeline.stages")]
    if unknown:
        text = f'"auto" is filled in by the Trainer and Accelerate alone: give {", ".join(unknown)} a value'
        raise RefusedError("configuration", f"{text}, or leave them out")


def refuse_batch(config: Mapping[str, Any], replicas: int) -> None:
    """Raise RefusedError for batch sizes that contradict each other.

    Args:
        replicas: data-parallel ranks, world / sequence_parallel_size.
    """
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    train, micro, steps = (x if isinstance(x := config.get(name), int) else None for name in names)
    if train is None:
        return
    least = (micro or 1) * (steps or 1) * replicas
    if train % least or (micro and steps and train != least):
        raise RefusedError(
            "train_batch_size",
            f"it is {train}, but micro-batches of {micro or 'any number of'} samples, "
            f"{steps or 'any number of'} accumulation steps and {replicas} data-parallel ranks (world / SP) "
            f"make {'' if micro and steps else 'a multiple of '}{least}: leave it out, and it is computed",
        )


def _autos(part: Any, path: str = "") -> Iterator[str]:
    """Return the keys of a configuration whose value is "auto", outside our own section."""
    if part == "auto":
        yield path
    elif isinstance(part, Mapping):
        for name, value in part.items():
            if name != KEY:
                yield from _autos(value, f"{path}.{name}".lstrip("."))


def refuse_mpu(config: Mapping[str, Any], mpu: Any, size: int) -> None:
    """Raise RefusedError for a caller's mpu that would go wrong; `size` is that of the JSON."""
    needed = ("get_sequence_parallel_group", "get_sequence_data_parallel_group", "get_model_parallel_group")
    lacking = [name for name in needed if not hasattr(mpu, name)]
    if lacking:
        raise RefusedError("mpu", f"it must have {', '.join(needed)}; it lacks {', '.join(lacking)}")
    group = mpu.get_sequence_parallel_group()
    actual = dist.get_world_size(group)
    if actual != size:
        raise RefusedError(
            "sequence_parallel_size",
            f"the JSON says {size}, but the CP groups have {actual} ranks: "
            f'write "sequence_parallel_size": {actual} (zero.Init reads it before there is an mpu)',
        )
    sequence = set(dist.get_process_group_ranks(group))
    if zero(config).stage == 3 and hasattr(mpu, "get_data_parallel_group"):
        data = set(dist.get_process_group_ranks(mpu.get_data_parallel_group()))
        if not sequence <= data:
            raise RefusedError(
                "data-parallel group",
                f"under ZeRO-3 get_data_parallel_group() must hold the sequence ranks too, else parameters "
                f"are sharded, and gradients averaged, over the wrong ranks: it has {sorted(data)}, the "
                f"CP group {sorted(sequence)}",
            )
    aliased = actual > 1 and sequence <= set(dist.get_process_group_ranks(mpu.get_model_parallel_group()))
    if aliased and part(config, "activation_checkpointing").get("partition_activations"):
        raise RefusedError(
            "partition_activations",
            "the mpu's model-parallel group is its CP group, whose ranks hold different tokens: "
            "activations partitioned over it are mixed up. Leave mpu out, or partition_activations",
        )
