"""What pip builds; everything is in pyproject.toml."""

from setuptools import setup

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="recover-megatron",
    version="0.1.0",
    description="Resilient pre-training for Megatron-LM: GPUs die in the middle of a step, the step finishes anyway",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["recover_megatron", "recover_megatron.*"]),
    package_data={"recover_megatron": ["py.typed", "report/page.html"]},
    py_modules=["pretrain_gpt_recover"],
    install_requires=[
        # From the first alpha on: NVIDIA's containers have 2.11.0a0+..., which is below 2.11.
        "torch>=2.11.0a0,<2.16",
        "megatron-core>=0.17,<0.20",
        "jinja2>=3.1,<4",
        "numpy>=1.26,<3",
        "rich>=13.7,<16",
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch]>=2.8,<3"],
        # Megatron needs it for --num-distributed-optimizer-instances above 1, and does not ask for it.
        "instances": ["einops>=0.7,<1"],
        "dev": [
            "einops>=0.7,<1",
            "hypothesis>=6.100,<7",
            "matplotlib>=3.8,<4",
            "mypy>=1.13,<3",
            "psutil>=5.9,<8",
            "pytest>=8,<10",
            "ruff>=0.8,<1",
            "tensorboard>=2.16,<3",
        ],
    },
    entry_points={
        "console_scripts": [
            "recover-run = recover_megatron.launch.__main__:main",
            "recover-coordinator = recover_megatron.membership.__main__:main",
            "recover-report = recover_megatron.report.full:main",
            "recover-status = recover_megatron.status.__main__:main",
        ]
    },
)
