"""Accelerate, the Trainer and TRL over sharded sequences: burst takes the place of DeepSpeed's Ulysses.

`_places` has the names of DeepSpeed, Accelerate and transformers that are replaced. Each replacement takes
the package's own and returns ours. Without CP groups the own one is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils.operations import gather_object, recursively_apply

import burst_mcore.transformers.trainer as shared
from burst_mcore.deepspeed.cpu import prepare_cpu
from burst_mcore.deepspeed.loader import BurstSPDataLoaderAdapter, adapter_of, sharding_to_groups, skipping
from burst_mcore.deepspeed.model import BurstSPAttentionHF, without_compilers
from burst_mcore.transformers.errors import RefusedError, refuse_versions
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
    shared.replace("sp_size", _places())


def restore_ulysses() -> None:
    """Undo `replace_ulysses`, for models that are prepared later."""
    shared.REPLACED["sp_size"].restore()


def _places() -> list[shared.Place]:
    """Return the names that DeepSpeed's Ulysses has to itself."""
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
        (accelerator.Accelerator, "_prepare_deepspeed", without_compilers),
        (accelerator.Accelerator, "gather", gathering_all),
        (accelerator.Accelerator, "gather_for_metrics", gathering),
        (trainer.Trainer, "__init__", counting_tokens),
        (trainer.Trainer, "get_batch_samples", batches_of_training),
    ]


@around
def gathering(own: Callable[..., Any], self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    """Accelerator.gather_for_metrics, for loaders of CP groups as well: see `counted`."""
    loader = adapter_of(self.gradient_state.active_dataloader)
    if loader is None:
        return own(self, input_data, use_gather_object)
    if use_gather_object or not _is_of_tensors(input_data):
        return [x for part in loader.counted(gather_object([list(input_data)])) for x in part]
    return recursively_apply(lambda x: torch.cat(loader.counted(shared.rows_of_ranks(x))), input_data)


@around
def gathering_all(own: Callable[..., Any], self: Any, tensor: Any) -> Any:
    """Accelerator.gather, also of an evaluation's last batches, which may have unequal numbers of rows."""
    loader = adapter_of(self.gradient_state.active_dataloader)
    if loader is None or loader.last is None:
        return own(self, tensor)
    return recursively_apply(lambda x: torch.cat(shared.rows_of_ranks(x)), tensor)


def _is_of_tensors(x: Any) -> bool:
    """Return whether lists, tuples and dicts have nothing but tensors."""
    try:
        recursively_apply(lambda each: each, x, error_on_other_type=True)
    except TypeError:
        return False
    return True


@around
def counting_tokens(init: shared.AnyMethod, self: Any, *args: Any, **kwargs: Any) -> None:
    """Trainer.__init__: losses are divided by the labels of all micro-batches, as without CP groups.

    TRL's trainers are refused here, but for those whose losses are known.
    """
    init(self, *args, **kwargs)
    if shared.sharing(self, "sp_size") > 1:
        _refuse_other_trainers(type(self))
        self.model_accepts_loss_kwargs = True  # which the Trainer takes back for DeepSpeed's Ulysses


@around
def batches_of_training(own: shared.AnyMethod, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Trainer.get_batch_samples: the model trains, although an evaluation came before its first batch."""
    if shared.sharing(self, "sp_size") > 1:
        self.model.train()
    return own(self, *args, **kwargs)


def _refuse_other_trainers(kind: type) -> None:
    """Raise RefusedError for a trainer of TRL whose loss over shards is not known, or a subclass of one."""
    names = [f"{c.__module__}.{c.__name__}" for c in kind.__mro__ if c.__module__.startswith("trl.")]
    if names and names[0] not in SUPPORTED:
        raise RefusedError(
            "trainer",
            f"{kind.__name__} is not supported over CP groups. Of TRL these are: "
            f"{', '.join(sorted({each.rsplit('.')[-1] for each in SUPPORTED}))}",
        )
