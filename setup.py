"""The framework packages live in directories of their own at the top of the repository."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["hvd_compress", "hvd_compress.*"]),
        "hvd_compress.torch",
        "hvd_compress.tensorflow",
        "hvd_compress.tensorflow.keras",
    ],
    package_dir={"hvd_compress.torch": "torch_impl", "hvd_compress.tensorflow": "tf"},
    package_data={"hvd_compress": ["*.in", "py.typed"]},
)
