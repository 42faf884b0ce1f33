"""In the place of DeepSpeed's Ulysses where Accelerate and the Trainer look for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from burst_mcore.deepspeed.agreement import on_all_ranks
from burst_mcore.deepspeed.cpu import prepare_cpu
from burst_mcore.deepspeed.errors import RefusedError
from burst_mcore.deepspeed.groups import unit_of
from burst_mcore.deepspeed.initialize import dealing, prepare_model
from burst_mcore.deepspeed.loader import ShardedLoader
from burst_mcore.deepspeed.refusals import refuse_config, refuse_versions
from burst_mcore.deepspeed.section import Section, section_of


class BurstSPAttentionHF:
    """Stands where UlyssesSPAttentionHF stands: `register_with_transformers` makes a model ready."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """Prepare a model, in place, as `initialize` does; DeepSpeed's configuration is Accelerate's.

        Args:
            model_name_or_path: the model; a name cannot be prepared.
            core_attn_implementation: not used, nor are lengths and micro_batch_size: any kernel, any length.
            disable_in_eval: in evaluation every rank has whole sequences, as the Trainer deals them.

        Returns:
            The mpu for deepspeed.initialize; None for one rank.

        Raises:
            RefusedError, SectionError: as `initialize`.
        """
        if sequence_parallel_size == 1:
            return None
        if isinstance(model_name_or_path, str):
            raise RefusedError("model", f"give the model itself, not its name {model_name_or_path!r}")
        section, config = on_all_ranks(lambda: _read(sequence_parallel_size))
        unit = unit_of(sequence_parallel_size)
        sequence = prepare_model(model_name_or_path, section, config, unit)
        sequence.evaluates_whole = disable_in_eval
        _dealing[id(unit.get_sequence_parallel_group())] = dealing(model_name_or_path, sequence)
        return unit


class BurstSPDataLoaderAdapter(ShardedLoader):
    """Stands where UlyssesSPDataLoaderAdapter stands: every rank loads its own, and all work on each in turn.

    Batches need no position_ids and may be of any length; labels are shifted here.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        how = _dealing.get(id(sp_group), {})
        super().__init__(dl, group=sp_group, own=True, device=device, **how)
        self.dl = dl
        self._batches: Any = None

    def __next__(self) -> dict[str, Any]:
        """The next of the epoch; the adapter that it stands for is an iterator."""
        self._batches = self._batches or iter(self)
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
            raise


def whole_loss(accelerator: Any, model: Any, inputs: dict[str, Any], return_outputs: bool, pc: Any) -> Any:
    """The Trainer's loss over a sequence group: that of the model's forward, which is the whole sequence's.

    transformers 5.23 gathers it once more, and the gradient of that is a sum, SP times too large.
    """
    outputs = model(**inputs)
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return (loss, outputs) if return_outputs else loss


def _of_the_model(compute_loss: Callable) -> Callable:
    """Trainer.compute_loss, which over a sequence group takes no loss but the model's."""

    @wraps(compute_loss)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        pc = getattr(self.accelerator, "parallelism_config", None)
        if pc is not None and pc.sp_enabled and self.model.training:
            for name, own in (
                ("label_smoothing_factor", self.label_smoother),
                ("compute_loss_func", self.compute_loss_func),
            ):
                if own is not None:
                    raise RefusedError(
                        "loss",
                        f"the Trainer's {name} is not served: the loss is the model's own",
                    )
        return compute_loss(self, *args, **kwargs)

    return checked


def replace_ulysses() -> None:
    """Make Accelerate and the Trainer use BurstAttention where they would use DeepSpeed's Ulysses.

    Call it before Accelerator or Trainer prepare a model. Twice is once; `restore_ulysses` takes it back. It
    sets a few names, which those packages look up when they need them, and changes no file.
    """
    refuse_versions()
    prepare_cpu()
    for module, name, ours in _places():
        if (module, name) not in _originals:
            _originals[module, name] = getattr(module, name)
            setattr(module, name, ours)


def restore_ulysses() -> None:
    """Take `replace_ulysses` back, for models that are prepared later."""
    while _originals:
        (module, name), own = _originals.popitem()
        setattr(module, name, own)


_originals: dict[tuple[Any, str], Any] = {}
_dealing: dict[int, dict[str, Any]] = {}
"""Of the last model that was prepared, by sequence group; groups live as long as the process."""


def _places() -> list[tuple[Any, str, Callable]]:
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    places: list[tuple[Any, str, Callable]] = [
        (ulysses_sp, "UlyssesSPAttentionHF", BurstSPAttentionHF),
        (ulysses_sp, "UlyssesSPDataLoaderAdapter", BurstSPDataLoaderAdapter),
    ]
    try:
        from transformers import trainer
    except ImportError:  # no Accelerate, no Trainer
        return places
    checked = _of_the_model(trainer.Trainer.compute_loss)
    return [
        *places,
        (trainer, "deepspeed_sp_compute_loss", whole_loss),
        (trainer.Trainer, "compute_loss", checked),
    ]


def _read(size: int) -> tuple[Section, dict[str, Any]]:
    """The section, and DeepSpeed's configuration as Accelerate is about to hand it over."""
    from accelerate.state import AcceleratorState

    refuse_versions()
    try:
        plugin = AcceleratorState().deepspeed_plugin
    except ValueError:  # nobody made an Accelerator
        raise RefusedError(
            "Accelerate",
            "replace_ulysses() serves Accelerate: make its Accelerator first. Without Accelerate use "
            "burst_mcore.deepspeed.initialize",
        ) from None
    if plugin is None:
        raise RefusedError("configuration", "Accelerate does not use DeepSpeed: give it a DeepSpeedPlugin")
    config: dict[str, Any] = plugin.deepspeed_config
    refuse_config(config)
    written = config.get("sequence_parallel_size", size)
    if written != size:
        raise RefusedError(
            "sequence_parallel_size",
            f"the JSON says {written!r}, Accelerate's ParallelismConfig has sp_size={size}",
        )
    return section_of(config), config
