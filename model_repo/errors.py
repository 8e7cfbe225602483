"""Owns what can go wrong in a shard, in domain terms; must not know Triton.

::

    ShardError
    ├── ShardLoadError       the version cannot be served; Triton reports it and keeps what it has
    └── RequestError       one request's mistake; its neighbours are answered
        ├── BadRequest       the request breaks a rule
        ├── WrongVersion     the request pins a version that is served elsewhere, or nowhere
        ├── NotReady         the delta that the request pins is being mapped
        ├── Unservable       the delta that the request pins cannot be mapped
        └── Cancelled        nobody waits for the answer any more
"""


class ShardError(Exception):
    """A failure with a message for the person or program that has to act on it."""


class ShardLoadError(ShardError):
    """The version directory, or the environment, cannot serve; the message says what to do."""


class RequestError(ShardError):
    """A request that gets an error for an answer."""


class BadRequest(RequestError):
    """The request breaks a rule; the message names the input, its value and the rule."""


class WrongVersion(RequestError):
    """The request pins a version that this process does not serve."""


class NotReady(RequestError):
    """The delta that the request pins is being mapped: ask again."""


class Unservable(RequestError):
    """The delta that the request pins cannot be mapped; the message says why. The next request tries again."""


class Cancelled(RequestError):
    """The caller has gone; no work was done."""
