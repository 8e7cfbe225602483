"""Log lines: their form, and the request's id in each of them."""

import logging

import orjson
import pytest
import structlog

from service.log import access_level, clean_request_id, configure_logging, rename_request, request_context


@pytest.fixture(autouse=True)
def restored():
    root = logging.getLogger()
    handlers, level, config = root.handlers[:], root.level, structlog.get_config()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**config)


def lines(capsys):
    return [orjson.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_lines_carry_the_request_id(capsys):
    configure_logging(json=True, level="info")
    log = structlog.get_logger("service.test")
    with request_context("first"):
        log.info("inside", size=3)
        rename_request("second")
        log.warning("renamed")
        rename_request("not\nplain")
        logging.getLogger("other").warning("from %s", "the standard library")
    log.info("outside")
    inside, renamed, foreign, outside = lines(capsys)
    assert (inside["event"], inside["size"], inside["request_id"]) == ("inside", 3, "first")
    assert inside["level"] == "info"
    assert renamed["request_id"] == foreign["request_id"] == "second"
    assert foreign["event"] == "from the standard library"
    assert "request_id" not in outside


def test_a_traceback_stays_on_one_line(capsys):
    configure_logging(json=True, level="info")
    try:
        [].pop()
    except IndexError:
        structlog.get_logger("service.test").exception("crashed")
    (line,) = lines(capsys)
    assert "IndexError: pop from empty list" in line["exception"]


def test_the_level_holds_for_both_libraries(capsys):
    configure_logging(json=True, level="warning")
    structlog.get_logger("service.test").info("quiet")
    logging.getLogger("uvicorn.access").info("quiet")
    assert lines(capsys) == []


def test_text_is_for_people(capsys):
    configure_logging(json=False, level="debug")
    structlog.get_logger("service.test").debug("hello", size=3)
    text = capsys.readouterr().err
    assert "hello" in text
    assert "size" in text


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="loud"):
        configure_logging(json=True, level="loud")


@pytest.mark.parametrize("offered", [None, "", "a b", "x" * 129, "a\r\nb", "é"])
def test_an_id_that_is_not_plain_is_replaced(offered):
    assert clean_request_id(offered) != offered
    assert clean_request_id("order-66/2:a") == "order-66/2:a"


@pytest.mark.parametrize(
    ("code", "level"),
    [("ok", "DEBUG"), *((c, "INFO") for c in ("invalid_argument", "not_found", "too_large")),
     *((c, "WARNING") for c in ("overloaded", "deadline_exceeded", "unavailable", "internal", "cancelled"))],
)  # fmt: skip
def test_only_what_an_operator_can_mend_is_a_warning(code, level):
    assert access_level(code) == logging.getLevelName(level)


def test_uvicorns_coloured_twin_of_a_message_is_dropped(capsys):
    configure_logging(json=True, level="info")
    logging.getLogger("service.x").info("started", extra={"color_message": "\x1b[36mstarted"})
    (line,) = lines(capsys)
    assert "color_message" not in line
