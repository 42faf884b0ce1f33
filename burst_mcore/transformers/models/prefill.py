"""The prompt of `generate` over a CP group: sharded, attended by the ring, and its cache gathered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout, shard
from burst_mcore.loss.whole import gathered
from burst_mcore.transformers.errors import RefusedError

CACHE_NAMES = ("past_key_values", "cache")
"""Argument of a forward, and field of its output, that holds a cache: "cache" from transformers 5.24 on."""


def cache_name(arguments: Mapping[str, Any]) -> str | None:
    """Return the name under which arguments or outputs of a forward have a cache; None if they have none."""
    return next((name for name in CACHE_NAMES if arguments.get(name) is not None), None)


class Prefill:
    """One prompt of n tokens: every rank has it whole before and after, and the work between is sharded.

    Every rank ends with the keys and values of all tokens in its cache, as a forward over the whole prompt
    leaves them. Later tokens are then computed by every rank alike.
    """

    def __init__(self, topology: Topology, group: dist.ProcessGroup, config: BurstConfig, n: int) -> None:
        self.topology, self.group, self.n = topology, group, n
        self.layout = Layout.of(config.layout)
        self.padded = self.layout.padded(n, topology.size)
        """Sharded tokens; those from n on are dropped again, and causal attention never sees them."""
        self._cache: Any = None

    def begin(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of this rank's part of the forward."""
        from transformers import DynamicCache

        mask = arguments.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all())):
            raise RefusedError("attention_mask", "prompts must be of one length: padding is not supported")
        if arguments.get("input_ids") is None:
            raise RefusedError("inputs_embeds", "generate under sequence parallelism needs input_ids")
        ids = arguments["input_ids"]
        name = cache_name(arguments)
        assert name is not None
        self._cache = arguments[name]
        places = self.places(ids.device).expand(ids.shape[0], -1)
        arguments = {
            **arguments,
            "input_ids": self._sharded(torch.nn.functional.pad(ids, (0, self.padded - self.n))),
            "position_ids": self._sharded(places),
            "attention_mask": None,
            name: DynamicCache(),  # without a model's config: it keeps all that it is given
        }
        arguments.pop("cache_position", None)
        return arguments

    def places(self, device: torch.device) -> Tensor:
        """Return the positions of the sharded tokens, [tokens]; those from n on are 0."""
        places = torch.arange(self.padded, device=device)
        return places.where(places < self.n, 0)

    def finish(self, out: Any) -> Any:
        """Return the output of a forward over the whole prompt."""
        name = cache_name(out)
        assert name is not None
        for layer, own in enumerate(out[name].layers):
            keys, values = (
                gathered(x, self.group, self.layout, dim=2)[:, :, : self.n] for x in (own.keys, own.values)
            )
            self._cache.update(keys, values, layer)
        out[name] = self._cache
        return out

    def _sharded(self, x: Tensor) -> Tensor:
        return shard(x, 1, rank=self.topology.rank, size=self.topology.size, layout=self.layout)
