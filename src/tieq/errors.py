"""The error family: each message says what happened, where, and what to do. Nothing here prints or exits."""

from __future__ import annotations


class TieqError(Exception):
    """Bad input or wrong usage; the command line turns it into exit code 2.

    Args:
        what: what was found and why it cannot be used, as a sentence.
        where: the file, tensor or option concerned.
        todo: what the user can do about it, as a sentence.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", todo: str = "") -> None:
        self.what = what
        self.where = where
        self.todo = todo
        super().__init__(self.sentence())

    def sentence(self) -> str:
        """The whole message: ``where: what todo``."""
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head} {self.todo}".strip()


class RefusedError(TieqError):
    """An input that must not be exported; nothing has been written when this is raised."""


class MissingRuntimeError(TieqError):
    """A runtime or tool that was asked for is not installed; exit code 3."""

    exit_code = 3
