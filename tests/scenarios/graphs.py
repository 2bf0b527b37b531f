"""What the optimizer of TensorFlow's graphs must leave alone: it takes a collective for a function
of its input, which may be computed early, once for two, or not at all."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvd
from hvd_compress import GTopK, StagedWarmup, TopK, switch
from scenarios.driver import assert_close
from scenarios.parity import follow_the_oracle

SCHEDULE = StagedWarmup(densities=(1.0, 0.25, 0.05))


def merging_with_a_rank_too_many() -> None:
    """Some ranks have no partner in a round, or no use for what they receive."""
    follow_the_oracle(GTopK(density=0.05), 6)


def merging_behind_branches() -> None:
    follow_the_oracle(GTopK(SCHEDULE), 6)


def constant_gradients_on_some_ranks() -> None:
    """In branches that are taken in turn."""
    lengths = (4, 300)
    variables = [tf.Variable(tf.zeros([n]), name=f"v{n}") for n in lengths]
    for method in (switch("none", TopK(density=1.0), 2), TopK(SCHEDULE), "none"):
        compression = hvd.bind(method, variables)

        @tf.function
        def averages(x: tf.Tensor, compression=compression) -> list[tf.Tensor]:
            own = hvd.rank() == 0
            return compression.reduce(
                [tf.fill(tf.shape(v), x) if own else tf.zeros_like(v) for v in variables]
            )

        for _ in range(5):
            means = averages(tf.constant(float(hvd.size())))
            for n, mean in zip(lengths, means, strict=True):
                assert mean.shape == (n,)
                if method != TopK(SCHEDULE):
                    assert_close({"mean": mean.numpy()}, {"mean": np.ones(n, np.float32)})
