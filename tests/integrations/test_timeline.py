"""Horovod's timeline shows our collectives, by the names that statistics have as well."""

import json
from pathlib import Path

import pytest

from tests import jobs

PROGRAM = """
import json, sys, time
from dataclasses import asdict
import torch
import hvd_compress.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(30, 200), torch.nn.ReLU(), torch.nn.Linear(200, 4))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=hvd.DGC(density=0.05),
)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 30)).square().mean().backward()
    optimizer.step()
if hvd.rank() == 0:
    found = {}
    hvd.log_stats(optimizer, lambda name, value, step: found.update({name: value}), 3)
    buckets = optimizer.compression.stats().buckets
    with open(sys.argv[1], "w") as file:
        json.dump({"scalars": found, "buckets": {k: asdict(x) for k, x in buckets.items()}}, file)
time.sleep(1)  # the timeline is written by a thread, which the end of Horovod cuts short
hvd.shutdown()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The report of rank 0 on three steps on two ranks, and Horovod's events."""
    folder = tmp_path_factory.mktemp("timeline")
    said, timeline = folder / "said.json", folder / "timeline.json"
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [*jobs.launcher(2, "mpirun"), jobs.python(), str(program), str(said)]
    jobs.run(command, timeout=100, HOROVOD_TIMELINE=str(timeline))
    return json.loads(said.read_text()), events(timeline)


def events(file: Path) -> list[dict]:
    """Horovod ends the list or not, by when it ends."""
    text = file.read_text().rstrip().rstrip(",")
    return json.loads(text if text.endswith("]") else f"{text}]")


@pytest.mark.jobs
@pytest.mark.timeout(120)
def test_buckets_have_the_names_of_statistics(job):
    said, found = job
    rows = {e["pid"]: e["args"]["name"] for e in found if "name" in e.get("args", {})}
    of_bucket = {
        label: [pid for pid, row in rows.items() if f".{label}." in row]
        for label in said["buckets"]
    }
    assert len(of_bucket) == 2  # DGC sends 1-D tensors whole
    for pids in of_bucket.values():
        [pid] = pids
        kind = rows[pid].partition(".")[0].upper()
        steps = [e for e in found if e["pid"] == pid and e.get("name") == f"NEGOTIATE_{kind}"]
        assert len(steps) == 3
    [(label, gathered)] = [
        (label, pid) for label, [pid] in of_bucket.items() if rows[pid].startswith("allgather.")
    ]
    assert rows[gathered].startswith("allgather.hvd_compress.")
    sizes = [
        e["args"]["shape"] for e in found if e["pid"] == gathered and "shape" in e.get("args", {})
    ]
    record = said["buckets"][label]["record"]
    received = sum(int(size.strip("[]")) for size in sizes)
    assert received == record["bytes_sent"] + record["bytes_received"]


@pytest.mark.jobs
@pytest.mark.timeout(120)
def test_what_is_logged_over_horovod(job):
    said, _ = job
    for label, bucket in said["buckets"].items():
        for key in ("wait", "under_way", "other"):
            name = f"compression/buckets/{label}/{key}"
            assert said["scalars"][name] == pytest.approx(
                bucket["times"][key] / bucket["times"]["steps"]
            )
            assert said["scalars"][name] > 0
        assert bucket["times"]["wait"] <= bucket["times"]["under_way"]
