"""What transformers' Trainer does over sharded sequences, as it does it without: its loss, its evaluation.

Each function here takes a method of the Trainer and returns the one that stands in its place. Without
sequence parallelism the method itself is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Trainer

from burst_mcore.deepspeed.accelerate.gathered import whole
from burst_mcore.deepspeed.accelerate.loader import ShardedBatch, adapter_of, group_of
from burst_mcore.loss import unpatched
from burst_mcore.rollouts.columns import IGNORED
from burst_mcore.transformers.errors import RefusedError
from burst_mcore.transformers.models.prefill import CACHE_NAMES
from burst_mcore.wrap import around

AnyMethod = Callable[..., Any]
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
def labels_of_whole_sequences(count: AnyMethod, self: Any, batches: Sequence[Any], device: Any) -> Any:
    """Trainer._get_num_items_in_batch: how many labels the sequences have, of which a rank has shards.

    Over the accumulated micro-batches, and in training over all groups where the Trainer averages over
    devices. The loss of an evaluation is that of one process, however many groups there are.
    """
    if _size(self) == 1:
        return count(self, batches, device)
    if not batches or "shift_labels" not in batches[0]:
        return None
    number = sum((batch["shift_labels"] != IGNORED).sum() for batch in batches)
    assert isinstance(number, Tensor)
    everywhere = self.args.average_tokens_across_devices and self.model.training
    dist.all_reduce(number, group=None if everywhere else _group(self))
    return number.to(device)


@around
def inputs_of_whole_sequences(track: AnyMethod, self: Any, inputs: Any) -> None:
    """Trainer._track_num_input_tokens: the tokens of sequences, without the padding for the layout."""
    before = self.state.num_input_tokens_seen
    track(self, inputs)
    size, seen = _size(self), self.state.num_input_tokens_seen - before
    if isinstance(inputs, ShardedBatch) and self.args.include_num_input_tokens_seen == "all":
        every = self.accelerator.gather(torch.tensor(inputs.tokens, device=self.args.device))
        seen = int(every[::size].sum())
    elif not isinstance(inputs, ShardedBatch):  # each rank of a group has the whole batch
        seen //= size
    self.state.num_input_tokens_seen = before + seen


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
    shards = "shift_labels" in inputs
    if _size(self) == 1 or not (shards or self.model.training):
        return compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
    for name, own in (
        ("label_smoothing_factor", self.label_smoother),
        ("compute_loss_func", self.compute_loss_func),
    ):
        if own is not None:
            raise RefusedError("loss", f"the Trainer's {name} is not served: the loss is the model's own")
    if num_items_in_batch is not None and self.model.training:
        # Without a label: no gradient. In evaluation the loss is NaN, which the Trainer leaves out.
        num_items_in_batch = num_items_in_batch.clamp(min=1)
    outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    averaged = self.model.training and self.args.average_tokens_across_devices
    if num_items_in_batch is not None and averaged:
        # The mean of gradients divides by the number of sequence groups.
        loss = loss * (self.accelerator.num_processes // _size(self))
    return (loss, outputs) if return_outputs else loss


@around
def over_shards(evaluation_loop: AnyMethod, self: Any, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
    """Trainer.evaluation_loop: predictions are for whole sequences where the Trainer makes them."""
    if _size(self) > 1:
        asked = inspect.signature(evaluation_loop).bind(self, dataloader, *args, **kwargs).arguments
        loss_only = asked.get("prediction_loss_only")
        loss_only = self.args.prediction_loss_only if loss_only is None else loss_only
        step = getattr(self.prediction_step, "__func__", None)
        if not loss_only and step is not Trainer.prediction_step:
            raise RefusedError(
                "compute_metrics",
                f"{type(self).__name__} has a prediction_step of its own, which predicts for a shard: "
                "leave compute_metrics out, and do not predict",
            )
    return evaluation_loop(self, dataloader, *args, **kwargs)


@around
def with_whole_outputs(
    prediction_step: AnyMethod,
    self: Any,
    model: Any,
    inputs: Any,
    prediction_loss_only: bool,
    ignore_keys: Any = None,
) -> Any:
    """Trainer.prediction_step: predictions and labels of whole sequences, where they are asked for.

    Then the model makes its logits, whether its loss is fused in training or not.
    """
    loader = adapter_of(self.accelerator.gradient_state.active_dataloader)
    if _size(self) == 1 or loader is None or "shift_labels" not in inputs:
        return prediction_step(self, model, inputs, prediction_loss_only, ignore_keys)
    if "labels" not in inputs:  # then plain transformers has no loss, which here is one of the tokens
        own = getattr(self.model.config, "keys_to_ignore_at_inference", CACHE_NAMES)
        ignore_keys = [*(own if ignore_keys is None else ignore_keys), "loss"]
    with nullcontext() if prediction_loss_only else unpatched(self.model):
        loss, logits, labels = prediction_step(self, model, inputs, prediction_loss_only, ignore_keys)
    if "inputs" in self.args.include_for_metrics:  # the loop reads them from the batch, after this
        inputs["input_ids"] = whole(inputs["input_ids"], loader)
    return loss, whole(logits, loader), whole(labels, loader)


def _refuse_other_trainers(kind: type) -> None:
    """Raise RefusedError for a trainer of TRL whose loss over shards is not known, or a subclass of one."""
    name = next(
        (f"{c.__module__}.{c.__name__}" for c in kind.__mro__ if c.__module__.startswith("trl.")), None
    )
    if name is not None and name not in SERVED:
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
