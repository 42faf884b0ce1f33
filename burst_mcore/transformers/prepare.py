"""Prepares a causal LM of transformers before an engine or a wrapper takes it: attention, loss, hooks."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch import nn

from burst_mcore.agreement.agreement import check_equal, on_all_ranks
from burst_mcore.attention.agree import meet
from burst_mcore.attention.resolve import connect
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.checkpointing import Policy
from burst_mcore.config import BurstConfig
from burst_mcore.loss import patch_causal_lm
from burst_mcore.recurrent.bound import why_scattered
from burst_mcore.transformers.errors import UnsupportedError, refuse
from burst_mcore.transformers.models import supported
from burst_mcore.transformers.models.rotary import attach_rotary, depends_on_length
from burst_mcore.transformers.models.sequence import SequenceParallel
from burst_mcore.transformers.models.strategies import ShardedBatch, WholeBatch
from burst_mcore.transformers.models.towers import attach_towers
from burst_mcore.transformers.models.vision import shard_entering
from burst_mcore.words import digest

logger = logging.getLogger("burst_mcore")

SEQUENCE = "_burst_mcore_sequence"
"""The attribute of a prepared model that has its `SequenceParallel`."""
CHECKPOINTING = "_burst_mcore_checkpointing"
"""The attribute of a model with a policy that has its users' settings, by path of a module."""
TOWERS = ("shared", "whole")
"""How ranks make the features of images: each those of some, or each those of all."""


def prepare_model(
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None,
    config: BurstConfig,
    fused_loss: bool,
    recompute: Policy | None,
    towers: str = "shared",
) -> SequenceParallel:
    """Prepare a model, in place. A second call changes nothing more.

    Collective over all ranks; the first logs how many of them share a sequence, and whose loss it is.

    Args:
        group: the ranks that share sequences.
        fused_loss: whether the LM head is fused with its loss.
        recompute: the policy of checkpointed layers; None leaves them as the user has set them.

    Raises:
        UnsupportedError: the model cannot be supported.
        OthersError: another rank has an error, or another model.
    """
    size = 1 if group is None else group.size()
    loss, inner = on_all_ranks(lambda: _change(model, size, fused_loss, recompute))
    check_equal("model", fingerprint(model))
    topology = on_all_ranks(lambda: _connected(model, group, config))
    meet(topology, "the preparation of a model")
    outermost = supported.called_for(model, inner)
    if SEQUENCE not in vars(outermost):
        vars(outermost)[SEQUENCE] = hooks = SequenceParallel(outermost, inner)
        hooks.batches = ShardedBatch(hooks) if hooks.text is None else WholeBatch(hooks)
        if hooks.text is not None and shard_entering not in hooks.text._forward_pre_hooks.values():
            hooks.text.register_forward_pre_hook(shard_entering, with_kwargs=True)
            attach_towers(inner, hooks)
    vars(model)[SEQUENCE] = sequence = sequence_of(outermost)
    sequence.topology, sequence.config = topology, config
    sequence.group = group if size > 1 else None
    sequence.shares_towers = towers == "shared"
    limit = getattr(inner.config.get_text_config(), "max_position_embeddings", None)
    if any(map(depends_on_length, inner.modules())):
        limit = 0  # padding must not make the sequence look longer: its positions start again from 0
    sequence.sharding = {"layout": config.layout, "max_positions": limit, "types": sequence.types}
    sequence.sharding["whole"] = sequence.text is not None
    if dist.get_rank() == 0:
        groups = dist.get_world_size() // size
        logger.warning(f"burst_mcore: {size} ranks share each sequence, {groups} CP group(s); {loss}")
    return sequence


def sequence_of(model: nn.Module) -> SequenceParallel:
    """Return what `prepare_model` attached to a model. Raises UnsupportedError if it was not prepared."""
    sequence = vars(model).get(SEQUENCE)
    if not isinstance(sequence, SequenceParallel):
        raise UnsupportedError("model", "prepare it by burst_mcore.deepspeed.initialize or parallelize")
    return sequence


def _change(model: Any, size: int, fused_loss: bool, recompute: Policy | None) -> tuple[str, Any]:
    """Change a model, without communication; return (whose loss it is, the model of transformers)."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError("model", f"give the model itself, got {model!r}")
    inner = supported.use_burst(model, size, headless=not fused_loss)
    attach_rotary(inner)
    loss = "the model makes no loss"
    if supported.makes_loss(inner):
        loss = "the loss is the model's own, of logits"
        supported.check_loss(inner)
    if supported.has_fused_head(inner):
        loss = "the loss is left to TRL's fused head"
    elif fused_loss:
        loss = "the loss is fused with the LM head"
        try:
            patch_causal_lm(inner)
        except ValueError as error:
            raise UnsupportedError("loss", f"{error}. The model's own loss: {supported.OWN_LOSS}") from None
    attach_checkpointing(inner, recompute)
    return loss, inner


def _connected(model: nn.Module, group: dist.ProcessGroup | None, config: BurstConfig) -> Topology:
    """Return the ring of a group, double if its ranks are on several hosts. Collective over it."""
    topology = Topology.single() if group is None else Topology.from_group(group)
    refuse("layout", why_scattered(model, config.layout, topology.size))
    try:
        connect(topology, config)
    except ValueError as error:
        raise UnsupportedError("head_parallel", str(error)) from None
    return topology


def attach_checkpointing(model: Any, policy: Policy | None) -> None:
    """Make the layers of a model of transformers recompute by a policy instead of their own setting.

    With None the model has again what its user had set (`gradient_checkpointing_enable`), or nothing.
    Raises UnsupportedError for a model that does not support checkpointing.
    """
    for path, settings in vars(model).pop(CHECKPOINTING, {}).items():
        vars(model.get_submodule(path)).update(settings)
    if policy is None:
        return
    if not model.supports_gradient_checkpointing:
        text = f"{type(model).__name__} does not support gradient checkpointing: leave the policy at none"
        raise UnsupportedError("checkpointing", text)
    names = "gradient_checkpointing", "_gradient_checkpointing_func"
    vars(model)[CHECKPOINTING] = {
        path: {name: getattr(module, name, None) for name in names}
        for path, module in model.named_modules()
        if hasattr(module, "gradient_checkpointing")
    }
    # The newer name is not in all releases that are supported.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": policy.contexts})


def fingerprint(model: nn.Module) -> str:
    """Return words that are equal on ranks with equal models: class, number and digest of parameters."""
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
    settings: Any = getattr(model, "config", None)
    config = settings.to_json_string() if hasattr(settings, "to_json_string") else ""
    name = digest(f"{shapes}{config}")
    return f"a {type(model).__name__} of {len(shapes)} parameters (digest of shapes and config {name})"
