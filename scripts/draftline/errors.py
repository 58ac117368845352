"""The one exception that a user may meet: what is wrong, where, and what to do."""


class DraftlineError(Exception):
    """A problem a user can solve. The message is one or two lines: path, key, value, remedy."""
