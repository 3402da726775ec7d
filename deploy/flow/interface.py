"""The names that users may import from Headway, seam by seam, and the example that uses them all.

Signatures and docstrings are read from the source, so that nothing is imported for a page of them."""

import ast
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.broker.errors import ConfigError


@dataclass(frozen=True)
class Name:
    """One name of the interface."""

    path: str
    """`package.module:name`."""
    members: tuple[str, ...] = ()
    """The members that belong to the interface; none: all public ones."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing that users write: the key of a recipe that names it, and the names that it takes to write it."""

    title: str
    key: str
    contract: str
    """Says how Headway makes and calls it, in which process, and what happens when it fails."""
    example: str
    """The file of the example, below `example/`."""
    names: tuple[Name, ...]
    """Those that the user writes first, then those that are given to it."""


INTERFACE = (
    Part(
        title="A prompt source",
        key="prompts.kind",
        contract="The learner makes the class as `Class(path=, seed=, **options)`, with `prompts.path`, `run.seed` and"
        " `prompts.options`, in a process of its own. A call that raises or passes `prompts.deadline_s` is made once"
        " more; a second failure ends the run. Equal arguments must give equal items: a resumed run asks again.",
        example="my_flow/prompts.py",
        names=(Name("headway.learner.data.prompts.base:PromptSource"), Name("headway.learner.data.prompts.base:Item")),
    ),
    Part(
        title="A reward",
        key="rewards[].kind",
        contract="Each worker calls the function in processes of its own, from several threads at once; it may be"
        " `async def`. A call that raises or passes `rewards[].deadline_s` is made once more; then the sample is"
        " generated anew. [Your own task](../guides/own-task.md#custom-reward-function) has the other signature,"
        " TRL's.",
        example="my_flow/rewards.py",
        names=(Name("headway.rollout_workers.rewards.base:RewardFunction"),),
    ),
    Part(
        title="An environment",
        key="environment.kind",
        contract="Each worker makes the class as `Class(**options)` in processes of its own, and calls `step` from"
        " several threads at once; `step` may be `async def`, and `close` may be missing. The object keeps nothing"
        " between two turns. Failures are those of a reward."
        " [Multi-turn environments](../guides/environments.md) says more.",
        example="my_flow/environment.py",
        names=(
            Name("headway.rollout_workers.environments:Environment", ("max_turns", "step")),
            Name("headway.rollout_workers.environments:Episode"),
            Name("headway.rollout_workers.environments:Step"),
            Name("headway.broker.schema:Prompt", ("text", "ground_truth", "data_source", "extra_info", "token_ids")),
        ),
    ),
    Part(
        title="An objective",
        key="algorithm.objective.kind",
        contract="Every rank of the learner calls the function for each micro-batch, with"
        " `algorithm.objective.options` as keyword arguments. It changes none of its arguments. What it raises ends"
        " the learner.",
        example="my_flow/objective.py",
        names=(
            Name("headway.algorithms.objectives:TokenObjective"),
            Name("headway.algorithms.tokens:Tokens"),
            Name("headway.algorithms.metrics:Metrics"),
            Name("headway.algorithms.metrics:masked_mean"),
        ),
    ),
    Part(
        title="A stage",
        key="stages[].kind",
        contract="Every rank of the learner makes the class as `Class(parts, options)`, with `options` as the class's"
        " own `Options`, and then calls `run` and `save`. All calls are collective. A stage that was stopped or killed"
        " is made again in the same directory and goes on from what `parts.checkpoints.load()` returns.",
        example="my_flow/stage.py",
        names=(
            Name("headway.learner.stages.base:Stage"),
            Name("headway.learner.stages.base:StageMetrics"),
            Name("headway.learner.stages.base:Progress"),
            Name("headway.learner.stages.base:StageParts"),
            Name("headway.learner.backends.base:Backend", ("step", "logprobs", "named_tensors")),
            Name("headway.learner.ranks:Ranks", ("is_first", "replica", "replicas", "sum", "max", "any")),
            Name("headway.learner.stages.stage_checkpoints:StageCheckpoints", ("load", "keep_if_due", "keep", "leave")),
            Name("headway.learner.data.examples:Example"),
            Name("headway.learner.stages.sft:tokenize"),
            Name("headway.learner.batching.packing:pack"),
            Name("headway.learner.objective.loss:supervised_loss"),
        ),
    ),
    Part(
        title="A metric sink",
        key="metrics[].kind",
        contract="The learner's first rank makes the class as `Class(**options)` and calls it from one thread. An error"
        " is logged, and training goes on, unless the sink `is_record`."
        " [Metrics and plots](../guides/metrics.md#a-sink-of-your-own) says more.",
        example="my_flow/sink.py",
        names=(
            Name("headway.deploy.observe.sinks.base:MetricSink"),
            Name("headway.deploy.observe.sinks.base:SinkRun"),
            Name("headway.deploy.run.events:Event"),
            Name("headway.deploy.run.events:StepEvent"),
            Name("headway.deploy.run.events:EvaluationEvent"),
            Name("headway.deploy.run.events:StageEvent"),
            Name("headway.deploy.run.events:HeartbeatEvent", ("incarnation", "step", "time_s", "workers", "queues")),
        ),
    ),
)


Function = ast.FunctionDef | ast.AsyncFunctionDef
ABOVE = Path(__file__).parents[3]
"""The directory in which `headway` lies."""


@dataclass(frozen=True)
class Described:
    """A name, or a member of one."""

    signature: str
    """As a caller needs it, such as `train(epoch: int, position: int) -> Item`."""
    doc: str
    """Its docstring, or the one below its annotation."""
    members: tuple["Described", ...] = ()


def described(name: Name) -> Described:
    """Return what the source says of the name, with its public members in the source's order. Raises LookupError where
    it lacks the name or one of the members."""
    module, _, wanted = name.path.partition(":")
    node, after = _definition(module, wanted)
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return _function(node)
        case ast.Assign():
            return Described(ast.unparse(node), _text_of(after))
    found = {_name(each): each for each in _members(node)}
    if missing := set(name.members) - set(found):
        raise LookupError(f"{name.path} lacks {', '.join(sorted(missing))}")
    members = [each for member, each in found.items() if not name.members or member in name.members]
    return Described(node.name, _doc(node), tuple(members))


def _definition(module: str, wanted: str) -> tuple[ast.ClassDef | Function | ast.Assign, ast.stmt | None]:
    """Return the definition, of this module or of the one from which it is imported, and the statement after it."""
    for node, after in _with_next(_tree(module).body):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found):
                if found == wanted:
                    return node, after
            case ast.Assign(targets=[ast.Name(id=found)]) if found == wanted:
                return node, after
            case ast.ImportFrom() if wanted in [alias.name for alias in node.names]:
                return _definition(_imported_from(module, node), wanted)
    raise LookupError(f"{module} has no {wanted}")


def _with_next(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.stmt | None]]:
    return zip(body, [*body[1:], None], strict=True)


def _tree(module: str) -> ast.Module:
    return ast.parse(_file(module).read_text())


def _file(module: str) -> Path:
    path = ABOVE.joinpath(*module.split("."))
    package = path / "__init__.py"
    return package if package.is_file() else path.with_suffix(".py")


def _imported_from(module: str, node: ast.ImportFrom) -> str:
    """Return the module's full name; inside a folder imports have a single dot."""
    if not node.level:
        return str(node.module)
    package = module if _file(module).name == "__init__.py" else module.rpartition(".")[0]
    return f"{package}.{node.module}"


def _members(node: ast.ClassDef) -> Iterator[Described]:
    """Yield public fields, properties and methods."""
    for statement, after in _with_next(node.body):
        match statement:
            case ast.AnnAssign(target=ast.Name(id=field)) if not field.startswith("_"):
                default = "" if statement.value is None else f" = {ast.unparse(statement.value)}"
                yield Described(f"{field}: {ast.unparse(statement.annotation)}{default}", _text_of(after))
            case ast.FunctionDef() | ast.AsyncFunctionDef() if _is_public(statement):
                yield _function(statement)


def _name(member: Described) -> str:
    return re.split(r"[:(]", member.signature.removeprefix("async "))[0]


def _is_public(function: Function) -> bool:
    """Whether callers use it. Of a function's protocol they use the call."""
    return function.name == "__call__" or not function.name.startswith("_")


def _function(node: Function) -> Described:
    arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
    returned = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    if any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list):
        return Described(f"{node.name}:{returned.removeprefix(' ->')}", _doc(node))
    later = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return Described(f"{later}{node.name}({arguments}){returned}", _doc(node))


def _doc(node: ast.ClassDef | Function) -> str:
    return ast.get_docstring(node) or ""


def _text_of(node: ast.stmt | None) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.split())
    return ""


EXAMPLE = Path(__file__).parent / "example"
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*")


def example_files() -> tuple[str, ...]:
    """Return the files of the example, below its directory, in the order in which a reader meets them."""
    order = ("recipe", "prompts", "rewards", "environment", "objective", "stage", "sink", "__init__", "test_my_flow")
    paths = [path for pattern in ("*.yaml", "*.py", "my_flow/*.py") for path in EXAMPLE.glob(pattern)]
    return tuple(str(path.relative_to(EXAMPLE)) for path in sorted(paths, key=lambda path: order.index(path.stem)))


def write_flow(directory: Path) -> tuple[str, ...]:
    """Write the example as `directory`, whole or not at all, and return its files. Raises ConfigError where the
    directory exists or cannot be made."""
    if directory.exists() or directory.is_symlink():
        raise ConfigError(f"{directory} exists already. Name a directory that does not.")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as beside:
            shutil.copytree(EXAMPLE, Path(beside, "flow"), ignore=LEFT_OUT)
            os.rename(Path(beside, "flow"), directory)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error.strerror or error}.") from error
    return example_files()
