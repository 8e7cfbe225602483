"""Owns the base of every error whose message is written for the person at the command line."""


class UserError(Exception):
    """Something a person can put right; the message is one line that names it and says what to do."""
