"""Accelerate, the Trainer and TRL over sharded sequences: burst takes the place of DeepSpeed's Ulysses.

`_places` has the names of DeepSpeed, Accelerate and transformers that are replaced, as in
burst_mcore.transformers.trainer.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import AcceleratorState
from accelerate.utils.operations import find_batch_size

from burst_mcore.agreement.agreement import on_all_ranks
from burst_mcore.deepspeed.cpu import prepare_cpu, without_builds
from burst_mcore.deepspeed.groups import unit_of
from burst_mcore.deepspeed.initialize import prepare_for_engine
from burst_mcore.deepspeed.section import Section, section_of
from burst_mcore.deepspeed.settings import refuse_config
from burst_mcore.transformers.data.loader import ShardedLoader
from burst_mcore.transformers.errors import UnsupportedError, refuse_versions
from burst_mcore.transformers.models.sequence import evaluates
from burst_mcore.transformers.models.strategies import LoadedBatch
from burst_mcore.transformers.trainer import REPLACED, AnyMethod, Place, replace, sharing
from burst_mcore.wrap import around

SUPPORTED = {
    *(f"trl.trainer.{kind.lower()}_trainer.{kind}Trainer" for kind in ("SFT", "DPO", "KTO")),
    "trl.experimental.kto.KTOTrainer",
}
"""The trainers of TRL that are held to one process in tests; the last is an older name of its like."""


def replace_ulysses() -> None:
    """Make Accelerate and the Trainer use BurstAttention where they would use DeepSpeed's Ulysses.

    Call it before Accelerator or Trainer prepare a model. Twice is once; `restore_ulysses` takes it back. It
    sets a few names, which those packages look up when they need them, and changes no file.
    """
    refuse_versions()
    prepare_cpu()
    replace("sp_size", _places())


def restore_ulysses() -> None:
    """Undo `replace_ulysses`, for models that are prepared later."""
    REPLACED["sp_size"].restore()


def _places() -> list[Place]:
    """Return the names that DeepSpeed's Ulysses has to itself."""
    from accelerate import accelerator, data_loader
    from deepspeed.runtime.sequence_parallel import ulysses_sp
    from transformers import trainer

    return [
        (ulysses_sp, "UlyssesSPAttentionHF", lambda _: BurstSPAttentionHF),
        (ulysses_sp, "UlyssesSPDataLoaderAdapter", lambda _: adapted),
        *((module, "prepare_data_loader", sharding_to_groups) for module in (data_loader, accelerator)),
        (data_loader.DataLoaderDispatcher, "__init__", dispatching_to_groups),
        (accelerator, "_refuse_recurrent_layers_under_sequence_parallelism", lambda _: lambda model: None),
        (accelerator.Accelerator, "_prepare_deepspeed", without_compilers),
        (trainer.Trainer, "__init__", counting_tokens),
    ]


@around
def counting_tokens(init: AnyMethod, self: Any, *args: Any, **kwargs: Any) -> None:
    """Trainer.__init__: losses are divided by the labels of all micro-batches, as without CP groups.

    TRL's trainers are refused here, but for those whose losses are known.
    """
    init(self, *args, **kwargs)
    if sharing(self, "sp_size") > 1:
        _refuse_other_trainers(type(self))
        self.model_accepts_loss_kwargs = True  # which the Trainer takes back for DeepSpeed's Ulysses


def _refuse_other_trainers(kind: type) -> None:
    """Raise UnsupportedError for a trainer of TRL whose loss over shards is unknown, or a subclass of one."""
    names = [f"{c.__module__}.{c.__name__}" for c in kind.__mro__ if c.__module__.startswith("trl.")]
    if names and names[0] not in SUPPORTED:
        legal = ", ".join(sorted({name.rsplit(".")[-1] for name in SUPPORTED}))
        text = f"{kind.__name__} is not supported over CP groups. Of TRL these are: {legal}"
        raise UnsupportedError("trainer", text)


@around
def without_compilers(original: AnyMethod, self: Any, *args: Any) -> Any:
    """Accelerator._prepare_deepspeed: on CPUs optimizers stay torch's, also with offload_optimizer."""
    config = self.deepspeed_plugin.deepspeed_config
    config.update(without_builds(config))
    return original(self, *args)


class BurstSPDataLoaderAdapter(ShardedLoader):
    """Stands for UlyssesSPDataLoaderAdapter: every rank loads its own batches, and all work on each in turn.

    Batches are whole, may be of any length, and need no position_ids: their model shards them.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        super().__init__(dl, group=sp_group, own=True, device=device, whole=True)


def adapted(dl: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a loader whose batches are equal on the ranks of a group; those of Accelerate's loaders are."""
    return dl if isinstance(dl, DataLoaderStateMixin) else BurstSPDataLoaderAdapter(dl, *args, **kwargs)


@around
def sharding_to_groups(original: AnyMethod, dataloader: Any, device: Any = None, **options: Any) -> Any:
    """accelerate's prepare_data_loader: each CP group is one process."""
    size = sharing(AcceleratorState(), "sp_size")
    if size == 1:
        return original(dataloader, device, **options)
    groups = groups_of(size)
    options |= {"num_processes": groups, "process_index": dist.get_rank() // size, "torch_device_mesh": None}
    loader = original(dataloader, device, **options)
    if groups == 1 and not hasattr(loader, "slice_fn"):  # for one process Accelerate leaves the order to it
        loader.rng_types = [*(loader.rng_types or ()), "torch"]
        generator = getattr(loader.get_sampler(), "generator", None)
        if isinstance(generator, torch.Generator):  # a script may have seeded it by rank
            loader.synchronized_generator = generator
            loader.rng_types.append("generator")
    return loader


@around
def dispatching_to_groups(init: AnyMethod, self: Any, *args: Any, **kwargs: Any) -> None:
    """DataLoaderDispatcher.__init__: rank 0 reads for all, and the ranks of a group get the same rows.

    In training rows are shared out evenly. In evaluation a group gets a batch, as one process has it.
    """
    init(self, *args, **kwargs)
    size, slice_rows = sharing(AcceleratorState(), "sp_size"), self.slice_fn
    if size == 1:
        return

    def rows_of_group(batch: Any, rows: slice, **options: Any) -> Any:
        count = self.batch_size or 1 if evaluates() else rows.stop - rows.start
        first = dist.get_rank() // size * count if rows.start else 0  # the first batch, repeated, begins at 0
        if first >= find_batch_size(batch):  # no row is left: what is reported of others is cut off
            first = 0
        return slice_rows(batch, slice(first, first + count), **options)

    self.slice_fn = rows_of_group
    rank = dist.get_rank()
    self.state = SimpleNamespace(num_processes=groups_of(size), process_index=rank, device=self.state.device)


def groups_of(size: int) -> int:
    """Return the number of CP groups."""
    world = dist.get_world_size()
    if world % size:
        text = f"sp_size={size} does not divide the {world} processes that were started"
        raise UnsupportedError("sequence_parallel_size", text)
    return world // size


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
            disable_in_eval: in evaluation a batch that differs by rank, or stands beside a cache, is a whole
                one of this rank alone.

        Returns:
            The mpu for deepspeed.initialize; None for one rank.

        Raises:
            UnsupportedError, SectionError: as `initialize`.
        """
        if sequence_parallel_size == 1:
            return None
        if isinstance(model_name_or_path, str):
            raise UnsupportedError("model", f"give the model itself, not its name {model_name_or_path!r}")
        section = on_all_ranks(lambda: _read(sequence_parallel_size))
        unit = unit_of(sequence_parallel_size)
        sequence = prepare_for_engine(model_name_or_path, section, unit)
        sequence.batches = LoadedBatch(sequence, alone=disable_in_eval)
        return unit


def _read(size: int) -> Section:
    """Return the section of DeepSpeed's configuration as Accelerate is about to pass it."""
    refuse_versions()
    try:
        plugin = AcceleratorState().deepspeed_plugin
    except ValueError:  # nobody made an Accelerator
        text = "make its Accelerator first, or use burst_mcore.deepspeed.initialize"
        raise UnsupportedError("Accelerate", f"replace_ulysses() is for Accelerate: {text}") from None
    if plugin is None:
        raise UnsupportedError("configuration", "Accelerate uses no DeepSpeed: give it a DeepSpeedPlugin")
    config: dict[str, Any] = plugin.deepspeed_config
    refuse_config(config)
    json_size = config.get("sequence_parallel_size", size)
    if json_size != size:
        text = f"the JSON says {json_size!r}, sp_size is {size}: leave the key out, or make them equal"
        raise UnsupportedError("sequence_parallel_size", text)
    return section_of(config)
