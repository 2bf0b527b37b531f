"""The DDP communication hook in real jobs that torchrun starts."""

from __future__ import annotations

import re
import socket
import subprocess

import pytest
import torch
import torch.distributed as dist

from hvd_compress.torch import DDPState, ddp_hook
from hvd_compress.torch.process_groups import ProcessGroupEngine
from tests import ddp_nodes_worker, ddp_worker, jobs


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
def test_a_whole_step_with_the_hook_may_be_compiled(alone, autograd):
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

    for p, q in zip(trained("eager"), trained(None), strict=True):
        assert torch.equal(p, q)


def test_what_was_loaded_too_early_is_saved_again():
    saved = {"version": 2, "states": {"parameter.0": {"residual": torch.ones(3)}}, "step": 7}
    state = DDPState("topk")
    state.load_state_dict(saved)
    assert state.state_dict() == saved
    assert state.state_dict(consolidate=False) is not saved
    with pytest.warns(RuntimeWarning, match="has got no gradients"):
        del state


@pytest.mark.parametrize("backends", ["cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
def test_messages_are_where_a_library_reads_them(monkeypatch, backends):
    """With NCCL alone where the gradients are: not on the current device, which may be another."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    there, x = torch.device("meta"), torch.ones(2)
    engine = ProcessGroupEngine(None, there)
    found = engine._reachable(x)
    assert found is x if "cpu" in backends else found.device == there
    assert engine.reads_device is ("nccl" in backends)


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


@pytest.fixture(scope="module")
def losing():
    """The ranks of two jobs, by the rank that each loses; both wait for their time-outs at once."""
    started = {}
    for stops in (0, 1):
        with socket.create_server(("127.0.0.1", 0)) as free:
            where = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        started[stops] = [
            subprocess.Popen(
                [jobs.python(), "-c", LOSES_A_RANK, where, str(rank), str(stops)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=jobs.environment(**jobs.sleeping_waits()),
            )
            for rank in range(3)
        ]
    yield started
    for process in (*started[0], *started[1]):
        process.kill()
        process.communicate()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("stops", "words"),
    [
        (1, r"collective failed on rank {} of 3; no word from rank 1\. .*init_process_group\(tim"),
        (0, r"collective failed on rank {} of 3, and the job's store, .* is silent\. .*stopped"),
    ],
    ids=["lost@1", "lost@0-which-has-the-store"],
)
def test_an_error_names_the_rank_that_is_lost(losing, stops, words):
    for rank in {0, 1, 2} - {stops}:
        output, _ = losing[stops][rank].communicate(timeout=150)
        assert re.search(words.format(rank), output), output
        assert "Timed out" in output or "clos" in output or "reset" in output, output


JOBS = [
    jobs.worker("ddp_worker", 3, ddp_worker.scenarios_of(3)),
    jobs.worker("ddp_nodes_worker", 4, ddp_nodes_worker.SCENARIOS),
]
FULL = [jobs.worker("ddp_worker", ranks, ddp_worker.scenarios_of(ranks)) for ranks in (1, 2, 4)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("job", "name"), jobs.cases(JOBS) + jobs.cases(FULL, pytest.mark.full))
def test_scenario(passes, job, name):
    passes(job, name)
