"""Fused exchanges that graphs call on the host, and their memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow.mpi as hvd
from hvd_compress.fused.on_host import Memory
from hvd_compress.kernels import loops_of


def address(array):
    return array.ctypes.data


def test_arrays_are_aligned_and_of_their_size():
    memory = Memory()
    for n in (1, 5, 16, 1000):
        array = memory.take(n)
        assert (array.shape, array.dtype) == ((n,), np.float32)
        assert address(array) % 64 == 0


def test_an_array_is_used_again_once_nobody_has_it():
    memory = Memory()
    first = memory.take(10)
    place = address(first)
    assert address(memory.take(10)) != place  # forgotten at once
    view = first.reshape(2, 5)[1:]
    del first
    assert address(memory.take(10)) != place
    del view
    own = [memory.take(10) for _ in range(2)]
    assert place in map(address, own)
    assert memory.nbytes == 2 * 4 * (10 + 16)


def test_what_a_graph_keeps_is_not_used_again():
    """Variables, and tensors that were read from them, adopt arrays without a copy."""
    memory, variable = Memory(), tf.Variable(tf.zeros([1000]))

    def fill(number):
        array = memory.take(1000)
        array[:] = number
        return array

    @tf.function
    def step(number):
        x = tf.numpy_function(fill, [number], tf.float32)
        variable.assign(tf.ensure_shape(x, [1000]))
        return variable.read_value()

    kept = [step(tf.constant(float(number))) for number in range(20)]
    for number, tensor in enumerate(kept):
        np.testing.assert_array_equal(tensor, np.full(1000, number, np.float32))
    all_at_once = memory.nbytes
    for number in range(200):
        step(tf.constant(float(number)))
    assert memory.nbytes <= all_at_once + 2 * 4 * (1000 + 16)


def test_other_sizes_have_memory_of_their_own():
    memory = Memory()
    place = address(memory.take(10))
    assert address(memory.take(11)) != place


def test_the_loops_take_what_will_be_in_host_memory():
    with tf.Graph().as_default():
        taken = []
        for device in ("CPU:0", "GPU:0"):
            with tf.device(device):
                x = tf.zeros([3])
            taken.append(loops_of(x) is not None)
    assert taken == [True, False]
    assert loops_of(tf.zeros([3])) is not None


def test_two_threads_that_run_one_graph_are_told_so():
    """They would write to one memory; and the compression goes on when they have stopped."""
    hvd.init()
    variable = tf.Variable(tf.zeros([1 << 20]))
    binding = hvd.bind("topk:density=0.01", [variable])
    step = tf.function(lambda: binding.reduce([tf.random.normal([1 << 20])])[0])
    step()
    together, problems = threading.Barrier(2), []

    def train(_):
        for _ in range(20):
            together.wait()
            try:
                step()
            except tf.errors.InvalidArgumentError as error:
                problems.append(str(error))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, range(2)))
    assert problems
    for problem in problems:
        assert "ConfigError: two threads run graphs of one compression" in problem
        assert "threading.Lock()" in problem
    before = int(binding.step)
    assert np.isfinite(step()).all()
    assert int(binding.step) == before + 1
