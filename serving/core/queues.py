"""Which requests are live, and which of them hold something: two queues in (priority, arrival) order.

Queues moves requests between them and knows nothing of what a request holds; Scheduler decides when.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from itertools import pairwise

from gdn_jax.serving.core.errors import DuplicateRequestError, InvariantError
from gdn_jax.serving.core.request import Request, RequestId, Status


class Queues:
    """Owns the live requests. Each stands in exactly one queue: waiting, or running (running and closing)."""

    def __init__(self) -> None:
        """Start without requests."""
        self._live: dict[RequestId, Request] = {}
        self._waiting: list[Request] = []  # both sorted by order
        self._running: list[Request] = []
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a lane."""
        return len(self._running)

    def get(self, request_id: RequestId) -> Request | None:
        """Return a live request, if there is one of that id."""
        return self._live.get(request_id)

    def live(self) -> list[Request]:
        """Return all live requests, as they came."""
        return list(self._live.values())

    def running(self) -> list[Request]:
        """Return a copy of the queue of requests that hold something."""
        return list(self._running)

    def last_running(self) -> Request:
        """Return who gives way first."""
        return self._running[-1]

    def next_arrival(self, request_id: RequestId) -> int:
        """Return the arrival number of a request that is about to be added.

        Raises:
            DuplicateRequestError: the id is in use.
        """
        if request_id in self._live:
            raise DuplicateRequestError(f"request id {request_id!r} is in use; choose another")
        self._num_arrived += 1
        return self._num_arrived

    def add(self, request: Request) -> None:
        """Let a new request wait at its place in the order."""
        self._live[request.request_id] = request
        insort(self._waiting, request, key=_order)

    def start(self, request: Request) -> None:
        """Move a waiting request to those that run."""
        self._waiting.remove(request)
        request.status = Status.RUNNING
        insort(self._running, request, key=_order)

    def stop(self, request: Request) -> None:
        """Let a running request wait again, at its place in the order."""
        self._running.remove(request)
        request.status = Status.WAITING
        insort(self._waiting, request, key=_order)

    def drop(self, request: Request) -> None:
        """Forget a request."""
        (self._waiting if request.status is Status.WAITING else self._running).remove(request)
        request.status = Status.GONE
        del self._live[request.request_id]

    def walk(self, admitting: Callable[[], bool]) -> Iterator[Request]:
        """Walk running requests, and waiting ones for as long as `admitting` says, in order.

        The caller may move them between the queues meanwhile: positions shift, orders do not. A request is seen at most
        once; one that stops running during the walk is not seen again unless somebody goes on admitting.
        """
        waiting, running = self._waiting, self._running
        next_waiting = next_running = 0
        last: tuple[int, int] | None = None
        while True:
            next_running = _skip(running, next_running, last)
            request = running[next_running] if next_running < len(running) else None
            if admitting():
                next_waiting = _skip(waiting, next_waiting, last)
                if next_waiting < len(waiting) and (request is None or waiting[next_waiting].order < request.order):
                    request = waiting[next_waiting]
            if request is None:
                return
            last = request.order
            yield request

    def check(self) -> None:
        """Raise InvariantError unless each live request stands in exactly one queue, and both are in order."""
        queued = [*self._waiting, *self._running]
        if len(queued) != len(self._live) or {id(one) for one in queued} != {id(one) for one in self._live.values()}:
            raise InvariantError("a live request is in no queue or in two")
        for queue in (self._waiting, self._running):
            if any(later.order < earlier.order for earlier, later in pairwise(queue)):
                raise InvariantError("a queue is out of order")
        if any((request.status is Status.WAITING) != (request in self._waiting) for request in queued):
            raise InvariantError("a request's status is not that of its queue")


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _skip(queue: list[Request], position: int, last: tuple[int, int] | None) -> int:
    """Return the first position from `position` on whose request comes after `last`."""
    while last is not None and position < len(queue) and queue[position].order <= last:
        position += 1
    return position
