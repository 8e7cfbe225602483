import gzip

import pytest

from examples.events import EVENT_LOG, hash_id, read_events


@pytest.mark.parametrize(
    ("key", "raw_id"),
    [("0114508", 6255965864902481181), ("382695041", 3151480582070459581), ("", -5426141060434712860)],
)
def test_hash_gives_its_stated_values(key, raw_id):
    assert hash_id(key) == raw_id


def test_leading_zeros_make_another_key():
    assert hash_id("0114508") != hash_id("114508")


def test_bundled_log_is_in_time_order_and_keeps_keys_as_text():
    events = read_events()
    assert len(events) == 40_000
    assert bool((events.times.diff() >= 0).all())
    assert {len(key) for key in events.items} == {7}
    assert any(key.startswith("0") for key in events.items)
    assert (events.users[0], events.items[0], events.ratings[0].item()) == ("382695041", "2171847", 6.0)


def test_bundled_log_is_small():
    assert EVENT_LOG.stat().st_size < 1_000_000


def test_limit_takes_the_first_events():
    assert read_events(limit=3).items == read_events().items[:3]


def test_other_columns_are_refused_by_name(tmp_path):
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(b"user,item\n1,2\n"))
    with pytest.raises(ValueError, match="user,item, the trainer reads ts,user,item,rating"):
        read_events(path)


def test_no_events_are_refused():
    with pytest.raises(ValueError, match="use a number of 1 or more"):
        read_events(limit=0)
