"""The names of DeepSpeed, Accelerate and transformers that burst replaces, and how to restore them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from burst_mcore.deepspeed.accelerate.model import BurstSPAttentionHF
from burst_mcore.deepspeed.ranks.cpu import prepare_cpu
from burst_mcore.deepspeed.ranks.groups import unit_of
from burst_mcore.transformers.accelerate.gathered import gathering, gathering_all, padding
from burst_mcore.transformers.accelerate.loader import BurstSPDataLoaderAdapter, skipping
from burst_mcore.transformers.accelerate.trainer import (
    counting_tokens,
    groups,
    inputs_of_whole_sequences,
    labels_of_whole_sequences,
    loss_of_whole_sequences,
    over_shards,
    with_whole_outputs,
)
from burst_mcore.transformers.errors import refuse_versions


def _group(accelerator: Any) -> dist.ProcessGroup | None:
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is None or parallelism.sp_backend != "deepspeed" or not parallelism.sp_enabled:
        return None
    group: dist.ProcessGroup = unit_of(parallelism.sp_size).get_sequence_parallel_group()
    return group


def replace_ulysses() -> None:
    """Make Accelerate and the Trainer use BurstAttention where they would use DeepSpeed's Ulysses.

    Call it before Accelerator or Trainer prepare a model. Twice is once; `restore_ulysses` takes it back. It
    sets a few names, which those packages look up when they need them, and changes no file.
    """
    refuse_versions()
    prepare_cpu()
    if _group not in groups:
        groups.append(_group)
    for module, name, replacing in _places():
        if (module, name) not in _originals:
            own = _originals[module, name] = getattr(module, name)
            setattr(module, name, replacing(own))


def restore_ulysses() -> None:
    """Undo `replace_ulysses`, for models that are prepared later."""
    if _group in groups:
        groups.remove(_group)
    while _originals:
        (module, name), own = _originals.popitem()
        setattr(module, name, own)


_originals: dict[tuple[Any, str], Any] = {}


def _places() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return (where, which name, its own value -> ours)."""
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    places: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (ulysses_sp, "UlyssesSPAttentionHF", lambda _: BurstSPAttentionHF),
        (ulysses_sp, "UlyssesSPDataLoaderAdapter", lambda _: BurstSPDataLoaderAdapter),
    ]
    try:
        import accelerate
        from accelerate import accelerator, data_loader
        from transformers import trainer
    except ImportError:  # no Accelerate, no Trainer
        return places
    return [
        *places,
        *((module, "skip_first_batches", skipping) for module in (accelerate, data_loader, accelerator)),
        (accelerator.Accelerator, "gather", gathering_all),
        (accelerator.Accelerator, "gather_for_metrics", gathering),
        (accelerator.Accelerator, "pad_across_processes", padding),
        (trainer, "skip_first_batches", skipping),
        (trainer.Trainer, "__init__", counting_tokens),
        (trainer.Trainer, "_get_num_items_in_batch", labels_of_whole_sequences),
        (trainer.Trainer, "_track_num_input_tokens", inputs_of_whole_sequences),
        (trainer.Trainer, "compute_loss", loss_of_whole_sequences),
        (trainer.Trainer, "evaluation_loop", over_shards),
        (trainer.Trainer, "prediction_step", with_whole_outputs),
    ]
