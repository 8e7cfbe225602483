"""Owns the one error that the exporter raises for a user; must not know where it is shown."""

import re

from export.contract import UserError


class ExportError(UserError):
    """An export or a verification that cannot be done; the message names what, the rule it breaks and what to do."""


def first_sentence(exc: BaseException) -> str:
    """What somebody else's error says first, in one line, behind its type."""
    text = re.split(r"\.\s|\n", str(exc).strip(), maxsplit=1)[0]
    kind = type(exc).__name__
    return f"{kind}: {text if text.isprintable() else repr(text)}" if text else kind
