"""Owns what can go wrong with a request, in domain terms; must not know HTTP or gRPC.

::

    LookupFailed
    ├── InvalidArgument      the client's request breaks a rule
    ├── NotFound             unknown collection, version or feature
    ├── TooLarge             over a size limit
    ├── Overloaded           refused before any work; try again later
    ├── DeadlineExceeded     not answered in the time that the client gave
    ├── Unavailable          a shard is down, or nothing is loaded yet
    └── Internal             a bug of ours

The two edges translate ``ErrorCode`` by one table each (``service.rest.converters``, ``service.grpc.converters``).
"""

from enum import StrEnum


class ErrorCode(StrEnum):
    """What kind of failure a reply carries."""

    INVALID_ARGUMENT = "invalid_argument"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


class LookupFailed(Exception):
    """A request that gets an error for an answer; the message is meant for the client."""

    code: ErrorCode = ErrorCode.INTERNAL


class InvalidArgument(LookupFailed):
    """The request breaks a rule; the message names the field, the value and the rule."""

    code = ErrorCode.INVALID_ARGUMENT


class NotFound(LookupFailed):
    """No such collection, version or feature."""

    code = ErrorCode.NOT_FOUND


class TooLarge(LookupFailed):
    """The request, or the reply it asks for, is over a limit."""

    code = ErrorCode.TOO_LARGE


class Overloaded(LookupFailed):
    """Refused before any work was done.

    Attributes:
        retry_after_s: When a retry may fare better, seconds.
    """

    code = ErrorCode.OVERLOADED

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(LookupFailed):
    """Not answered in the time that the client gave, or the server's own limit."""

    code = ErrorCode.DEADLINE_EXCEEDED


class Unavailable(LookupFailed):
    """A shard that the request needs does not answer, or the collection is not loaded."""

    code = ErrorCode.UNAVAILABLE


class Internal(LookupFailed):
    """A bug of ours; clients get a generic text, the log gets the cause."""

    code = ErrorCode.INTERNAL
