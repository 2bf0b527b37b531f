"""Tables of texts on a screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows of texts below a header and a line.  The first column begins at the left, and all
    others end at the right.

    >>> print(text_table(("method", "sent"), [("none", "4 B"), ("topk", "80 B")]))
    method  sent
    ------------
    none     4 B
    topk    80 B
    """
    rows = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
