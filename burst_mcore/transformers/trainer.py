"""Methods of Accelerate and transformers' Trainer that are the same beside DeepSpeed and beside FSDP2.

Each takes a method and returns the one that stands in its place. Without ranks that share sequences, which
the Trainer's `get_tp_size` counts, the Trainer's method itself is called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from burst_mcore.agreement.agreement import integers_of
from burst_mcore.loss import unpatched
from burst_mcore.transformers.errors import UnsupportedError
from burst_mcore.transformers.models.sequence import evaluates
from burst_mcore.transformers.prepare import sequence_of
from burst_mcore.wrap import Replaced, around, while_set

AnyMethod = Callable[..., Any]
Place = tuple[Any, str, Callable[[Any], Any]]
"""Where a name is replaced, which name, and what makes of its own value ours."""
CALLS = {
    "sp_size": "burst_mcore.deepspeed.replace_ulysses()",
    "cp_size": "burst_mcore.torch.replace_context_parallel()",
}
"""By setting of Accelerate's ParallelismConfig, the function that replaces what it asks for."""
REPLACED = {setting: Replaced() for setting in CALLS}

logger = logging.getLogger("burst_mcore")
ALONE = "burst_mcore_alone"
"""The attribute of an Accelerator whose user was told that no sequence is shared."""


def replace(setting: str, places: Iterable[Place]) -> None:
    """Replace the places of one setting of Accelerate, and the places that all settings share."""
    from accelerate import Accelerator
    from transformers import Trainer

    common = [
        (Accelerator, "prepare", with_groups),
        (Accelerator, "gather_for_metrics", reports_of_batches),
        (Trainer, "get_tp_size", ranks_of_a_batch),
        (Trainer, "get_sp_size", lambda _: lambda self: 1),
        (Trainer, "get_cp_size", lambda _: lambda self: 1),
        (Trainer, "_get_num_items_in_batch", labels_of_batches),
        (Trainer, "_track_num_input_tokens", inputs_of_whole_sequences),
        (Trainer, "floating_point_ops", operations_of_a_rank),
        (Trainer, "compute_loss", loss_of_whole_sequences),
        (Trainer, "prediction_step", with_logits),
        (Trainer, "_prepare_inputs", without_repeated_rows),
    ]
    for place in (*common, *places):
        REPLACED[setting].replace(*place)


@around
def with_groups(prepare: AnyMethod, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Accelerator.prepare: warn, once on the first rank, where no ranks share a sequence.

    Raises:
        UnsupportedError: ranks share sequences by a setting, or an engine, for which nothing was replaced.
    """
    settings = [setting for setting, replacements in REPLACED.items() if replacements]
    sizes = {setting: getattr(self.parallelism_config, setting, 1) for setting in REPLACED}
    for setting in (setting for setting, size in sizes.items() if size > 1 and setting not in settings):
        (legal,) = settings
        needs = f"{setting}={sizes[setting]} needs {CALLS[setting]}, and {CALLS[legal]} was called"
        raise UnsupportedError("configuration", f"{needs}: call the first, or write {legal}={sizes[setting]}")
    if sizes["sp_size"] > 1 and self.distributed_type != "DEEPSPEED":  # of FSDP 1 Accelerate says it itself
        text = "needs DeepSpeed: give the Trainer its JSON as deepspeed=, or Accelerator a DeepSpeedPlugin"
        raise UnsupportedError("configuration", f"sp_size={sizes['sp_size']} {text}")
    if max(sizes.values()) == 1 < self.num_processes and ALONE not in vars(self):
        vars(self)[ALONE] = True
        if self.is_main_process:
            logger.warning(
                f"burst_mcore: no sequence is shared, each of {self.num_processes} processes has its own: "
                f"give the Trainer or Accelerator a ParallelismConfig with {' or '.join(settings)}, or set "
                f"ACCELERATE_USE_PARALLELISM_CONFIG=true and PARALLELISM_CONFIG_{settings[0].upper()}"
            )
    return prepare(self, *args, **kwargs)


@around
def loss_of_whole_sequences(
    compute_loss: AnyMethod,
    self: Any,
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """Trainer.compute_loss: the model's loss is the whole sequence's, as where no ranks share one.

    For Ulysses transformers 5.23 gathers the losses of shards, and that gradient is SP times too large.
    """
    if sharing(self) == 1:
        return compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
    if self.label_smoother is not None:  # it shifts no labels of models that FSDP2 has renamed
        raise UnsupportedError("loss", "label_smoothing_factor is not supported: the loss is the model's own")
    if self.compute_loss_func is not None:  # it takes labels that are not shifted, and logits of the whole
        inputs = {name: x for name, x in inputs.items() if name != "shift_labels"}
    if num_items_in_batch is not None and self.model.training:  # without a label: no gradient
        num_items_in_batch = num_items_in_batch.clamp(min=1)
    with while_set(self.accelerator.parallelism_config, sp_backend=None):  # by which it knows Ulysses
        return compute_loss(self, model, inputs, return_outputs, num_items_in_batch)


@around
def with_logits(
    original: AnyMethod,
    self: Any,
    model: Any,
    inputs: Any,
    prediction_loss_only: bool,
    ignore_keys: Any = None,
) -> Any:
    """Trainer.prediction_step: logits, which are of whole sequences, are made where they are asked for.

    The loss is that of one process: the labels of this rank's sequences count, also right after training.
    """
    if sharing(self) == 1:
        return original(self, model, inputs, prediction_loss_only, ignore_keys)
    makes_logits = nullcontext() if prediction_loss_only else unpatched(self.model)
    loss_only = prediction_loss_only and type(self).compute_loss.__module__ == "transformers.trainer"
    local_average = while_set(self.args, average_tokens_across_devices=False)
    with local_average, makes_logits, while_set(sequence_of(self.model), loss_only=loss_only):
        return original(self, model, inputs, prediction_loss_only, ignore_keys)


@around
def inputs_of_whole_sequences(track: AnyMethod, self: Any, inputs: Any) -> None:
    """Trainer._track_num_input_tokens: of ranks that share sequences, the first counts."""
    if sharing(self) > 1 and dist.get_rank() % self.get_tp_size():
        inputs = {name: x[:0] for name, x in inputs.items() if isinstance(x, Tensor) and x.dim()}
    track(self, inputs)


@around
def operations_of_a_rank(original: AnyMethod, self: Any, inputs: Any) -> float:
    """Trainer.floating_point_ops, which the Trainer adds up over all ranks: of a batch each makes a part.

    Parameters that ZeRO-3 has sharded are counted too: the Trainer sees none of their entries.
    """
    column = self.model.main_input_name
    operations = original(self, inputs)
    if sharing(self) > 1 and column in inputs:  # GRPO's inputs are a list of prompts
        embeddings = {id(m.weight) for m in self.model.modules() if isinstance(m, nn.Embedding)}
        shards = (p for p in self.model.parameters() if not p.numel() and id(p) not in embeddings)
        operations += 6 * inputs[column].numel() * sum(getattr(p, "ds_numel", 0) for p in shards)
    return float(operations) / sharing(self)


@around
def ranks_of_a_batch(original: AnyMethod, self: Any) -> int:
    """Trainer.get_tp_size: ranks that have the same batch, and return the same loss of it."""
    return int(original(self)) * sharing(self)


@around
def labels_of_batches(original: AnyMethod, self: Any, batch_samples: Any, device: Any) -> Any:
    """Trainer._get_num_items_in_batch: of this rank's sequences, where those of all ranks are not asked for.

    The Trainer divides the number by the ranks of a batch, also where it has not added theirs.
    """
    number = original(self, batch_samples, device)
    if sharing(self) == 1 or self.args.average_tokens_across_devices or number is None:
        return number
    return number * self.get_tp_size()


@around
def reports_of_batches(gather: AnyMethod, self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    """Accelerator.gather_for_metrics: of ranks that report of one batch, the first counts.

    In the last load of a dataset no sample counts that Accelerate has repeated.
    """
    from accelerate.utils.operations import gather_object, recursively_apply

    if sharing(self) == 1:
        return gather(self, input_data, use_gather_object)
    alike = sharing(self) * int(self.parallelism_config.tp_size)

    def counted(parts: list[Any]) -> list[Any]:
        samples, each = _last_load(self, len(parts) // alike) or (None, None)
        if samples is None or each is None:
            return parts[::alike]
        return [part[: min(max(samples - i * each, 0), each)] for i, part in enumerate(parts[::alike])]

    try:
        recursively_apply(lambda x: x, input_data, error_on_other_type=True)
    except TypeError:
        use_gather_object = True
    if use_gather_object:
        return [x for part in counted(gather_object([list(input_data)])) for x in part]
    return recursively_apply(lambda x: torch.cat(counted(rows_of_ranks(x))), input_data)


@around
def without_repeated_rows(original: AnyMethod, self: Any, inputs: Any) -> Any:
    """Trainer._prepare_inputs: rows that Accelerate repeats to fill an evaluation's last batch are cut off.

    Where they are all that a replica has, its report is cut off. Rows that are no samples stay as they are.
    """
    replicas = dist.get_world_size() // self.get_tp_size() if sharing(self) > 1 else 1
    last = None if self.model.training or replicas == 1 else _last_load(self.accelerator, replicas)
    if last is not None and "labels" in inputs:
        samples, rows = last
        count = samples - dist.get_rank() // self.get_tp_size() * rows
        are_samples = all(isinstance(x, Tensor) and x.shape[:-1] == (rows,) for x in inputs.values())
        if 0 < count < rows and are_samples:
            inputs = {name: x[:count] for name, x in inputs.items()}
    return original(self, inputs)


def _last_load(accelerator: Any, replicas: int) -> tuple[int, int] | None:
    """Return (samples of the dataset in a loader's last load, samples that each replica has of the load).

    None in other loads, and where Accelerate does not know.
    """
    state = accelerator.gradient_state
    if not state.end_of_dataloader or state.remainder <= 0:
        return None
    loader = state.active_dataloader
    if hasattr(loader, "slice_fn"):  # rank 0 reads for all, and in training shares rows out evenly
        return (state.remainder, loader.batch_size or 1) if evaluates() else None
    return state.remainder, loader.total_batch_size // replicas


def sharing(trainer: Any, *settings: str) -> int:
    """Return how many ranks share a sequence under a Trainer or Accelerator, by some settings or by any."""
    parallelism = getattr(getattr(trainer, "accelerator", trainer), "parallelism_config", None)
    return max(int(getattr(parallelism, name, 1)) for name in settings or REPLACED)


def rows_of_ranks(x: Tensor) -> list[Tensor]:
    """Return the rows that every rank has of a tensor, by rank, also where the numbers of rows differ."""
    x = x.clone()[None] if x.dim() == 0 else x.contiguous()
    rows = [count for (count,) in integers_of(dist.group.WORLD, [len(x)])]  # type: ignore[arg-type]
    parts = [x.new_empty((max(rows), *x.shape[1:])) for _ in rows]
    dist.all_gather(parts, torch.cat([x, x.new_zeros((max(rows) - len(x), *x.shape[1:]))]))
    return [part[:count] for part, count in zip(parts, rows, strict=True)]
