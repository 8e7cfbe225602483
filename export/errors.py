"""Owns the one error that the exporter raises for a user; must not know where it is shown."""

from export.contract import UserError


class ExportError(UserError):
    """An export or a verification that cannot be done; the message names what, the rule it breaks and what to do."""
