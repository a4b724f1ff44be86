"""The command line as a user meets it: what lives here is one call of it, whichever way it ends."""

from __future__ import annotations

from headrace import cli


def status_of(*words: str) -> int:
    """The exit status; flags that cannot be read end the process."""
    try:
        return cli.main(list(words))
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code
