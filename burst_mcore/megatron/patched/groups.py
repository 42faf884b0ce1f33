"""Context-parallel groups that are rebound after a model was built.

Megatron-Bridge evaluates at another context-parallel size than it trains at: it binds other groups to the
modules of a built model. Core attention follows by `Rebindable`. Layer, model and rotary positions must use
the same group: wrappers of Megatron's forwards check this. The rotary embedding stores its group, and
Megatron's configuration the size; both are updated here.

The wrappers can go when Megatron has one place for the group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from burst_mcore.megatron.layouts import forget_rotary_positions, language_models, refuse_unknown_modules
from burst_mcore.wrap import around, wrap

_of_model: Any = None
"""The context-parallel group of the running language model."""


class Rebindable(MegatronModule):  # type: ignore[misc]  # Megatron is untyped
    """A core attention with a rebindable context-parallel group; rebinding is collective over the group.

    `use_group(group, cp_comm_type, levels=None)` of the subclass attends over a group, None for this rank
    alone; levels are the hierarchical groups, if any. `is_alone` is whether the configured context-parallel
    size is 1 though the group is larger (vision towers).
    """

    @property
    def cp_group(self) -> Any:
        return self._cp_group

    @cp_group.setter
    def cp_group(self, group: Any) -> None:
        if group is not self._cp_group:
            self.use_group(group, self.cp_comm_type)

    @property
    def pg_collection(self) -> Any:
        """Megatron's process groups of the layer; `cp` and `hcp` are used."""
        return self._pg_collection

    @pg_collection.setter
    def pg_collection(self, groups: Any) -> None:
        if groups.cp is not self._cp_group:
            self.use_group(groups.cp, self.cp_comm_type, getattr(groups, "hcp", None))
        self._pg_collection = groups

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: Any = None
    ) -> None:
        """Attend over another group from now on, like TransformerEngine's method of this name.

        Args:
            cp_group: None for this rank alone.
            cp_global_ranks: of the group, in its order; checked if given.
            cp_stream: unused: messages have their own streams.
            cp_comm_type: as --cp-comm-type; None: unchanged.

        Raises:
            ValueError: ranks other than the group's, a list of groups, or as the constructor.
        """
        if isinstance(cp_group, list | tuple):
            raise ValueError(
                f"layer {self.layer_number}: burst attention takes one context-parallel group, got "
                f"{len(cp_group)}: for hierarchical groups set pg_collection, with cp and hcp"
            )
        if cp_group is not None and cp_global_ranks is not None and [*cp_global_ranks] != _ranks(cp_group):
            raise ValueError(
                f"layer {self.layer_number}: cp_global_ranks are {[*cp_global_ranks]}, but the group has "
                f"ranks {_ranks(cp_group)}"
            )
        self.use_group(cp_group, cp_comm_type or self.cp_comm_type)


def follow_groups() -> None:
    """Wrap Megatron's attention modules and language models to use the groups that they are bound to."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.ssm.mamba_mixer import MambaMixer

    for mixer in (MambaMixer, GatedDeltaNet):
        wrap(mixer, "forward", _of_the_group_of_its_constructor)
    for module in (Attention, MultiLatentAttention):
        wrap(module, "forward", _of_one_group)
    for model in language_models():
        wrap(model, "forward", _of_its_group)
        if hasattr(model, "build_schedule_plan"):
            wrap(model, "build_schedule_plan", _of_the_group_as_built)


_signature = cache(inspect.signature)


def has_cache(forward: Callable, *args: Any, **kwargs: Any) -> bool:
    """Return whether a call of a layer's function has an inference context."""
    arguments = _signature(forward).bind(*args, **kwargs).arguments
    return any(arguments.get(name) is not None for name in ("inference_context", "inference_params"))


@around
def _of_one_group(forward: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the forward of an attention module: core attention and model must have the same group."""
    core, group = getattr(self, "core_attention", None), _group_of(self)
    if not isinstance(core, Rebindable):
        return forward(self, *args, **kwargs)
    if core.topology.size > 1 and has_cache(forward, self, *args, **kwargs):
        raise ValueError(  # core attention sees only keys: a prompt's keys look like a shard
            f"layer {core.layer_number}: burst attention does not generate with a cache under context "
            f"parallelism: generate at --context-parallel-size 1"
        )
    is_tower = group is not None and core.is_alone and core.cp_group is None and group.size() > 1
    if group is None or (is_tower and _of_model is None):
        return forward(self, *args, **kwargs)
    if is_tower:
        raise ValueError(
            f"layer {core.layer_number}: the model's context_parallel_size is 1, but its context-parallel "
            f"process group has {group.size()} ranks"
        )
    for name, its_group in (("core attention", core.cp_group), ("model", _of_model or group)):
        if its_group is not group and _ranks(its_group) != _ranks(group):
            raise ValueError(
                f"layer {core.layer_number}: the context-parallel group of the layer has ranks "
                f"{_ranks(group)}, that of its {name} {_ranks(its_group)}: bind one group to all modules "
                f"(pg_collection, and set_context_parallel_group of core attention)"
            )
    with _going_by(self, group):
        return forward(self, *args, **kwargs)


@around
def _of_its_group(forward: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the forward of a language model: with burst attention, positions use the model's group."""
    global _of_model
    group, outer = _group_of(self), _of_model
    is_new = group is not None and _is_bound_anew(self, group)
    if is_new:
        refuse_unknown_modules(self, group.size())
    _of_model = group
    try:
        with _going_by(self, group) if is_new else nullcontext():
            return forward(self, *args, **kwargs)
    finally:
        _of_model = outer


@around
def _of_the_group_as_built(build: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the schedule that overlaps experts' messages: it computes positions outside of forward.

    So a rebound group, which these positions would not follow, raises.
    """
    group = _group_of(self)
    if group is not None and _is_bound_anew(self, group):
        raise ValueError(
            f"build_schedule_plan (--overlap-moe-expert-parallel-comm) of a model whose context-parallel "
            f"group was bound anew, to ranks {_ranks(group)}: call the model itself, or keep its group"
        )
    return build(self, *args, **kwargs)


def _is_bound_anew(model: Any, group: Any) -> bool:
    """Return whether a model's group, with burst attention, differs from its positions' or config's."""
    rope = getattr(model, "rotary_pos_emb", None)
    is_as_built = getattr(rope, "cp_group", group) is group
    if is_as_built and model.config.context_parallel_size == group.size():
        return False
    return any(isinstance(module, Rebindable) for module in model.modules())


@around
def _of_the_group_of_its_constructor(
    forward: Callable, self: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any
) -> Any:
    """Wrap the forward of Mamba and gated delta net, which keep the group of their constructor.

    Mamba separates documents by `seq_idx`, which Megatron-Core from 0.17 on derives only from `total_tokens`.
    """
    owner, params = getattr(self, "cp", None) or self, packed_seq_params
    group = getattr(owner, "cp_group", None) or _group_of(self)
    size = getattr(owner, "cp_size", group.size())
    of_call = getattr(params, "local_cp_size", None) is not None
    target = params.cp_group if of_call else _of_model or group
    if _ranks(target) != _ranks(group) or len(_ranks(target)) != size:
        raise ValueError(
            f"{type(self).__name__} keeps the context-parallel group of its constructor, of size {size}, but "
            f"the {'call' if of_call else 'model'} has ranks {_ranks(target)}: keep the group of such a model"
        )
    is_packed = getattr(params, "qkv_format", None) == "thd"
    if is_packed and owner is not self and getattr(params, "seq_idx", params) is None:
        raise ValueError(
            f"{type(self).__name__} tells packed documents apart by seq_idx, which packed_seq_params lack: "
            "give PackedSeqParams their total_tokens"
        )
    return forward(self, *args, packed_seq_params=packed_seq_params, **kwargs)


@contextmanager
def _going_by(owner: Any, group: Any) -> Iterator[None]:
    """Set the group of rotary positions and, within the context, the size in a module's configuration."""
    rope: Any = getattr(owner, "rotary_pos_emb", None)
    config = owner.config
    if getattr(rope, "cp_group", group) is not group:
        rope.cp_group, rope.max_seq_len_cached = group, 0  # YaRN keeps cosines of that length
        forget_rotary_positions()
    before, config.context_parallel_size = config.context_parallel_size, group.size()
    try:
        yield
    finally:
        config.context_parallel_size = before


def _group_of(module: Any) -> Any:
    return getattr(getattr(module, "pg_collection", None), "cp", None)


def _ranks(group: Any) -> list[int]:
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
