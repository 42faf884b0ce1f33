"""Which communicator carries a message: NCCL runs the messages of a communicator one after another."""

from __future__ import annotations

from functools import lru_cache

from burst_mcore.attention.schedule.actions import Channel, Kind, Link
from burst_mcore.attention.schedule.route import Route

WHOLE = "whole"
"""The process group of all ranks, for links that may lead to any of them."""

Communicator = tuple[str, Kind, tuple[int, ...]]
"""(process group: a link or WHOLE, kind of message, the ranks that share the communicator)."""


@lru_cache(maxsize=4096)
def communicator_of(channel: Channel, rank: int, route: Route, intra_size: int) -> Communicator:
    """Return the communicator of a rank's messages on a channel.

    Args:
        channel: link and kind of the messages.
        rank: one of the ranks of `route`.
        intra_size: ranks of a node.
    """
    size = route.size
    everyone, several_nodes = tuple(range(size)), size > intra_size
    node = everyone[rank - rank % intra_size :][:intra_size]
    if channel.kind == Kind.TOTAL:
        channel = channel._replace(kind=Kind.GRADIENT)  # it follows them
    if channel.link == Link.HEADS:
        group_in_node = not route.outer and intra_size % route.heads == 0
        return Link.HEADS, Kind.DATA, node if group_in_node else everyone
    if channel.link == Link.MESH:
        return Link.MESH, Kind.DATA, everyone
    if channel.link == Link.INTER:
        return Link.INTER, channel.kind, everyone[rank % intra_size :: intra_size]
    ring_in_node = not any(intra_size % shape.span for shape in route.shapes)
    if several_nodes and not ring_in_node:
        return WHOLE, channel.kind, everyone
    return Link.INTRA, channel.kind, node
