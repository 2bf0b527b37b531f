"""Python whose packages are imported already: forks of a process that has imported them.

Most of what a short job takes are imports, on every rank: two seconds of processor for PyTorch,
five for TensorFlow.  A launcher starts a small program in place of Python.  It hands its arguments,
variables, folder and streams to a server, which forks, and ends as the fork ends, or with it; so to
launchers and tests it is the rank.  It becomes a plain Python where variables differ that packages
read when they are imported.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

#: how variables begin that the C library, Python and packages read when they start
READ_EARLY = ("CUDA", "GLIBC", "LD_P", "MALLOC", "MKL", "MPLBACKEND", "OMP_", "PYTHON", "TORCH_")
#: and that forks heed, too: horovodrun and torchrun set them, or ``tf.keras`` reads it when it is
#: looked up for the first time
READ_LATE = ("PYTHONUNBUFFERED", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TF_USE_LEGACY_KERAS")
OF_PACKAGES = {"tensorflow": ("KERAS", "TF_")}
#: a stream of MPICH's launcher is not handed on
PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
early = {{
    k: v for k, v in os.environ.items() if k.startswith({read_early}) and k not in {read_late}
}}
handed_on = sys.argv[1][:1] != "-" or sys.argv[1] in ("-c", "-m", "-u")
if early != {early} or "PMI_FD" in os.environ or not handed_on:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({servers}[os.getpid() % 2])
    asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(connection, [len(asked).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(asked)
    status = int(connection.recv(100) or -signal.SIGKILL)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


def python(packages: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return a program that takes Python's arguments and starts with ``packages`` imported.

    It has two servers, since processes hash strings differently, and ranks have to agree anyway.
    They import when they are asked for the first time.
    """
    folder = Path(tempfile.mkdtemp(prefix="hvd_compress-forked-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    servers = [str(folder / name) for name in ("even", "odd")]
    program = folder / "python"
    ends, _ = os.pipe()  # is closed, and so ends the servers, when this process ends
    for name in servers:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
            listener.listen(100)
            listener.set_inheritable(True)
            command = [sys.executable, "-m", "tests.forked", str(listener.fileno()), str(program)]
            streams = [(os.POSIX_SPAWN_DUP2, ends, 0)]
            os.posix_spawn(
                command[0], [*command, *packages], environ, file_actions=streams, setsid=True
            )
    os.close(ends)
    read_early = READ_EARLY + sum((OF_PACKAGES.get(package, ()) for package in packages), ())
    early = {
        name: value
        for name, value in environ.items()
        if name.startswith(read_early) and name not in READ_LATE
    }
    names = {"read_early": read_early, "read_late": READ_LATE, "early": early}
    program.write_text(PROGRAM.format(python=sys.executable, servers=servers, **names))
    program.chmod(0o755)
    return str(program)


def serve(listener: socket.socket) -> tuple[list[str], dict[str, str], str]:
    """Fork for each that asks; only forks return, with arguments, variables and folder."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so nobody need wait for keepers
    while True:
        if 0 in select.select([listener, 0], [], [])[0]:
            os._exit(0)
        connection, _ = listener.accept()
        if not os.fork():
            break
        connection.close()
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, *_ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as rest:
        asked = json.loads(rest.read(int.from_bytes(size, "big")))
    if pid := os.fork():
        keep(pid, connection, streams)
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    return asked


def keep(pid: int, connection: socket.socket, streams: list[int]) -> None:
    """Say how a fork ended, or end it when the program that stands for it has ended."""
    for stream in (*range(3), *streams):
        os.close(stream)
    end = os.pidfd_open(pid)
    if connection in select.select([connection, end], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(b"%d" % status)
    os._exit(0)


def run(arguments: list[str], environ: dict[str, str], folder: str) -> None:
    """Do what Python does with its arguments."""
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as each process does
    asked = arguments[0] == "-u"
    for stream in (sys.stdout, sys.stderr):  # whatever the server itself was told
        stream.reconfigure(write_through=asked or bool(environ.get("PYTHONUNBUFFERED")))
    arguments = arguments[asked:]
    first, *rest = arguments
    if first == "-m":
        sys.argv[:], sys.path[0] = rest, folder
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv[:], sys.path[0] = ["-c", *rest[1:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(rest[0], main.__dict__)
    else:
        sys.argv[:], sys.path[0] = arguments, str(Path(first).absolute().parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    number, program, *packages = sys.argv[1:]
    if 0 in select.select([int(number), 0], [], [])[0]:
        sys.exit()  # nobody has asked
    for package in packages:
        importlib.import_module(package)
    sys.executable = program  # so that what forks start are forks, too
    gc.collect()
    gc.freeze()  # so that forks share this memory
    run(*serve(socket.socket(fileno=int(number))))
