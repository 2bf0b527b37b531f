"""Every framework on real Horovod and real MPI: all scenarios, in jobs of several sizes.

A job starts once and runs all scenarios of its modules; the tests read its results.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest

from tests import jobs
from tests.scenarios import names

PARITY = ("parity",)
FOLLOWS = (
    "parity.dgc_and_top_k_follow_the_oracle",
    "parity.two_rounds_follow_the_oracle",
    "parity.quantised_sums_follow_the_oracle",
    "parity.neighbours_and_broadcasts_follow_the_oracle",
)
ONCE = (
    # Horovod numbers collectives without a name, such as those of gradients, and ranks of later
    # scenarios have called other numbers of them.
    *(
        "training",
        "collectives",
        "collectives_torch",
        "options",
        "torch_users",
        "numerics",
        "state",
        "shared",
    ),
    *("rows", "auto", "dropped", "wrong_kinds"),
)
TORCH = (*ONCE, *PARITY)
KERAS = ("parity", "shared", "keras_fit", "keras_callbacks", "keras_restore", "keras_common")
#: what is tried over nodes of two ranks
NODES = (
    *("nodes", "dropped.discarded_steps_leave_no_trace"),
    "dropped.a_gradient_that_some_ranks_lack_counts_as_zero",
    "numerics.overflow_under_a_grad_scaler",
    "numerics.a_rank_without_gradients_under_a_grad_scaler",
    "options.a_change_of_backward_passes_counts_from_there",
    "options.synchronize_clip_and_skip",
)
OTHERS_KERAS = ("systems", "systems_keras", "codistillation", "codistillation_keras")
OTHERS = ("systems", "systems_torch", "codistillation", "codistillation_torch")
OPTIMIZERS_TORCH = ("optimizers", "optimizers_torch")
OPTIMIZERS_KERAS = ("optimizers", "optimizers_keras")
KERAS_2 = (
    *("keras_legacy", "keras_fit.fit_is_the_oracle"),
    "keras_callbacks.broadcasts_averages_and_schedules",
    "keras_callbacks.a_commit_is_what_restore_goes_back_to",
)
COLLECTIVES = ("collectives", "collectives_tensorflow")
#: what graphs over MPI must show in each run of the tests: that ranks tell each other something
OVER_MPI = (
    *("over_mpi_tensorflow", *COLLECTIVES),
    "keras_restore.what_one_rank_restored_and_sends_counts_once",
    "keras_common.numbers_of_the_optimizer_that_differ_are_an_error",
    "keras_common.gradients_that_some_ranks_lack_are_an_error",
    *("keras_fit.fit_is_the_oracle", "keras_fit.nothing_stays_of_what_is_gone"),
    "keras_fit.parts_of_a_model_stay_local",
    "keras_callbacks.broadcasts_averages_and_schedules",
    "keras_callbacks.callbacks_tell_of_a_rank_with_fewer_batches",
    "codistillation.predictions_follow_a_reference",
)
#: what shows more between three: sets with somebody outside, partners, and sums in an order
OF_THREE = (
    *("shared.a_set_of_processes", "shared.ranks_that_differ_all_say_so"),
    *("graphs.constant_gradients_on_some_ranks", "graphs.replies_that_one_rank_does_not_read"),
    *("parity.two_rounds_follow_the_oracle", "parity.quantised_sums_follow_the_oracle"),
    "parity.neighbours_and_broadcasts_follow_the_oracle",
    "over_mpi_tensorflow.half_precisions_are_added_in_float32",
    "systems.training_follows_the_lockstep_world",
)
#: and the same over Horovod in PyTorch
OF_THREE_TORCH = (
    *(*FOLLOWS, "rows.a_set_of_processes", "shared.a_set_of_processes"),
    "shared.ranks_that_differ_all_say_so",
    "systems_torch.ranks_of_a_set_have_a_graph_of_their_own",
    "systems_torch.every_graph_gives_the_bits_of_the_simulation",
)


@dataclasses.dataclass(frozen=True)
class Job:
    """``over`` is ``SCENARIOS_OVER``; see ``scenarios/driver.py``."""

    over: str
    modules: tuple[str, ...]
    controller: str
    ranks: int

    def __str__(self) -> str:
        first = self.modules[0].partition(".")[0]
        return f"{self.over}-{self.controller}-{self.ranks}-{first}"

    @functools.cached_property
    def names(self) -> list[str]:
        return [
            name
            for module in self.modules
            for name in names(module, over=self.over, ranks=self.ranks)
        ]

    def run(self, folder: Path) -> None:
        command = jobs.launcher(self.ranks, self.controller)
        framework = "torch" if self.over in ("horovod", "mpi") else "tensorflow"
        command += [jobs.python(framework), "-m", "tests.scenarios", str(folder), *self.modules]
        env = {"SCENARIOS_OVER": self.over, **jobs.variables(self.controller)}
        if self.over == "tf_keras":
            env |= {"SCENARIOS_OVER": "tensorflow", "TF_USE_LEGACY_KERAS": "1"}
        if "nodes" in self.modules:
            env["SCENARIOS_NODES"] = "2"
        if self in FULL:
            env["SCENARIOS_FULL"] = "1"
        elif self.over == "tensorflow" and "graphs" not in self.modules:
            env["SCENARIOS_GRAPPLER"] = "0"
        if self.ranks == 3:
            # The order of additions of three numbers depends on where fusion puts them; here, runs
            # are compared bit by bit.
            env["HOROVOD_FUSION_THRESHOLD"] = "0"
        # Some minutes more than the longest takes on a quiet machine.
        jobs.run(command, timeout=900 + 30 * self.ranks, **env)


#: every scenario once over each engine, between two ranks where more show no more; under each
#: controller at least what must hold everywhere
JOBS = [
    Job("horovod", (*TORCH, *OPTIMIZERS_TORCH, *OTHERS), "mpirun", 2),
    Job("horovod", OF_THREE_TORCH, "mpirun", 3),
    Job("horovod", FOLLOWS, "gloo", 2),
    Job("horovod", (*FOLLOWS, "training.without_loss_it_is_the_plain_optimizer"), "alone", 1),
    Job("mpi", (*TORCH, *OPTIMIZERS_TORCH, "over_mpi", *OTHERS), "mpirun", 2),
    Job("mpi", (*FOLLOWS, "over_mpi"), "mpich", 3),
    Job("horovod", NODES, "mpirun", 4),
    Job("mpi", (*NODES, "training.without_loss_it_is_the_plain_optimizer"), "mpirun", 4),
    Job(
        "mpi", (*FOLLOWS, "systems_torch.every_graph_gives_the_bits_of_the_simulation"), "mpirun", 5
    ),
    Job(
        "tensorflow", ("keras_callbacks", "keras_fit", "keras_restore", "keras_common"), "mpirun", 2
    ),
    Job(
        "tensorflow",
        (
            *(*COLLECTIVES, "shared", "rows", *FOLLOWS),
            *("parity.tapes_follow_the_oracle", "parity.learning_follows_the_oracle"),
        ),
        "mpirun",
        2,
    ),
    Job("tensorflow", (*OPTIMIZERS_KERAS, *OTHERS_KERAS), "mpirun", 2),
    Job("tensorflow", ("graphs",), "mpirun", 3),
    Job("tf_keras", KERAS_2, "mpirun", 2),
    Job("tensorflow-mpi", OVER_MPI, "mpirun", 2),
    Job("tensorflow-mpi", OF_THREE, "mpirun", 3),
]
FULL = [
    Job("horovod", PARITY, "gloo", 2),
    Job("mpi", (*PARITY, "over_mpi"), "mpich", 3),
    Job("horovod", (*TORCH, *OPTIMIZERS_TORCH, *OTHERS), "alone", 1),
    Job("mpi", OTHERS, "mpirun", 4),
    Job("mpi", ("over_mpi", *PARITY), "mpirun", 5),
    Job("horovod", (*TORCH, *OPTIMIZERS_TORCH, *OTHERS), "mpirun", 3),
    Job("horovod", ONCE, "gloo", 2),
    Job("horovod", TORCH, "mpirun", 4),
    Job("horovod", PARITY, "mpirun", 8),
    Job("mpi", (*TORCH, "over_mpi"), "mpirun", 1),
    Job("mpi", (*TORCH, "over_mpi"), "mpich", 2),
    Job("mpi", (*TORCH, "over_mpi"), "mpirun", 3),
    Job("mpi", (*TORCH, "over_mpi"), "mpirun", 4),
    Job("mpi", PARITY, "mpich", 4),
    Job("mpi", (*PARITY, "over_mpi"), "mpirun", 8),
    Job("tensorflow", (*KERAS, "optimizers"), "alone", 1),
    Job("tensorflow", KERAS, "mpirun", 2),
    Job("tensorflow", (*OPTIMIZERS_KERAS, *OTHERS_KERAS), "mpirun", 3),
    Job("tensorflow", PARITY, "gloo", 2),
    Job("tensorflow", ("graphs",), "mpirun", 5),
    Job("tensorflow", PARITY, "mpirun", 4),
    Job("tape", ("shared", *PARITY), "mpirun", 2),
    Job(
        "tensorflow-mpi",
        ("over_mpi_tensorflow", *COLLECTIVES, "shared", "keras_fit", "keras_callbacks"),
        "mpirun",
        3,
    ),
    Job("tensorflow-mpi", (*OPTIMIZERS_KERAS, *OTHERS_KERAS), "mpirun", 2),
    Job("tensorflow-mpi", ("over_mpi_tensorflow", "shared", "keras_fit"), "alone", 1),
    Job("tensorflow-mpi", ("graphs", "shared"), "mpirun", 3),
    Job("tensorflow-mpi", ("keras_restore", "keras_common"), "mpirun", 3),
    Job("tape-mpi", ("shared", *FOLLOWS), "mpirun", 2),
]


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("job", "name"), [*jobs.cases(JOBS), *jobs.cases(FULL, pytest.mark.full)])
def test_scenario(passes, job, name):
    if job.controller == "mpich" and (problem := jobs.mpich_missing()):
        pytest.skip(problem)
    passes(job, name)


def test_every_scenario_applies_in_a_job():
    """The scenarios that are always run, so that none passes by saying nothing."""
    modules = {module.partition(".")[0] for job in JOBS for module in job.modules}
    every = {name for module in modules for name in names(module, over=None)}
    assert every == {name for job in JOBS for name in job.names}
