"""Batches fetched ahead: they come in order and no further ahead than they should, errors reach the main thread."""

import threading
import time

import pytest

from ahead import AHEAD, fetch_ahead


def test_places_come_in_order_from_another_thread():
    fetched = fetch_ahead(lambda *place: (place, threading.current_thread()), [(step, 0) for step in range(20)])
    places, threads = zip(*fetched, strict=True)
    assert list(places) == [(step, 0) for step in range(20)]
    assert threading.main_thread() not in threads


def test_no_further_ahead_than_needed():
    seen = []
    fetched = fetch_ahead(seen.append, ((step,) for step in range(100)))
    for step in range(5):
        next(fetched)
        time.sleep(0.01)
        assert len(seen) <= step + 1 + AHEAD
    fetched.close()
    assert len(seen) <= 5 + AHEAD


def test_an_error_is_raised_where_its_batch_would_have_come():
    def fetch(step):
        if step == 3:
            raise ValueError("batch 3 is not there")
        return step

    fetched = fetch_ahead(fetch, ((step,) for step in range(6)))
    assert [next(fetched) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="batch 3 is not there"):
        next(fetched)
