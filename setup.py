"""Packaging of Discreet.

The requirements are the direct ones, with the ranges the code is written for. pip
cannot resolve TensorFlow Federated's own pins today, so the supported install is the
lock, without resolving: `make env`, or `pip install --no-deps --require-hashes -r
requirements.txt`. The tests keep this file and the lock in agreement.
"""

import pathlib

import setuptools

setuptools.setup(
    name="discreet",
    version="0.1.0",
    description="A simulator for private federated learning on TensorFlow Federated",
    long_description=pathlib.Path(__file__).with_name("README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.12",
    packages=setuptools.find_packages(
        include=[
            "centaur*",
            "distributed_dp*",
            "simulation*",
            "scripts*",
            "upcycled_fl*",
        ]
    ),
    install_requires=[
        "absl-py>=1.4,<2",
        "dp-accounting>=0.4.3,<0.5",
        "matplotlib>=3.8,<4",
        "mlxtend>=0.23.4,<0.24",
        "numpy>=1.25,<2",
        "pillow>=10,<14",
        "scipy>=1.9.3,<2",
        "tensorflow>=2.14,<2.15",
        "tensorflow-privacy>=0.9,<0.10",
        "tqdm>=4.64,<5",
    ],
    extras_require={
        "parquet": ["pyarrow>=21,<22"],
        "ray": ["ray>=2.52,<3"],
        "tff": ["grpcio>=1.46,<2", "tensorflow-federated>=0.87,<0.88"],
    },
)
