"""The Python interface is the one that its page lists, and changes only on purpose."""

import ast

import pytest

from headway.deploy.flow.interface import EXAMPLE, INTERFACE, Name, described, example_files

from .pages import ROOMS, ROOT

PROMISED = ROOT / "tests" / "docs" / "interface.txt"
NAMES = [name for part in INTERFACE for name in part.names]


def listing() -> str:
    """Return every name with its signature and those of its members, a line each."""
    lines = []
    for part in INTERFACE:
        lines.append(part.key)
        for name in part.names:
            one = described(name)
            lines += [f"  {name.path}  {one.signature}", *(f"    {member.signature}" for member in one.members)]
    return "\n".join(lines) + "\n"


def test_names_and_signatures_are_those_that_were_promised() -> None:
    assert listing() == PROMISED.read_text(), (
        "The Python interface has changed. If that is meant, put the new listing into tests/docs/interface.txt, and"
        " what users must do into CHANGELOG.md."
    )


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_every_name_says_what_it_promises(name: Name) -> None:
    one = described(name)
    assert one.doc
    assert not [member.signature for member in one.members if not member.doc]


def test_a_name_or_a_member_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"algorithms\.tokens has no Token$"):
        described(Name("headway.algorithms.tokens:Token"))
    with pytest.raises(LookupError, match=r"algorithms\.tokens:Tokens lacks lag_T"):
        described(Name("headway.algorithms.tokens:Tokens", ("lag_T",)))


@pytest.mark.parametrize("file", [file for file in example_files() if file.endswith(".py")])
def test_the_example_imports_only_what_the_interface_names(file: str) -> None:
    imported = {
        f"{node.module}:{alias.name}"
        for node in ast.walk(ast.parse((EXAMPLE / file).read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ROOMS
        for alias in node.names
    }
    assert imported <= {name.path for name in NAMES}
