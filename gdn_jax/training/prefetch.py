"""The next batches, made and sent to the device in a thread while the device works on the present one."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import jax

from gdn_jax.training.batch import TrainBatch

_AHEAD = 2


@contextmanager
def prefetched(make: Callable[[int], TrainBatch], first: int, stop: int) -> Iterator[Iterator[TrainBatch]]:
    """Yield an iterator over the batches of steps `first:stop`, on the device; they equal `make(step)`.

    Args:
        make: makes one step's batch; called in one other thread, in order.
        first: first step.
        stop: one beyond the last step.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        waiting: deque[Future[TrainBatch]] = deque()

        def batches() -> Iterator[TrainBatch]:
            for step in range(first, stop + _AHEAD):
                if step < stop:
                    waiting.append(pool.submit(lambda step=step: jax.device_put(make(step))))
                if step >= first + _AHEAD:
                    yield waiting.popleft().result()

        try:
            yield batches()
        finally:
            for future in waiting:
                future.cancel()
