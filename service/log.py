"""Owns how log lines look and how a request's id gets into each of them; must not decide what is logged."""

import logging
import re
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from service.errors import ErrorCode

_SAFE_ID = re.compile(r"[A-Za-z0-9_.:/+=-]{1,128}")


def configure_logging(json: bool, level: str) -> None:
    """Send structlog's and the standard library's records to stderr in one format.

    Args:
        json: One JSON object a line; false: text for a terminal.
        level: ``debug``, ``info``, ``warning`` or ``error``.

    Raises:
        ValueError: The level is not one of these.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level {level!r}: use debug, info, warning or error")
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        _drop_colours,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json
        # Not structlog's default traceback, which shows every local variable: seconds of work beside tensors.
        else [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries speak up from a warning on: FBGEMM alone tells of every shared library that it loads.
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("service").setLevel(number)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def _drop_colours(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Uvicorn sends each message a second time, with colours."""
    event.pop("color_message", None)
    return event


def access_level(code: str) -> int:
    """How loud a request's line is, by its outcome: what the client got wrong is no trouble of the operator's."""
    if code == "ok":
        return logging.DEBUG
    mistakes = {ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND, ErrorCode.TOO_LARGE}
    return logging.INFO if code in mistakes else logging.WARNING


def new_request_id() -> str:
    """An id for a request whose client named none."""
    return uuid.uuid4().hex


def clean_request_id(offered: str | None) -> str:
    """The client's id where it is short and plain, else a new one: it goes into headers and every log line."""
    return offered if offered and _SAFE_ID.fullmatch(offered) else new_request_id()


@contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Put ``request_id`` into every line logged inside, across awaits and threads."""
    with structlog.contextvars.bound_contextvars(request_id=request_id):
        yield


def current_request_id() -> str:
    """The id under which lines are logged now; empty outside of a request."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))


def rename_request(request_id: str) -> None:
    """Log under the protocol's own request id from here on, when the client gave one."""
    if _SAFE_ID.fullmatch(request_id):
        structlog.contextvars.bind_contextvars(request_id=request_id)
