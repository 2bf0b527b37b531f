"""The folders of packages in the repository, and the compiled loops: pyproject.toml cannot say
them."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import find_packages, setup

ParallelCompile(default=0).install()  # a file on each core
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
        "hvd_compress.torch.ddp",
        "hvd_compress.torch.mpi",
        "hvd_compress.torch.optimizers",
        "hvd_compress.torch.state",
        "hvd_compress.torch.triton",
        "hvd_compress.tensorflow",
        "hvd_compress.tensorflow.keras",
        "hvd_compress.tensorflow.mpi",
    ],
    package_dir={"hvd_compress.torch": "torch_impl", "hvd_compress.tensorflow": "tf"},
    package_data={
        "hvd_compress": [
            "advisor/*.json",
            "kernels/*.cpp",
            "kernels/*.h",
            "py.typed",
        ],
    },
)
