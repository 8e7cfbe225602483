"""Owns what ends a command with a message for the person at the command line; must not know where it is shown."""


class UserError(Exception):
    """Something a person can put right; the message is one line that names it and says what to do."""


class Stopped(BaseException):
    """A signal ends the command; the message is one line. No ``Exception``, so that nobody handles it as an error."""
