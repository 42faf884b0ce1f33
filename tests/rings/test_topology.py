"""Where the ranks are: hosts, nodes, groups that exist; and what is refused."""

import contextlib
import copy
import gc
import io
import os
import pickle
import random
import threading
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import limits
import pytest
import torch
import torch.distributed as dist
from dense import dense, error, problem
from ranks import processes
from test_ring import _attend, _gathered
from torch.distributed.device_mesh import init_device_mesh

from burst_mcore import BurstConfig, Layout, Mask, Topology, burst_attention, shard
from burst_mcore.attention.agree import agreement_of
from burst_mcore.attention.candidates import Question, Ranks, routes, settings_of
from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.prepare import connect
from burst_mcore.attention.runtime import topology as module
from burst_mcore.attention.runtime.communicators import Communicators
from burst_mcore.attention.runtime.companions import companion
from burst_mcore.attention.runtime.executor import GroupTransport
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.rates import Rates
from burst_plan.machines import MACHINES


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


def _given_size(rank, size):
    rates = Rates(intra=1e9, inter=1e8, compute=1e12)
    made = Topology.from_group(dist.group.WORLD, intra_size=2, rates=rates)
    assert (made.nodes, made.intra_size, made.rates, str(made)) == (2, 2, rates, "2 x 2")
    for wrong in (3, 0, -2, 8, True, 2.0):
        with pytest.raises(ValueError, match=rf"one of \[1, 2, 4\], got {wrong!r}"):
            Topology.from_group(dist.group.WORLD, intra_size=wrong)
    return True


def test_the_size_of_a_node_must_divide():
    assert all(processes(4, _given_size))


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
    inner, outer = _groups(rank, size, intra)
    topology = Topology.from_groups(intra=inner, inter=outer)
    assert (topology.rank, topology.size, topology.intra_size) == (rank, size, intra)
    assert Topology.from_groups(intra=inner, inter=outer) == topology
    p = problem(size, 8 * size, heads=4, kv_heads=2)
    got = _gathered(_attend(p, Mask.causal(), size, rank, config, topology), size, "zigzag")
    return max(error(g, w) for g, w in zip(got, dense(p, Mask.causal()), strict=True))


@pytest.mark.parametrize(
    ("size", "intra", "config"),
    [
        (4, 2, BurstConfig(backward="query")),
        (4, 2, BurstConfig(backward="kv", ring="flat")),
        (4, 2, BurstConfig(backward="query", head_parallel=2)),
        (4, 4, BurstConfig(backward="kv", head_parallel=2)),
        (4, 1, BurstConfig(backward="query")),
        (6, 2, BurstConfig(backward="kv", overlap=False)),
        (4, 2, BurstConfig(head_parallel=4)),
    ],
    ids=str,
)
def test_a_double_ring_over_groups_that_exist(size, intra, config):
    assert max(processes(size, _on_groups, intra, config)) < 1e-12


def _in_another_order(rank, size):
    """The ring is 0, 2, 1, 3: what the ranks tell one another, such as how much each holds, is by ring."""
    inner, outer = _mine(rank, [[0, 2], [1, 3]]), _mine(rank, [[0, 1], [2, 3]])
    topology, config = Topology.from_groups(intra=inner, inter=outer), BurstConfig()
    assert topology.rank == [0, 2, 1, 3][rank]
    p = problem(0, 27, heads=4, kv_heads=2)
    want = dense(p, Mask.causal())
    got = _attend(p, Mask.causal(), size, topology.rank, config, topology)
    mine = [shard(x, 1, rank=topology.rank, size=size, layout=config.layout) for x in want]
    return max(error(g, w) for g, w in zip(got, mine, strict=True))


def test_a_ring_in_another_order_than_its_ranks_holds_what_is_sharded_to_it():
    assert max(processes(4, _in_another_order)) < 1e-12


def _no_grid(rank, size):
    inner, _ = _groups(rank, size, 2)
    with pytest.raises(ValueError, match="must form a grid"):
        Topology.from_groups(intra=inner, inter=inner)
    with pytest.raises(ValueError, match="inter must be a torch.distributed process group"):
        Topology.from_groups(intra=inner, inter=None)
    return True


def test_groups_that_form_no_grid_are_refused():
    assert all(processes(4, _no_grid))


def _uneven_grid(rank, size):
    rows, columns = [[0, 1, 2], [3]], [[0, 3], [1], [2]]
    inner, outer = _mine(rank, rows), _mine(rank, columns)
    with pytest.raises(ValueError, match=r"different numbers of ranks: \[3, 1\]"):
        Topology.from_groups(intra=inner, inter=outer)
    return True


def test_uneven_nodes_are_refused_with_the_counts():
    assert all(processes(4, _uneven_grid))


def _in_different_numbers_of_groups(rank, size):
    """A group that only some ranks are in, as for logging, made before ours."""
    dist.new_group([0])
    inner, outer = _groups(rank, size, 2)
    topology = Topology.from_groups(intra=inner, inter=outer)
    p = problem(1, 8 * size, heads=4, kv_heads=2)
    got = _gathered(_attend(p, Mask.causal(), size, rank, BurstConfig(ring="flat"), topology), size, "zigzag")
    return error(got.dq, dense(p, Mask.causal()).dq)


def test_ranks_may_be_in_different_numbers_of_groups():
    assert max(processes(4, _in_different_numbers_of_groups)) < 1e-12


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


def _connected(rank, size):
    topology = Topology.from_group(dist.group.WORLD, intra_size=2)
    for degree in (3, 8):
        with pytest.raises(ValueError, match=f"head_parallel={degree} is not legal with 4 ranks, 2 a node"):
            connect(topology, BurstConfig(head_parallel=degree))
    connect(topology, BurstConfig(head_parallel=4))
    connect(topology, BurstConfig(head_parallel="auto", ring="auto"))
    return True


def test_connecting_refuses_what_no_heads_can_make_legal():
    assert all(processes(4, _connected))


@pytest.mark.parametrize(("size", "words"), [(2, {}), (4, {}), (4, {"ring": "flat"})])
def test_connecting_makes_the_routes_that_a_call_searches(size, words, monkeypatch):
    connected, config = set(), BurstConfig(**words)
    monkeypatch.setattr(GroupTransport, "connect", lambda self, pass_: connected.add(self._route))
    connect(Topology(rank=0, size=size, intra_size=1), config)
    shape = {"batch": 1, "tokens": 8, "heads": 4, "kv_heads": 4, "head_dim": 8, "value_dim": 8}
    shard, ranks = Shard(**shape, dtype=torch.float32), Ranks(size, 1)
    question = Question(shard, Layout("zigzag"), Mask.causal(), 8 * size, ranks, MACHINES["H100"].rates)
    assert connected == set(routes(question, settings_of(config, question)))


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


def _destroyed(rank, size, kind, used):
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
    return True


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("kind", ["world", "group"])
def test_a_call_on_a_destroyed_group_says_so(kind, used):
    assert all(processes(2, _destroyed, kind, used))


def _meshes(rank, size):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    with pytest.raises(ValueError, match=r"got DeviceMesh.*; pass mesh.get_group\(\)") as caught:
        Topology.from_group(mesh)
    with pytest.raises(ValueError, match=r"Topology.from_groups: intra must be .*pass mesh.get_group\(\)"):
        Topology.from_groups(intra=mesh, inter=mesh.get_group())
    with pytest.raises(ValueError, match=r"topology must be a Topology, got DeviceMesh.*mesh.get_group\(\)"):
        burst_attention(*(torch.ones(1, 8, 2, 8),) * 3, topology=mesh, mask=Mask.causal())
    return len(str(caught.value)) < 300 and Topology.from_group(mesh.get_group("cp")).size == size


def test_a_device_mesh_is_asked_for_its_group():
    assert all(processes(2, _meshes))


def _collectives_between(rank, size, sub):
    """Calls that go ahead, and collectives of the model on the same group, by ranks that keep no step."""
    group = _mine(rank, [list(range(size))]) if sub else dist.group.WORLD
    calls = agreement_of(Topology.from_group(group, intra_size=size))
    generator = random.Random(rank)
    for step in range(60):
        calls.agree({"step": str(step)}, ahead=True)
        time.sleep(generator.random() * 4e-3)
        found = [torch.zeros(5, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(found, torch.full((5,), rank + 10 * step), group=group)
        assert torch.stack(found).tolist() == [[each + 10 * step] * 5 for each in range(size)], step
    calls.settle()
    return True


@pytest.mark.parametrize("sub", [False, True], ids=["world", "a group of the user"])
def test_calls_that_go_ahead_meet_no_collective_of_the_model(sub):
    assert all(processes(3, _collectives_between, sub))


def _sequence_group(rank, size):
    """DeepSpeed keeps its sequence-parallel group as a plain process group."""
    import deepspeed
    from deepspeed.ops import __compatible_ops__
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    __compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles an all-reduce that nobody uses
    deepspeed.init_distributed("gloo", verbose=False)
    parallel_state_sp.initialize_sequence_parallel(2)
    group = parallel_state_sp.get_sequence_parallel_group()
    topology = Topology.from_group(group, intra_size=1)
    p = problem(1, 32, heads=4, kv_heads=2)
    at = dist.get_rank(group)
    out = _attend(p, Mask.causal(), 2, at, BurstConfig(), topology).out
    from burst_mcore import shard

    return error(out, shard(dense(p, Mask.causal()).out, 1, rank=at, size=2))


def test_a_deepspeed_sequence_group_carries_a_ring():
    pytest.importorskip("deepspeed")
    assert max(processes(4, _sequence_group)) < 1e-12


class _Group:
    """Stands for a process group: only who is in it matters here."""

    def __init__(self, ranks):
        self.ranks = list(ranks)


def test_on_nccl_every_link_and_kind_of_message_has_a_communicator_of_its_own(monkeypatch):
    from burst_mcore.attention.runtime import communicators
    from burst_mcore.attention.runtime.executor import GroupTransport
    from burst_mcore.attention.schedule.actions import by_hop
    from burst_mcore.attention.schedule.route import Route, program

    made = []

    def companion(ranks, backend, timeout, max_ctas):
        between_nodes = len(ranks) == 2  # where a network card moves less than NVLink
        assert (backend, timeout.seconds, max_ctas) == ("nccl", 9, 4 if between_nodes else 6)
        made.append(_Group(ranks))
        return made[-1]

    monkeypatch.setattr(communicators, "companion", companion)
    monkeypatch.setattr(communicators, "timeout_of", lambda group: timedelta(seconds=9))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group.ranks)
    whole = _Group(range(8))
    topology = Topology(
        rank=5,
        size=8,
        intra_size=4,
        communicators=communicators.Communicators(range(8), {"whole": whole}, whole),
    )

    def carriers(route):
        transport = GroupTransport(topology, route, 6)
        channels = {c for name in Pass for c, _ in by_hop(program(5, route, name)) if c is not None}
        groups = {(c.link, c.kind): transport.carrier(c)[0] for c in channels}
        for (link, kind), group in list(groups.items()):
            if kind == "total":  # a gradient's last hop follows the others on their communicator
                assert groups.pop((link, kind)) is groups[link, "gradient"] is group
        return groups

    double = carriers(Route(2, 4))
    assert len(set(double.values())) == len(double) == len(made) == 4
    assert all(
        group.ranks == ([4, 5, 6, 7] if link == "intra" else [1, 5]) for (link, _), group in double.items()
    )
    flat = carriers(Route(1, 8))
    assert whole not in flat.values()  # the user's own collectives would come between
    assert carriers(Route(1, 8, direct=True)) == {("direct", what): flat["intra", what] for _, what in flat}
    assert flat["intra", "gradient"].ranks == list(range(8))
    hybrid = carriers(Route(2, 2, 2))
    heads = {group for (link, _), group in hybrid.items() if link == "heads"}
    assert len(heads) == 1 and heads.isdisjoint(double.values())
    assert {hybrid[key] for key in double} == set(double.values())  # those that exist are used again
    assert len(made) == 7


def test_threads_that_make_groups_at_once_get_their_own_names(monkeypatch):
    """Both threads, and a third that makes a group of the user's, are in torch's new_group together."""
    together, names = threading.Barrier(3, timeout=limits.SECONDS), {}
    monkeypatch.setattr(
        dist.distributed_c10d, "_process_group_name", lambda ranks, use_hashed_name: "torch's"
    )

    def new_group(ranks, **options):
        together.wait()
        names[tuple(ranks)] = dist.distributed_c10d._process_group_name(ranks, True)
        together.wait()
        return dist.ProcessGroup(0, 2)

    monkeypatch.setattr(dist, "new_group", new_group)
    makers = [
        threading.Thread(target=companion, args=(ranks, "gloo", timedelta(seconds=1)))
        for ranks in ([0, 1], [0, 2])
    ]
    for each in makers:
        each.start()
    new_group([0])
    for each in makers:
        each.join()
    assert names[0,] == "torch's" == dist.distributed_c10d._process_group_name([3], True)
    assert len(set(names.values())) == 3


def _split_off(rank, size):
    """What torch would split a companion of rank 0 off, and the device of the default group afterwards."""
    world, split = dist.distributed_c10d._get_default_group(), []

    class Backend:
        class Options:
            def __init__(self, is_high_priority_stream):
                self.config = SimpleNamespace()

        def __init__(self, store, rank, size, options):
            split.append(getattr(options, "split_from", None))
            raise InterruptedError

    parent = SimpleNamespace(supports_splitting=True, perform_nocolor_split=split.append)
    if rank:
        return None
    with (
        patch.object(dist.distributed_c10d, "ProcessGroupNCCL", Backend),
        patch.object(dist, "ProcessGroupNCCL", Backend),
        patch.object(dist.distributed_c10d, "_get_split_source", lambda group: parent),
        contextlib.suppress(InterruptedError),
    ):
        world.bound_device_id = torch.device("cuda", 0)  # as `init_process_group(device_id=...)` does
        companion([0], "nccl", timedelta(minutes=1), 8)
    return [source is parent for source in split], str(world.bound_device_id)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="a torch without NCCL")
def test_a_communicator_is_not_split_off_the_world_whose_other_ranks_do_not_come():
    assert processes(2, _split_off)[0] == ([False], "cuda:0")


class _Aborted:
    """An NCCL communicator that notes whether it was aborted."""

    aborted = False

    def abort(self):
        self.aborted = True


def test_an_abort_ends_every_communicator_of_nccl(monkeypatch):
    communicators = object.__new__(Communicators)
    groups = [_Aborted(), _Aborted()]
    communicators._made = {index: (group, {}) for index, group in enumerate(groups)}
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    communicators.abort()
    assert all(group.aborted for group in groups)


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


def _let_go(rank, size):
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
    return world() is None and topology.communicators.destroyed


def test_ranks_do_not_wait_for_one_that_closed_its_ring():
    assert processes(2, _let_go) == [True, True]


def _beside_a_newcomer(rank, size):
    """Ranks 0 and 1 make a ring; then rank 2, which was in none, takes the place of rank 1."""
    store, done = dist.distributed_c10d._get_default_store(), []
    for number, members in enumerate([(0, 1), (0, 2)]):
        dist.destroy_process_group()
        if rank in members:
            own, place = dist.PrefixStore(str(number), store), members.index(rank)
            dist.init_process_group("gloo", rank=place, world_size=2, store=own)
            topology = Topology.from_group(dist.group.WORLD)
            q, k, v, _ = (x.requires_grad_() for x in problem(0, 8, dtype=torch.float32))
            burst_attention(q, k, v, topology=topology, mask=Mask.causal()).sum().backward()
            done.append(topology.size)
            dist.barrier()
        else:
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.PrefixStore("alone", store))
    dist.barrier = lambda: None
    return done


def test_a_new_process_takes_the_place_of_one_that_is_gone():
    assert processes(3, _beside_a_newcomer) == [[2, 2], [2], [2]]
