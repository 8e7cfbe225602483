"""Owns the face that the dataplane shows the two edges; REST and gRPC know this and nothing behind it."""

from typing import Protocol

from service.admission import Permit
from service.types import CollectionInfo, CollectionStatistics, LookupReply, LookupRequest, Readiness


class Plane(Protocol):
    """Protocol-free lookups. The real one is ``service.dataplane.DataPlane``; tests may pass a fake."""

    def admit(self, nbytes: int = 0) -> Permit:
        """Take a place before reading a body of ``nbytes``; raises ``Overloaded``. Release it when the reply has left."""
        ...

    async def lookup(self, request: LookupRequest, permit: Permit) -> LookupReply:
        """Answer one request; raises ``service.errors.LookupFailed`` and its kinds, nothing else.

        The predicted reply is reserved on ``permit`` before any shard is asked.
        """
        ...

    def collections(self) -> tuple[CollectionInfo, ...]:
        """Collections being served, by name."""
        ...

    def collection(self, name: str, version: int | None = None) -> CollectionInfo:
        """One collection; raises ``NotFound`` for an unknown name, or a version that is not served."""
        ...

    def statistics(self, name: str) -> CollectionStatistics:
        """Counts since start; raises ``NotFound``."""
        ...

    def readiness(self, name: str | None = None, version: int | None = None) -> Readiness:
        """Whether every shard (of one collection, or of all) answers; raises ``NotFound``."""
        ...
