"""The calls that users make on any object that exchanges gradients."""

from __future__ import annotations

from hvd_compress.reduce import Reducer
from hvd_compress.stats import Stats


class Controls:
    """The base class of what has a reducer.

    Attributes:
        reducer: has the method, and the states by name of the parameter.
    """

    reducer: Reducer

    def stats(self) -> Stats:
        """Return the exact bytes so far and the residuals' norm, by parameter and in total."""
        return self.reducer.stats()

    def reset_stats(self) -> None:
        """Begin at zero with all that :meth:`stats` counts."""
        self.reducer.reset_stats()

    def set_epoch(self, epoch: float) -> None:
        """Announce the epoch, which may be fractional such as 2.5, for schedules by epoch."""
        self.reducer.set_epoch(epoch)

    def keep_undo(self) -> None:
        """Keep the states as they were before each step, from now on, for :meth:`discard`.  It
        takes as much memory as the states again, and the time to copy them.  To be called on all
        ranks."""
        self.reducer.keep_undo()

    def discard(self) -> None:
        """Take back what the last backward pass has exchanged, on all ranks, since no step will use
        it::

            state.keep_undo()  # once, before training
            ...
            if norm > limit:  # the same on all ranks: the gradients are averages
                state.discard()
                optimizer.zero_grad()

        Residuals, velocities and the number of the step are those of before; gradients are the
        caller's.

        Raises:
            ConfigError: :meth:`keep_undo` was not called, or there is nothing to take back.
        """
        self.reducer.discard()
