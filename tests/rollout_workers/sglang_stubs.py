"""Writes modules that SGLang imports, and does not need for models of text on a CPU, into this Python's packages.

No wheel of `sgl_kernel` exists for CPUs, and the PyPI build of `torchvision` breaks imports on a CPU build of torch.
"""

import sysconfig
from pathlib import Path

KERNEL = '''"""A stub: SGLang's kernels."""

__version__ = "0.0.0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a stub")

    return missing
'''
VISION = '''"""A stub: any name is a class, with any names."""

__version__ = "0.28.0"


class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything(name, (), {})
'''
MODULES = {
    "sgl_kernel/__init__.py": KERNEL,
    "torchvision/__init__.py": '"""A stub."""\n\n__version__ = "0.28.0"\n',
    "torchvision/io.py": VISION,
    "torchvision/ops.py": VISION,
    "torchvision/tv_tensors.py": VISION,
    "torchvision/transforms/__init__.py": VISION,
    "torchvision/transforms/functional.py": VISION,
    "torchvision/transforms/v2/__init__.py": VISION,
    "torchvision/transforms/v2/functional.py": VISION,
    "torchvision-0.28.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n",
}


def write() -> None:
    """Write the stubs, over those that are there."""
    packages = Path(sysconfig.get_path("purelib"))
    for name, text in MODULES.items():
        path = packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    write()
