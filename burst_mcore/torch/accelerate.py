"""Accelerate and the Trainer with ParallelismConfig(cp_size=...): burst in the place of torch's ring.

Ranks that share a sequence are given the same batches by Accelerate. The model deals each batch in its
forward, and returns the loss, and what else is asked for, of the whole: seen from outside the ranks are like
those of tensor parallelism, which the Trainer knows how to count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

from torch import nn

from burst_mcore.loss import unpatched
from burst_mcore.torch.parallel import parallelize
from burst_mcore.transformers.errors import RefusedError
from burst_mcore.transformers.prepare import SEQUENCE, sequence_of

_originals: dict[tuple[Any, str], Any] = {}


def replace_context_parallel(**options: Any) -> None:
    """Make Accelerate and the Trainer use BurstAttention where cp_size asks for torch's context parallelism.

    Call it before Accelerator or Trainer prepare a model; `python -m burst_mcore.torch SCRIPT` does it for an
    unchanged script. A second call replaces the options; `restore_context_parallel` takes it back.

    Args:
        options: of `parallelize`: config, loss, checkpointing.
    """
    _options.clear()
    _options.update(options)
    for owner, name, replacing in _places():
        if (owner, name) not in _originals:
            own = _originals[owner, name] = getattr(owner, name)
            setattr(owner, name, replacing(own))


def restore_context_parallel() -> None:
    """Undo `replace_context_parallel`, for models that are prepared later."""
    while _originals:
        (owner, name), own = _originals.popitem()
        setattr(owner, name, own)


_options: dict[str, Any] = {}


def _places() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return (where, which name, its own value -> ours)."""
    from accelerate import Accelerator
    from transformers import Trainer

    return [
        (Accelerator, "_prepare_cp", _preparing),
        (Accelerator, "gather_for_metrics", _of_one_rank_each),
        (Trainer, "__init__", _with_references),
        (Trainer, "_prepare_context_parallel_inputs", _whole_inputs),
        (Trainer, "_get_num_items_in_batch", _labels),
        (Trainer, "get_tp_size", _ranks_of_a_batch),
        (Trainer, "get_cp_size", lambda _: lambda self: 1),
        (Trainer, "prediction_step", _with_logits),
    ]


def _cp_size(accelerator: Any) -> int:
    parallelism = getattr(accelerator, "parallelism_config", None)
    return 1 if parallelism is None else int(parallelism.cp_size)


def _preparing(own: Any) -> Any:
    """Accelerator._prepare_cp: the model is prepared, and no context cuts buffers."""

    @wraps(own)
    def _prepare_cp(self: Any, *args: Any) -> Any:
        for model in args:
            if isinstance(model, nn.Module):
                _prepare(model, self)
        self._cp_context = lambda **_: nullcontext()
        return args

    return _prepare_cp


def _prepare(model: nn.Module, accelerator: Any) -> None:
    if SEQUENCE not in vars(model):
        parallelize(model, accelerator.torch_device_mesh["cp"], **_options)
        sequence_of(model).deals = True


def _with_references(own: Any) -> Any:
    """Trainer.__init__: reference models, which TRL puts under FSDP past Accelerate, are prepared as well."""

    def preparing(prepare_fsdp: Any) -> Any:
        @wraps(prepare_fsdp)
        def prepared(model: Any, accelerator: Any, *args: Any) -> Any:
            if _cp_size(accelerator) > 1:
                _prepare(model, accelerator)
            return prepare_fsdp(model, accelerator, *args)

        return prepared

    @wraps(own)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # the method that it stands for
        modules: list[tuple[str, Any]] = [*sys.modules.items()]
        for name, module in modules:
            if name.startswith("trl.trainer.") and "prepare_fsdp" in vars(module):
                if (module, "prepare_fsdp") not in _originals:
                    fsdp = _originals[module, "prepare_fsdp"] = module.prepare_fsdp
                    module.prepare_fsdp = preparing(fsdp)
        own(self, *args, **kwargs)

    return __init__


def _of_one_rank_each(own: Any) -> Any:
    """Accelerator.gather_for_metrics: of ranks that report of one batch, the first counts."""

    @wraps(own)
    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        size = _cp_size(self)
        if size == 1:
            return own(self, input_data, use_gather_object)
        from accelerate.utils.operations import recursively_apply

        alike = size * int(self.parallelism_config.tp_size)
        try:
            recursively_apply(lambda each: each, input_data, error_on_other_type=True)
        except TypeError:
            raise RefusedError("gather_for_metrics", "under cp_size only tensors are gathered") from None

        def leaders(each: Any) -> Any:
            rows = 1 if each.dim() == 0 else len(each)
            every = self.gather(each).unflatten(0, (-1, alike, rows))
            return every[:, 0].flatten(0, 1)

        gathered = recursively_apply(leaders, input_data)
        state = self.gradient_state
        if state.end_of_dataloader and state.remainder > 0:
            return recursively_apply(lambda each: each[: state.remainder], gathered)
        return gathered

    return gather_for_metrics


def _whole_inputs(own: Any) -> Any:
    """Trainer._prepare_context_parallel_inputs: batches stay whole; their model deals them."""

    @wraps(own)
    def _prepare_context_parallel_inputs(self: Any, model: Any, inputs: Any) -> tuple[Any, Any]:
        if _cp_size(self.accelerator) > 1:
            return nullcontext, inputs
        context_and_inputs: tuple[Any, Any] = own(self, model, inputs)
        return context_and_inputs

    return _prepare_context_parallel_inputs


def _ranks_of_a_batch(own: Any) -> Any:
    """Trainer.get_tp_size: ranks that have the same batch, and return the same loss of it."""

    @wraps(own)
    def get_tp_size(self: Any) -> int:
        return int(own(self)) * _cp_size(self.accelerator)

    return get_tp_size


def _labels(own: Any) -> Any:
    """Trainer._get_num_items_in_batch: of this rank's sequences, where those of all ranks are not asked for.

    That number is not divided by the ranks of a batch, and an evaluation's loss is that of one process.
    """

    @wraps(own)
    def _get_num_items_in_batch(self: Any, batches: Any, device: Any) -> Any:
        everywhere = self.args.average_tokens_across_devices
        if _cp_size(self.accelerator) == 1 or (everywhere and self.model.training):
            return own(self, batches, device)
        self.args.average_tokens_across_devices = False
        try:
            number = own(self, batches, device)
        finally:
            self.args.average_tokens_across_devices = everywhere
        # Where losses are scaled by the replicas, an evaluation's must not be.
        times = self.accelerator.num_processes if everywhere else self.get_tp_size()
        return None if number is None else number * times

    return _get_num_items_in_batch


def _with_logits(own: Any) -> Any:
    """Trainer.prediction_step: where predictions are asked for, the model makes its logits."""

    @wraps(own)
    def prediction_step(
        self: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        asks = _cp_size(self.accelerator) > 1 and not prediction_loss_only
        with unpatched(self.model) if asks else nullcontext():
            return own(self, model, inputs, prediction_loss_only, ignore_keys=ignore_keys)

    return prediction_step
