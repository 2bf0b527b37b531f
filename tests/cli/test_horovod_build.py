"""Everything about building Horovod but the minutes-long build itself."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from hvd_compress.horovod_wheel import build as horovod_build
from hvd_compress.horovod_wheel import environment as env
from hvd_compress.horovod_wheel import plan as horovod_plan
from hvd_compress.horovod_wheel.environment import BuildError

LOG = """\
  [ 80%] Building CXX object a.cc.o
  cd /build && c++ -c a.cc
  a.cc: In function 'int f()':
  a.cc:3:5: error: 'g' was not declared in this scope
      3 |     g();
        |     ^
  gmake[2]: *** [a.cc.o] Error 1
"""


@pytest.fixture
def install(monkeypatch, capfd):
    """The command with these options and variables: its exit status, stdout and stderr."""

    def run(*options, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return horovod_build.main(options), *capfd.readouterr()

    return run


@pytest.fixture(autouse=True)
def toolkit(tmp_path_factory, monkeypatch):
    """A whole toolkit, whatever the machine has, for a PyTorch that is built for CUDA."""
    folder = tmp_path_factory.mktemp("toolkit")
    for name in ("bin/nvcc", "include/cuda_runtime.h"):
        (folder / name).parent.mkdir()
        (folder / name).touch()
    monkeypatch.setenv("CUDA_HOME", str(folder))


@pytest.fixture(scope="module")
def inputs():
    return horovod_plan.key_inputs(env.compiler(), "none")


@pytest.fixture
def wrapper(tmp_path):
    folder = tmp_path / "with space"
    folder.mkdir()
    return horovod_build.write_wrapper(folder, env.compiler())


class TestKey:
    def test_is_stable(self, inputs):
        again = horovod_plan.key_inputs(env.compiler(), "none")
        assert horovod_plan.key_of(again) == horovod_plan.key_of(inputs)

    def test_survives_a_move_of_the_environment(self, inputs):
        assert sys.prefix not in json.dumps(inputs)
        assert inputs["mpi"]["mpicxx"]

    def test_depends_on_every_input(self, inputs):
        keys = {horovod_plan.key_of(inputs)}
        keys |= {horovod_plan.key_of(inputs | {name: "other"}) for name in inputs}
        keys |= {
            horovod_plan.key_of(inputs | {name: inputs[name] | {fact: "other"}})
            for name in ("torch", "tensorflow", "mpi")
            if inputs[name]
            for fact in inputs[name]
        }
        facts = sum(len(inputs[name] or ()) for name in ("torch", "tensorflow", "mpi"))
        assert len(keys) == 1 + len(inputs) + facts

    def test_names_what_is_installed(self, inputs):
        assert inputs["horovod"] == "0.28.1"
        if inputs["torch"]:
            assert inputs["torch"]["version"] == env.version_of("torch")
            assert isinstance(inputs["torch"]["cxx11_abi"], bool)
        if inputs["tensorflow"]:
            assert inputs["tensorflow"]["version"] == env.version_of("tensorflow")

    def test_depends_on_the_compiler(self, inputs, tmp_path):
        other = tmp_path / "c++"
        other.write_text("#!/bin/sh\necho another compiler 1.0\n")
        other.chmod(0o755)
        assert horovod_plan.key_inputs([str(other)], "none")["compiler"] == "another compiler 1.0"

    def test_depends_on_build_variables_only(self, inputs, monkeypatch):
        monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1024")
        assert horovod_plan.key_inputs(env.compiler(), "none") == inputs
        monkeypatch.setenv("CXXFLAGS", "-O1")
        monkeypatch.setenv("HOROVOD_BUILD_ARCH_FLAGS", "-march=native")
        changed = horovod_plan.key_inputs(env.compiler(), "none")
        assert {"CXXFLAGS", "HOROVOD_BUILD_ARCH_FLAGS"} <= set(changed["variables"])


def test_pytorch_says_for_what_it_was_built(monkeypatch):
    """Which the distribution of the common index does not: doctor would miss the right one."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0")
    assert env.version_of("torch") == torch.__version__


class TestWrapper:
    @pytest.mark.parametrize("standard", env.SAMPLES)
    def test_turns_cpp14_into_what_the_frameworks_want(self, tmp_path, standard):
        wrapper = horovod_build.write_wrapper(tmp_path, env.compiler(standard), standard)
        source = tmp_path / "a.cc"
        beyond = (
            f"static_assert(__cplusplus >= 20{standard}00L && __cplusplus < 20{standard + 3}00L);"
        )
        source.write_text(f"{env.SAMPLES[standard]}\n{beyond}\n")
        for old in ("-std=c++14", "-std=gnu++14"):
            subprocess.run([wrapper, old, "-fsyntax-only", source], check=True)

    @pytest.mark.parametrize("standard", ["c++14", "c++17", "gnu++20"])
    def test_declares_what_compilers_once_did(self, wrapper, tmp_path, standard):
        """TensorFlow's flags bring a standard of their own."""
        source = tmp_path / "a.cc"
        source.write_text("std::logic_error error(const char*);\n")
        subprocess.run([wrapper, f"-std={standard}", "-fsyntax-only", source], check=True)

    def test_is_the_host_compiler_of_nvcc(self, wrapper, tmp_path):
        """Which preprocesses a file, and has the result compiled under another name."""
        source, result = tmp_path / "a.cu", tmp_path / "a.cudafe1.cpp"
        source.write_text("#include <stdexcept>\nstd::logic_error error(const char*);\n")
        first = [wrapper, "-std=c++11", "-E", "-x", "c++", "-D__NVCC__", source, "-o", result]
        subprocess.run(first, check=True)
        subprocess.run([wrapper, "-std=c++11", "-x", "c++", "-fsyntax-only", result], check=True)

    def test_mends_the_header_that_assigns_to_a_constant(self, wrapper, tmp_path):
        headers = tmp_path / "flatbuffers" / "include" / "flatbuffers"
        headers.mkdir(parents=True)
        (headers / "stl_emulation.h").write_text(
            "using size_type = int;\nstruct span {\n  const size_type count_;\n"
            "  span &operator=(const span &other) { count_ = other.count_; return *this; }\n};\n"
        )
        (headers / "flatbuffers.h").write_text('#include "flatbuffers/stl_emulation.h"\n')
        source = tmp_path / "a.cc"
        source.write_text('#include "flatbuffers/flatbuffers.h"\n')
        command = [f"-I{headers.parent}", "-std=c++14", "-fsyntax-only", source]
        assert subprocess.run(["c++", *command], capture_output=True).returncode
        for _ in range(2):
            subprocess.run([wrapper, *command], check=True)

    def test_leaves_other_standards_alone(self, wrapper, tmp_path):
        source = tmp_path / "a.cc"
        source.write_text('static_assert(__cplusplus == 201103L, "");\n')
        subprocess.run([wrapper, "-std=c++11", "-fsyntax-only", source], check=True)

    def test_compiles_nothing_in_place_of_the_xla_op(self, wrapper, tmp_path):
        source, built = tmp_path / "xla_mpi_ops.cc", tmp_path / "xla.o"
        source.write_text("#error cannot be compiled\n")
        subprocess.run([wrapper, "-c", source, "-o", built], check=True)
        assert built.exists()

    def test_reports_errors(self, wrapper, tmp_path):
        source = tmp_path / "a.cc"
        source.write_text("#error no\n")
        failed = subprocess.run([wrapper, "-c", source], capture_output=True, text=True)
        assert failed.returncode
        assert "error" in failed.stderr

    def test_makes_the_library_path_relative(self, wrapper, tmp_path):
        source, library = tmp_path / "a.cc", tmp_path / "a.so"
        source.write_text("int f() { return 1; }\n")
        search = f"-Wl,-rpath,{sys.prefix}/lib:/elsewhere/lib:{sys.prefix}/lib/torch"
        subprocess.run([wrapper, "-fPIC", "-shared", search, source, "-o", library], check=True)
        text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
        up = f"$ORIGIN/{horovod_plan.up_to_prefix()}"
        assert f"[{up}/lib:/elsewhere/lib:{up}/lib/torch]" in text

    def test_runs_the_compiler_that_the_user_chose(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CXX", "c++ -DCHOSEN")
        source = tmp_path / "a.cc"
        source.write_text("#ifndef CHOSEN\n#error not the chosen compiler\n#endif\n")
        wrapper = horovod_build.write_wrapper(tmp_path, env.compiler())
        subprocess.run([wrapper, "-fsyntax-only", source], check=True)


@pytest.mark.parametrize("wrong", [["--jobs", "0"], ["--jobs", "two"], ["--gpu=x"]], ids=" ".join)
def test_wrong_usage(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        horovod_build.main(wrong)
    assert "usage: hvd-compress-horovod" in capsys.readouterr().err


NOWHERE = "/no/such/folder"  # also where the usual place has a toolkit


class TestMissing:
    @pytest.mark.parametrize(
        ("present", "options", "variables", "words"),
        [
            ([], [], {}, ["C++17", "install g++"]),
            ([], [], {"CXX": "/no/such/compiler"}, ["C++17", "tried /no/such/compiler"]),
            (["c++", "as", "ld"], [], {}, ["cmake is missing", "pip install cmake"]),
            (["c++", "as", "ld", "cmake"], [], {}, ["make is missing"]),
            (
                ["c++", "as", "ld", "cmake", "make"],
                ["--gpu", "mpi"],
                {"CUDA_HOME": NOWHERE, "HOROVOD_CUDA_HOME": NOWHERE},
                ["--gpu mpi needs the CUDA toolkit", "HOROVOD_CUDA_HOME"],
            ),
        ],
        ids=["compiler", "chosen compiler", "cmake", "make", "cuda"],
    )
    def test_tool(self, install, tmp_path, present, options, variables, words):
        for name in present:
            (tmp_path / name).symlink_to(shutil.which(name))
        status, out, err = install(*options, **{"PATH": str(tmp_path), "CXX": ""} | variables)
        assert (status, out) == (1, "")
        assert err.startswith("hvd-compress-horovod: error: ")
        assert err.count("\n") == 1
        for word in words:
            assert word in err

    def test_framework(self, install, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        status, _, err = install()
        assert status == 1
        assert "neither torch nor tensorflow is installed" in err

    def test_package(self):
        with pytest.raises(BuildError, match=r"Horovod needs no-such: .* install no-such$"):
            env.require_packages({"no_such_module": "no-such", "json": "json"}, "Horovod")


class TestPlan:
    def test_dry_run_says_what_it_would_do_and_does_nothing(self, install, tmp_path):
        cache = tmp_path / "cache"
        status, out, err = install("--dry-run", "--jobs", "7", HVD_COMPRESS_CACHE=str(cache))
        assert (status, err) == (0, "")
        for word in ("Horovod 0.28.1", "MPI", "compiler", str(cache), "7 jobs", "about 2 minutes"):
            assert word in out
        for name in ("torch", "tensorflow"):
            assert f"{name} {env.version_of(name)}" in out or not env.version_of(name)
        assert not cache.exists()

    @pytest.mark.parametrize("damage", [b"", b"a whe", b"another"])
    def test_cached_wheel_is_taken_unless_damaged(self, tmp_path, monkeypatch, damage):
        monkeypatch.setenv("HVD_COMPRESS_CACHE", str(tmp_path))
        plan = horovod_plan.make_plan()
        plan.folder.mkdir()
        wheel = plan.folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
        wheel.write_bytes(b"a wheel")
        assert plan.wheel is None, "of which nothing is recorded"
        horovod_plan.record_of(wheel).write_text(horovod_plan.digest_of(wheel))
        assert plan.wheel == wheel
        assert "install the cached wheel" in plan.describe()
        assert "cached wheel" not in plan.describe(rebuild=True)
        wheel.write_bytes(damage)
        assert plan.wheel is None
        assert "build with" in plan.describe()
        assert "the cached wheel is damaged" in plan.describe()
        assert "the cached wheel" not in plan.describe(rebuild=True)

    @pytest.mark.parametrize("what", ["root", "folder", "wheel", "record"])
    @pytest.mark.parametrize("how", ["group", "others", "owner"])
    def test_a_cache_that_others_can_change_is_refused(self, tmp_path, monkeypatch, what, how):
        """The hash of a wheel lies beside it."""
        if how == "owner" and os.geteuid():
            pytest.skip("only root can give files away")
        root = tmp_path / "cache"
        monkeypatch.setenv("HVD_COMPRESS_CACHE", str(root))
        folder = root / "horovod"
        folder.mkdir(parents=True)
        wheel = folder / "horovod-0.28.1.whl"
        paths = {
            "root": root,
            "folder": folder,
            "wheel": wheel,
            "record": horovod_plan.record_of(wheel),
        }
        for path in paths.values():
            if not path.is_dir():
                path.touch()
            path.chmod(0o755)
        horovod_plan.check_private(folder)
        changed = paths[what]
        if how == "owner":
            os.chown(changed, 4321, -1)
            cure = "set HVD_COMPRESS_CACHE to a folder of your own"
        else:
            changed.chmod(0o775 if how == "group" else 0o757)
            cure = f"chmod go-w {changed}, or set HVD_COMPRESS_CACHE"
        with pytest.raises(BuildError, match=f"^{changed} .*{cure}"):
            horovod_plan.check_private(folder)

    def test_what_is_kept_is_private_whatever_the_umask(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HVD_COMPRESS_CACHE", str(tmp_path / "new" / "cache"))
        folder = horovod_plan.cache_root() / "horovod"
        plan = horovod_plan.BuildPlan([], "none", 1, {}, folder)
        before = os.umask(0o002)
        try:
            with horovod_build.folder_in(folder) as work:
                built = Path(work, "horovod-0.28.1.whl")
                built.write_bytes(b"a wheel")
                wheel = horovod_build.keep(plan, built)
        finally:
            os.umask(before)
        horovod_plan.check_private(folder)
        assert plan.wheel == wheel

    def test_a_folder_for_all_may_hold_the_caches_of_each(self, tmp_path, monkeypatch):
        """As /tmp does, where nobody can replace what is another's."""
        tmp_path.chmod(0o1777)
        monkeypatch.setenv("HVD_COMPRESS_CACHE", str(tmp_path))
        horovod_plan.check_private(tmp_path / "horovod")

    def test_install_looks_at_the_cache_before_it_takes_anything(self, install, tmp_path):
        tmp_path.chmod(0o777)
        status, _, err = install("--dry-run", HVD_COMPRESS_CACHE=str(tmp_path))
        assert status == 1
        assert f"{tmp_path} can be written by others" in err

    @pytest.mark.parametrize(
        ("torch", "standard"),
        [
            (None, 17),
            ("2.1.0", 17),
            ("2.9.1+cu130", 17),
            ("2.13.0+cpu", 17),
            ("2.14.0", 20),
            ("2.14.0.dev20270101", 20),
            ("3.0", 20),
        ],
    )
    def test_the_standard_of_cpp_follows_pytorch(self, torch, standard):
        assert horovod_plan.standard_of(torch) == standard
        assert (horovod_plan.untried(torch) is None) is (torch != "3.0")
        inputs = {"torch": torch and {"version": torch}}
        assert horovod_plan.BuildPlan([], "none", 1, inputs, Path()).standard == standard

    def test_half_a_cuda_toolkit_is_said_before_the_build(self, tmp_path):
        torch = {"version": "2.13.0+cu130", "cuda": "13.0"}
        horovod_plan.check_toolkit_of(torch, None)
        with pytest.raises(BuildError, match=rf"{tmp_path}/bin/nvcc is missing: .* CUDA_HOME"):
            horovod_plan.check_toolkit_of(torch, str(tmp_path))
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch()
        with pytest.raises(BuildError, match=r"include/cuda_runtime.h is missing"):
            horovod_plan.check_toolkit_of(torch, str(tmp_path))
        (tmp_path / "include").mkdir()
        (tmp_path / "include" / "cuda_runtime.h").touch()
        horovod_plan.check_toolkit_of(torch, str(tmp_path))

    def test_place_of_the_cache(self, tmp_path, monkeypatch):
        monkeypatch.delenv("HVD_COMPRESS_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert horovod_plan.cache_root() == Path.home() / ".cache" / "hvd_compress"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert horovod_plan.cache_root() == tmp_path / "hvd_compress"
        monkeypatch.setenv("HVD_COMPRESS_CACHE", str(tmp_path / "own"))
        assert horovod_plan.cache_root() == tmp_path / "own"

    @pytest.mark.parametrize(
        ("version", "too_new"),
        [("Open MPI 4.1.8", False), ("Open MPI 5.0.7", True), ("MPICH 4.2", False), (None, False)],
    )
    def test_open_mpi_5(self, version, too_new):
        assert env.too_new_for_horovodrun(version) is too_new


class TestBuild:
    def test_failure_shows_the_log_and_leaves_no_wheel(self, install, tmp_path):
        # No index and nothing to find: pip fails at once, without a network.
        status, _, err = install(
            HVD_COMPRESS_CACHE=str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path)
        )
        (log,) = tmp_path.glob("horovod-*/build.log")
        assert status == 1
        assert "No matching distribution found for horovod==0.28.1" in err
        assert err.splitlines()[-1].endswith(f"the whole log: {log}")
        assert [file.name for file in log.parent.iterdir()] == ["build.log"]

    def test_a_cache_that_cannot_be_written_is_one_line(self, install, tmp_path):
        file = tmp_path / "file"
        file.touch()
        status, _, err = install(HVD_COMPRESS_CACHE=str(file))
        assert status == 1
        assert err.count("\n") == 1
        assert f"the cache {file}" in err
        assert "cannot be written (File exists): set HVD_COMPRESS_CACHE" in err

    def test_another_source_is_not_built(self, install, tmp_path):
        with tarfile.open(tmp_path / "horovod-0.28.1.tar.gz", "w:gz") as archive:
            setup = tmp_path / "setup.py"
            setup.write_text("open('/nowhere/at/all', 'w')")
            archive.add(setup, "horovod-0.28.1/setup.py")
        status, _, err = install(
            HVD_COMPRESS_CACHE=str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path)
        )
        assert status == 1
        assert err.count("\n") == 1
        assert "is not the published one, whose SHA-256 is 92a43f5a94c4" in err

    def test_progress_in_plain_lines(self, tmp_path, capfd):
        lines = r"printf '[  3%%] a\n[ 12%%] b\n[ 19%%] c\n[100%%] d\n'; exit 3"
        log = tmp_path / "log"
        assert horovod_build.run_logged(["sh", "-c", lines], dict(os.environ), log) == 3
        assert [line.split()[1] for line in capfd.readouterr().out.splitlines()] == ["10%", "100%"]
        assert log.read_text().endswith("[100%] d\n")

    def test_variables(self, tmp_path):
        plan = horovod_plan.make_plan(jobs=3)
        variables = horovod_build.build_environment(plan, tmp_path / "cxx")
        assert variables["MAKEFLAGS"] == "-j3"
        assert variables["CXX"] == str(tmp_path / "cxx")
        for name, variable in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW")):
            switch = "WITH" if env.version_of(name) else "WITHOUT"
            assert variables[f"HOROVOD_{switch}_{variable}"] == "1"
        assert "HOROVOD_GPU_OPERATIONS" not in variables

    def test_the_toolkit_that_was_named_is_taken(self, tmp_path, monkeypatch):
        """Also where it is PyTorch alone that is built for CUDA."""
        monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
        monkeypatch.delenv("HOROVOD_CUDA_HOME", raising=False)
        plan = horovod_plan.make_plan(jobs=3)
        for cuda, home in ((None, None), ("13.0", "/opt/cuda")):
            plan.inputs["torch"] = {"version": "2.13.0", "cuda": cuda}
            found = horovod_build.build_environment(plan, tmp_path / "cxx")
            assert found.get("HOROVOD_CUDA_HOME") == home

    def test_the_nccl_of_pytorch_is_linked(self, tmp_path, monkeypatch):
        """Its wheel has headers and a library, which has no name that a linker looks for."""
        assert horovod_plan.nccl_of_torch() is None or env.version_of("torch")
        nccl = tmp_path / "nvidia" / "nccl"
        for name in ("include/nccl.h", "lib/libnccl.so.2"):
            (nccl / name).parent.mkdir(parents=True)
            (nccl / name).write_text(name)
        monkeypatch.syspath_prepend(tmp_path)
        for name in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
            monkeypatch.delitem(sys.modules, name)
        assert horovod_plan.nccl_of_torch() == nccl
        plan = dataclasses.replace(horovod_plan.make_plan(jobs=3), gpu="nccl")
        assert plan.nccl is None, "somebody has named another one, say"
        plan.inputs["nccl"] = str(nccl)
        assert "nccl (the library of PyTorch)" in plan.describe()
        variables = horovod_build.build_environment(plan, tmp_path / "cxx")
        assert variables["HOROVOD_NCCL_LINK"] == "SHARED"
        assert variables["HOROVOD_NCCL_INCLUDE"] == str(nccl / "include")
        linked = Path(variables["HOROVOD_NCCL_LIB"], "libnccl.so")
        assert linked.read_text() == "lib/libnccl.so.2"
        (nccl / "include" / "nccl.h").unlink()
        assert horovod_plan.nccl_of_torch() is None

    def test_excerpt_shows_the_first_errors(self):
        text = horovod_build.excerpt("noise\n" * 50 + LOG + "noise\n" * 50)
        assert text.splitlines()[0].strip() == "a.cc: In function 'int f()':"
        assert "a.cc:3:5: error: 'g' was not declared" in text
        assert "|     ^" in text
        assert "noise" not in text

    def test_excerpt_without_errors_shows_the_end(self):
        lines = [f"line {i}" for i in range(100)]
        assert horovod_build.excerpt("\n".join(lines)).splitlines() == lines[-30:]
