"""The logs of several runs as one long table, and its picture.

Owns the columns of ``metrics.csv`` and how files are replaced whole.

| column | meaning |
|---|---|
| ``model`` | name of the run |
| ``step`` | Lightning step after which the value was logged, from 0 |
| ``tokens`` | tokens that each block, or the whole control, had processed by then |
| ``key`` | metric key, as in ``lightning_blocktrain.callbacks`` |
| ``value`` | the number |
"""

import csv
import importlib.util
import io
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

CURVE_KEY = "val/bits_per_byte"


class Row(NamedTuple):
    """One logged value; see the module docstring."""

    model: str
    step: int
    tokens: int
    key: str
    value: float


def read_rows(path: Path, model: str, tokens_per_step: int, num_steps: int) -> list[Row]:
    """Return what a CSV logger wrote, one row per value.

    Args:
        path: The logger's ``metrics.csv``.
        model: Name of the run.
        tokens_per_step: Tokens of each block, or of the control, per step.
        num_steps: Steps of the run; values under ``test/`` belong to its last one, whatever step they carry.
    """
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Row(model, step, (step + 1) * tokens_per_step, key, float(value))
            for line in csv.DictReader(file)
            for key, value in line.items()
            if value and key not in ("step", "epoch")
            for step in [num_steps - 1 if key.startswith("test/") else int(line["step"])]
        ]


def points_by_model(rows: Iterable[Row], key: str = CURVE_KEY) -> dict[str, list[tuple[int, float]]]:
    """Return ``(tokens, value)`` of one key by model, in the order of the rows."""
    by_model: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.key == key:
            by_model.setdefault(row.model, []).append((row.tokens, row.value))
    return by_model


def rows_csv(rows: Sequence[Row]) -> bytes:
    """Return the table as CSV in UTF-8, header first."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(rows)
    return text.getvalue().encode()


def curves_png(by_model: Mapping[str, Sequence[tuple[int, float]]], titles: Mapping[str, str]) -> bytes | None:
    """Return a picture of the curves as PNG; None without matplotlib.

    Args:
        by_model: ``(tokens, bits per byte)`` by model.
        titles: What the legend calls each model.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return None
    # The object interface: no backend is chosen for the whole process, no window can open.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for model, points in by_model.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=titles.get(model, model))
    axes.set_xlabel("tokens per block, or per end-to-end model")
    axes.set_ylabel("val bits per byte, one sweep for DiffusionBlocks")
    axes.legend()
    axes.grid(alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=130)
    return image.getvalue()


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file in one step: a reader sees the old one or the new one, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
