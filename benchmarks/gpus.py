"""The GPUs that this process may use, by name."""

import os


def gpu_names(count: int) -> list[str]:
    """The first `count` of CUDA_VISIBLE_DEVICES, as it names them, or of the machine. Raises SystemExit for too few."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    if len(names) < count:
        raise SystemExit(f"{count} GPUs are wanted, and CUDA_VISIBLE_DEVICES has {visible}")
    return names[:count]
