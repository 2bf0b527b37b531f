"""What pyproject.toml cannot say: where packages live in the repository, the compiled loops, and
the start-up file."""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import Command, find_packages, setup
from setuptools.command.build import build


class build_start_up(Command):
    """Put the ``.pth`` beside the packages, the only place where Python reads it."""

    def initialize_options(self) -> None:
        self.editable_mode = False

    def finalize_options(self) -> None:
        if self.editable_mode:  # nothing of build_lib is installed then
            self.folder = self.get_finalized_command("install").install_lib
        else:
            self.folder = self.get_finalized_command("build").build_lib

    def run(self) -> None:
        self.mkpath(self.folder)
        self.copy_file("hvd_compress_open_mpi.pth", self.folder)

    def get_source_files(self) -> list[str]:
        return ["hvd_compress_open_mpi.pth"]

    def get_outputs(self) -> list[str]:
        return [str(Path(self.folder, "hvd_compress_open_mpi.pth"))]


class build_all(build):
    sub_commands = [*build.sub_commands, ("build_start_up", None)]


KERNELS = Path("hvd_compress/kernels")
native = Pybind11Extension(
    "hvd_compress.kernels.native",
    sorted(map(str, KERNELS.glob("*.cpp"))),
    depends=sorted(map(str, KERNELS.glob("*.h"))),
    cxx_std=17,
    extra_compile_args=["-O3", "-ffp-contract=off", "-pthread"],
    extra_link_args=["-pthread"],
    optional=True,  # without a compiler NumPy serves, and says so
)

setup(
    ext_modules=[native],
    packages=[
        *find_packages(include=["hvd_compress", "hvd_compress.*"]),
        "hvd_compress.torch",
        "hvd_compress.torch.measures",
        "hvd_compress.torch.mpi",
        "hvd_compress.torch.optimizers",
        "hvd_compress.torch.training",
        "hvd_compress.tensorflow",
        "hvd_compress.tensorflow.keras",
        "hvd_compress.tensorflow.keras.mpi",
        "hvd_compress.tensorflow.mpi",
    ],
    package_dir={"hvd_compress.torch": "torch_impl", "hvd_compress.tensorflow": "tf"},
    package_data={
        "hvd_compress": ["*.in", "cli/*.json", "kernels/*.cpp", "kernels/*.h", "py.typed"],
    },
    cmdclass={"build": build_all, "build_start_up": build_start_up},
)
