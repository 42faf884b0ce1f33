"""The functions of torch.distributed between ranks that are threads, and what torch keeps of groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .clocks import CHECKER, place
from .groups import NETWORK, Communicator, Group, Message, Operation
from .streams import THREAD, current_stream, waits
from .tensors import CudaTensor, values_of


def _mine() -> Group:
    """Return the world of this thread's rank."""
    return NETWORK[-1].world[THREAD.rank or 0]


def _of(group: Any) -> Group:
    return _mine() if group is None else group


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    **options: Any,
) -> Group:
    """Make a group together: with its ranks, or with all; of a default group with a device, split off it."""
    network, rank = NETWORK[-1], THREAD.rank
    assert rank is not None
    members, backend = tuple(ranks or network.ranks), backend or "nccl"
    split = backend == "nccl" and _mine().bound_device_id is not None
    if backend == "nccl" and torch._C._current_graph_task_id() != -1:
        CHECKER.found("communicator", f"{members} was made in a backward at [{place()}]")
    everybody = members if use_local_synchronization and not split else network.ranks
    with network.lock:
        network.calls[rank, members, backend] += 1
        key = members, backend, network.calls[rank, members, backend]
        came = network.groups.setdefault(key, {})
        if not came:
            came[-1] = Communicator(network, members, f"{backend} {len(network.groups)}")  # type: ignore[assignment]
        shared: Any = came[-1]
        came[rank] = Group(shared, rank) if rank in members else None  # type: ignore[assignment]
        network.event()
    what = f"rank {rank}: the making of {backend} {members}" + (", split off the world" if split else "")
    network.until(lambda: set(everybody) <= came.keys(), what)
    return came[rank]


class P2POp:
    """As torch's."""

    def __init__(
        self, op: Any, tensor: Any, peer: Any = None, group: Any = None, tag: int = 0, group_peer: Any = None
    ):
        assert isinstance(tensor, CudaTensor), "NCCL sends memory of the device"
        if not tensor.is_contiguous():
            raise ValueError("Tensors for NCCL must be contiguous")
        self.op, self.tensor, self.group = op, tensor, _of(group)
        self.peer = self.group.communicator.members[group_peer] if peer is None else peer


def batch_isend_irecv(operations: Sequence[P2POp]) -> list[Operation]:
    group, communicator = operations[0].group, operations[0].group.communicator
    assert all(each.group is group for each in operations)
    with communicator.network.lock:
        if group.me not in communicator.started:
            CHECKER.found(
                "communicator",
                f"{communicator.kind} is started by a message at [{place()}]: not by all ranks",
            )
            communicator.started.add(group.me)
        made = Operation(group, [Message(each.op == "isend", each.tensor, each.peer) for each in operations])
        reads = [each.tensor for each in operations if each.op == "isend"]
        writes = [each.tensor for each in operations if each.op == "irecv"]
        made.launched("messages", reads, writes)
        for x in writes:
            x.values.fill_(torch.nan if x.values.is_floating_point() else 255)
        communicator.post(made)
    return [made]


def _collective(
    name: str,
    group: Any,
    reads: Sequence[Any],
    writes: Sequence[Any],
    compute: Callable[[dict[int, Operation]], None],
    data: Any,
    *,
    async_op: bool = False,
) -> Any:
    group = _of(group)
    made = Operation(group, collective=name)
    made.compute, made.data = compute, data
    with group.communicator.network.lock:
        tensors = [x for x in (*reads, *writes) if isinstance(x, CudaTensor)]
        if group.backend != "gloo" and tensors:
            group.communicator.started.add(group.me)
            made.launched(name.split()[0], reads, writes)
        group.communicator.post(made)
    if async_op:
        return made
    made.wait()
    return None


def _shape(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}"


def all_reduce(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
    largest = op == dist.ReduceOp.MAX

    def compute(heads: dict[int, Operation]) -> None:
        values = torch.stack([values_of(each.data).clone() for each in heads.values()])
        total = values.amax(0) if largest else values.sum(0)
        for each in heads.values():
            values_of(each.data).copy_(total)

    return _collective(
        f"all_reduce {_shape(tensor)}", group, [tensor], [tensor], compute, tensor, async_op=async_op
    )


def all_gather(tensors: Sequence[Any], tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    def compute(heads: dict[int, Operation]) -> None:
        values = [values_of(heads[rank].data[1]).clone() for rank in _of(group).communicator.members]
        for each in heads.values():
            for to, came in zip(each.data[0], values, strict=True):
                values_of(to).copy_(came)

    data = tensors, tensor
    return _collective(
        f"all_gather {_shape(tensor)}", group, [tensor], tensors, compute, data, async_op=async_op
    )


def reduce_scatter_tensor(
    output: Any, input: Any, op: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    def compute(heads: dict[int, Operation]) -> None:
        members = _of(group).communicator.members
        total = torch.stack([values_of(each.data[1]) for each in heads.values()]).sum(0)
        for rank, share in zip(members, total.chunk(len(members)), strict=True):
            values_of(heads[rank].data[0]).copy_(share)

    return _collective(
        f"reduce_scatter {_shape(input)}",
        group,
        [input],
        [output],
        compute,
        (output, input),
        async_op=async_op,
    )


def all_gather_object(objects: list[Any], mine: Any, group: Any = None) -> None:
    def compute(heads: dict[int, Operation]) -> None:
        values = [heads[rank].data[1] for rank in _of(group).communicator.members]
        for each in heads.values():
            each.data[0][:] = values

    _collective("all_gather_object", group, [], [], compute, (objects, mine))


def barrier(group: Any = None, device_ids: Any = None) -> None:
    group = _of(group)
    group.communicator.started.add(group.me)
    _collective("barrier", group, [], [], lambda heads: None, None)
    if group.backend != "gloo":
        waits(group.me, CHECKER.snapshot(current_stream(group.me).number), "barrier")


def gather(
    tensor: Tensor, rows: Any = None, group: Any = None, group_dst: int = 0, async_op: bool = True
) -> Any:
    """Gloo's: the root waits for all, the others for nobody."""
    return _rooted("gather", group, group_dst, tensor, rows, root_gives=False)


def broadcast(tensor: Tensor, group: Any = None, group_src: int = 0, async_op: bool = True) -> Any:
    """Gloo's: the others wait for the root, who waits for nobody."""
    return _rooted("broadcast", group, group_src, tensor, None, root_gives=True)


def _rooted(name: str, group: Group, root: int, tensor: Tensor, rows: Any, *, root_gives: bool) -> Operation:
    communicator, made = group.communicator, Operation(group, collective=name)
    network, at_root = communicator.network, communicator.members.index(group.me) == root
    with network.lock:
        network.calls[group.me, communicator.kind, name] += 1
        key = communicator.kind, name, network.calls[group.me, communicator.kind, name]
        came: dict[int, Any] = network.groups.setdefault(key, {})  # type: ignore[assignment]
        came[group.me] = made, tensor.clone(), tensor, rows
        source = communicator.members[root]
        if root_gives and source in came:
            for each, _, to, _ in came.values():
                to.copy_(came[source][1])
                each.over = True
        if not root_gives:
            made.over = not at_root
            if len(came) == len(communicator.members):
                for to, rank in zip(came[source][3], communicator.members, strict=True):
                    to.copy_(came[rank][1])
                came[source][0].over = True
        network.event()
    return made


def destroy_process_group(group: Any = None) -> None:
    _of(group).gone = True


class _World:
    """What torch keeps of groups."""

    @property
    def default_pg(self) -> Any:
        return _mine() if NETWORK else None

    @property
    def pg_map(self) -> Any:
        return _Known()


class _Known:
    def __contains__(self, group: Group) -> bool:
        return not group.gone

    def __getitem__(self, group: Group) -> Any:
        return group.backend, NETWORK[-1].store


DISTRIBUTED: dict[str, Any] = {
    "get_rank": lambda group=None: _of(group).communicator.members.index(_of(group).me),
    "get_world_size": lambda group=None: len(_of(group).communicator.members),
    "get_backend": lambda group=None: "nccl" if _of(group).backend == "world" else _of(group).backend,
    "get_backend_config": lambda group=None: "gloo" if _of(group).backend == "gloo" else "cpu:gloo,cuda:nccl",
    "get_process_group_ranks": lambda group=None: list(_of(group).communicator.members),
    "get_group_rank": lambda group, rank: group.communicator.members.index(rank),
    "get_global_rank": lambda group, rank: group.communicator.members[rank],
    "is_initialized": lambda: True,
    "is_available": lambda: True,
    "isend": "isend",
    "irecv": "irecv",
    **{
        each.__name__: each
        for each in (
            new_group, P2POp, batch_isend_irecv, all_reduce, all_gather, reduce_scatter_tensor,
            all_gather_object, barrier, gather, broadcast, destroy_process_group,
        )
    },
}  # fmt: skip
"""What stands in torch.distributed."""
WORLD = _World()
