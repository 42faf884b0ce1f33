"""What is refused before anything is built, each under a name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch.distributed as dist
from packaging.version import Version

from burst_mcore.deepspeed.errors import RefusedError
from burst_mcore.deepspeed.settings import part, zero

SUPPORTED = {"deepspeed": ("0.19", "0.20"), "transformers": ("5", "6")}
"""Releases from the first on, below the second: those whose contracts were read and tested."""


def refuse_versions() -> None:
    """RefusedError where an installed package is not one whose contracts are known."""
    for package, (first, end) in SUPPORTED.items():
        found = Version(version(package))
        if not Version(first) <= found < Version(end):
            raise RefusedError(
                "versions", f"{package} {found} is installed, tested are releases from {first} to below {end}"
            )


def sequence_parallel_size(config: Mapping[str, Any], world: int) -> int:
    """The "sequence_parallel_size" of a configuration, for `world` ranks; 1 where it is missing."""
    size = config.get("sequence_parallel_size", 1)
    if type(size) is not int or size < 1 or world % size:
        legal = [d for d in range(1, world + 1) if world % d == 0]
        raise RefusedError(
            "sequence_parallel_size", f"it must divide the {world} ranks: one of {legal}, got {size!r}"
        )
    return size


def refuse_config(config: Mapping[str, Any], mesh_param: Any = None) -> None:
    """RefusedError for what DeepSpeed would do wrongly with a sharded sequence, whatever the groups."""
    if mesh_param is not None or "data_parallel_size" in config:
        raise RefusedError(
            "mesh",
            '"data_parallel_size" (or mesh_param) makes DeepSpeed build a device mesh: then ZeRO leaves '
            'gradients unreduced over the sequence groups: give "sequence_parallel_size" alone',
        )
    if part(config, "pipeline").get("stages") not in (None, "auto", 1):
        raise RefusedError("pipeline", "pipeline stages are not supported beside sequence groups")
    tensor = part(config, "tensor_parallel").get("autotp_size", 0)
    if tensor and tensor > 1:
        raise RefusedError(
            "tensor_parallel", f'"autotp_size": {tensor} is not supported beside sequence groups'
        )


def refuse_mpu(config: Mapping[str, Any], mpu: Any, size: int) -> None:
    """RefusedError for an mpu of the caller's that would go wrong; `size` is that of the JSON."""
    needed = ("get_sequence_parallel_group", "get_sequence_data_parallel_group", "get_model_parallel_group")
    lacking = [name for name in needed if not hasattr(mpu, name)]
    if lacking:
        raise RefusedError("mpu", f"it must have {', '.join(needed)}; it lacks {', '.join(lacking)}")
    group = mpu.get_sequence_parallel_group()
    found = dist.get_world_size(group)
    if found != size:
        raise RefusedError(
            "sequence_parallel_size",
            f"the JSON says {size} (1 where it is missing), but the sequence groups have {found} ranks: "
            f'write "sequence_parallel_size": {found} (zero.Init reads it before there is an mpu)',
        )
    sequence = set(dist.get_process_group_ranks(group))
    if zero(config).stage == 3 and hasattr(mpu, "get_data_parallel_group"):
        data = set(dist.get_process_group_ranks(mpu.get_data_parallel_group()))
        if not sequence <= data:
            raise RefusedError(
                "data-parallel group",
                f"under ZeRO-3 get_data_parallel_group() must hold the sequence ranks too, else parameters "
                f"are dealt and gradients averaged over the wrong ranks: it has {sorted(data)}, the sequence "
                f"group {sorted(sequence)}",
            )
    aliased = found > 1 and sequence <= set(dist.get_process_group_ranks(mpu.get_model_parallel_group()))
    if aliased and part(config, "activation_checkpointing").get("partition_activations"):
        raise RefusedError(
            "partition_activations",
            "the mpu's model-parallel group is its sequence group, whose ranks hold different tokens: "
            "activations partitioned over it are mixed up. Leave mpu out, or partition_activations",
        )
