"""Two queues in order, walked while requests move between them."""

import pytest

from gdn_jax.serving.core.blocks import HashChain
from gdn_jax.serving.core.errors import DuplicateRequestError, InvariantError
from gdn_jax.serving.core.queues import Queues
from gdn_jax.serving.core.request import Request, RequestId, Status


def make_request(queues: Queues, name: str, priority: int = 0) -> Request:
    request = Request(
        request_id=RequestId(name),
        tokens=[1],
        num_prompt=1,
        max_tokens=1,
        seed=0,
        priority=priority,
        arrival=queues.next_arrival(RequestId(name)),
        turn_borders=(),
        chain=HashChain(b"", 4),
    )
    queues.add(request)
    return request


def make_queues(waiting: str, running: str = "") -> Queues:
    """Return queues whose requests are named by letters, and ordered by them."""
    queues = Queues()
    for name in sorted(waiting + running):
        request = make_request(queues, name)
        if name in running:
            queues.start(request)
    return queues


def names(requests) -> str:
    return "".join(request.request_id for request in requests)


def test_a_request_is_waiting_then_running_then_gone() -> None:
    queues = make_queues("a")
    request = queues.get(RequestId("a"))
    assert (request.status, queues.num_waiting, queues.num_running) == (Status.WAITING, 1, 0)
    queues.start(request)
    assert (request.status, queues.num_waiting, queues.num_running) == (Status.RUNNING, 0, 1)
    queues.stop(request)
    assert (request.status, names(queues.live())) == (Status.WAITING, "a")
    queues.drop(request)
    assert (request.status, queues.get(RequestId("a")), queues.live()) == (Status.GONE, None, [])
    queues.check()


def test_an_id_is_used_once_at_a_time() -> None:
    queues = make_queues("a")
    with pytest.raises(DuplicateRequestError, match="'a' is in use"):
        queues.next_arrival(RequestId("a"))
    queues.drop(queues.get(RequestId("a")))
    assert make_request(queues, "a").arrival == 2


def test_running_requests_stand_in_order_and_the_last_gives_way_first() -> None:
    queues = make_queues("", "bd")
    late = make_request(queues, "early", priority=-1)
    queues.start(late)
    assert [request.request_id for request in queues.running()] == ["early", "b", "d"]
    assert queues.last_running().request_id == "d"


def test_a_walk_merges_both_queues_in_order() -> None:
    assert names(make_queues("bde", "acf").walk(lambda: True)) == "abcdef"
    assert names(make_queues("bde", "acf").walk(lambda: False)) == "acf"
    assert names(make_queues("", "").walk(lambda: True)) == ""


def test_a_walk_goes_on_with_those_that_run_once_nobody_is_admitted_any_more() -> None:
    queues, admitting = make_queues("bde", "acf"), [True]
    seen = ""
    for request in queues.walk(lambda: admitting[0]):
        seen += request.request_id
        admitting[0] &= request.request_id != "b"
    assert seen == "abcf"


def test_whoever_starts_during_a_walk_is_seen_once() -> None:
    queues = make_queues("bde", "acf")
    seen = ""
    for request in queues.walk(lambda: True):
        seen += request.request_id
        if request.status is Status.WAITING:
            queues.start(request)
    assert (seen, queues.num_waiting, names(queues.running())) == ("abcdef", 0, "abcdef")


def test_whoever_gives_way_during_a_walk_has_no_further_turn_in_it() -> None:
    queues, admitting = make_queues("", "abcd"), [True]
    seen = ""
    for request in queues.walk(lambda: admitting[0]):
        seen += request.request_id
        if request.request_id == "b":
            admitting[0] = False
            queues.stop(queues.last_running())
            queues.stop(queues.last_running())
    assert seen == "ab"
    seen = ""
    for request in make_queues("", "abc").walk(lambda: False):
        seen += request.request_id
    assert seen == "abc"


def test_one_that_gives_way_itself_is_not_seen_again() -> None:
    queues = make_queues("", "ab")
    seen = ""
    for request in queues.walk(lambda: False):
        seen += request.request_id
        if request.request_id == "b":
            queues.stop(request)
    assert seen == "ab"


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda queues: queues._waiting.pop(), "in no queue or in two"),
        (lambda queues: queues._running.append(queues._waiting[0]), "in no queue or in two"),
        (lambda queues: queues._running.append(queues._waiting.pop()), "status is not that of its queue"),
        (lambda queues: queues._waiting.reverse(), "out of order"),
        (lambda queues: queues._running.reverse(), "out of order"),
    ],
)
def test_the_check_sees_a_request_in_the_wrong_place(break_it, message: str) -> None:
    queues = make_queues("bd", "ac")
    queues.check()
    break_it(queues)
    with pytest.raises(InvariantError, match=message):
        queues.check()
