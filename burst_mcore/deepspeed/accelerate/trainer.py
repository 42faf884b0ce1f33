"""What transformers' Trainer does over sharded sequences, as it does it without: its loss, its labels.

Each function here takes a method of the Trainer and returns the one that stands in its place. Without
sequence parallelism the method itself is called.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from burst_mcore.deepspeed.accelerate.loader import group_of
from burst_mcore.rollouts.columns import IGNORED
from burst_mcore.transformers.errors import RefusedError
from burst_mcore.transformers.trainer import AnyMethod
from burst_mcore.wrap import around

SERVED = {
    *(f"trl.trainer.{kind.lower()}_trainer.{kind}Trainer" for kind in ("SFT", "DPO", "KTO")),
    "trl.experimental.kto.KTOTrainer",
}
"""The trainers of TRL that are held to one process in tests; the last is an older name of its like."""


@around
def counting_tokens(init: AnyMethod, self: Any, *args: Any, **kwargs: Any) -> None:
    """Trainer.__init__: losses are divided by the labels of all micro-batches, as without sequence groups.

    TRL's trainers are refused here, but for those whose losses are known.
    """
    init(self, *args, **kwargs)
    if _size(self) > 1:
        _refuse_other_trainers(type(self))
        self.model_accepts_loss_kwargs = True  # which the Trainer takes back for DeepSpeed's Ulysses


@around
def ranks_of_a_batch(own: AnyMethod, self: Any) -> int:
    """Trainer.get_tp_size: ranks that work on the same batch, which Accelerate deals to them as to one."""
    return int(own(self)) * _size(self)


@around
def batches_of_training(own: AnyMethod, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Trainer.get_batch_samples: the model trains, although an evaluation came before its first batch."""
    if _size(self) > 1:
        self.model.train()
    return own(self, *args, **kwargs)


@around
def labels_of_whole_sequences(count: AnyMethod, self: Any, batch_samples: Any, device: Any) -> Any:
    """Trainer._get_num_items_in_batch: how many labels the sequences have, of which a rank has shards.

    Over the accumulated micro-batches, and in training over all groups where the Trainer averages over
    devices. The loss of an evaluation is that of one process, however many groups there are.
    """
    if not self.model.training or _size(self) == 1:
        number = count(self, batch_samples, device)
        return number if _size(self) == 1 or number is None else number * self.get_tp_size()
    if not batch_samples or "shift_labels" not in batch_samples[0]:
        return None
    number = sum((batch["shift_labels"] != IGNORED).sum() for batch in batch_samples)
    dist.all_reduce(number, group=None if self.args.average_tokens_across_devices else _group(self))
    return number.to(device)


@around
def loss_of_whole_sequences(
    compute_loss: AnyMethod,
    self: Any,
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """Trainer.compute_loss: the loss that the model returns is the whole sequence's already.

    transformers 5.23 gathers the losses of shards once more, and the gradient of that is a sum, SP times too
    large.
    """
    if _size(self) == 1:
        return compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
    asked = {"label_smoothing_factor": self.label_smoother, "compute_loss_func": self.compute_loss_func}
    for name, own in asked.items():
        if own is not None:
            raise RefusedError("loss", f"the Trainer's {name} is not served: the loss is the model's own")
    if not self.model.training:
        return compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
    if num_items_in_batch is not None:  # without a label: no gradient
        num_items_in_batch = num_items_in_batch.clamp(min=1)
    outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    if num_items_in_batch is not None and self.args.average_tokens_across_devices:
        # The mean of gradients divides by the number of sequence groups.
        loss = loss * (self.accelerator.num_processes // _size(self))
    return (loss, outputs) if return_outputs else loss


def _refuse_other_trainers(kind: type) -> None:
    """Raise RefusedError for a trainer of TRL whose loss over shards is not known, or a subclass of one."""
    names = [f"{c.__module__}.{c.__name__}" for c in kind.__mro__ if c.__module__.startswith("trl.")]
    if names and names[0] not in SERVED:
        raise RefusedError(
            "trainer",
            f"{kind.__name__} is not served over sequence groups. Of TRL these are: "
            f"{', '.join(sorted({served.rsplit('.')[-1] for served in SERVED}))}",
        )


def _group(trainer: Any) -> dist.ProcessGroup | None:
    """Return the ranks that share sequences under a Trainer."""
    return group_of(getattr(trainer.accelerator, "parallelism_config", None))


def _size(trainer: Any) -> int:
    group = _group(trainer)
    return 1 if group is None else group.size()
