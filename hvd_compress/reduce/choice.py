"""The method of a reducer that is chosen in the first steps."""

from __future__ import annotations

from typing import Any

from hvd_compress.errors import ConfigError
from hvd_compress.methods import as_compressor
from hvd_compress.reduce.state_file import entry, refused
from hvd_compress.times import Clock


class Choice:
    """The method in use, and the reason; until the choice, the times of the steps before it.

    Attributes:
        text: the method as users write it; "none" until the choice.
        why: the reason in one line; empty until the choice.
        method: that of ``text``.
        backward: the seconds of each step on this rank since the ranks last changed, from its first
            gradient on, without those of exchanges.

    >>> Choice("fp16", "fp16, 332 ms per step against 610 ms with none").method
    FP16(algorithm=None, rows='float16')
    """

    def __init__(self, text: str = "none", why: str = "") -> None:
        self.text, self.why, self.method = text, why, as_compressor(text)
        self.backward: list[float] = []
        self._since: tuple[float, float] | None = None

    def gradient_is_ready(self, clock: Clock) -> None:
        """Note when the first gradient of a step is ready."""
        if not self.why and self._since is None:
            self._since = clock.now(), clock.times.total

    def step_is_over(self, clock: Clock) -> None:
        if self._since is not None:
            (began, total), self._since = self._since, None
            self.backward.append(clock.now() - began - (clock.times.total - total))

    def step_is_abandoned(self) -> None:
        self._since = None

    def term(self) -> str:
        """Return the text that must be the same on all ranks before a step."""
        return self.why or f"none after {len(self.backward)} steps"

    def state(self) -> dict[str, str]:
        """Return the choice as plain values that JSON can hold."""
        return {"method": self.text, "why": self.why}

    @classmethod
    def read(cls, state: Any) -> Choice:
        """Return the choice of a state; ``None``: one that begins again."""
        if state is None:
            return cls()
        text, why = (entry(state, key, str, of="the choice") for key in ("method", "why"))
        try:
            choice = cls(text, why)
        except ConfigError as error:
            raise refused(f"the method that was chosen is {text!r}: {error}") from None
        if choice.method.is_chosen_later or (text != "none" and not why):
            raise refused(f"the method that was chosen is {text!r}, for the reason {why!r}")
        return choice
