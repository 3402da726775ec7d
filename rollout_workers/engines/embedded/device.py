"""The torch device on which models run that transformers loads: an engine's, and those of scorers."""

import torch

from headway.broker.errors import ConfigError


def device_named(name: str, key: str) -> torch.device:
    """Return the device. Raises ConfigError, with the `key` that names it, if torch cannot use it in this process."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts that it has it
        why = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(f"{key} is {name}, which torch cannot use here: {why}. Set {key}=cpu.") from error
    return device
