"""What a long command shows while it runs."""

import logging
import sys
from types import SimpleNamespace

import pytest

from export.terminal import Rate, show_progress


@pytest.mark.parametrize(
    ("total", "speed", "text"), [(4_000_000, 312_500.0, "312.5 k/s"), (100, 7.0, "7/s"), (1, 5.0, ""), (100, None, "")]
)
def test_a_bar_shows_its_rate(total, speed, text):
    assert Rate().render(SimpleNamespace(total=total, speed=speed)).plain == text


def test_the_exporters_warnings_are_lines_on_stderr_while_it_runs(capsys):
    log = logging.getLogger("export.anything")
    with show_progress() as on_progress:
        on_progress("writing", 1, 2)
        log.warning("table %s: is [odd]", "user")
        log.info("nobody needs this")
    log.warning("too late")
    assert capsys.readouterr() == ("", "warning: table user: is [odd]\n")


def test_a_warning_is_shown_once_whatever_handler_the_root_has(capsys):
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        with show_progress():
            logging.getLogger("export.anything").warning("table user: is odd")
    finally:
        logging.getLogger().removeHandler(handler)
    assert capsys.readouterr() == ("", "warning: table user: is odd\n")
    assert logging.getLogger("export").propagate


def test_only_rank_0_shows_anything(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with show_progress():
        logging.getLogger("export.anything").warning("table user: is odd")
    assert capsys.readouterr() == ("", "")
