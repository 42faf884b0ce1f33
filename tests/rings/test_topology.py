"""Where the ranks are: hosts, nodes, groups that exist; and what is refused."""

import copy
import gc
import io
import os
import pickle
import random
import time
import weakref
from datetime import timedelta
from functools import partial

import limits
import pytest
import torch
import torch.distributed as dist
from dense import dense, error, problem
from ranks import on_ranks, processes
from sharded import own_results, whole_results
from torch.distributed.device_mesh import init_device_mesh

from burst_mcore import BurstConfig, Mask, Topology, burst_attention, shard
from burst_mcore.agreement.claims import Claim
from burst_mcore.attention.agree import agreement_of
from burst_mcore.attention.checks import check_group
from burst_mcore.attention.resolve import connect
from burst_mcore.attention.runtime import topology as module
from burst_mcore.rates import Rates


def _with_hosts(rank, size, hosts):
    module.host_name = lambda: hosts[rank]
    try:
        made = Topology.from_group(dist.group.WORLD)
    except ValueError as error:
        return str(error)
    again = Topology.from_group(dist.group.WORLD)
    assert made == again and made.communicators is again.communicators
    return made.nodes, made.intra_size, made.rank


@pytest.mark.parametrize(
    ("hosts", "nodes", "intra"), [("aaaa", 1, 4), ("aabb", 2, 2), ("abcd", 4, 1), ("aaabbb", 2, 3)]
)
def test_nodes_are_the_hosts_of_the_ranks(hosts, nodes, intra):
    assert processes(len(hosts), _with_hosts, hosts) == [(nodes, intra, r) for r in range(len(hosts))]


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ("aaab", ["different numbers of ranks", "a: 3, b: 1", "intra_size"]),
        ("abab", ["ranks that are mixed", "a: 2, b: 2", "intra_size"]),
        ("aabba", ["a: 3, b: 2"]),
    ],
)
def test_uneven_or_mixed_hosts_are_refused_on_every_rank_with_the_counts(hosts, words):
    for message in processes(len(hosts), _with_hosts, hosts):
        assert all(word in message for word in words), message


def _groups(rank, size, intra):
    """Groups as Megatron's hierarchical context parallelism makes them."""
    rows = [list(range(at, at + intra)) for at in range(0, size, intra)]
    columns = [list(range(at, size, intra)) for at in range(intra)]
    return _mine(rank, rows), _mine(rank, columns)


def _mine(rank, partition, timeout=None):
    """The group of `rank` among those that all ranks make together."""
    made = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in partition]
    return next(group for ranks, group in made if rank in ranks)


def _on_groups(rank, size, intra, config):
    """On groups of which ranks are in different numbers, as one for logging, made before, brings about."""
    dist.new_group([0])
    inner, outer = _groups(rank, size, intra)
    topology = Topology.from_groups(intra=inner, inter=outer)
    assert (topology.rank, topology.size, topology.intra_size) == (rank, size, intra)
    assert Topology.from_groups(intra=inner, inter=outer) == topology
    p = problem(size, 8 * size, heads=4, kv_heads=2)
    got = whole_results(p, Mask.causal(), rank, size, config, topology)
    return max(error(g, w) for g, w in zip(got, dense(p, Mask.causal()), strict=True))


@pytest.mark.parametrize(
    ("size", "intra", "config"),
    [
        (4, 2, BurstConfig(backward="kv", ring="flat")),
        (4, 2, BurstConfig(backward="query", head_parallel=2)),
        (4, 1, BurstConfig(backward="query")),
        (6, 2, BurstConfig(backward="kv", overlap=False)),
    ],
    ids=str,
)
def test_a_double_ring_over_groups_that_exist(size, intra, config):
    assert max(processes(size, _on_groups, intra, config)) < 1e-12


@on_ranks(4)
def test_a_ring_in_another_order_than_its_ranks_holds_what_is_sharded_to_it(rank, size):
    """The ring is 0, 2, 1, 3: what the ranks tell one another, such as how much each holds, is by ring."""
    inner, outer = _mine(rank, [[0, 2], [1, 3]]), _mine(rank, [[0, 1], [2, 3]])
    topology, config = Topology.from_groups(intra=inner, inter=outer), BurstConfig()
    assert topology.rank == [0, 2, 1, 3][rank]
    p = problem(0, 27, heads=4, kv_heads=2)
    want = dense(p, Mask.causal())
    got = own_results(p, Mask.causal(), topology.rank, size, config, topology)
    mine = [shard(x, 1, rank=topology.rank, size=size, layout=config.layout) for x in want]
    assert max(error(g, w) for g, w in zip(got, mine, strict=True)) < 1e-12


@on_ranks(4)
def test_groups_meshes_and_sizes_that_make_no_topology_are_refused(rank, size):
    """What no topology is made of, on four ranks."""
    world, (inner, outer) = dist.group.WORLD, _groups(rank, size, 2)
    uneven = _mine(rank, [[0, 1, 2], [3]]), _mine(rank, [[0, 3], [1], [2]])
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    of_group, of_groups = Topology.from_group, Topology.from_groups
    attend = partial(burst_attention, *(torch.ones(1, 8, 2, 8),) * 3, mask=Mask.causal())
    rates = Rates(intra=1e9, inter=1e8, compute=1e12)
    made = Topology.from_group(world, intra_size=2, rates=rates)
    assert (made.nodes, made.intra_size, made.rates, str(made)) == (2, 2, rates, "2 x 2")
    assert Topology.from_group(mesh.get_group("cp")).size == size
    check_group(made, "cpu")  # gloo reaches host memory alone
    for make, words in (
        (partial(check_group, made, "cuda"), "cuda tensors need a process group with cuda:nccl"),
        (partial(check_group, made, "meta"), "meta tensors need a process group with cpu or cuda tensors"),
        *(
            (partial(of_group, world, intra_size=wrong), rf"one of \[1, 2, 4\], got {wrong!r}")
            for wrong in (3, 0, -2, 8, True, 2.0)
        ),
        *(
            (
                partial(connect, made, BurstConfig(head_parallel=wrong)),
                f"head_parallel={wrong} is not legal .*4 ranks",
            )
            for wrong in (3, 8)
        ),
        (partial(of_group, None), "group.WORLD"),
        (partial(of_group, mesh), r"got DeviceMesh.{,250}; pass mesh.get_group\(\)"),
        (partial(of_groups, intra=inner, inter=inner), "must form a grid"),
        (partial(of_groups, intra=uneven[0], inter=uneven[1]), r"numbers of ranks: \[3, 1\]"),
        (partial(of_groups, intra=inner, inter=None), "inter must be .*process group"),
        (partial(of_groups, intra=mesh, inter=outer), r"intra must be .*pass mesh.get_group\(\)"),
        (partial(attend, topology=mesh), r"topology must be a Topology, got DeviceMesh.*mesh.get_group\(\)"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    for legal in ({"head_parallel": 4}, {"head_parallel": "auto", "ring": "auto"}):
        connect(made, BurstConfig(**legal))


def _late(rank, size):
    wait = timedelta(seconds=3)
    inner, outer = _mine(rank, [[0, 1], [2, 3]], wait), _mine(rank, [[0, 2], [1, 3]], wait)
    topology = Topology.from_groups(intra=inner, inter=outer)
    q, k, v, _ = problem(0, 8)
    store = dist.distributed_c10d._get_default_store()
    if rank == 3:
        limits.keys(store, *(f"waited {other}" for other in range(3)))
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="has gone or did not come"):
        burst_attention(q, k, v, topology=topology, mask=Mask.causal())
    seconds = time.monotonic() - start
    store.set(f"waited {rank}", "")
    dist.barrier = lambda: None  # ranks.processes ends with one
    return seconds


def test_ranks_are_waited_for_as_long_as_their_groups_say():
    assert max(processes(4, _late)[:3]) < limits.AT_ONCE


class Holds(torch.nn.Module):
    """A layer that holds its ring, as attention layers do."""

    def __init__(self, topology):
        super().__init__()
        self.topology, self.projection = topology, torch.nn.Linear(4, 4)


def _copied(rank, size):
    topology = Topology.from_group(dist.group.WORLD)
    layer = Holds(topology)
    average = copy.deepcopy(layer)  # as for an EMA
    assert average.projection.weight is not layer.projection.weight
    for again in (average.topology, copy.copy(topology)):
        assert again == topology and again.communicators is topology.communicators
    out, same = (
        burst_attention(*(torch.ones(1, 8, 2, 8),) * 3, topology=x.topology, mask=Mask.causal())
        for x in (layer, average)
    )
    for dump in (pickle.dumps, lambda x: torch.save(x, io.BytesIO())):
        with pytest.raises(TypeError, match="topology of a ring of 2 ranks holds process groups.*from_group"):
            dump(layer)
    return torch.equal(out, same)


def test_a_module_that_holds_a_ring_is_copied_and_never_pickled():
    assert all(processes(2, _copied))
    single = Topology.single()
    assert pickle.loads(pickle.dumps(single)) == copy.deepcopy(single) == single


@pytest.mark.parametrize(("kind", "used"), [("world", True), ("group", False), ("group", True)])
@on_ranks(2)
def test_a_call_on_a_destroyed_group_says_so(rank, size, kind, used):
    group = dist.group.WORLD if kind == "world" else dist.new_group()
    topology = Topology.from_group(group)
    x = torch.ones(1, 8, 2, 8, requires_grad=True)
    out = burst_attention(x, x, x, topology=topology, mask=Mask.causal()) if used else None
    dist.barrier()
    dist.destroy_process_group(None if kind == "world" else group)
    words = "the process groups of this ring were destroyed: make new ones, and their Topology.from_group"
    with pytest.raises(RuntimeError, match=words):
        burst_attention(x, x, x, topology=topology, mask=Mask.causal())
    if used:
        with pytest.raises(RuntimeError, match=words):
            out.sum().backward()
    dist.barrier = lambda: None  # the world may be gone


@on_ranks(3)
def test_calls_that_go_ahead_meet_no_collective_of_the_model(rank, size):
    """Calls that go ahead, and collectives of the model on the same group, by ranks that keep no step."""
    group = dist.group.WORLD
    calls = agreement_of(Topology.from_group(group, intra_size=size))
    generator = random.Random(rank)
    for step in range(60):
        calls.meet(Claim({"step": str(step)}, kind="step"))
        time.sleep(generator.random() * 4e-3)
        found = [torch.zeros(5, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(found, torch.full((5,), rank + 10 * step), group=group)
        assert torch.stack(found).tolist() == [[each + 10 * step] * 5 for each in range(size)], step
    calls.settle()


def _made_anew(rank, size, kind):
    """Threads and open files in each of five rings; the user destroys the groups of each."""
    counts, topology, store = [], None, dist.distributed_c10d._get_default_store()
    for number in range(5):
        groups, before = [], topology
        if kind == "world":
            dist.destroy_process_group()
            own = dist.PrefixStore(str(number), store)
            dist.init_process_group("gloo", rank=rank, world_size=size, store=own)
            topology = Topology.from_group(dist.group.WORLD)
        elif kind == "group":
            groups = [dist.new_group(range(size))]
            topology = Topology.from_group(groups[0])
        else:
            groups = _groups(rank, size, 2)
            topology = Topology.from_groups(intra=groups[0], inter=groups[1])
        q, k, v, _ = (x.requires_grad_() for x in problem(0, 8, dtype=torch.float32))
        burst_attention(q, k, v, topology=topology, mask=Mask.causal()).sum().backward()
        gc.collect()
        counts.append([len(os.listdir(f"/proc/self/{each}")) for each in ("task", "fd")])
        store.set(f"{number} {rank}", "")  # nothing is under way anywhere after this
        limits.keys(store, *(f"{number} {each}" for each in range(size)))
        for group in groups:
            dist.destroy_process_group(group)
        if before is not None:
            with pytest.raises(RuntimeError, match=r"were destroyed: make new ones"):
                burst_attention(q, k, v, topology=before, mask=Mask.causal())
            del before
    return counts


@pytest.mark.parametrize("kind", ["group", "groups", "world"])
def test_rings_made_anew_leave_no_threads_and_no_connections(kind):
    for counts in processes(4, _made_anew, kind):
        assert counts[2:] == counts[1:2] * 3


@on_ranks(2)
def test_ranks_do_not_wait_for_one_that_closed_its_ring(rank, size):
    """Whether a group is gone as soon as its ring is closed, and not with the next collection of garbage."""
    topology = Topology.from_group(dist.group.WORLD)
    q, k, v, _ = (x.requires_grad_() for x in problem(0, 8, dtype=torch.float32))
    burst_attention(q, k, v, topology=topology, mask=Mask.causal()).sum().backward()
    gc.collect()
    gc.disable()
    world = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    module._forget_destroyed()
    dist.barrier = lambda: None
    assert world() is None and topology.communicators.destroyed
