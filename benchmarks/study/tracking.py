"""Runs and reports of a study in Weights & Biases: a run each, in one group, the tables as artifacts; offline too."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.study.protocol import Protocol, Run
from benchmarks.study.report import Block, Heading, Table
from benchmarks.study.runner import title_of

LogRun = Callable[[Run, dict[str, Any]], None]
LogReport = Callable[[Sequence[Block]], None]


def tracker(protocol: Protocol, project: str, folder: Path) -> tuple[LogRun, LogReport]:
    """Return what logs a finished run, and what logs the report.

    Args:
        protocol: Of the study.
        project: W&B's.
        folder: Of the study: W&B's files go there, and the report is read from it.
    """
    import wandb

    group = f"{protocol.name}-{protocol.size}-{protocol.digest}"

    def start(name: str, job: str, config: dict[str, Any]) -> Any:
        return wandb.init(project=project, group=group, name=name, job_type=job, config=config, dir=folder)

    def log_run(run: Run, row: dict[str, Any]) -> None:
        config = {"arm": run.arm, "corpus": run.corpus, "seed": run.seed, "part": run.part, **run.options}
        with start(title_of(run), "run", config) as tracked:
            for tokens, seconds, value in row["curve"]:
                tracked.log({"tokens": tokens, "seconds": seconds, "bits_per_token": value})
            tracked.summary.update(row["measures"])

    def log_report(blocks: Sequence[Block]) -> None:
        with start("report", "report", {"protocol": protocol.digest}) as tracked:
            artifact = wandb.Artifact(f"{protocol.name}-{protocol.size}", type="report")
            for name in ("report.md", "report.html", "results.jsonl"):
                artifact.add_file(str(folder / name))
            for name, table in named_tables(blocks):
                artifact.add(wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows]), name)
            tracked.log_artifact(artifact)
        wandb.teardown()  # its own process ends with the study

    return log_run, log_report


def named_tables(blocks: Sequence[Block]) -> Iterator[tuple[str, Table]]:
    """Yield the tables of a report, each with the headings that it stands under and its number there."""
    headings: list[str] = []
    number = 0
    for block in blocks:
        if isinstance(block, Heading) and block.level > 1:
            headings, number = [*headings[: block.level - 2], block.text], 0
        elif isinstance(block, Table):
            number += 1
            yield " / ".join([*headings, f"{number}"]), block
