"""`headway trajectories`: a run's trained trajectories as files that other programs read."""

from pathlib import Path

import click

from headway.deploy.printing import say, say_json


@click.command()
@click.argument("run")
@click.option(
    "--as",
    type=click.Choice(["openenv"]),
    default="openenv",
    show_default=True,
    expose_value=False,  # there is one
    help="openenv: each line is an OpenEnv TrainingTrace, one episode of an agent.",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="The file to write: FILE.jsonl.  [default: stdout]"
)
@click.option("--from", "first_step", type=click.IntRange(min=0), default=0, show_default=True, help="The first step.")
@click.option("--steps", type=click.IntRange(min=1), help="Export so many steps.  [default: all that were logged]")
@click.option("--json", "as_json", is_flag=True, help="With --out: what was written, as one JSON object.")
def trajectories(run: str, out: Path | None, first_step: int, steps: int | None, as_json: bool) -> None:
    """Write the trajectories that RUN's learner took, from its experience log.

    RUN is a name below ./runs or a directory; it may be running. Each turn has the tokens that the model read and
    sampled, their logprobs, and the mask of what was trained. Turns that were not trained are left out.
    """
    if as_json and out is None:
        raise click.UsageError("--json needs --out: without it, the lines themselves are printed.")
    from headway.deploy.run.openenv_traces import logged_traces, write_traces
    from headway.deploy.run.run_directory import EXPERIENCE, find_run

    log = find_run(run) / EXPERIENCE
    if out is None:
        for trace in logged_traces(log, first_step, steps):
            say_json(trace, in_one_line=True)
        return
    written = write_traces(log, out, first_step, steps)
    if as_json:
        say_json(written)
    else:
        say(f"{out}: {written.traces:,} episodes of {written.steps:,} steps, {written.turns:,} turns")
