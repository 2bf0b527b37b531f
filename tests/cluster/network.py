"""Namespaces, links and jobs on them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests import jobs

SUBNET = "10.77.0"
# Package by program, as Debian names them.
PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "mount": "util-linux",
    "hostname": "hostname",
}
# Set in every process of a job, so that those it leaves behind are found.
MARK = "HVD_CLUSTER_JOB"

# MPI starts its helpers through this, in place of ssh.  Processes see their own host's name and all
# hosts' addresses, since libraries look up what gethostname() says, and no other host's memory.
AGENT = """#!/bin/sh
# Called as ssh is: [options] HOST command...
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
exec ip netns exec {name}-$host unshare --uts sh -c '
mount --bind "$0" /etc/hosts && mount -t tmpfs shm /dev/shm && hostname "$1" || exit 127
shift
eval "$*"' {folder}/hosts "$host" "$@"
"""


class NetworkError(RuntimeError):
    """A command that makes or changes the network failed."""


class Traffic(NamedTuple):
    """Bytes through a host's link, with the headers of every frame."""

    received: int
    sent: int


@functools.cache
def unavailable() -> str | None:
    """Why there can be no network on this machine and what would help, or None if there can."""
    if not sys.platform.startswith("linux"):
        return "a network of namespaces needs Linux: use a machine or container with it"
    if os.geteuid():
        return "a network of namespaces needs root: use sudo, or a privileged container"
    for program, package in PROGRAMS.items():
        if not shutil.which(program):
            return f"a network of namespaces needs `{program}`: apt install {package}"
    try:
        with Network(hosts=1) as network:
            _command(*network.on(1, ["true"]))
    except NetworkError as error:
        return (
            "a network of namespaces needs a privileged container, and veth, bridge and sch_tbf "
            f"in the kernel: {' '.join(str(error).split())}"
        )
    return None


class Network:
    """``hosts`` namespaces, numbered from 1, each with one link to a switch.

    Args:
        rate: of each link, in either direction, as ``tc`` writes it: ``"1gbit"``, ``"200mbit"``.
        burst: what may pass at once; a large one lets small messages escape the limit.
        latency: how long a packet may wait before it is dropped; with a short queue TCP stalls.
    """

    _serial = itertools.count()

    def __init__(
        self, hosts: int = 4, *, rate: str = "1gbit", burst: str = "16kb", latency: str = "300ms"
    ) -> None:
        self.hosts = range(1, hosts + 1)
        self.limit = ["tbf", "rate", rate, "burst", burst, "latency", latency]
        self.name = ""
        self._jobs = itertools.count()
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Network:
        _remove_remains()
        # A number of a process that is gone may have been given to this one.
        taken = {_owner(namespace) for namespace in _namespaces()}
        names = (f"hvdnet-{os.getpid()}-{serial}" for serial in self._serial)
        self.name = next(name for name in names if name not in taken)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            jobs.kill(process)
        _end(self.name)
        for process in self._started:
            process.wait()
            if process.stdout:
                process.stdout.close()
        self._started.clear()
        _remove(self.name)

    def _build(self) -> None:
        switch = f"{self.name}-sw"
        _command("ip", "netns", "add", switch)
        _command("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _command("ip", "-n", switch, "link", "set", "br0", "up")
        for host in self.hosts:
            space, port = self._namespace(host), f"h{host}"
            _command("ip", "netns", "add", space)
            # Made where they belong: names of interfaces are short and must not clash.
            pair = ["type", "veth", "peer", "name", "eth0", "netns", space]
            _command("ip", "-n", switch, "link", "add", port, *pair)
            _command("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _command("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _command("ip", "-n", space, "link", "set", "lo", "up")
            _command("ip", "-n", space, "link", "set", "eth0", "up")
            _limit(switch, port, self.limit)
            _limit(space, "eth0", self.limit)
        names = "".join(f"{self.address(host)} h{host}\n" for host in self.hosts)
        (self._folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        self._agent.write_text(AGENT.format(name=self.name, folder=shlex.quote(str(self._folder))))
        self._agent.chmod(0o700)

    @property
    def _agent(self) -> Path:
        return self._folder / "agent"

    def _namespace(self, host: int) -> str:
        return f"{self.name}-h{host}"

    def address(self, host: int) -> str:
        return f"{SUBNET}.{host}"

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs ``command`` on one host; its name is h1, h2 ..."""
        return [str(self._agent), f"h{host}", f"exec {shlex.join(command)}"]

    def job(
        self,
        command: Sequence[str],
        ranks_per_host: int = 1,
        *,
        mpi: str = "openmpi",
        tag: bool = True,
        **env: str,
    ) -> tuple[list[str], dict[str, str]]:
        """The command that starts ranks of a command on all hosts, in their order, and the
        variables for it.

        Args:
            mpi: ``"openmpi"`` or ``"mpich"``.
            tag: put the rank before what it prints.
            env: variables for the ranks, beside those of all jobs.
        """
        slots = ",".join(f"h{host}:{ranks_per_host}" for host in self.hosts)
        ranks = ["-n", str(ranks_per_host * len(self.hosts))]
        env = {**env, MARK: f"{self.name}-{next(self._jobs)}"}
        if mpi == "openmpi":
            start = ["mpirun", *ranks, "-H", slots, "--map-by", "slot", "--bind-to", "none"]
            parameters = {
                "plm_rsh_agent": str(self._agent),
                "pml": "ob1",
                "btl": "tcp,vader,self",
                "btl_tcp_if_include": f"{SUBNET}.0/24",
                "oob_tcp_if_include": f"{SUBNET}.0/24",
                "orte_tmpdir_base": str(self._folder),
            }
            for parameter, value in parameters.items():
                start += ["--mca", parameter, value]
            for variable in jobs.settings(**env):
                if not variable.startswith("OMPI_"):  # those come along
                    start += ["-x", variable]
            start += ["--tag-output"] * tag
        else:
            start = [str(jobs.MPICH / "bin" / "mpiexec"), *ranks, "-hosts", slots]
            start += ["-launcher", "ssh", "-launcher-exec", str(self._agent)]
            start += ["-iface", "eth0", "-bind-to", "none", *["-prepend-rank"] * tag]
            tcp = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"}
            env = jobs.variables("mpich") | tcp | env
        return self.on(1, [*start, *command]), env

    def run(
        self,
        command: Sequence[str],
        ranks_per_host: int = 1,
        *,
        timeout: float,
        check: bool = True,
        mpi: str = "openmpi",
        **env: str,
    ) -> tuple[int, str]:
        """``jobs.run`` of a command as ranks on all hosts."""
        start, env = self.job(command, ranks_per_host, mpi=mpi, **env)
        try:
            return jobs.run(start, timeout, check=check, **env)
        finally:
            # Behind a link that is cut, helpers of MPI wait for ever.
            _end(self.name, f"{MARK}={env[MARK]}\0")

    def start(
        self, command: Sequence[str], *, stdout: int | None = subprocess.PIPE, **env: str
    ) -> subprocess.Popen[str]:
        """Start a command that :meth:`on` or :meth:`job` made; when the network ends, it does."""
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stdout and subprocess.STDOUT,
            text=True,
            errors="replace",
            env=jobs.environment(**env),
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def cut(self, host: int) -> None:
        """Pull the cable out at the switch: the host's link loses its carrier."""
        _command("ip", "-n", f"{self.name}-sw", "link", "set", f"h{host}", "down")

    def mend(self, host: int) -> None:
        _command("ip", "-n", f"{self.name}-sw", "link", "set", f"h{host}", "up")

    def slow(self, host: int, rate: str) -> None:
        """Change the rate of a host's link, in both directions, as of :class:`Network`."""
        limit = [*self.limit[:2], rate, *self.limit[3:]]
        for namespace, device in ((f"{self.name}-sw", f"h{host}"), (self._namespace(host), "eth0")):
            _command("tc", "-n", namespace, "qdisc", "change", "dev", device, "root", *limit)

    def traffic(self) -> dict[int, Traffic]:
        """The bytes that each host received and sent since the network began, as the limiters
        counted."""
        # They count the headers of every frame; interfaces those of every uncut packet.
        ports = _limiters(f"{self.name}-sw")
        return {
            host: Traffic(
                received=ports[f"h{host}"]["bytes"],
                sent=_limiters(self._namespace(host))["eth0"]["bytes"],
            )
            for host in self.hosts
        }

    def pids(self, host: int) -> list[int]:
        return _pids(self._namespace(host))


def _command(*command: str) -> str:
    # In a session of its own, for Ctrl-C shall not end it halfway.
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise NetworkError(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _limit(namespace: str, device: str, limit: list[str]) -> None:
    _command("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *limit)
    # Packets that TCP leaves uncut for the card must fit into the bucket with room to spare, else
    # the limiter cuts them into frames itself, and 1 Gbit/s becomes 600 Mbit/s.
    bucket = _limiters(namespace)[device]["options"]["burst"]
    largest = str(min(bucket * 3 // 4, 65536))
    _command("ip", "-n", namespace, "link", "set", device, "gso_max_size", largest)


def _limiters(namespace: str) -> dict[str, dict]:
    found = json.loads(_command("tc", "-n", namespace, "-s", "-j", "qdisc", "show"))
    return {limiter["dev"]: limiter for limiter in found}


def _namespaces(name: str = "hvdnet") -> list[str]:
    found = [line.split()[0] for line in _command("ip", "netns", "list").splitlines() if line]
    return [namespace for namespace in found if namespace.startswith(f"{name}-")]


def _owner(namespace: str) -> str:
    """Name of the network that the namespace is of."""
    return namespace.rpartition("-")[0]


def _remove_remains() -> None:
    """Networks whose process is gone: it was killed before it could clean up."""
    for name in {_owner(namespace) for namespace in _namespaces()}:
        owner = re.match(r"hvdnet-(\d+)-", name)
        if owner and not Path("/proc", owner[1]).exists():
            with contextlib.suppress(NetworkError):  # another process does the same
                _end(name)
                _remove(name)


def _remove(name: str) -> None:
    for namespace in _namespaces(name):
        _command("ip", "netns", "delete", namespace)
    for folder in Path(tempfile.gettempdir()).glob(f"{name}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _command("ip", "netns", "pids", namespace).split()]


def _end(name: str, marked: str = "") -> None:
    """Kill what runs in the namespaces of a network, or what of it has a variable set."""
    for _ in range(100):  # one killed now may have started another
        found = [pid for space in _namespaces(name) for pid in _pids(space) if pid != os.getpid()]
        found = [pid for pid in found if marked.encode() in _environ(pid)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    raise NetworkError(f"processes {found} in {name} do not end: kill -9 them, or restart")


def _environ(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""
