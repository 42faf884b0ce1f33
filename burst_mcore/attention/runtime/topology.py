"""Topologies: the node and the local rank of each rank of a ring, from its process groups."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from burst_mcore.attention.runtime.communicators import Communicators, exists
from burst_mcore.attention.runtime.companions import companion, timeout_of, times
from burst_mcore.rates import Rates
from burst_mcore.words import brief

ANSWER_WITHIN = timedelta(seconds=60)
"""The time-out of ranks that build a topology together."""


@dataclass(frozen=True)
class Topology:
    """A ring of ranks: M nodes of L consecutive ranks each, and the process groups that join them.

    Build it with `single`, `from_group` or `from_groups`.
    """

    rank: int
    size: int
    intra_size: int = 0
    """Ranks of a node, L; 0 stands for all of them."""
    rates: Rates | None = None
    """The speeds of links and ranks, for the options "auto"; None: `rates.default_rates`."""
    communicators: Communicators | None = field(default=None, repr=False)
    """None for a single rank."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "intra_size", self.intra_size or self.size)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it never changes; a copy has the same process groups

    def __getstate__(self) -> dict[str, Any]:
        if self.communicators is not None:
            raise TypeError(
                f"the topology of a ring of {self.size} ranks holds process groups, which cannot be pickled: "
                f"pickle without it, and call Topology.from_group(group) where it is loaded"
            )
        return self.__dict__

    @property
    def nodes(self) -> int:
        """The number of nodes, M."""
        return self.size // self.intra_size

    def __str__(self) -> str:
        return f"{self.nodes} x {self.intra_size}"

    @classmethod
    def single(cls) -> Topology:
        """Return the topology of one rank, which has the whole sequence."""
        return cls(rank=0, size=1)

    @classmethod
    def from_group(
        cls, group: dist.ProcessGroup, intra_size: int | None = None, rates: Rates | None = None
    ) -> Topology:
        """Return the ring over `group`, in the order of its ranks, `intra_size` of them on each node.

        By default the nodes are the hosts of the ranks. The first call for a group is collective over the
        group: it makes a gloo group over the same ranks. Later calls return the same topology, so calls in a
        forward are legal; prefer to build the topology with the model.

        Raises:
            ValueError: the group is not initialised, or this rank is not in it; intra_size does not divide
                the group; the hosts hold different numbers of ranks, or ranks that are not neighbours.
            RuntimeError: a rank of the group did not call this in time.
        """
        _check_group("the group of Topology.from_group", group)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if intra_size is not None:
            _check_divides(intra_size, size)
        facts = _known(group)
        if size == 1:
            return cls(rank, size, rates=rates)
        if intra_size is None:
            facts.by_host = facts.by_host or _ranks_per_host(_ask("hosts", host_name(), group))
            intra_size = facts.by_host
        if facts.communicators is None:
            _ask("ring", "", group)  # a rank that does not come is named here; making a group would wait
            ranks = dist.get_process_group_ranks(group)
            control = companion(ranks, "gloo", timeout_of(group))
            facts.communicators = Communicators(ranks, {"whole": group}, control)
        return cls(rank, size, intra_size, rates, facts.communicators)

    @classmethod
    def from_groups(
        cls, *, intra: dist.ProcessGroup, inter: dist.ProcessGroup, rates: Rates | None = None
    ) -> Topology:
        """Return the ring over M nodes, from two groups: this rank's node, and its peers on other nodes.

        These are Megatron's hierarchical context-parallel groups (`pg_collection.hcp[0]` and `[1]`). Rank
        (m, l), place m in `inter` and l in `intra`, is rank m * L + l of the ring. The first call for a pair
        of groups is collective over all their ranks: it makes a gloo group over them. Later calls return the
        same topology.

        Raises:
            ValueError: not process groups, or groups that do not form a grid.
            RuntimeError: a rank of `inter` did not call this in time.
        """
        for name, group in (("intra", intra), ("inter", inter)):
            _check_group(f"Topology.from_groups: {name}", group)
        facts = _known(intra, inter)
        if facts.topology is None:
            facts.topology = cls._from_groups(intra, inter)
            facts.communicators = facts.topology.communicators
        return replace(facts.topology, rates=rates)

    @classmethod
    def _from_groups(cls, intra: dist.ProcessGroup, inter: dist.ProcessGroup) -> Topology:
        m, l = dist.get_rank(inter), dist.get_rank(intra)  # noqa: E741  # node m, local l
        rows = [*map(json.loads, _ask("rows", json.dumps(dist.get_process_group_ranks(intra)), inter))]
        # A rank checks one column of the grid; an error in another column must raise here as well.
        for problem in _ask("columns", _why_no_grid(rows, l, dist.get_process_group_ranks(inter)), intra):
            if problem:
                raise ValueError(problem)
        sizes, ranks = [len(row) for row in rows], [rank for row in rows for rank in row]
        if len(ranks) == 1:
            return cls.single()
        groups = {"intra": intra, "inter": inter}
        if 1 in (len(rows), sizes[0]):
            groups["whole"] = intra if len(rows) == 1 else inter
        communicators = Communicators(ranks, groups, companion(ranks, "gloo", timeout_of(intra)))
        return cls(m * sizes[0] + l, len(ranks), sizes[0], communicators=communicators)


@dataclass
class _Known:
    groups: tuple[dist.ProcessGroup, ...]
    communicators: Communicators | None = None
    by_host: int = 0
    topology: Topology | None = None


_KNOWN: dict[tuple[str, ...], _Known] = {}


def _known(*groups: dist.ProcessGroup) -> _Known:
    """Return the facts about the ring over these groups, by their names, which come again after a destroy."""
    names = tuple(group.group_name for group in groups)
    if names not in _KNOWN or _KNOWN[names].groups != groups:
        _forget_destroyed()
        _KNOWN[names] = _Known(groups)
    return _KNOWN[names]


def _forget_destroyed() -> None:
    """Close the rings of destroyed process groups: each ring has a thread and connections of its own."""
    for names, facts in list(_KNOWN.items()):
        if not all(map(exists, facts.groups)):
            del _KNOWN[names]
            if facts.communicators is not None:
                facts.communicators.close()


def _check_group(owner: str, group: object) -> None:
    if isinstance(group, dist.ProcessGroup):
        return
    hint = (
        "pass mesh.get_group(), or mesh.get_group(name) of a dimension"
        if isinstance(group, DeviceMesh)
        else "for all ranks pass torch.distributed.group.WORLD after init_process_group, for one rank alone "
        "use Topology.single()"
    )
    raise ValueError(
        f"{owner} must be a torch.distributed process group that this rank is in, got {brief(group)}; {hint}"
    )


def host_name() -> str:
    """Return a name that is unique to this host."""
    return socket.gethostname()


def _ask(topic: str, answer: str, group: dist.ProcessGroup) -> list[str]:
    """Return every rank's answer on a topic, by the store: independent of the group's messages."""
    name = f"{topic}/{times((topic, group.group_name))}/{group.group_name}"
    store = PrefixStore(f"burst_mcore/{name}", _get_default_store())
    store.set(str(dist.get_rank(group)), answer)
    keys = [str(rank) for rank in range(dist.get_world_size(group))]
    try:
        store.wait(keys, ANSWER_WITHIN)
    except RuntimeError as error:
        absent = [int(key) for key in keys if not store.check([key])]
        raise RuntimeError(
            f"ranks {absent} of the group did not build their topology within {ANSWER_WITHIN.seconds} s: "
            f"all ranks of a ring must call Topology.from_group (or from_groups)"
        ) from error
    return [store.get(key).decode() for key in keys]


def _why_no_grid(rows: Sequence[Sequence[int]], local: int, column: Sequence[int]) -> str:
    """Explain why the groups form no nodes x ranks grid, "" if they do; `column`: inter group of `local`."""
    sizes = [len(row) for row in rows]
    if len(set(sizes)) > 1:
        return f"the nodes hold different numbers of ranks: {sizes}"
    ranks = [rank for row in rows for rank in row]
    places = [row[local] for row in rows]
    if places != list(column) or len(set(ranks)) < len(ranks):
        return (
            f"intra and inter must form a grid: inter has ranks {list(column)}, place {local} of the intra "
            f"groups has {places}"
        )
    return ""


def _ranks_per_host(hosts: Sequence[str]) -> int:
    """Return L, if every host holds L consecutive ranks; `hosts` by rank."""
    counts = Counter(hosts)
    ranks_per_host = next(iter(counts.values()))
    in_order = [host for host in counts for _ in range(counts[host])]
    if set(counts.values()) != {ranks_per_host} or list(hosts) != in_order:
        numbers = ", ".join(f"{host}: {count}" for host, count in counts.items())
        even = set(counts.values()) == {ranks_per_host}
        why = "ranks that are mixed" if even else "different numbers of ranks"
        raise ValueError(
            f"the hosts hold {why} ({numbers}): a double ring needs equal runs of neighbouring ranks. Pass "
            f"Topology.from_group(group, intra_size=...), {len(hosts)} for a flat ring"
        )
    return ranks_per_host


def _check_divides(intra_size: int, size: int) -> None:
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    if type(intra_size) is not int or intra_size not in divisors:
        raise ValueError(
            f"intra_size must divide the {size} ranks of the group: one of {divisors}, got "
            f"{brief(intra_size)}"
        )
