"""Packaging of powernorm_fairseq. Tool settings are in pyproject.toml."""

import os
import platform
import re
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

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

KERNELS = "powernorm_fairseq/norms/kernels"
# Sums may be added up in another order; what is infinite or no number stays so, if not always the one or the other.
ARITHMETIC = ["-fno-math-errno", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-ffp-contract=fast"]
# -O3 takes twice as long and gives nothing more; other compilers than gcc may not know the second.
OPTIMIZATION = [["-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic"], ["-O3"]]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mprefer-vector-width=512"]
# Builds of passes.cpp: the name of its table, and instructions that it may use. The best is chosen at run time.
X86_BUILDS = {
    "passes_portable": [],
    "passes_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "passes_avx512": AVX512,
}
PORTABLE = {"passes_portable": []}


class BuildKernels(build_ext):
    """Builds the norms' CPU kernels, a plain shared library, or says in one line that they are left out."""

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split("."))) + ".so"  # it has nothing to do with this version of Python

    def build_extension(self, ext):
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        if not self.kept(library):
            reason = self.attempts(ext, library)
            if reason:
                print(
                    "powernorm_fairseq: the fused CPU kernels are left out (no C++ compiler that can build them: "
                    f"{reason}); norms will run in plain PyTorch, several times slower on CPUs",
                    file=sys.stderr,
                )
                return
        try:
            self.build_binding(library)
        except Exception as error:
            print(
                f"powernorm_fairseq: the kernels' C++ binding is left out ({error}); calls take longer through Python",
                file=sys.stderr,
            )

    def kept(self, path):
        """Whether scripts/setup-venv.sh has kept this library of unchanged sources."""
        folder = os.environ.get("POWERNORM_KERNELS")
        if not folder or not (Path(folder) / path.name).exists():
            return False
        shutil.copy(Path(folder) / path.name, path)
        return True

    def attempts(self, ext, library):
        """Builds the library, with fewer wishes each time; None, or why it failed first."""
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        reason = None
        for builds in [X86_BUILDS, PORTABLE] if x86 else [PORTABLE]:
            for optimization in OPTIMIZATION:
                try:
                    self.build_library(ext, library, builds, optimization)
                    return None
                except Exception as error:  # whatever a compiler does, the package works without
                    reason = reason or error
        return reason

    def build_binding(self, library):
        """Differentiable functions for the torch at hand; an isolated build has none."""
        try:
            import torch
            from torch.utils import cpp_extension
        except ImportError:
            return
        if not hasattr(torch.library, "register_autograd"):  # before torch 2.4 its headers want another C++
            return
        name = "_binding_" + re.sub(r"\W", "_", torch.__version__)
        path = library.with_name(name + sysconfig.get_config_var("EXT_SUFFIX"))
        if self.kept(path):
            return
        folders = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
        objects = self.compiler.compile(
            [f"{KERNELS}/csrc/binding.cpp"],
            output_dir=str(Path(self.build_temp) / "binding"),
            include_dirs=folders,
            macros=[("TORCH_EXTENSION_NAME", name), ("TORCH_API_INCLUDE_EXTENSION_H", None)],
            extra_postargs=["-std=c++20", "-fPIC", "-g0", "-O2", "-fvisibility=hidden"],
        )
        origin = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
        self.compiler.link_shared_object(
            [*objects, str(library)],
            str(path),
            library_dirs=cpp_extension.library_paths(),
            libraries=["c10", "torch_cpu", "torch", "torch_python"],
            extra_postargs=[f"-Wl,-rpath,{origin}"],
            target_lang="c++",
        )

    def build_library(self, ext, library, builds, optimization):
        def compiled(source, folder, *flags):
            return self.compiler.compile(
                [f"{KERNELS}/csrc/{source}"],
                output_dir=str(Path(self.build_temp) / folder),
                extra_postargs=[
                    "-std=c++17",
                    "-fPIC",
                    "-g0",
                    "-fvisibility=hidden",
                    *optimization,
                    *ARITHMETIC,
                    *flags,
                ],
                depends=ext.depends,
            )

        several = ["-DX86_BUILDS"] if len(builds) > 1 else []
        with ThreadPoolExecutor() as pool:
            jobs = [pool.submit(compiled, "native.cpp", "native", *several)]
            jobs += [
                pool.submit(compiled, "passes.cpp", name, f"-DPASSES={name}", *several, *flags)
                for name, flags in builds.items()
            ]
            objects = [path for job in jobs for path in job.result()]
        libraries = ["dl", "pthread"] if sys.platform.startswith("linux") else []
        soname = [] if sys.platform == "darwin" else ["-Wl,-soname,_native.so"]  # the binding finds it beside itself
        self.compiler.link_shared_object(
            objects, str(library), libraries=libraries, extra_postargs=soname, target_lang="c++"
        )

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        for path in (Path(self.build_lib) / KERNELS).glob("_binding_*"):
            shutil.copy(path, ROOT / KERNELS)

    def get_outputs(self):
        folders = {Path(path).parent for path in super().get_outputs()}
        return [str(path) for folder in folders for path in folder.glob("_*.so")]


class PlatformWheel(bdist_wheel):
    """The library needs a platform, but no version of Python; the binding needs that too."""

    def get_tag(self):
        tag = super().get_tag()
        bound = any(Path(self.bdist_dir or "").rglob("_binding_*"))
        return tag if bound else ("py3", "none", tag[2])


setup(
    name="powernorm_fairseq",
    version=VERSION,
    description="PowerNorm, AdaNorm and other normalization layers for fairseq Transformers",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["powernorm_fairseq", "powernorm_fairseq.*"]),
    package_data={"powernorm_fairseq": ["py.typed"], "powernorm_fairseq.norms.kernels": ["csrc/*"]},
    ext_modules=[
        Extension(
            f"{KERNELS}/_native".replace("/", "."),
            [f"{KERNELS}/csrc/native.cpp", f"{KERNELS}/csrc/passes.cpp"],
            depends=[f"{KERNELS}/csrc/{name}" for name in ("call.h", "native.h", "passes.h")],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
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
        "regex",
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
            'triton>=3; sys_platform == "linux" and platform_machine == "x86_64" and python_version >= "3.11"',
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["powernorm_fairseq = powernorm_fairseq.__main__:main"]},
)
