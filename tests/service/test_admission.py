"""Permits: counted in, counted out, whatever happens between."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.admission import Admission
from service.errors import Overloaded


def test_a_permit_gives_everything_back_once():
    admission = Admission(max_requests=2, max_bytes=100)
    permit = admission.admit(10)
    permit.grow(20)
    assert (admission.inflight_requests, admission.inflight_bytes) == (1, 30)
    permit.release()
    permit.release()
    assert (admission.inflight_requests, admission.inflight_bytes) == (0, 0)


def test_one_request_alone_may_exceed_the_byte_limit():
    admission = Admission(max_requests=2, max_bytes=100)
    with admission.admit(80) as permit:
        permit.grow(500)
        with pytest.raises(Overloaded, match="580 bytes"):
            admission.admit(1)
    assert admission.inflight_bytes == 0


def test_a_refused_grow_keeps_what_was_reserved_before():
    admission = Admission(max_requests=3, max_bytes=100)
    with admission.admit(50), admission.admit(10) as permit:
        with pytest.raises(Overloaded):
            permit.grow(60)
        assert admission.inflight_bytes == 60
        permit.grow(40)


def test_over_the_request_limit_nothing_is_reserved():
    admission = Admission(max_requests=1, max_bytes=100)
    with admission.admit(1):
        with pytest.raises(Overloaded, match="1 requests"):
            admission.admit(1)
        assert (admission.inflight_requests, admission.inflight_bytes) == (1, 1)


@given(st.lists(st.integers(0, 50), max_size=30))
def test_any_sequence_ends_at_zero(sizes):
    admission = Admission(max_requests=10, max_bytes=100)
    permits = []
    for size in sizes:
        try:
            permits.append(admission.admit(size))
        except Overloaded:
            if permits:
                permits.pop(0).release()
        assert admission.inflight_requests == len(permits) <= 10
    for permit in permits:
        permit.release()
    assert (admission.inflight_requests, admission.inflight_bytes) == (0, 0)


def test_slow_senders_take_no_place_from_those_who_are_there():
    admission = Admission(max_requests=2, max_bytes=100, max_reading=5)
    slow = [admission.admit() for _ in range(3)]
    quick = [admission.admit() for _ in range(2)]
    for permit in quick:
        permit.work()
        permit.work()
    with pytest.raises(Overloaded, match="2 requests are in flight"):
        slow[0].work()
    for permit in quick:
        permit.release()
    slow[0].work()
    for permit in slow:
        permit.release()
    assert admission.inflight_requests == 0


def test_there_is_an_end_to_those_who_are_still_sending():
    admission = Admission(max_requests=1, max_bytes=100, max_reading=3)
    senders = [admission.admit() for _ in range(3)]
    with pytest.raises(Overloaded, match="3 requests are being received"):
        admission.admit()
    senders[0].release()
    admission.admit()
