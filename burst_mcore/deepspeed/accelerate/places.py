"""The names of DeepSpeed, Accelerate and transformers that burst replaces, with what stands in their place.

Each replacement takes the package's own and returns ours. Without CP groups the own one is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import burst_mcore.transformers.trainer as shared
from burst_mcore.deepspeed.accelerate.loader import BurstSPDataLoaderAdapter, sharding_to_groups, skipping
from burst_mcore.deepspeed.accelerate.model import BurstSPAttentionHF, without_compilers
from burst_mcore.deepspeed.accelerate.trainer import (
    batches_of_training,
    counting_tokens,
    gathering,
    gathering_all,
    loss_of_whole_sequences,
)
from burst_mcore.deepspeed.ranks.cpu import prepare_cpu
from burst_mcore.transformers.errors import refuse_versions


def replace_ulysses() -> None:
    """Make Accelerate and the Trainer use BurstAttention where they would use DeepSpeed's Ulysses.

    Call it before Accelerator or Trainer prepare a model. Twice is once; `restore_ulysses` takes it back. It
    sets a few names, which those packages look up when they need them, and changes no file.
    """
    refuse_versions()
    prepare_cpu()
    for place in _places():
        _replaced.replace(*place)


def restore_ulysses() -> None:
    """Undo `replace_ulysses`, for models that are prepared later."""
    _replaced.restore()


_replaced = shared.REPLACED["sp_size"]


def _places() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return (where, which name, its own value -> ours)."""
    from accelerate import accelerator, data_loader
    from deepspeed.runtime.sequence_parallel import ulysses_sp
    from transformers import trainer

    name, own = "skip_first_batches", data_loader.skip_first_batches  # a script may have imported it
    skippers = [m for m in [*sys.modules.values()] if getattr(m, "__dict__", {}).get(name) is own]
    return [
        (ulysses_sp, "UlyssesSPAttentionHF", lambda _: BurstSPAttentionHF),
        (ulysses_sp, "UlyssesSPDataLoaderAdapter", lambda _: BurstSPDataLoaderAdapter),
        *((module, "prepare_data_loader", sharding_to_groups) for module in (data_loader, accelerator)),
        *((module, name, skipping) for module in skippers),
        (accelerator, "_refuse_recurrent_layers_under_sequence_parallelism", lambda _: lambda model: None),
        (accelerator.Accelerator, "prepare", shared.with_groups),
        (accelerator.Accelerator, "_prepare_deepspeed", without_compilers),
        (accelerator.Accelerator, "gather", gathering_all),
        (accelerator.Accelerator, "gather_for_metrics", gathering),
        (trainer.Trainer, "__init__", counting_tokens),
        (trainer.Trainer, "get_sp_size", lambda _: lambda self: 1),
        (trainer.Trainer, "get_tp_size", shared.ranks_of_a_batch),
        (trainer.Trainer, "get_batch_samples", batches_of_training),
        (trainer.Trainer, "_get_num_items_in_batch", shared.labels_of_batches),
        (trainer.Trainer, "_track_num_input_tokens", shared.inputs_of_whole_sequences),
        (trainer.Trainer, "floating_point_ops", shared.operations_of_a_rank),
        (trainer.Trainer, "compute_loss", loss_of_whole_sequences),
        (trainer.Trainer, "prediction_step", shared.with_logits),
    ]
