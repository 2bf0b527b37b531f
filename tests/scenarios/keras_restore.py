"""A residual that waited when a state was saved waits once when it is restored, by every way.

The table of ways by who saved, and by what is damaged, is here; an elastic state, which keeps the
copies, is in ``keras_callbacks.py``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from hvd_compress import DGC, RandomK, TopK
from hvd_compress.errors import ConfigError
from hvd_compress.tensorflow.saved_state import BindingState
from tests.scenarios import applies
from tests.scenarios.driver import assert_same_everywhere, barrier, make, raises, train
from tests.scenarios.driver_tensorflow import hvd, traced

METHOD = TopK(density=0.05)


@functools.cache
def _once() -> tuple[Any, Any]:
    run = train(make(METHOD), range(3))
    return run, run.compression.kept()


def _trained() -> Any:
    """A run after three steps, whose graph is traced once for all scenarios."""
    run, kept = _once()
    run.compression.restore(*kept)
    return run


def _keras_file(run: Any, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    run.model.compile(run.optimizer, loss="mse")
    path = folder / "model.keras"
    return lambda: run.model.save(path), lambda: run.model.load_weights(path)


def _checkpoint(run: Any, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    checkpoint = tf.train.Checkpoint(model=run.model, compression=run.compression)
    path = str(folder / "checkpoint")
    return lambda: checkpoint.write(path), lambda: checkpoint.read(path).assert_consumed()


def _manager(run: Any, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    checkpoint = tf.train.Checkpoint(model=run.model, optimizer=run.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, folder / "many", max_to_keep=1)
    return manager.save, manager.restore_or_initialize


def _copy(run: Any, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """In memory, as an elastic run keeps it."""

    def save() -> None:
        _copies[folder] = run.compression.kept()

    return save, lambda: run.compression.restore(*_copies[folder])


_copies: dict[Path, Any] = {}
#: what saves a run, and what restores it; Keras comes last, since it gives models their optimizers
WAYS = {"checkpoint": _checkpoint, "manager": _manager, "keras": _keras_file}
#: which rank of how many has saved, ``None`` for as many as there are, and whether what waited on
#: others is lost
SAVED = {
    "each rank": (None, None, False),
    "rank 0": (0, None, True),
    "rank 0, consolidated": (0, None, False),
    "rank 0 of fewer": (0, 1, False),
    "rank 0 of more": (0, 8, True),
}


def _saved_by(rank: int, size: int) -> Any:
    """A state that is saved meanwhile says that this rank of so many saved it."""
    header = BindingState.header

    def changed(self: Any, *args: Any, **options: Any) -> Any:
        saved = header(self, *args, **options)  # which one rank alone calls consolidated
        return saved._replace(rank=rank, size=size, consolidated=False)

    return mock.patch.object(BindingState, "header", changed)


@contextlib.contextmanager
def _folder(everyones: bool) -> Iterator[Path]:
    """A folder that all ranks see, or one for each."""
    with tempfile.TemporaryDirectory() as own:
        name = own if everyones else hvd.broadcast_object(own, 0)
        yield Path(name)
        barrier()


def _waits(run: Any) -> dict[str, np.ndarray]:
    return {key: x for key, x in run.states().items() if key.endswith("residual")}


def _total(waits: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        key: hvd.allreduce(tf.constant(x), op=hvd.Sum, name=f"total.{key}").numpy()
        for key, x in waits.items()
    }


def _of_rank_0(waits: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return _total({key: x * (hvd.rank() == 0) for key, x in waits.items()})


def _assert_waits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    assert any(np.abs(x).max() > 0 for x in expected.values())
    for key, x in found.items():
        np.testing.assert_allclose(x, expected[key], rtol=1e-5, atol=1e-6, err_msg=key)


def _texts(function: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return "\n".join(str(w.message) for w in caught)


def what_waited_counts_once() -> None:
    """By each way, and for each of ``SAVED``; then this rank is at the step that was saved."""
    waited = _waits(_trained())
    for way in WAYS.values():
        other = make(METHOD)
        # The others save the same bytes, and hand them to the same function.
        for saves in SAVED if way is _checkpoint else ("each rank", "rank 0"):
            run, (saver, of, warns) = _trained(), SAVED[saves]
            if is_mean := saves == "rank 0, consolidated":
                run.compression.consolidate()
            each = saves == "each rank"
            expected = _total(waited) if each or is_mean else _of_rank_0(waited)
            if of:
                expected = {key: x * hvd.size() / of for key, x in expected.items()}
            with _folder(everyones=each) as folder:
                if each or hvd.rank() == 0:
                    with _saved_by(saver, of or hvd.size()) if of else contextlib.nullcontext():
                        said = _texts(way(run, folder)[0])
                    is_told = hvd.size() > 1 and not is_mean
                    assert ("compression.consolidate()" in said) == is_told, (saves, said)
                barrier()
                said = _texts(way(other, folder)[1])
            is_lost = warns and not (saver == hvd.rank() and (of or hvd.size()) == hvd.size())
            assert ("are lost" in said) == is_lost, (saves, said)
            _assert_waits(_total(_waits(other)), expected)
            if each:
                for key, x in _waits(run).items():
                    np.testing.assert_array_equal(_waits(other)[key], x)
            assert int(other.compression.step) == 3
            assert other.compression.is_consolidated == (is_mean or hvd.size() == 1)


def what_is_damaged_changes_nothing_by_any_way() -> None:
    """A residual with a NaN in it, in a file or in a copy."""
    run, other = make(METHOD), make(METHOD)
    residual = run.compression.store.states["0"]["residual"]
    residual.assign(tf.fill(residual.shape, np.nan))
    before = other.states()
    for way in (*WAYS.values(), _copy):
        with _folder(everyones=True) as folder:
            _texts(way(run, folder)[0])
            with raises(ValueError, "nothing was changed", "NaN or Inf"):  # Keras makes it one
                way(other, folder)[1]()
        assert int(other.compression.step) == 0
        for key, x in other.states().items():
            np.testing.assert_array_equal(x, before[key], err_msg=key)


@applies(least=2)  # nobody to send to
def what_one_rank_restored_and_sends_counts_once() -> None:
    """With ``BroadcastGlobalVariablesCallback``, which calls ``broadcast``."""
    for consolidated in (False, True):
        run, other = _trained(), make(METHOD)
        expected = _of_rank_0(_waits(run))
        if consolidated:
            expected = _total(_waits(run))
            run.compression.consolidate()
        values = run.compression.values()
        if hvd.rank() == 0:
            other.compression.load_values(values)
        said = _texts(other.compression.broadcast)
        assert ("1 of" in said) == (hvd.rank() == 0 and not consolidated), said
        _assert_waits(_total(_waits(other)), expected)
        assert int(other.compression.step) == 3
        assert_same_everywhere(other.states())


@applies(least=2)
def a_damaged_state_of_one_rank_is_refused_by_all() -> None:
    """By ``broadcast`` and by ``unite``, which check like files; then nothing has changed."""
    values = _trained().compression.values()
    for send in ("broadcast", "unite"):
        other = make(METHOD)
        if hvd.rank() == 0:
            _texts(lambda other=other: other.compression.load_values(values))
            residual = other.compression.store.states["0"]["residual"]
            residual.assign(tf.fill(residual.shape, np.nan))
        before, step = other.states(), int(other.compression.step)

        def refused(other: Any = other, send: str = send) -> None:
            with raises(ConfigError, "nothing was changed", "NaN or Inf"):
                getattr(other.compression, send)()

        _texts(refused)
        assert int(other.compression.step) == step
        for key, x in other.states().items():
            np.testing.assert_array_equal(x, before[key], err_msg=f"{send} {key}")


def momentum_that_is_damaged_is_not_taken_over() -> None:
    """A plain optimizer's comes the same way as a file's."""
    w, sgd = keras.Variable([1.0, 2.0]), keras.optimizers.SGD(0.1, momentum=0.9)
    sgd.apply([tf.constant([1.0, 1.0])], [w])
    optimizer = hvd.DistributedOptimizer(sgd, compression=DGC(density=0.5, min_size=1))
    velocity = optimizer.compression.store.states["0"]["velocity"].numpy()
    np.testing.assert_allclose(velocity, [1.0, 1.0], rtol=1e-6)
    sgd.momentums[0].assign([np.nan, 0.0])
    with raises(ConfigError, "'velocity' of", "NaN or Inf"):
        hvd.DistributedOptimizer(sgd, compression=DGC(density=0.5, min_size=1))


def a_checkpoint_may_be_restored_before_there_is_an_optimizer() -> None:
    """It waits until the first step is traced, and is restored once, not in every step."""
    run, other = _trained(), make(METHOD)
    holder, late = tf.Module(), tf.Module()
    holder.compression = run.compression
    with _folder(everyones=True) as folder:
        path = str(folder / "checkpoint")
        _texts(lambda: tf.train.Checkpoint(holder=holder).write(path))
        tf.train.Checkpoint(holder=late).read(path)

        @traced
        def restore() -> None:
            late.compression = other.compression

        restore()
    assert int(other.compression.step) == 3
    train(other, range(3, 4))
    assert int(other.compression.step) == 4


def a_state_of_another_method_gives_what_both_keep() -> None:
    """Velocities have no use; what waits goes on; what it lacks begins anew."""
    dgc = train(make(DGC(density=0.05)), range(3))
    other = _trained()
    said = _texts(lambda: other.compression.load_values(dgc.compression.values()))
    assert "no use for 'velocity'" in said, said
    assert "a state of dgc" in said, said
    both = _waits(other).keys() & _waits(dgc).keys()
    _assert_waits({k: _waits(other)[k] for k in both}, {k: _waits(dgc)[k] for k in both})
    assert not any(np.any(_waits(other)[key]) for key in _waits(other).keys() - both)
    velocities = [key for key in dgc.states() if key.endswith("velocity")]
    assert all(np.any(dgc.states()[key]) for key in velocities)
    _texts(lambda: dgc.compression.load_values(other.compression.values()))
    assert velocities
    assert not any(np.any(dgc.states()[key]) for key in velocities)


def what_cannot_be_taken_over_changes_nothing() -> None:
    """Another version, another seed, or a file that is cut off."""
    run = _trained()
    values = run.compression.values()
    header = json.loads(values["header"].tobytes())
    for change, says in (
        ({"version": 0}, "version 0"),
        ({"version": 7}, "version 7"),
        ({"method": {}}, "'method' has no 'method'"),
        ({"rank": 3, "size": 3}, "by rank 3 of 3"),
    ):
        text = np.frombuffer(json.dumps(header | change).encode(), np.uint8)
        with raises(ConfigError, says):
            run.compression.load_values(values | {"header": text})
    with raises(ConfigError, "no text in JSON"):
        run.compression.load_values(values | {"header": np.zeros(3, np.uint8)})
    drawn = make(RandomK(density=0.05), seed=3)
    with raises(ConfigError, "seed=3", "seed=0"):
        make(RandomK(density=0.05)).compression.load_values(drawn.compression.values())
    whole = _serialized(run)
    for damaged in (whole[: len(whole) // 2], b"x" + whole, b"\0" * 100):
        with raises(ConfigError, "nothing was changed"):
            run.compression.deserialize(damaged)
    for key, x in run.compression.values().items():
        np.testing.assert_array_equal(x, values[key], err_msg=key)


def _serialized(run: Any) -> bytes:
    found: list[bytes] = []
    _texts(lambda: found.append(run.compression.serialize()))
    return found[0]
