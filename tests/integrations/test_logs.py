"""Statistics where plots of a training are: one call, whatever they are written by."""

import numpy as np
import pytest

import hvd_compress
from hvd_compress import DGC
from hvd_compress.engines.local import LocalEngine
from hvd_compress.errors import ConfigError
from hvd_compress.reduce import Reducer

GRADIENTS = {"a": np.ones((60, 50), np.float32), "b": np.ones(7, np.float32)}


@pytest.fixture(scope="module")
def reducer():
    reducer = Reducer(DGC(density=0.01), LocalEngine())
    for _ in range(2):
        reducer.reduce(GRADIENTS)
    return reducer


def read(folder):
    """The points that TensorBoard shows of a folder: (step, value) by name."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()
    found = {name: (e.step, e.value) for name in tags["scalars"] for e in events.Scalars(name)}
    for name in tags["tensors"]:
        for e in events.Tensors(name):
            found[name] = (e.step, float(make_ndarray(e.tensor_proto)))
    return found


def expected(reducer, prefix="compression", **options):
    scalars = reducer.stats().scalars(**options)
    return {f"{prefix}/{name}": value for name, value in scalars.items()}


def assert_same(found, wanted, step):
    assert found.keys() == wanted.keys()
    assert {at for at, _ in found.values()} == {step}
    for name, (_, value) in found.items():
        assert value == pytest.approx(wanted[name], rel=1e-6), name


def test_torchs_summary_writer(reducer, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        hvd_compress.log_stats(reducer, writer, 7)
    assert_same(read(tmp_path), expected(reducer), 7)


def test_a_writer_of_tf_summary(reducer, tmp_path):
    tf = pytest.importorskip("tensorflow")
    with tf.summary.create_file_writer(str(tmp_path)).as_default() as writer:
        hvd_compress.log_stats(reducer.stats(), writer, 8, prefix="c", tensors=True)
        writer.flush()
    assert_same(read(tmp_path), expected(reducer, "c", tensors=True), 8)


def test_objects_that_take_all_at_once(reducer):
    class Run:  # as wandb has it
        def log(self, data, step=None):
            self.logged = data, step

    class Logger:  # as Lightning has it
        def log_metrics(self, metrics, step=None):
            self.logged = metrics, step

    for writer in (Run(), Logger()):
        hvd_compress.log_stats(reducer, writer, 3)
        assert writer.logged == (expected(reducer), 3)
    run = Run()
    hvd_compress.log_stats(reducer, run)
    assert run.logged[1] is None


def test_a_function_and_what_is_written(reducer):
    found = {}
    hvd_compress.log_stats(
        reducer, lambda name, value, step: found.update({name: (step, value)}), 1
    )
    assert_same(found, expected(reducer), 1)
    for label, bucket in reducer.stats().buckets.items():
        assert found[f"compression/buckets/{label}/bytes_sent"][1] == bucket.record.bytes_sent / 2
        for key in ("search", "wait", "encode", "add_up", "other", "under_way"):
            seconds = getattr(bucket.times, key) / bucket.times.steps
            assert found[f"compression/buckets/{label}/{key}"][1] == seconds
    assert found["compression/total/ratio"][1] == reducer.stats().total.ratio
    assert not [name for name in found if name.startswith("compression/a/")]


def test_what_has_no_statistics_and_what_cannot_write(reducer):
    with pytest.raises(ConfigError, match="no statistics in a dict"):
        hvd_compress.log_stats({}, print, 1)
    with pytest.raises(ConfigError, match="cannot write to a int"):
        hvd_compress.log_stats(reducer, 3, 1)
