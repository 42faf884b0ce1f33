"""Who reduces the gradients of a model over the ranks that share a sequence, and by which factor that goes.

FSDP2 and DDP take the mean over all their ranks. Of a rank's part of a gradient, which all ranks of a
sequence add to, the mean is CP times too small: it is multiplied by CP in backward. Where FSDP2 was told to
divide by another number (`set_gradient_divide_factor`) it sums, and the factor is 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from burst_mcore.transformers.errors import UnsupportedError

WORDS = ("auto", "mean", "sum")
"""How gradients are reduced: as the wrapper does, or as the caller says who reduces them himself."""


class Reduction:
    """The factor of a model's gradients, asked for in every backward; at the first the wrapper is looked for.

    Raises:
        UnsupportedError: nothing reduces a parameter's gradient over the ranks of a sequence.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, word: str) -> None:
        self._model, self._group, self._word = model, group, word
        self._ddp: DistributedDataParallel | None = None
        self._groups: list[Any] | None = None
        if word == "auto" and group.size() > 1:
            model.register_forward_pre_hook(self._note_ddp)

    def __call__(self) -> float:
        size = self._group.size()
        if size == 1 or self._word == "sum":
            return 1.0
        if self._word == "mean" or self._reduced_by_ddp():
            return float(size)
        if self._groups is None:
            self._groups = self._reduced_by_fsdp()
        sums = {x.gradient_divide_factor not in (None, x.mesh_info.mesh.size()) for x in self._groups}
        if len(sums) > 1:
            text = "some modules under fully_shard average gradients, others sum them"
            raise UnsupportedError("reduction", f"{text}: set_gradient_divide_factor must be alike on all")
        return 1.0 if sums == {True} else float(size)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_ddp(self, *_: Any) -> None:
        active = DistributedDataParallel._get_active_ddp_module()
        trains = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if active is not None or trains:  # past DDP an evaluation or a recompute changes nothing
            self._ddp = active

    def _reduced_by_ddp(self) -> bool:
        if self._ddp is None:
            return False
        if not self._within(dist.get_process_group_ranks(self._ddp.process_group)):
            raise UnsupportedError("reduction", self._text("DDP's process group has not all ranks of cp"))
        return True

    def _reduced_by_fsdp(self) -> list[Any]:
        """Return FSDP2's groups that hold parameters of the model, which must hold all that are trained."""
        groups: list[Any] = []
        paths = {
            (id(module), name): f"{path}.{name}".lstrip(".")
            for path, module in self._model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        }
        for group in _groups():
            places = paths.keys() & {place for each in group.fsdp_params for place in _places(each)}
            if places and not self._within(group.mesh_info.mesh.mesh.flatten().tolist()):
                raise UnsupportedError("reduction", self._text("fully_shard's mesh has not all ranks of cp"))
            groups += [group] if places else []
            paths = {place: path for place, path in paths.items() if place not in places}
        if paths:
            raise UnsupportedError("reduction", self._text(f"nothing reduces {next(iter(paths.values()))}"))
        if not groups and getattr(self._model, "_is_fsdp_managed_module", False):
            raise UnsupportedError("reduction", self._text("FSDP 1 does not say over which ranks it reduces"))
        return groups

    def _within(self, ranks: list[int]) -> bool:
        return {*dist.get_process_group_ranks(self._group)} <= {*ranks}

    def _text(self, problem: str) -> str:
        return (
            f"{problem}: gradients must be reduced over the {self._group.size()} ranks of a sequence, by "
            'fully_shard over dp x cp, by DDP, or by you: parallelize(..., reduction="mean" or "sum")'
        )


def refuse_wrapped(model: nn.Module) -> None:
    """Raise UnsupportedError for a model that is under FSDP2 or DDP already."""
    if isinstance(model, DistributedDataParallel) or any(isinstance(m, FSDPModule) for m in model.modules()):
        raise UnsupportedError("order", "call parallelize(model, ...) first, then fully_shard or DDP")


def _groups() -> Iterator[Any]:
    """Yield the groups of parameters that FSDP2 reduces together; a release of torch has one a module.

    Of all modules that there are: the module that reduces a model's parameters may be one around the model.
    """
    for module in [*_module_state_mapping]:
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            yield from getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group])


def _places(parameter: Any) -> Iterator[tuple[int, str]]:
    """Yield where modules have a parameter of FSDP2's: (id of the module, name)."""
    info = parameter._module_info
    yield id(info.module), info.param_name
    for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
        yield id(module), name
