"""The one exception that a user of the data tools is meant to read."""


class DataError(ValueError):
    """Bad input, a bad option or a damaged data set.

    The message is one line that says what is wrong, where (file, line, field) and a way out. Command lines print it
    after ``error: `` and exit with a non-zero status; it never needs a traceback to be understood.
    """

    def __init__(self, message: str) -> None:
        if message.startswith("Caught "):  # in a DataLoader's worker: torch makes it anew of its traceback
            message = message.strip().split("\n")[-1].partition("Error: ")[2] or message
        super().__init__(" ".join(message.split("\n")))


class NoDocument(DataError):
    """The inputs were read to their end and hold no document."""
