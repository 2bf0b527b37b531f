"""The largest scale at which something does not rise too far."""

from __future__ import annotations

from collections.abc import Callable


def bisect(
    rise: Callable[[float], float],
    target: float = 0.1,
    upper: float = 2.0,
    steps: int = 15,
    tolerance: float = 0.0,
) -> float:
    """Return the largest scale in (0, upper] at which ``rise`` is at most ``target``, by bisection.

    Args:
        rise: grows with the scale.
        target: the most that it may be.
        upper: the largest scale that is looked at.
        steps: how often the interval is halved.
        tolerance: stop as soon as the rise is this near to the target.

    Returns:
        ``upper`` if the rise is small even there; never 0, but 2^-steps upper at least.

    >>> round(bisect(lambda s: 2.5 * s * s, steps=40), 6)
    0.2
    """
    if rise(upper) <= target:
        return upper
    lower, top = 0.0, upper
    for _ in range(steps):
        middle = (lower + top) / 2
        found = rise(middle)
        if abs(found - target) < tolerance:
            return middle
        if found <= target:
            lower = middle
        else:
            top = middle
    return lower or top
