"""Accelerate and the Trainer with ParallelismConfig(cp_size=...): burst in the place of torch's ring.

Ranks that share a sequence are given the same batches by Accelerate. The model shards each batch in its
forward, and returns the loss, and what else is asked for, of the whole: seen from outside the ranks are like
those of tensor parallelism, which the Trainer knows how to count.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn

from burst_mcore.checkpointing import Policy
from burst_mcore.config import BurstConfig
from burst_mcore.torch.parallel import options_of, parallelize
from burst_mcore.transformers.errors import UnsupportedError
from burst_mcore.transformers.models.strategies import WholeBatch
from burst_mcore.transformers.models.supported import has_fused_head
from burst_mcore.transformers.prepare import SEQUENCE, sequence_of
from burst_mcore.transformers.trainer import REPLACED, Place, replace, sharing
from burst_mcore.wrap import around

_replaced = REPLACED["cp_size"]


def replace_context_parallel(
    *,
    config: BurstConfig | Mapping[str, Any] | None = None,
    loss: str = "fused",
    checkpointing: Policy | str = "none",
    towers: str = "shared",
) -> None:
    """Make Accelerate and the Trainer use BurstAttention where cp_size asks for torch's context parallelism.

    Call it before Accelerator or Trainer prepare a model; `python -m burst_mcore.torch SCRIPT` does it for an
    unchanged script. A second call replaces the options; `restore_context_parallel` takes it back.

    Args:
        config, loss, checkpointing, towers: as `parallelize` has them.

    Raises:
        UnsupportedError: one of them is not legal.
    """
    options_of(config, loss, checkpointing, towers)
    _options.update(config=config, loss=loss, checkpointing=checkpointing, towers=towers)
    replace("cp_size", _places())


def restore_context_parallel() -> None:
    """Undo `replace_context_parallel`, for models that are prepared later."""
    _replaced.restore()


_options: dict[str, Any] = {}


def _places() -> list[Place]:
    """Return the names that torch's context parallelism has to itself."""
    from accelerate import Accelerator
    from accelerate.utils import fsdp_utils
    from transformers import Trainer, TrainingArguments

    return [
        (Accelerator, "_prepare_cp", _preparing),
        (fsdp_utils, "_find_final_norm", _final_norm),
        (TrainingArguments, "__post_init__", _with_packing),
        (Trainer, "__init__", _with_references),
        # Batches stay whole: their model shards them.
        (Trainer, "_prepare_context_parallel_inputs", lambda _: lambda self, model, x: (nullcontext, x)),
    ]


@around
def _preparing(_: Any, self: Any, *args: Any) -> Any:
    """Accelerator._prepare_cp: the model is prepared, and no context cuts buffers."""
    for model in args:
        if isinstance(model, nn.Module):
            _prepare(model, self)
    self._cp_context = lambda **_: nullcontext()
    return args


def _prepare(model: nn.Module, accelerator: Any) -> None:
    if SEQUENCE not in vars(model):
        parallelize(model, accelerator.torch_device_mesh["cp"], **_options)
        sequence = sequence_of(model)
        sequence.batches = WholeBatch(sequence)


@around
def _final_norm(original: Any, model: Any) -> Any:
    """accelerate's _find_final_norm, in whose FSDP2 group the LM head is: also the norm within a decoder.

    TRL's fused head never calls the LM head. The forward of its group's norm makes the weight whole, and
    has the gradient reduced; without it each rank applies its own. Accelerate looks beside the decoder alone.
    """
    norm, sequence = original(model), getattr(model, SEQUENCE, None)
    if norm is not None or sequence is None:
        return norm
    norms = [x for x in model.get_decoder().children() if "Norm" in type(x).__name__]
    tied = model.get_input_embeddings().weight is getattr(model.get_output_embeddings(), "weight", None)
    if not norms and not tied and has_fused_head(sequence.model):
        reason = "has no last norm, with which FSDP2 gathers the LM head for TRL's loss: tie the embeddings"
        raise UnsupportedError("model", f"{type(model).__name__} {reason}")
    return norms[-1] if norms else None


@around
def _with_references(init: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Trainer.__init__: reference models, which TRL puts under FSDP past Accelerate, are prepared as well."""
    modules: list[tuple[str, Any]] = [*sys.modules.items()]
    for name, module in modules:
        if name.startswith("trl.trainer.") and "prepare_fsdp" in vars(module):
            _replaced.replace(module, "prepare_fsdp", _preparing_reference)
    init(self, *args, **kwargs)
    if sharing(self, "cp_size") > 1:  # SFTTrainer refuses packing then: torch's ring mixes documents of a row
        names = vars(self.args).keys() & {"packing", "eval_packing"}
        self.burst_packing = {name: getattr(self.args, name) for name in names}
        vars(self.args).update(dict.fromkeys(names, False))


@around
def _with_packing(original: Any, self: Any) -> None:
    """TrainingArguments.__post_init__: SFTTrainer, which may be imported late, is changed too."""
    if hasattr(self, "packing"):
        from trl.trainer.sft_trainer import SFTTrainer

        _replaced.replace(SFTTrainer, "__init__", _after_the_check)
    original(self)


@around
def _after_the_check(init: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """SFTTrainer.__init__: its arguments, which say nothing of packing while it checks them, say it again."""
    try:
        init(self, *args, **kwargs)
    finally:
        if hasattr(self, "burst_packing"):
            vars(self.args).update(vars(self).pop("burst_packing"))


@around
def _preparing_reference(prepare_fsdp: Any, model: Any, accelerator: Any, *args: Any) -> Any:
    if sharing(accelerator, "cp_size") > 1:
        _prepare(model, accelerator)
    return prepare_fsdp(model, accelerator, *args)
