"""A model that Accelerate prepares over sharded sequences, as it would prepare one for Ulysses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from burst_mcore.deepspeed.cpu import without_builds
from burst_mcore.deepspeed.groups import unit_of
from burst_mcore.deepspeed.initialize import prepare_for_engine
from burst_mcore.deepspeed.loader import shard_for
from burst_mcore.deepspeed.section import Section, section_of
from burst_mcore.deepspeed.settings import refuse_config
from burst_mcore.transformers.agreement import on_all_ranks
from burst_mcore.transformers.errors import RefusedError, refuse_versions
from burst_mcore.transformers.models.strategies import LoadedBatch
from burst_mcore.wrap import around


@around
def without_compilers(own: Callable[..., Any], self: Any, *args: Any) -> Any:
    """Accelerator._prepare_deepspeed: on CPUs optimizers stay torch's, also with offload_optimizer."""
    config = self.deepspeed_plugin.deepspeed_config
    config.update(without_builds(config))
    return own(self, *args)


class BurstSPAttentionHF:
    """Takes the place of UlyssesSPAttentionHF: `register_with_transformers` prepares a model."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """Prepare a model, in place, as `initialize` does; DeepSpeed's configuration is Accelerate's.

        Args:
            model_name_or_path: the model; a name cannot be prepared.
            core_attn_implementation: not used, nor are lengths and micro_batch_size: any kernel, any length.
            disable_in_eval: in evaluation a batch without shift_labels, which no adapter has sharded, is a
                whole one of this rank alone.

        Returns:
            The mpu for deepspeed.initialize; None for one rank.

        Raises:
            RefusedError, SectionError: as `initialize`.
        """
        if sequence_parallel_size == 1:
            return None
        if isinstance(model_name_or_path, str):
            raise RefusedError("model", f"give the model itself, not its name {model_name_or_path!r}")
        section = on_all_ranks(lambda: _read(sequence_parallel_size))
        unit = unit_of(sequence_parallel_size)
        sequence = prepare_for_engine(model_name_or_path, section, unit)
        sequence.batches = batches = LoadedBatch(sequence, alone=disable_in_eval)
        shard_for(batches)
        return unit


def _read(size: int) -> Section:
    """Return the section of DeepSpeed's configuration as Accelerate is about to pass it."""
    from accelerate.state import AcceleratorState

    refuse_versions()
    try:
        plugin = AcceleratorState().deepspeed_plugin
    except ValueError:  # nobody made an Accelerator
        raise RefusedError(
            "Accelerate",
            "replace_ulysses() is for Accelerate: make its Accelerator first. Without Accelerate use "
            "burst_mcore.deepspeed.initialize",
        ) from None
    if plugin is None:
        raise RefusedError("configuration", "Accelerate does not use DeepSpeed: give it a DeepSpeedPlugin")
    config: dict[str, Any] = plugin.deepspeed_config
    refuse_config(config)
    written = config.get("sequence_parallel_size", size)
    if written != size:
        text = f"the JSON says {written!r}, Accelerate's ParallelismConfig has sp_size={size}"
        raise RefusedError("sequence_parallel_size", text)
    return section_of(config)
