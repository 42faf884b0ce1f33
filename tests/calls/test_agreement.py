"""What ranks compare, the words for how they differ, and the integers that they exchange."""

import time
from concurrent.futures import Future
from datetime import timedelta

import limits
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, processes
from torch.distributed.distributed_c10d import _get_default_store

from burst_mcore.agreement import (
    Agreement,
    Claim,
    Latest,
    alike,
    board,
    claims_of,
    digest_of,
    disagreement,
    integers_of,
    watch,
)
from burst_mcore.agreement.board import Board
from burst_mcore.agreement.claims import AHEAD, WAITS, Word, differences, lengths_of


def test_the_latest_entries_are_kept_in_order():
    latest = Latest()
    for number in range(Latest.MOST + 10):
        latest[number] = -number
    assert len(latest) == Latest.MOST and next(iter(latest.items())) == (10, -10)


def test_a_thread_that_is_late_is_waited_for(monkeypatch):
    """Else it would wake in an interpreter that has ended, which aborts the process."""
    monkeypatch.setattr(watch, "LOOK_EVERY", timedelta(seconds=0.1))
    monkeypatch.setattr(watch.Watch, "_work", lambda _: time.sleep(0.5))
    late = watch.Watch(None, (), Board(None, 0, 0), lambda: None)
    late.meetings.put(watch.Meeting(1, Word(WAITS), {}, Future()))
    late.start()
    late.close("it ends")
    assert not late.thread.is_alive()


def test_every_field_and_error_tells_claims_apart():
    one, swapped = {"layout": "zigzag", "heads": "4"}, {"layout": "4", "heads": "zigzag"}
    alike_ = [Claim(one), Claim({"heads": "4", "layout": "zigzag"})]
    assert disagreement(dict(enumerate(alike_))) is None and alike([claim.number for claim in alike_])
    others = [{"layout": "zigzag"}, one | {"heads": "5"}, one | {"more": ""}, swapped]
    assert len({digest_of(each) for each in [one, *others]}) == 5
    for other in others:
        claims = [Claim(one), Claim(other)]
        assert not alike(claim.number for claim in claims)
        assert disagreement(dict(enumerate(claims))) is not None
    claims = {0: Claim({"layout": "zigzag"}), 3: Claim({"layout": "striped"}, "no heads"), 5: Claim({}, "")}
    assert disagreement(claims) == "rank 3: no heads; rank 5: "  # errors come before differences
    assert not alike([claims[3].number, claims[3].number])


def test_differences_name_fields_values_and_ranks():
    signatures = {0: {"a": "1", "b": "2"}, 1: {"a": "1", "b": "3"}, 4: {"a": "1"}, 5: {"a": "1", "b": "3"}}
    assert differences(signatures) == "b: 2 on ranks [0], 3 on ranks [1, 5], nothing on ranks [4]"
    assert disagreement({rank: Claim(each) for rank, each in signatures.items()}) == (
        "ranks make different calls: b: 2 on ranks [0], 3 on ranks [1, 5], nothing on ranks [4]"
    )


def test_words_on_a_call_give_the_lengths_of_ranks_that_differ():
    def verdict(*words):
        return lengths_of(words, lambda: {rank: {"a": str(word.always)} for rank, word in enumerate(words)})

    even, other = Word(WAITS, 7, 8, 5), Word(WAITS, 7, 9, 6)
    assert verdict(even, even) == (5, 5)
    assert verdict(even, other) == (5, 6)  # what must be the same of even lengths alone may differ
    for unlike in (even._replace(always=3), even._replace(if_even=9)):
        with pytest.raises(ValueError, match="make different calls"):
            verdict(even, unlike)
    with pytest.raises(ValueError, match=r"hold \[5, 6\] tokens, but a rank went ahead"):
        verdict(even._replace(how=AHEAD), other)
    with pytest.raises(ValueError, match=r"different calls: a: 7 on ranks \[0\], 3 on ranks \[1\]"):
        verdict(even, other._replace(always=3))


def _exchanged(rank, size):
    """Integers over the pair of this rank, and claims over a grid of 2 x 2 by its rows and columns."""
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    row, column = rows[rank // 2], columns[rank % 2]
    claims = claims_of([row, column], Claim({"rank": str(rank)}, "first" if rank == 0 else None))
    return integers_of(row, [rank, -rank, 2**62]), disagreement(claims), list(claims)


def test_ranks_of_a_grid_hear_of_each_other():
    for rank, (table, error, ranks) in enumerate(processes(4, _exchanged)):
        first = rank - rank % 2
        assert table == [[first, -first, 2**62], [first + 1, -first - 1, 2**62]]
        assert error == "rank 0: first" and ranks == [0, 1, 2, 3]


def _numbered(rank, size):
    """Calls over the world in another order of its ranks, of which rank 1 refuses one."""
    order = [2, 0, 1]
    calls = Agreement(dist.group.WORLD, order, order.index(rank))
    number, lengths, _ = calls.meet({"call of": "all"}, {"rank": str(rank)}, rows=rank)
    with pytest.raises(ValueError, match="rank 2 of the ring refused this call: KeyError: 'no'") as caught:
        if rank == 1:
            calls.refuse(KeyError("no"))
            raise ValueError("rank 2 of the ring refused this call: KeyError: 'no'")
        calls.meet({"call of": "two"})
    with pytest.raises(ValueError, match=r"call of: other on ranks \[0, 2\], 0 on ranks \[1\]"):
        calls.meet({"call of": "0" if rank == 0 else "other"})
    return number, lengths, calls.meet({}).number, calls.least(float(rank)), str(caught.value)[:6]


def test_numbered_calls_go_by_the_order_of_the_ring():
    assert processes(3, _numbered) == [(1, (2, 0, 1), 4, 0.0, "rank 2")] * 3


def _told_of_a_failed_pass(rank, size, ahead):
    """Rank 1 fails in a pass, ahead of rank 0 or beside it, and makes no call that would tell so."""
    calls, store = Agreement(dist.group.WORLD, range(size), rank), _get_default_store()
    calls.meet({"call": "all"}, kind="all")
    dist.barrier = lambda: None  # ranks.processes ends with one
    if rank == 1:
        for _ in range(2 * ahead):
            calls.meet({"call": "all"}, kind="all", may_go_ahead=True)
        with pytest.raises(MemoryError), calls.ring():
            raise MemoryError("no memory left")
        store.set("failed", "")
        limits.keys(store, "told")
        return 0.0
    limits.keys(store, "failed")
    start = time.monotonic()
    with pytest.raises((ValueError, RuntimeError), match="rank 1 of the ring .*no memory left"):
        for _ in range(1 + ahead):
            calls.meet({"call": "all"}, kind="all", may_go_ahead=ahead)
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
    calls, store = Agreement(dist.group.WORLD, range(size), rank), _get_default_store()
    dist.barrier = lambda: None
    if rank == 1:
        limits.keys(store, "told")
        return
    failed = Agreement(dist.group.WORLD, range(size), rank)
    calls._board.store = failed._board.store = _LostStore()
    calls.refuse(KeyError("no"))
    with pytest.raises(RuntimeError, match="has gone or did not come to this call.*reset by peer"):
        calls.meet({"call": "all"}, kind="all")
    with pytest.raises(MemoryError), failed.ring():
        raise MemoryError("no memory left")
    store.set("told", "")


def test_ranks_that_are_gone_are_waited_for_together(monkeypatch):
    monkeypatch.setattr(board, "ANSWER_WITHIN", timedelta(seconds=1))
    store, start = dist.HashStore(), time.monotonic()
    store.set("signature/0/63", '{"a": "1"}')
    words = differences(Board(store, rank=0, size=64).signatures(0, {"a": "2"}))
    assert words.startswith("a: 2 on ranks [0], nothing on ranks [1, 2, 3,")
    assert "1 on ranks [63]" in words and "answer: nothing on ranks [0, 63], none within 1 s" in words
    assert time.monotonic() - start < 30


class _Places(dist.HashStore):
    """A store of places, which goes with its process before the place of rank 3 is read."""

    def check(self, keys):
        if keys[0] == "place/3":
            raise RuntimeError("connection closed")
        return super().check(keys)


def test_ranks_are_absent_that_came_to_fewer_places():
    notes = Board(_Places(), rank=0, size=4)
    for rank, place in enumerate(([5, "cp.shard"], [4, "a forward"])):
        notes.leave(f"place/{rank}", place)
    assert notes.absent(5) == "rank 1, last at a forward; rank 2, last at no place; rank 3, last at no place"


def _absent_for_good_reason(rank, size, with_rank_0):
    """Rank 1 waits for rank 2 in a collective, of which rank 0 has begun its part, or has none."""
    control, pair = dist.new_group(), dist.new_group([1, 2])
    calls, group = Agreement(control, range(size), rank), dist.group.WORLD if with_rank_0 else pair
    calls.come_to("the start")
    if rank == 2:
        limits.until(lambda: calls._board.find("stand"), "rank 1 did not tell where it is")
        time.sleep(3)  # rank 0 looks at it thrice
    if rank or with_rank_0:
        dist.all_reduce(torch.ones(()), group=group, async_op=rank == 0)
    calls.come_to("the end")
    return calls._board.find("stand")


@pytest.mark.parametrize("with_rank_0", [False, True])
def test_a_rank_that_is_absent_for_a_good_reason_is_waited_for(with_rank_0):
    """No error comes; a rank that never began the collective gets one (test_what_is_refused)."""
    for _, rank, *_, text in processes(3, _absent_for_good_reason, with_rank_0):
        assert rank == 1 and text.startswith("all_reduce at ") and "test_agreement.py" in text


@on_ranks(2)
def test_no_call_waits_for_a_ring_that_was_closed(rank, size):
    """Rank 0 closes its ring while it has calls under way and queued that rank 1 never makes."""
    calls, store = Agreement(dist.group.WORLD, range(size), rank), _get_default_store()
    calls.meet({"call": "all"}, kind="all")
    dist.barrier = lambda: None
    if rank == 1:
        limits.keys(store, "told")
        return
    for _ in range(3):
        calls.meet({"call": "all"}, kind="all", may_go_ahead=True)
    calls.close()
    with pytest.raises(RuntimeError, match="the process groups of this ring were destroyed"):
        calls.settle()
    store.set("told", "")


@on_ranks(2)
def test_an_abort_that_fails_hides_no_error(rank, size):
    """Ranks differ in a call made ahead, and no wait can be ended; then rank 1 refuses a call."""

    def abort():
        raise ValueError("the group is gone")

    calls = Agreement(dist.group.WORLD, range(size), rank, abort)
    calls.meet({"call": "all"}, kind="all")
    calls.meet({"call": str(rank)}, kind="all", may_go_ahead=True)
    with pytest.raises(ValueError, match="call: 0 on ranks .0., 1 on ranks .1."):
        calls.settle()
    with pytest.raises(RuntimeError, match="make the process group anew"):
        calls.meet({"call": "all"}, kind="all")
