"""The one exception that means: the user can mend this. Its message is one line: what, where, and a way out."""


class UserError(Exception):
    """Shown by the command line as ``error: MESSAGE`` with exit code 1, without a traceback.

    ``shared`` is set when every rank of a run raises the same, so that one of them says it.
    """

    def __init__(self, message: str, shared: bool = False):
        super().__init__(message)
        self.shared = shared


def nearest(word: str, choices: list[str]) -> str:
    """A hint such as `` (did you mean 'width'?)``, or an empty string when nothing is close."""
    import difflib

    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
