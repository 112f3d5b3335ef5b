"""UserError, which ends a command with a one-line message, and the one-line form of other exceptions."""


class UserError(Exception):
    """Bad input: one line that names what is wrong and what to change. Commands exit with code 2."""


def first_line(error: Exception) -> str:
    """The first line of the message of `error`, or the name of its class when it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
