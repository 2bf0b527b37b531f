"""The files that start a training on a cluster: scripts, manifests and environments.

There is no cluster here.  Fields of manifests are compared with those that the operators know, by
hand from their definitions (MPI Operator 0.8, Kubeflow Trainer 2.3), and what can run does.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from mpi_examples.demo import parser_of
from tests import jobs
from tests.project import PROJECT, toml

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "mpi_examples" / "clusters"
CONTAINER = {
    "name": str,
    "image": str,
    "securityContext": {"runAsUser": int},
    "env": [{"name": str, "value": str}],
    "command": [str],
    "args": [str],
    "resources": {"requests": {"cpu": str, "memory": str}, "limits": {"cpu": str, "memory": str}},
    "readinessProbe": {"tcpSocket": {"port": int}, "initialDelaySeconds": int},
    "volumeMounts": [{"name": str, "mountPath": str}],
}
POD = {
    "spec": {
        "containers": [CONTAINER],
        "volumes": [{"name": str, "emptyDir": {"medium": {"Memory"}, "sizeLimit": str}}],
        "securityContext": {"fsGroup": int},
        "topologySpreadConstraints": [
            {
                "maxSkew": int,
                "topologyKey": str,
                "whenUnsatisfiable": {"ScheduleAnyway", "DoNotSchedule"},
                "labelSelector": {"matchLabels": dict},
            }
        ],
    }
}
REPLICAS = {"replicas": int, "restartPolicy": {"Never", "OnFailure", "Always"}, "template": POD}
HEAD = {"apiVersion": str, "kind": str, "metadata": {"name": str, "labels": dict}}
#: fields, and what they are: a type, one of some words, a list, or fields in turn
FIELDS = {
    "kubeflow.org/v2beta1 MPIJob": {
        "slotsPerWorker": int,
        "runLauncherAsWorker": bool,
        "mpiImplementation": {"OpenMPI", "Intel", "MPICH"},
        "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
        "sshAuthMountPath": str,
        "runPolicy": {
            "cleanPodPolicy": {"Running", "None", "All"},
            "ttlSecondsAfterFinished": int,
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
        },
        "mpiReplicaSpecs": {"Launcher": REPLICAS, "Worker": REPLICAS},
    },
    "trainer.kubeflow.org/v1alpha1 ClusterTrainingRuntime": {
        "mlPolicy": {
            "numNodes": int,
            "mpi": {
                "numProcPerNode": int,
                "mpiImplementation": {"OpenMPI", "Intel", "MPICH"},
                "sshAuthMountPath": str,
                "runLauncherAsNode": bool,
            },
        },
        "template": {
            "spec": {
                "network": {"publishNotReadyAddresses": bool},
                "successPolicy": {"operator": {"All", "Any"}, "targetReplicatedJobs": [str]},
                "replicatedJobs": [
                    {
                        "name": str,
                        "dependsOn": [{"name": str, "status": {"Ready", "Complete"}}],
                        "template": {"metadata": {"labels": dict}, "spec": {"template": POD}},
                    }
                ],
            }
        },
    },
    "trainer.kubeflow.org/v1alpha1 TrainJob": {
        "runtimeRef": {"name": str},
        "activeDeadlineSeconds": int,
        "trainer": {
            "image": str,
            "command": [str],
            "args": [str],
            "env": [{"name": str, "value": str}],
            "numNodes": int,
            "numProcPerNode": int,
            "resourcesPerNode": CONTAINER["resources"],
        },
    },
}


def check(value, allowed, where):
    if isinstance(allowed, dict):
        assert isinstance(value, dict), where
        for key, inner in value.items():
            assert key in allowed, f"{where} has no field {key}"
            check(inner, allowed[key], f"{where}.{key}")
    elif isinstance(allowed, list):
        assert isinstance(value, list), where
        for i, inner in enumerate(value):
            check(inner, allowed[0], f"{where}[{i}]")
    elif isinstance(allowed, set):
        assert value in allowed, f"{where}: {value}"
    else:
        assert type(value) is allowed, f"{where}: {value!r}"


def manifests(file):
    return {each["kind"]: each for each in yaml.safe_load_all((CLUSTERS / file).read_text())}


@pytest.mark.parametrize("file", ["mpijob.yaml", "trainjob.yaml"])
def test_fields_are_known_to_the_operators(file):
    for kind, each in manifests(file).items():
        fields = FIELDS[f"{each['apiVersion']} {kind}"]
        check(each, {**HEAD, "spec": fields}, kind)


def assert_starts_training(container, ranks):
    """``mpirun`` starts as many ranks as there are slots, of a program with options that it has."""
    assert container["command"] == ["mpirun"]
    args = container["args"]
    assert args[args.index("-np") + 1] == str(ranks)
    start = args.index("-m") + 1
    assert args[start] == "mpi_examples.train_digits_mpi"
    parser_of("digits", "digits.png", epochs=1, seeds=1).parse_args(args[start + 1 :])
    # What the environment says, ranks on other hosts hear from mpirun only.
    sent = {args[i + 1] for i, arg in enumerate(args) if arg == "-x"}
    assert sent == {"PATH", *(each["name"] for each in container["env"])}


def test_mpijob():
    spec = manifests("mpijob.yaml")["MPIJob"]["spec"]
    replicas = spec["mpiReplicaSpecs"]
    launcher, worker = (
        replicas[role]["template"]["spec"]["containers"][0] for role in ("Launcher", "Worker")
    )
    assert_starts_training(launcher, spec["slotsPerWorker"] * replicas["Worker"]["replicas"])
    assert launcher["image"] == worker["image"] == image()
    assert worker["args"][-1] == f"{Path(spec['sshAuthMountPath']).parent}/.sshd_config"
    threads = int({each["name"]: each["value"] for each in launcher["env"]}["OMP_NUM_THREADS"])
    assert int(worker["resources"]["limits"]["cpu"]) == threads * spec["slotsPerWorker"]


def test_trainjob():
    both = manifests("trainjob.yaml")
    runtime, job = both["ClusterTrainingRuntime"], both["TrainJob"]["spec"]
    assert job["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer = job["trainer"]
    assert_starts_training(trainer, trainer["numNodes"] * trainer["numProcPerNode"])
    mpi = runtime["spec"]["mlPolicy"]["mpi"]
    assert mpi["numProcPerNode"] == trainer["numProcPerNode"]
    groups = {each["name"]: each for each in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    assert groups.keys() == {"node", "launcher"}
    for group in groups.values():
        [container] = group["template"]["spec"]["template"]["spec"]["containers"]
        assert container["image"] == trainer["image"] == image()
        # The operator looks for this name, in the launcher as well where it is a node.
        assert container["name"] == "node"
    labels = groups["launcher"]["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def image():
    name = f"hvd-compress:{PROJECT['version']}"
    assert f"-t {name} " in (CLUSTERS / "Dockerfile").read_text()
    return name


def test_the_image_has_what_manifests_ask_for():
    text = (CLUSTERS / "Dockerfile").read_text()
    [extras] = re.findall(r'-e "\.\[([\w,-]+)\]"', text)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert "/home/mpiuser/.sshd_config" in text
    assert "HostKey /home/mpiuser/.ssh/id_rsa" in text
    assert "Port 2222" in text
    assert "--uid 1000" in text
    assert "USER 1000" in text


def test_the_environment_of_conda_has_what_the_package_needs():
    environment = yaml.safe_load((CLUSTERS / "environment.yml").read_text())
    names = {re.split("[=<>]", each)[0] for each in environment["dependencies"]}
    assert names >= {"python", "numpy", "horovod", "openmpi", "mpi4py", "pytorch", "pip"}
    for need in toml("pyproject.toml")["build-system"]["requires"]:
        assert need in environment["dependencies"], "the build is not isolated"


@pytest.mark.parametrize("file", ["pbs.sh", "slurm.sh"])
def test_scripts_are_of_bash(file):
    subprocess.run(["bash", "-n", str(CLUSTERS / file)], check=True)


#: of the manual pages of sbatch and qsub (PBS Professional)
OPTIONS = {
    "slurm.sh": (
        "SBATCH",
        {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "output"},
    ),
    "pbs.sh": ("PBS", {"N", "l", "j"}),
}


@pytest.mark.parametrize("file", ["pbs.sh", "slurm.sh"])
def test_directives_stand_in_front_of_all_commands(file):
    word, options = OPTIONS[file]
    head, _, body = (CLUSTERS / file).read_text().partition("\nset -euo pipefail\n")
    assert f"#{word} " not in body
    found = re.findall(rf"^#{word} --?([\w-]+)", head, re.MULTILINE)
    assert set(found) == options
    if word == "PBS":
        chunk = dict(part.split("=") for part in re.search(r"select=2:(\S+)", head)[1].split(":"))
        assert int(chunk["ncpus"]) == int(chunk["mpiprocs"]) * int(chunk["ompthreads"])


#: stands in for Slurm, which starts two tasks, and for programs, which print what they are told
STAND_INS = {
    "scontrol": r"printf 'node1\nnode2\n'",
    "srun": "while [[ $1 == --* ]]; do shift; done\n"
    'for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NODEID=0 "$@" & done; wait',
    "python": 'echo "$RANK $LOCAL_RANK of $WORLD_SIZE, $GROUP_RANK, $MASTER_ADDR:$MASTER_PORT $*"',
    "torchrun": 'echo "$*"',
}


def test_slurm_scripts_of_ddp_say_which_rank_is_which(tmp_path):
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"CPUS_PER_TASK": "8", "NTASKS": "2", "NNODES": "8", "JOB_ID": "7"}
    settings = {f"SLURM_{name}": value for name, value in slurm.items()}
    settings |= {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node[1-2]"}
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/ddp.md").read_text(), re.DOTALL)
    by_torchrun, by_python = (
        subprocess.run(
            ["bash", "-c", block], env=settings, check=True, capture_output=True, text=True
        ).stdout.splitlines()
        for block in blocks
    )
    assert by_torchrun[0] == (
        "--nnodes 8 --nproc-per-node 4 --rdzv-id 7 --rdzv-backend c10d "
        "--rdzv-endpoint node1:29500 train.py"
    )
    expected = [f"{rank} {rank} of 2, 0, node1:29500 train.py" for rank in (0, 1)]
    assert sorted(by_python) == expected


def test_pbs_script(tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("a\na\nb\nb\n")
    command = ["bash", str(CLUSTERS / "pbs.sh"), "--epochs", "5"]
    settings = {"PBS_NODEFILE": str(nodes), "PBS_O_WORKDIR": str(ROOT), "OMP_NUM_THREADS": "2"}
    _, output = jobs.run(
        command, timeout=20, START="echo started", ARGS="--framework numpy", **settings
    )
    said, started = output.splitlines()
    assert said == "2 nodes, 4 ranks, 2 cores each: echo started"
    expected = "started python -m mpi_examples.train_digits_mpi --framework numpy --epochs 5"
    assert started == expected
