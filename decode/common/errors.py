"""UserError, which ends a command with a one-line message, and the one-line form of other exceptions."""


class UserError(Exception):
    """Bad input: one line that names what is wrong and what to change. Commands exit with code 2."""


class NotFiniteError(UserError):
    """Logits that are NaN or infinite. `prompt` is the number of the prompt; None if they are the draft's."""

    def __init__(self, prompt: int | None, message: str):
        super().__init__(message)
        self.prompt = prompt


def first_line(error: Exception) -> str:
    """The first line of the message of `error`, or the name of its class when it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: Exception, longest: int = 200) -> str:
    """The message of `error` in one line of up to `longest` characters, after the name of its class where the message
    is a single word, as that of a KeyError is."""
    text = " ".join(str(error).split())
    text = text if " " in text else f"{type(error).__name__} {text}".strip()
    return text if len(text) <= longest else text[: longest - 1] + "…"
