"""The costs of exchanges, in TensorBoard, Weights & Biases, or whatever plots numbers over
steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_compress.errors import ConfigError
from hvd_compress.stats import Stats


def log_stats(
    source: Any,
    writer: Any,
    step: int | None = None,
    *,
    prefix: str = "compression",
    tensors: bool = False,
) -> None:
    """Write the statistics of exchanges to TensorBoard, Weights & Biases or any other writer::

        if hvd.rank() == 0 and step % 100 == 0:
            hvd.log_stats(optimizer, writer, step)

    It writes bytes, ratio and residuals.  For every bucket it writes bytes and the times of search,
    encoding and waiting (:meth:`hvd_compress.stats.Stats.scalars`).  Statistics are of one rank and
    need no other.  After ``reset_stats()`` the next numbers are those of the steps since.

    Args:
        source: a distributed optimizer, a ``Reducer``, a ``DDPState`` or another object with
            ``stats()``, alone or as its ``compression``; or the result of ``stats()``.
        writer: torch's ``SummaryWriter``, a writer of ``tf.summary`` or a run of wandb.  Any object
            with ``log(dict, step=step)`` or Lightning's ``log_metrics``, or a function of name,
            value and step, does as well.
        step: of the training, for the axis; may be left out if the writer counts by itself.
        prefix: in front of all names.
        tensors: also of each tensor, which makes as many plots as there are tensors.

    Raises:
        ConfigError: there are no statistics in ``source``, or ``writer`` is nothing of these.
    """
    scalars = _stats_of(source).scalars(tensors=tensors)
    _write(writer, {f"{prefix}/{name}": value for name, value in scalars.items()}, step)


def _stats_of(source: Any) -> Stats:
    if isinstance(source, Stats):
        return source
    for holder in (source, getattr(source, "compression", None)):
        stats = getattr(holder, "stats", None)
        if callable(stats) and isinstance(found := stats(), Stats):
            return found
    raise ConfigError(
        f"log_stats() finds no statistics in a {type(source).__name__}: hand in the distributed "
        "optimizer, or what stats() returns"
    )


def _write(writer: Any, scalars: dict[str, float], step: int | None) -> None:
    if add_scalar := getattr(writer, "add_scalar", None):
        _each(add_scalar, scalars, step)
    elif as_default := getattr(writer, "as_default", None):
        import tensorflow as tf  # whose writer this is

        with as_default():
            _each(lambda name, value, at: tf.summary.scalar(name, value, step=at), scalars, step)
    elif log_metrics := getattr(writer, "log_metrics", None):
        log_metrics(scalars, step=step)
    elif log := getattr(writer, "log", None):
        log(scalars) if step is None else log(scalars, step=step)
    elif callable(writer):
        _each(writer, scalars, step)
    else:
        raise ConfigError(
            f"log_stats() cannot write to a {type(writer).__name__}: hand in a SummaryWriter, a "
            "writer of tf.summary, a run of wandb, or a function of name, value and step"
        )


def _each(
    write: Callable[[str, float, int | None], Any], scalars: dict[str, float], step: int | None
) -> None:
    for name, value in scalars.items():
        write(name, value, step)
