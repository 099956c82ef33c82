"""Packaging of powernorm_fairseq. Tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'"(.+)"', (ROOT / "powernorm_fairseq/version.py").read_text().split("__version__")[-1]).group(1)

# Every distribution below imports as `fairseq`. Upstream's last release does not import on Python 3.11,
# so there one of two redistributions of upstream takes its place; never two of them in one environment.
FAIRSEQ = [
    'fairseq==0.12.2; python_version < "3.11"',
    've-fairseq==0.12.3; python_version >= "3.11" and python_version < "3.13"'
    ' and sys_platform == "linux" and platform_machine == "x86_64"',
    'fairseq-fixed==0.12.3.1; python_version >= "3.13"'
    ' or (python_version >= "3.11" and (sys_platform != "linux" or platform_machine != "x86_64"))',
]

setup(
    name="powernorm_fairseq",
    version=VERSION,
    description="PowerNorm, AdaNorm and other normalization layers for fairseq Transformers",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["powernorm_fairseq", "powernorm_fairseq.*"]),
    package_data={"powernorm_fairseq": ["py.typed"]},
    python_requires=">=3.8",
    install_requires=[
        *FAIRSEQ,
        # fairseq 0.12.2 pins its own, older hydra and omegaconf.
        'hydra-core>=1.3.2,<1.4; python_version >= "3.11"',
        'omegaconf<2.4; python_version >= "3.11"',
        # With numpy 1.24 the names that fairseq 0.12.2 uses (np.float, ...) are gone.
        'numpy<1.24; python_version < "3.11"',
        'torch>=1.12,<1.13; python_version < "3.11"',
        'torchaudio<0.13; python_version < "3.11"',
        'torch>=2.0; python_version >= "3.11"',
        "sacrebleu>=2.0",
        "sacremoses>=0.1",
        "sentencepiece>=0.1.97",
        "subword-nmt>=0.3.8",
        "matplotlib>=3.6",
        "PyYAML>=5.4",
    ],
    extras_require={
        # fairseq's --tensorboard-logdir writes through it.
        "tensorboard": ["tensorboardX>=2"],
        # Other versions of ruff and mypy find other things; linting is done on Python 3.11 and later.
        "dev": [
            "hypothesis>=6",
            'mypy==2.4.1; python_version >= "3.11"',
            "pytest>=7",
            "pytest-xdist>=3",
            'ruff==0.17.6; python_version >= "3.11"',
            "tensorboardX>=2",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["powernorm_fairseq = powernorm_fairseq.__main__:main"]},
)
