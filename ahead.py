"""Batches of the next steps, fetched in a thread while the device computes."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor

AHEAD = 2  # micro-batches fetched before they are asked for


def fetch_ahead(fetch, places):
    """Yield fetch(*place) for each of the places, fetched in a thread a little ahead; its errors are raised here."""
    with ThreadPoolExecutor(1) as pool:
        waiting = deque()
        for place in places:
            waiting.append(pool.submit(fetch, *place))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
