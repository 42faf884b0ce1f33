"""The names of DeepSpeed, Accelerate and transformers that burst replaces, and how to restore them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from burst_mcore.deepspeed.accelerate.loader import BurstSPDataLoaderAdapter, dealing_to_groups, skipping
from burst_mcore.deepspeed.accelerate.model import BurstSPAttentionHF, without_compilers
from burst_mcore.deepspeed.ranks.cpu import prepare_cpu
from burst_mcore.transformers.errors import refuse_versions
from burst_mcore.transformers.trainer import REPLACED


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


_replaced = REPLACED["sp_size"]


def _places() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return (where, which name, its own value -> ours)."""
    from accelerate import accelerator, data_loader
    from deepspeed.runtime.sequence_parallel import ulysses_sp
    from transformers import trainer

    import burst_mcore.deepspeed.accelerate.gathered as gathered
    import burst_mcore.deepspeed.accelerate.trainer as ours
    import burst_mcore.transformers.trainer as shared

    name, own = "skip_first_batches", data_loader.skip_first_batches  # a script may have imported it
    skippers = [m for m in [*sys.modules.values()] if getattr(m, "__dict__", {}).get(name) is own]
    return [
        (ulysses_sp, "UlyssesSPAttentionHF", lambda _: BurstSPAttentionHF),
        (ulysses_sp, "UlyssesSPDataLoaderAdapter", lambda _: BurstSPDataLoaderAdapter),
        *((module, "prepare_data_loader", dealing_to_groups) for module in (data_loader, accelerator)),
        *((module, name, skipping) for module in skippers),
        (accelerator, "_refuse_recurrent_layers_under_sequence_parallelism", lambda _: lambda model: None),
        (accelerator.Accelerator, "prepare", shared.with_groups),
        (accelerator.Accelerator, "_prepare_deepspeed", without_compilers),
        (accelerator.Accelerator, "gather", gathered.gathering_all),
        (accelerator.Accelerator, "gather_for_metrics", gathered.gathering),
        (trainer.Trainer, "__init__", ours.counting_tokens),
        (trainer.Trainer, "get_sp_size", lambda _: lambda self: 1),
        (trainer.Trainer, "get_tp_size", ours.ranks_of_a_batch),
        (trainer.Trainer, "get_batch_samples", ours.batches_of_training),
        (trainer.Trainer, "_get_num_items_in_batch", ours.labels_of_whole_sequences),
        (trainer.Trainer, "_track_num_input_tokens", shared.inputs_of_whole_sequences),
        (trainer.Trainer, "compute_loss", ours.loss_of_whole_sequences),
        (trainer.Trainer, "prediction_step", shared.with_logits),
    ]
