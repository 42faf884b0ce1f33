"""The forward of a Megatron model over a row with a tree: attention masks and rotary positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

from torch import Tensor, nn

from burst_mcore.mask import Mask
from burst_mcore.rollouts.columns import TREE
from burst_mcore.rollouts.trees import depths, tree_mask

ROTARY = ("RotaryEmbedding", "YarnRotaryEmbedding")
"""Classes with a forward that returns one table, by position; a user's class may return several."""


@contextmanager
def in_tree(model: nn.Module | Sequence[nn.Module], packed_seq_params: Any, tree: Tensor) -> Iterator[None]:
    """Apply a tree to a model's forwards with these packed_seq_params. Backward may follow after the context.

    packed_seq_params are of the whole row as one document, padding included; the tree is padded, too. A model
    may be a list of its chunks.

    Raises:
        ValueError: a module without support for trees; cu_seqlens that are not the row's.
    """
    places, ends = depths(tree), getattr(packed_seq_params, "cu_seqlens_q", None)
    modules = dict((model if isinstance(model, nn.Module) else nn.ModuleList(model)).named_modules())
    for name, module in modules.items():
        if not _knows_branches(name, module):
            raise ValueError(f"{name} ({type(module).__name__}) does not know the branches of a tree")
    row = None if ends is None else ends.tolist()
    if row != [0, len(places)]:
        raise ValueError(f"cu_seqlens_q must be of the whole row, [0, {len(places)}], got {row}")

    def of_depths(_: nn.Module, __: Any, table: Any) -> Any:
        if isinstance(table, tuple):  # with a factor, as YaRN has one
            return table[0][places.to(table[0].device)], *table[1:]
        return table[places.to(table.device)]

    setattr(packed_seq_params, TREE, cache(partial(tree_mask, tree)))  # of a window, for all layers
    with ExitStack() as stack:
        for module in modules.values():
            if _rotary(module) in ROTARY:
                stack.callback(module.register_forward_hook(of_depths).remove)
        yield


def mask_of_call(packed_seq_params: Any, mask: Mask, window: Mask) -> Mask:
    """Return the mask of a layer's call: `mask`, or the mask of its tree with the layer's window."""
    of_tree = getattr(packed_seq_params, TREE, None)
    return mask if of_tree is None else of_tree(window)


def _knows_branches(name: str, module: nn.Module) -> bool:
    """Return whether a module supports trees: token by token, or attention with the tree's mask."""
    config, kind, slot = getattr(module, "config", None), type(module).__name__, name.rpartition(".")[2]
    if slot == "core_attention":
        return kind == "BurstCoreAttention" and "causal" in str(module.attn_mask_type)
    attends = slot != "self_attention" or kind == "IdentityOp" or hasattr(module, "core_attention")
    mixes = slot == "mixer" or isinstance(module, nn.Conv1d) or _rotary(module) not in (None, *ROTARY)
    along_the_row = any(getattr(config, x, None) for x in ("mtp_num_layers", "multi_latent_attention"))
    return attends and not mixes and not along_the_row


def _rotary(module: nn.Module) -> str | None:
    """Return the name of the class with a rotary module's forward; None for other modules."""
    kinds = {kind.__name__: "forward" in vars(kind) for kind in type(module).__mro__}
    return next(filter(kinds.get, kinds)) if any("Rotary" in name for name in kinds) else None
