"""What ranks compare, the words for how they differ, and the integers that they exchange."""

import json
import os
import time
from datetime import timedelta
from types import SimpleNamespace

import limits
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, processes
from torch.distributed.distributed_c10d import _get_default_store

from burst_mcore.agreement import watch
from burst_mcore.agreement.agreement import Ring, agreement_over, digest_of, integers_of, word_of
from burst_mcore.agreement.claims import Claim, differences, numbers_of
from burst_mcore.agreement.watch import Meeting
from burst_mcore.latest import Latest

ALL = {"call": "all"}


def _ring(group, ranks, rank):
    return Ring(group, ranks, rank, lambda: None)


def test_the_latest_entries_are_kept_in_order():
    latest = Latest()
    for number in range(Latest.MOST + 10):
        latest[number] = -number
    assert len(latest) == Latest.MOST and next(iter(latest.items())) == (10, -10)


@pytest.fixture
def alone(monkeypatch):
    """A maker of one rank's end of a ring, over a store, without other ranks."""
    rings = []

    def made(size=0, store=None):
        monkeypatch.setattr(watch.c10d, "_get_default_store", lambda: store or dist.HashStore())
        monkeypatch.setattr(dist, "get_group_rank", lambda group, rank: rank)
        rings.append(_ring(SimpleNamespace(group_name="a ring"), range(size), 0))
        return rings[-1]

    yield made
    for each in rings:
        each.close()


def test_a_thread_that_is_late_is_waited_for(monkeypatch, alone):
    """Else it would wake in an interpreter that has ended, which aborts the process."""
    monkeypatch.setattr(watch, "LOOK_EVERY", timedelta(seconds=0.1))
    monkeypatch.setattr(Ring, "_work", lambda _: time.sleep(0.5))
    late = alone()
    late._post(Claim({}))
    late.close("it ends")
    assert not late._thread.is_alive()


def _judged(*claims, ahead=()):
    """The first numbers of ranks that bring these claims, or their error; `ahead`: ranks that go ahead."""
    words = [word_of(claim, ahead=rank in ahead) for rank, claim in enumerate(claims)]
    texts = [json.dumps([{**claim.signature, **claim.details}, claim.error]).encode() for claim in claims]
    longest = max(map(len, texts))

    def exchange(mine):
        return [[len(text)] if len(mine) == 1 else [*text.ljust(longest)] for text in texts]

    try:
        return [number for number, *_ in numbers_of(words, claims[0], exchange, range(len(claims)))]
    except ValueError as error:
        return str(error)


def test_every_field_and_error_tells_claims_apart():
    one, swapped = {"layout": "zigzag", "heads": "4"}, {"layout": "4", "heads": "zigzag"}
    assert _judged(Claim(one), Claim({"heads": "4", "layout": "zigzag"})) == [0, 0]
    others = [{"layout": "zigzag"}, one | {"heads": "5"}, one | {"more": ""}, swapped]
    assert len({digest_of(*each.items()) for each in [one, *others]}) == 5
    for other in others:
        assert _judged(Claim(one), Claim(other)).startswith("ranks make different calls: ")
    refusing = Claim({"layout": "striped"}, error="rank 3: no heads"), Claim({}, error="rank 5: ")
    assert _judged(Claim({"layout": "zigzag"}), *refusing) == "rank 3: no heads; rank 5: "
    assert _judged(refusing[0], refusing[0]) == "rank 3: no heads"


def test_differences_name_fields_values_and_ranks():
    signatures = {0: {"a": "1", "b": "2"}, 1: {"a": "1", "b": "3"}, 4: {"a": "1"}, 5: {"a": "1", "b": "3"}}
    assert differences(signatures) == "b: 2 on ranks [0], 3 on ranks [1, 5], nothing on ranks [4]"


def test_claims_give_the_numbers_of_ranks_that_differ():
    even, other = Claim({"a": "7"}, (5,)), Claim({"a": "7"}, (6,))
    assert _judged(even, even) == [5, 5]
    assert _judged(even, other) == [5, 6]
    assert _judged(even, even._replace(signature={"a": "3"})).endswith(": a: 7 on ranks [0], 3 on ranks [1]")
    named = [each._replace(details={"b": str(each.numbers)}) for each in (even, other)]
    told = _judged(*named, ahead=[0])
    assert "calls: b: (5,) on ranks [0], (6,) on ranks [1]; a rank went ahead: if lengths" in told
    assert _judged(even, other._replace(signature={"a": "3"})).startswith(
        "ranks make different calls: a: 7 on"
    )


def _exchanged(rank, size):
    """Integers over the pair of this rank, and errors over a grid of 2 x 2 by its rows, then its columns."""
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    row, column = rows[rank // 2], columns[rank % 2]
    across, within = agreement_over(column), agreement_over(row)
    with pytest.raises(ValueError) as caught:
        with across.refusing():
            with within.refusing():
                if rank == 0:
                    raise ValueError("first")
            within.meet(Claim({}))
        across.meet(Claim({}))
    with pytest.raises(ValueError, match=rf"r: {rank % 2} on ranks .*{rank % 2 + 2} on ranks"):
        across.meet(Claim({"r": str(rank)}, (rank,)))
    assert within.meet(Claim({}, (rank, 5))).lengths == (rank - rank % 2, rank - rank % 2 + 1)
    return integers_of(row, [rank, -rank, 2**62]), str(caught.value)


def test_ranks_of_a_grid_hear_of_each_other():
    for rank, (table, error) in enumerate(processes(4, _exchanged)):
        first = rank - rank % 2
        assert table == [[first, -first, 2**62], [first + 1, -first - 1, 2**62]]
        assert error == ("rank 0: first" if rank else "first")


def _numbered(rank, size):
    """Calls over the world in another order of its ranks, of which rank 1 refuses one."""
    order = [2, 0, 1]
    calls = _ring(dist.group.WORLD, order, order.index(rank))
    first = calls.meet(Claim({"call of": "all"}, (rank,)))
    with pytest.raises((ValueError, KeyError)) as caught:
        with calls.refusing():
            if rank == 1:
                raise KeyError("no")
        calls.meet(Claim({"call of": "two"}))
    with pytest.raises(ValueError, match=r"call of: other on ranks \[0, 2\], 0 on ranks \[1\]"):
        calls.meet(Claim({"call of": "0" if rank == 0 else "other"}))
    return first.number, first.lengths, calls.meet(Claim({})).number, str(caught.value)


def test_numbered_calls_go_by_the_order_of_the_ring():
    for rank, found in enumerate(processes(3, _numbered)):
        told = "'no'" if rank == 1 else "rank 2 of the ring refused this call: KeyError: 'no'"
        assert found == (1, (2, 0, 1), 4, told)


def _told_of_a_failed_pass(rank, size, ahead):
    """Rank 1 fails in a pass, ahead of rank 0 or beside it, and makes no call that would tell so."""
    calls, store = _ring(dist.group.WORLD, range(size), rank), _get_default_store()
    calls.meet(Claim(ALL, kind="all"))
    dist.barrier = lambda: None  # ranks.processes ends with one
    if rank == 1:
        for _ in range(2 * ahead):
            calls.meet(Claim(ALL, kind="all"))
        with pytest.raises(MemoryError), calls.ring():
            raise MemoryError("no memory left")
        store.set("failed", "")
        limits.keys(store, "told")
        return 0.0
    limits.keys(store, "failed")
    start = time.monotonic()
    with pytest.raises((ValueError, RuntimeError), match="rank 1 of the ring .*no memory left"):
        for _ in range(1 + ahead):
            calls.meet(Claim(ALL, kind="all" if ahead else None))
        calls.settle()
    seconds = time.monotonic() - start
    store.set("told", "")
    return seconds


@pytest.mark.parametrize("ahead", [False, True])
def test_a_pass_that_failed_is_told_to_ranks_in_other_calls(ahead):
    assert max(processes(2, _told_of_a_failed_pass, ahead)) < limits.AT_ONCE


class _LostStore:
    """A store whose process has ended."""

    def __getattr__(self, name):
        def lost(*arguments):
            raise RuntimeError("Connection reset by peer")

        return lost


@on_ranks(2)
def test_a_store_that_is_gone_hides_no_error(rank, size):
    """Rank 0 waits in vain, and then refuses a call; errors are those of the calls."""
    calls, store = _ring(dist.group.WORLD, range(size), rank), _get_default_store()
    dist.barrier = lambda: None
    if rank == 1:
        limits.keys(store, "told")
        return
    failed = _ring(dist.group.WORLD, range(size), rank)
    calls._store = failed._store = _LostStore()
    with pytest.raises(KeyError), calls.refusing():
        raise KeyError("no")
    with pytest.raises(RuntimeError, match="has gone or did not come to this call.*reset by peer"):
        calls.meet(Claim(ALL, kind="all"))
    with pytest.raises(MemoryError), failed.ring():
        raise MemoryError("no memory left")
    store.set("told", "")


def _refuses_and_ends(rank, size):
    """Rank 1 refuses a call, and its process ends without more ado, before the others come."""
    calls, store = _ring(dist.group.WORLD, range(size), rank), _get_default_store()
    dist.barrier()
    dist.barrier = lambda: None
    if rank == 1:
        with pytest.raises(KeyError), calls.refusing():
            raise KeyError("no heads")
        store.set("refused", "")
        os._exit(0)
    limits.keys(store, "refused")
    with pytest.raises(ValueError, match="rank 1 of the ring refused this call: KeyError: 'no heads'"):
        calls.meet(Claim(ALL))
    store.set(f"told {rank}", "")
    limits.keys(store, "told 0", "told 2")
    return True


@pytest.mark.filterwarnings("ignore")
def test_why_a_rank_refused_is_known_after_its_end():
    with pytest.raises(AssertionError, match=r"ranks \[1\] of 3 ended without an answer") as caught:
        processes(3, _refuses_and_ends)
    assert caught.value.args[1] == {0: True, 2: True}


class _Places(dist.HashStore):
    """A store of sync points, which goes with its process before that of rank 3 is read."""

    def check(self, keys):
        if keys[0] == "at/3":
            raise RuntimeError("connection closed")
        return super().check(keys)


def test_ranks_are_absent_that_came_to_fewer_sync_points(alone):
    calls = alone(4)
    calls._store = _Places()
    for calls._rank, (call, place) in enumerate([(4, "a forward"), (5, "cp.shard")]):
        calls._meeting = Meeting(call, Claim({}), [])
        calls._leave_place(place)
    listed = "rank 0, last at a forward; rank 2, last at no sync point; rank 3, last at no sync point"
    assert "; ".join([text for text, *_ in calls._late()]) == listed


def _absent_for_good_reason(rank, size, with_rank_0):
    """Rank 1 waits for rank 2 in a collective, of which rank 0 has begun its part, or has none."""
    control, pair = dist.new_group(), dist.new_group([1, 2])
    calls, group = _ring(control, range(size), rank), dist.group.WORLD if with_rank_0 else pair
    calls.meet(Claim({"at": "the start"}))
    note, noted = None, lambda: json.loads(calls._store.get("at/1"))
    if rank == 2:
        limits.until(lambda: noted()[2], "rank 1 did not tell where it is")
        note = noted()
        time.sleep(7)  # rank 0 looks at it twice
    if rank or with_rank_0:
        dist.all_reduce(torch.ones(()), group=group, async_op=rank == 0)
    calls.meet(Claim({"at": "the end"}))
    return note


@pytest.mark.parametrize("with_rank_0", [False, True])
def test_a_rank_that_is_absent_for_a_good_reason_is_waited_for(with_rank_0):
    """No error comes; a rank that never began the collective gets one: see the test below."""
    _, text, *_ = processes(3, _absent_for_good_reason, with_rank_0)[2]
    assert text.startswith("rank 1, last at all_reduce at ") and "test_agreement.py" in text


@on_ranks(2)
def test_a_rank_that_waits_for_one_in_a_collective_that_it_has_not_begun_is_told(rank, size):
    """Each would wait for the other until the limit of its group."""
    calls, group = _ring(dist.new_group(), range(size), rank), dist.new_group()
    calls.meet(Claim({"at": "the start"}))
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(
            RuntimeError, match="rank 1, last at all_reduce at .*, waits for rank 0, which .* end"
        ):
            calls.meet(Claim({"at": "the end"}))
        dist.all_reduce(torch.ones(()), group=group)
    else:
        dist.all_reduce(torch.ones(()), group=group)
        with pytest.raises(RuntimeError, match="rank 1, last at all_reduce"):
            calls.meet(Claim({"at": "the end"}))
    assert time.monotonic() - start < limits.AT_ONCE


@on_ranks(2)
def test_no_call_waits_for_a_ring_that_was_closed(rank, size):
    """Rank 0 closes its ring while it has calls under way and queued that rank 1 never makes."""
    calls, store = _ring(dist.group.WORLD, range(size), rank), _get_default_store()
    calls.meet(Claim(ALL, kind="all"))
    dist.barrier = lambda: None
    if rank == 1:
        limits.keys(store, "told")
        return
    for _ in range(3):
        calls.meet(Claim(ALL, kind="all"))
    calls.close()
    with pytest.raises(RuntimeError, match="the process groups of this ring were destroyed"):
        calls.settle()
    store.set("told", "")


@on_ranks(2)
def test_an_abort_that_fails_hides_no_error(rank, size):
    """Ranks differ in a call made ahead, and no wait can be ended; then rank 1 refuses a call."""

    def abort():
        raise ValueError("the group is gone")

    calls = Ring(dist.group.WORLD, range(size), rank, abort)
    calls.meet(Claim(ALL, kind="all"))
    calls.meet(Claim({"call": str(rank)}, kind="all"))
    with pytest.raises(ValueError, match="call: 0 on ranks .0., 1 on ranks .1."):
        calls.settle()
    with pytest.raises(ValueError, match="call: 0 on .*make the process group anew"):
        calls.meet(Claim(ALL, kind="all"))
