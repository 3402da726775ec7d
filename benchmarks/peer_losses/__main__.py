"""Compare, setting by setting, and end with exit status 1 where one disagrees."""

import sys
from collections.abc import Iterable
from importlib.metadata import version

import torch

from benchmarks import command

from . import __doc__ as page
from .ours import Setting
from .sample import Outcome, draw

TOLERANCE = 1e-8
SINGLE_TOLERANCE = 1e-6
"""The tolerance where a peer rounds to float32 itself."""


def difference(ours: Outcome, theirs: Outcome) -> float:
    """Return the largest difference over the largest number."""
    pairs = [(ours.value, theirs.value)]
    if ours.gradient_T is not None and theirs.gradient_T is not None:
        pairs.append((ours.gradient_T, theirs.gradient_T))
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in pairs)


def main() -> int:
    """Print the report, and return the exit status."""
    command.parser(page, "peer_losses").parse_args()
    try:
        from . import of_trl, of_trl_preferences, of_verl
    except ModuleNotFoundError as error:
        sys.exit(
            f"{error}: `make peer-losses` installs verl and TRL into an environment of their own and runs this there."
        )
    torch.set_default_dtype(torch.float64)  # peers make tensors of constants
    of_peer = {"verl": [of_verl], "trl": [of_trl, of_trl_preferences]}
    settings = {peer: [one for part in parts for one in part.settings()] for peer, parts in of_peer.items()}
    found = {f"{peer} {version(peer)}": compared(each) for peer, each in settings.items()}
    coarse = dict.fromkeys(of_trl_preferences.SINGLE_PRECISION, SINGLE_TOLERANCE)
    agree = {
        peer: sum(difference <= coarse.get(name, TOLERANCE) for name, difference in one.items())
        for peer, one in found.items()
    }
    report = {peer: {"settings": len(one), "agree": agree[peer], "differences": one} for peer, one in found.items()}
    return command.finish(report, any(agree[peer] < len(settings) for peer, settings in found.items()))


def compared(settings: Iterable[Setting]) -> dict[str, float]:
    """Return the difference of each setting."""
    found = {}
    for name, ours, theirs in settings:
        found[name] = difference(ours(draw()), theirs(draw()))
        command.tell(f"{name}: {found[name]:.1e}")
    return found


if __name__ == "__main__":
    sys.exit(main())
