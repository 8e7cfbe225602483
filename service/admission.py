"""Owns how much work is let in: permits for requests and for the bytes they and their replies hold.

A permit is taken before a request's body is read and given back when the reply has left, whatever happens between. It
takes a place among the working only when the body is there: clients that send slowly, or never finish, hold up nobody
but each other. Single-threaded by design: every call is made on the event loop.
"""

from types import TracebackType
from typing import Self

from service.errors import Overloaded


class Permit:
    """The place of one request among those in flight; a context manager that gives everything back."""

    __slots__ = ("_admission", "_bytes", "_working", "received_at")

    def __init__(self, admission: "Admission") -> None:
        self._admission: Admission | None = admission
        self._bytes = 0
        self._working = False
        self.received_at: float | None = None
        """When the request was there in full, on the event loop's clock: its deadline counts from then."""

    def work(self) -> None:
        """Take a place among the working; a second call does nothing.

        Raises:
            Overloaded: No place is left.
        """
        assert self._admission is not None, "the permit was given back"
        if not self._working:
            self._admission._start()  # noqa: SLF001 - a permit is a part of its admission
            self._working = True

    def grow(self, nbytes: int) -> None:
        """Reserve ``nbytes`` more for this request.

        Raises:
            Overloaded: The requests in flight hold too much; nothing was reserved.
        """
        assert self._admission is not None, "the permit was given back"
        self._admission._reserve(nbytes, own=self._bytes)  # noqa: SLF001 - a permit is a part of its admission
        self._bytes += nbytes

    def release(self) -> None:
        """Give back the place and the bytes; a second call does nothing."""
        if self._admission is not None:
            self._admission._leave(self._bytes, working=self._working)  # noqa: SLF001 - as above
            self._admission = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class Admission:
    """Counts requests in flight and the bytes they hold.

    Args:
        max_requests: Requests worked on at a time.
        max_reading: Requests let in at a time, those whose bodies are still coming included.
        max_bytes: Bytes of requests and predicted replies let in at a time. One request alone may exceed it, since
            its own size limits hold: otherwise it could never be served.
    """

    def __init__(self, *, max_requests: int, max_bytes: int, max_reading: int | None = None) -> None:
        self._max_requests = max_requests
        self._max_reading = max_requests if max_reading is None else max(max_reading, max_requests)
        self._working_requests = 0
        self._max_bytes = max_bytes
        self.inflight_requests = 0
        self.inflight_bytes = 0

    def admit(self, nbytes: int = 0) -> Permit:
        """Let one request in, with ``nbytes`` reserved.

        Raises:
            Overloaded: No place is left; nothing was reserved.
        """
        if self._working_requests >= self._max_requests:
            raise Overloaded(f"{self._working_requests} requests are in flight, the limit; try again later")
        if self.inflight_requests >= self._max_reading:
            raise Overloaded(f"{self.inflight_requests} requests are being received, the limit; try again later")
        self.inflight_requests += 1
        permit = Permit(self)
        try:
            permit.grow(nbytes)
        except Overloaded:
            permit.release()
            raise
        return permit

    def _reserve(self, nbytes: int, *, own: int) -> None:
        others = self.inflight_bytes - own
        if others and self.inflight_bytes + nbytes > self._max_bytes:
            raise Overloaded(
                f"other requests in flight hold {others} bytes and this one needs {own + nbytes}, "
                f"over the limit of {self._max_bytes}; try again later"
            )
        self.inflight_bytes += nbytes

    def _start(self) -> None:
        if self._working_requests >= self._max_requests:
            raise Overloaded(f"{self._working_requests} requests are in flight, the limit; try again later")
        self._working_requests += 1

    def _leave(self, nbytes: int, *, working: bool) -> None:
        self.inflight_requests -= 1
        self._working_requests -= working
        self.inflight_bytes -= nbytes
