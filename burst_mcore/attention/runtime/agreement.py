"""The agreement of a ring: the instance of `burst_mcore.agreement` that calls over a topology use."""

from __future__ import annotations

from burst_mcore.agreement import Agreement, Signature
from burst_mcore.attention.runtime.topology import Topology

__all__ = ["Agreement", "Signature", "agreement"]

_BY_GROUP: dict[str, Agreement] = {}
"""By the name of the control group."""


def agreement(topology: Topology) -> Agreement | None:
    """Return the agreement of a ring, made at its first use; None for one rank, which agrees with nobody."""
    communicators = topology.communicators
    if communicators is None:
        return None
    group = communicators.control
    known = _BY_GROUP.get(group.group_name)
    if known is None or known.group is not group:  # names come again after destroy_process_group
        if known is not None:
            known.close()
        known = Agreement(group, communicators.ranks, topology.rank, communicators.abort)
        _BY_GROUP[group.group_name] = known
    return known
