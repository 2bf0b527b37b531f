"""The DDP communication hook in real jobs that torchrun starts."""

from __future__ import annotations

import functools
import re
import socket
import subprocess

import pytest
import torch
import torch.distributed as dist

from hvd_compress.torch import DDPState, ddp_hook
from hvd_compress.torch.ddp.process_groups import ProcessGroupEngine
from tests import jobs
from tests.ddp_worker import scenarios_of
from tests.scenarios import read

WORKER = jobs.TESTS / "ddp_worker.py"


def test_a_state_that_was_never_used_says_so():
    """At the first look at it, and when it ends."""
    states = [DDPState("topk", torch.nn.Linear(2, 3))]
    with pytest.warns(RuntimeWarning, match="Lightning leaves hooks out"):
        states[0].stats()
    states[0].state_dict()
    with pytest.warns(RuntimeWarning, match="has got no gradients"):
        states.clear()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler, about frames of PyTorch
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("autograd", [False, True])
def test_a_whole_step_with_the_hook_may_be_compiled(autograd):
    def trained(backend):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 8))
        state = DDPState("topk:density=0.2", model)
        model.register_comm_hook(state, ddp_hook)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            sgd.zero_grad()
            model(x).square().mean().backward()
            sgd.step()

        function = step if backend is None else torch.compile(step, backend=backend)
        with torch._dynamo.config.patch(compiled_autograd=autograd):
            for number in range(3):
                function(torch.full((4, 16), 1.0 + number))
        assert state.reducer.step == 3
        return list(model.parameters())

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for p, q in zip(trained("eager"), trained(None), strict=True):
            assert torch.equal(p, q)
    finally:
        dist.destroy_process_group()


def test_what_was_loaded_too_early_is_saved_again():
    saved = {"version": 2, "states": {"parameter.0": {"residual": torch.ones(3)}}, "step": 7}
    state = DDPState("topk")
    state.load_state_dict(saved)
    assert state.state_dict() == saved
    assert state.state_dict(consolidate=False) is not saved
    with pytest.warns(RuntimeWarning, match="has got no gradients"):
        del state


def test_messages_of_nccl_are_where_the_gradients_are():
    """Not on the current device, which may be another one."""
    there = torch.device("meta")
    engine, x = ProcessGroupEngine(None, there), torch.ones(2)
    assert engine._reachable(x, "nccl").device == there
    assert engine._reachable(x, "gloo") is x


LOSES_A_RANK = """
import datetime, os, signal, sys
import torch
import torch.distributed as dist
from hvd_compress.torch import DDPState, ddp_hook

where, rank, stops = sys.argv[1], *map(int, sys.argv[2:])
limit = datetime.timedelta(seconds=5)
dist.init_process_group("gloo", init_method=where, rank=rank, world_size=3, timeout=limit)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 3))
model.register_comm_hook(DDPState("topk:density=0.5", model), ddp_hook)
for step in range(100):
    if step == 2 and rank == stops:
        os.kill(os.getpid(), signal.SIGSTOP)
    model(torch.ones(1, 2)).sum().backward()
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("stops", "words"),
    [
        (1, r"collective failed on rank {} of 3; no word from rank 1\. .*init_process_group\(tim"),
        (0, r"collective failed on rank {} of 3, and the job's store, .* is silent\. .*stopped"),
    ],
    ids=["1", "0-which-has-the-store"],
)
def test_an_error_names_the_rank_that_is_lost(stops, words):
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    command = [jobs.python(), "-c", LOSES_A_RANK, where]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(stops)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=jobs.environment(**jobs.sleeping_waits()),
        )
        for rank in range(3)
    ]
    try:
        for rank in {0, 1, 2} - {stops}:
            output, _ = ranks[rank].communicate(timeout=150)
            assert re.search(words.format(rank), output), output
            assert "Timed out" in output or "clos" in output or "reset" in output, output
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """``results(ranks)[rank]``: a problem or ``None`` by scenario name."""

    @functools.cache
    def run(ranks: int) -> list[dict[str, str | None]]:
        folder = tmp_path_factory.mktemp(f"torchrun-{ranks}")
        command = jobs.torchrun(ranks)
        try:
            jobs.run([*command, str(WORKER), str(folder)], timeout=150)
        except jobs.JobError as error:
            (folder / "failure").write_text(str(error))
        return [read(folder, rank, list(scenarios_of(ranks))) for rank in range(ranks)]

    return run


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, name, id=f"torchrun-{ranks}@{name}", marks=marks)
        for ranks, marks in ((2, []), (3, []), (1, pytest.mark.full), (4, pytest.mark.full))
        for name in scenarios_of(ranks)
    ],
)
def test_scenario(results, ranks, name):
    for rank, found in enumerate(results(ranks)):
        assert found[name] is None, f"rank {rank} of {ranks}: {found[name]}"
