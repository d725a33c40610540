"""The one exception that means: the user can mend this. Its message is one line: what, where, and a way out."""


class UserError(Exception):
    """Shown by the command line as ``error: MESSAGE`` with exit code 1, without a traceback."""


def nearest(word: str, choices: list[str]) -> str:
    """A hint such as `` (did you mean 'width'?)``, or an empty string when nothing is close."""
    import difflib

    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
