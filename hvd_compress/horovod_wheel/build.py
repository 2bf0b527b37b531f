"""Building Horovod 0.28.1, and installing it.

Its source release does not compile against today's frameworks.  It pins C++14 where PyTorch >= 2.1
wants C++17, and >= 2.14 C++20.  TensorFlow's wheels stopped shipping headers that its
``xla_mpi_ops.cc`` includes.  GCC 13 and 14 want a header and an assignment written otherwise.

No file of Horovod is touched: CXX is a small script that starts the compiler with other arguments
(:func:`write_wrapper`).  Only the opt-in XLA allreduce op is lost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hvd_compress.horovod_wheel import environment as env
from hvd_compress.horovod_wheel.environment import BuildError
from hvd_compress.horovod_wheel.plan import (
    GPU,
    SOURCE_SHA256,
    VERSION,
    BuildPlan,
    digest_of,
    make_plan,
    record_of,
    untried,
    up_to_prefix,
)


def write_wrapper(folder: Path, compiler: list[str], standard: int = 17) -> Path:
    """Write a script that stands in for the compiler, and return its path.

    - It asks for that standard of C++ where Horovod's build asks for C++14.
    - It includes ``<stdexcept>`` in every unit but nvcc's, which are preprocessed already.
    - It compiles an empty unit instead of ``xla_mpi_ops.cc``.
    - It makes the library search path relative to the library, so that the wheel works in other
      environments too.
    - Before FlatBuffers' headers comes a copy of the one that assigns to a constant.
    """
    empty = folder / "empty.cc"
    empty.write_text("")
    prefixes = {sys.prefix, str(Path(sys.prefix).resolve())}
    edits = [f"-e {shlex.quote(f's|{p}/|$ORIGIN/{up_to_prefix()}/|g')}" for p in sorted(prefixes)]
    script, mended = folder / "cxx", shlex.quote(str(folder / "flatbuffers"))
    script.write_text(f"""#!/bin/sh
mend() {{
    mkdir -p {mended} && cd {mended} && sed "s/const size_type count_;/size_type count_;/" \\
        "$1/stl_emulation.h" > "$$" && mv "$$" stl_emulation.h
}}
count=$# include="-include stdexcept"
for argument in "$@"; do
    case "$argument" in
        -D__NVCC__* | *.cudafe*.cpp) include= ;;
    esac
done
for argument in "$@"; do
    case "$argument" in
        -std=c++14 | -std=gnu++14) set -- "$@" $include; argument=-std=c++{standard} ;;
        -std=c++* | -std=gnu++*) set -- "$@" $include ;;
        -I*/flatbuffers/include)
            [ -e {mended}/stl_emulation.h ] || (mend "${{argument#-I}}/flatbuffers") || exit 1
            set -- "$@" -I{shlex.quote(str(folder))} ;;
        */xla_mpi_ops.cc) argument={shlex.quote(str(empty))} ;;
        -Wl,-rpath,*) argument=$(printf %s "$argument" | sed {" ".join(edits)}) ;;
    esac
    set -- "$@" "$argument"
done
shift "$count"
exec {shlex.join(compiler)} "$@"
""")
    script.chmod(0o755)
    return script


def build_environment(plan: BuildPlan, wrapper: Path) -> dict[str, str]:
    """Return the environment variables that control Horovod's build."""
    switches = {
        f"HOROVOD_{'WITH' if name in plan.frameworks else 'WITHOUT'}_{variable}": "1"
        for name, variable in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW"))
    }
    if plan.gpu != "none":
        switches["HOROVOD_GPU_OPERATIONS"] = plan.gpu.upper()
        switches["HOROVOD_CUDA_HOME"] = str(env.cuda_home())
    elif (
        (torch := plan.inputs["torch"]) and torch["cuda"] and (home := os.environ.get("CUDA_HOME"))
    ):
        # PyTorch's extension is built for CUDA all the same, by CMake's nvcc, which is PATH's.
        switches["HOROVOD_CUDA_HOME"] = os.environ.get("HOROVOD_CUDA_HOME", home)
    if nccl := plan.nccl:
        # Its wheel has no file of the name that linkers look for.
        (wrapper.parent / "libnccl.so").symlink_to(nccl / "lib" / "libnccl.so.2")
        switches["HOROVOD_NCCL_INCLUDE"] = str(nccl / "include")
        switches["HOROVOD_NCCL_LIB"] = str(wrapper.parent)
        switches["HOROVOD_NCCL_LINK"] = "SHARED"
    return {
        **os.environ,
        **switches,
        "PATH": env.search_path(),
        "CXX": str(wrapper),
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "CMAKE_GENERATOR": "Unix Makefiles",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the age of Gloo's files
        "MAKEFLAGS": f"-j{plan.jobs}",
        "VERBOSE": "1",  # compile commands in the log
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def build(plan: BuildPlan) -> Path:
    """Build the wheel into the cache; the log stays beside it."""
    # Built aside and moved in at the end: what is in the cache is whole.
    with folder_in(plan.folder) as work:
        source = Path(work, "source.txt")
        source.write_text(f"horovod=={VERSION} --hash=sha256:{SOURCE_SHA256}\n")
        wrapper = write_wrapper(Path(work), plan.compiler, plan.standard)
        variables = build_environment(plan, wrapper)
        # --use-pep517: the old way would fetch setup_requires (cffi, which nothing uses).
        command = [sys.executable, "-m", "pip", "wheel", "-v", "--disable-pip-version-check"]
        command += ["--use-pep517", "--no-build-isolation", "--no-cache-dir", "--no-deps"]
        command += ["--no-binary", "horovod", "--wheel-dir", work, "--requirement", str(source)]
        status = run_logged(command, variables, plan.log)
        built = next(iter(Path(work).glob("horovod-*.whl")), None)
        if status or built is None:
            log = plan.log.read_text(errors="replace")
            if "DO NOT MATCH THE HASHES" in log:
                raise BuildError(
                    f"the source of Horovod {VERSION} that pip found is not the published one, "
                    f"whose SHA-256 is {SOURCE_SHA256}: look at `pip config list`; log: {plan.log}"
                )
            print(excerpt(log), file=sys.stderr)
            raise BuildError(f"Horovod did not build; the whole log: {plan.log}")
        return keep(plan, built)


def keep(plan: BuildPlan, built: Path) -> Path:
    """Move a wheel into the cache, with its hash and what it depends on, and return its path."""
    text = json.dumps(plan.inputs, indent=2, sort_keys=True)
    (plan.folder / "inputs.json").write_text(text + "\n")
    wheel = plan.folder / built.name
    record_of(wheel).write_text(digest_of(built))
    for file in (record_of(wheel), built):
        file.chmod(0o644)  # where the umask lets a group write
    return built.replace(wheel)


def folder_in(cache: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a new folder in the cache, which is made where it is missing; no one else may write
    to it."""
    try:
        for folder in (cache.parent, cache):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="building-", dir=cache)
    except OSError as error:
        raise BuildError(
            f"the cache {cache} cannot be written ({error.strerror}): set HVD_COMPRESS_CACHE to a "
            "folder that can"
        ) from None


def run_logged(command: list[str], variables: dict[str, str], log: Path) -> int:
    """Run a command, and return its exit status.  Its output goes to ``log``, and a line for each
    tenth of the build to stdout."""
    tenths, start = 0, time.monotonic()
    with (
        log.open("w") as file,
        subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            found = re.match(r"\s*\[\s*(\d+)%\]", line)
            if found and (done := int(found[1]) // 10) > tenths:
                tenths = done
                print(f"  building {10 * tenths:3}%  {time.monotonic() - start:.0f} s", flush=True)
    return process.returncode


def excerpt(log: str, errors: int = 3, context: int = 3, tail: int = 30) -> str:
    """Return the part of a build log that matters: the first errors, or the last lines."""
    lines = [line.rstrip() for line in log.splitlines()]
    pattern = re.compile(r"\b(fatal )?error: |CMake Error|undefined reference|: cannot find -l")
    hits = [i for i, line in enumerate(lines) if pattern.search(line)][:errors]
    if not hits:
        return "\n".join(lines[-tail:])
    wanted = sorted({j for i in hits for j in range(max(0, i - 1), i + 1 + context)})
    return "\n".join(lines[j][:300] for j in wanted if j < len(lines))


def built_with(framework: str) -> dict[str, bool] | None:
    """Return what ``horovod.<framework>`` was built with; ``None`` if it cannot be imported."""
    facts: dict[str, bool] | None = env.ask_python(
        f"import json, horovod.{framework} as hvd\n"
        "names = ('mpi', 'gloo', 'nccl', 'cuda', 'rocm')\n"
        "print(json.dumps({n: bool(getattr(hvd, n + '_built')()) for n in names}))"
    )
    return facts


def install(plan: BuildPlan, rebuild: bool = False) -> None:
    """Build the wheel unless it is cached, and put it into this environment instead of any other
    Horovod.  Then import it, each framework in a fresh process."""
    start = time.monotonic()
    wheel = (None if rebuild else plan.wheel) or build(plan)
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    command += ["--no-index", "--no-deps", "--force-reinstall", str(wheel)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
        raise BuildError(f"pip could not install {wheel}")
    for name in plan.frameworks:
        facts = built_with(name)
        if facts is None or not (facts["mpi"] and facts["gloo"]):
            raise BuildError(
                f"horovod.{name} was installed but cannot be imported with MPI and Gloo; "
                f"build it again: {env.COMMAND} --rebuild"
            )
    seconds = round(time.monotonic() - start)
    print(f"Horovod {VERSION} works with {', '.join(plan.frameworks)} ({seconds} s)")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=env.COMMAND,
        description=f"Build Horovod {VERSION}, which pip cannot, for the installed PyTorch and "
        "TensorFlow, and install it.  Wheels are cached: a second time takes seconds.",
    )
    parser.add_argument(
        "--gpu", choices=GPU, default="none", help="what moves GPU tensors (default: none)"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="default: number of cores")
    parser.add_argument("--rebuild", action="store_true", help="even if there is a cached wheel")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    options = parser.parse_args(argv)
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"argument --jobs: must be at least 1; got {options.jobs}")
    try:
        plan = make_plan(options.gpu, options.jobs)
        print(plan.describe(options.rebuild), flush=True)
        if env.too_new_for_horovodrun(plan.inputs["mpi"]["version"]):
            print(f"  warning: horovodrun does not work with Open MPI 5: {env.INSTALL_MPI}")
        if text := untried(plan.inputs["torch"] and plan.inputs["torch"]["version"]):
            print(f"  warning: {text}")
        if not options.dry_run:
            install(plan, options.rebuild)
    except BuildError as error:
        print(f"{env.COMMAND}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
