"""Which communicator carries a message: NCCL runs the messages of a communicator one after another."""

from __future__ import annotations

from functools import lru_cache

from burst_mcore.attention.schedule.actions import Channel
from burst_mcore.attention.schedule.route import Route

Communicator = tuple[str, str, tuple[int, ...]]
"""(link, kind of message, the ranks that share the communicator)."""


@lru_cache(maxsize=4096)
def communicator_of(channel: Channel, rank: int, route: Route, intra_size: int) -> Communicator:
    """The communicator of a rank's messages on a channel.

    Args:
        channel: link and kind of the messages.
        rank: one of the ranks of `route`.
        intra_size: ranks of a node.
    """
    size = route.size
    everyone, several_nodes = tuple(range(size)), size > intra_size
    node = everyone[rank - rank % intra_size :][:intra_size]
    if channel.link == "heads":
        return "heads", "data", node if route.heads <= intra_size else everyone
    if channel.link == "inter":
        return "inter", channel.what, everyone[rank % intra_size :: intra_size]
    flat_across = route.nodes == 1 and several_nodes
    if several_nodes and (channel.link == "direct" or flat_across):
        return "whole", channel.what, everyone
    return "intra", channel.what, node
