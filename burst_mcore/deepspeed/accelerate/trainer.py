"""The Trainer's loss, tokens and batches where ranks share sequences, and what Accelerate gathers of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils.operations import gather_object, recursively_apply

import burst_mcore.transformers.trainer as shared
from burst_mcore.deepspeed.accelerate.loader import adapter_of
from burst_mcore.transformers.errors import RefusedError
from burst_mcore.wrap import around, while_set

SUPPORTED = {
    *(f"trl.trainer.{kind.lower()}_trainer.{kind}Trainer" for kind in ("SFT", "DPO", "KTO")),
    "trl.experimental.kto.KTOTrainer",
}
"""The trainers of TRL that are held to one process in tests; the last is an older name of its like."""


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


@around
def loss_of_whole_sequences(
    compute_loss: shared.AnyMethod,
    self: Any,
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """Trainer.compute_loss: the model's loss is the whole sequence's, as where no ranks share one.

    For Ulysses transformers 5.23 gathers the losses of shards, and that gradient is SP times too large.
    """
    if shared.sharing(self, "sp_size") == 1:
        return compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
    asked = {"label_smoothing_factor": self.label_smoother, "compute_loss_func": self.compute_loss_func}
    for name, own in asked.items():
        if own is not None:
            raise RefusedError("loss", f"the Trainer's {name} is not supported: the loss is the model's own")
    if num_items_in_batch is not None and self.model.training:  # without a label: no gradient
        num_items_in_batch = num_items_in_batch.clamp(min=1)
    with while_set(self.accelerator.parallelism_config, sp_backend=None):  # by which it knows Ulysses
        return compute_loss(self, model, inputs, return_outputs, num_items_in_batch)


def _refuse_other_trainers(kind: type) -> None:
    """Raise RefusedError for a trainer of TRL whose loss over shards is not known, or a subclass of one."""
    names = [f"{c.__module__}.{c.__name__}" for c in kind.__mro__ if c.__module__.startswith("trl.")]
    if names and names[0] not in SUPPORTED:
        raise RefusedError(
            "trainer",
            f"{kind.__name__} is not supported over CP groups. Of TRL these are: "
            f"{', '.join(sorted({each.rsplit('.')[-1] for each in SUPPORTED}))}",
        )
