"""The layering of the package: a file imports only from its own level or lower."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_blocktrain

PACKAGE = "lightning_blocktrain"
ROOT = Path(lightning_blocktrain.__file__).parent

LEVELS = {
    "errors.py": 0,
    "heap.py": 0,
    "protocols.py": 0,
    "partition.py": 1,
    "edm.py": 1,
    "metrics.py": 1,
    "rounds/": 1,
    "data/": 1,
    "models/": 2,
    "transport/": 2,
    "pipeline/": 2,
    "coordinator/": 2,
    "strategies/": 3,
    "callbacks/": 3,
    "serving/": 3,
    "registration.py": 4,
    "demo/": 4,
    "cli.py": 4,
    "cli_options.py": 4,
    "cli_runs.py": 4,
    "cli_serving.py": 4,
    "cli_status.py": 4,
    "__init__.py": 4,
}
"""Level of each file at the top, and of all files in each folder."""

FORBIDDEN = {"strategies/": ("models/", "data/")}
"""Imports that the levels allow and the design does not: strategies reach a module through the protocols only."""

HEAVY = ("datasets", "pyarrow", "pandas", "matplotlib", "wandb", "transformers", "aiohttp", "scipy")

FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def entry_of(file: str) -> str:
    """Return the key of ``LEVELS`` under which ``file`` (relative, with slashes) falls."""
    return file.split("/")[0] + "/" if "/" in file else file


def imported_names(source: str, file: str) -> Iterator[str]:
    """Yield the dotted names that ``source`` imports, anywhere in it; relative ones made absolute."""
    parents = [PACKAGE, *file.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*parents[: len(parents) + 1 - node.level], node.module or ""]) if node.level else node.module
            )
            yield from (f"{base}.{alias.name}".replace("..", ".") for alias in node.names)


def file_of(name: str, root: Path) -> str | None:
    """Return the file of the package that the dotted ``name`` (a module, or a name in one) lives in, else None."""
    head, *parts = name.split(".")
    if head != PACKAGE:
        return None
    for length in range(len(parts), -1, -1):
        stem = "/".join(parts[:length])
        for file in (f"{stem}.py", f"{stem}/__init__.py" if stem else "__init__.py"):
            if (root / file).is_file():
                return file
    raise AssertionError(f"{name} is no module of {root}")


def faults(file: str, source: str, root: Path = ROOT) -> list[str]:
    """Return what is wrong with the imports of one file."""
    entry = entry_of(file)
    if entry not in LEVELS:
        return [f"{file} has no level: add it to LEVELS"]
    found = []
    for name in imported_names(source, file):
        target = file_of(name, root)
        if target is None or target == file:
            continue
        other = entry_of(target)
        if other not in LEVELS:
            found.append(f"{target} has no level: add it to LEVELS")
        elif LEVELS[other] > LEVELS[entry]:
            found.append(f"{file} (level {LEVELS[entry]}) imports {target} (level {LEVELS[other]})")
        elif other in FORBIDDEN.get(entry, ()):
            found.append(f"{file} imports {target}, which {entry} never does")
    return found


@pytest.mark.parametrize("file", FILES)
def test_imports_of_every_file_stay_on_its_level_or_below(file: str) -> None:
    assert faults(file, (ROOT / file).read_text()) == []


def test_files_found_include_every_folder_of_the_package() -> None:
    assert {"errors.py", "__init__.py", "models/base.py", "strategies/blocktrain.py", "data/hub.py"} <= set(FILES)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("edm.py", "from lightning_blocktrain.models.base import ByteModule"),
        ("edm.py", "from lightning_blocktrain import models"),
        ("edm.py", "import lightning_blocktrain.models.base as base"),
        ("edm.py", "from .models import base"),
        ("rounds/merge.py", "from ..coordinator.network import NetworkModel"),
        ("rounds/merge.py", "def merge():\n    from lightning_blocktrain.strategies import BlockTrainStrategy"),
        ("models/base.py", "from lightning_blocktrain import BlockTrainStrategy"),
        ("errors.py", "from lightning_blocktrain.edm import weight"),
        ("strategies/blocktrain.py", "from lightning_blocktrain.models import ByteTransformer"),
        ("strategies/workers.py", "from lightning_blocktrain.data.bytes import Batch"),
    ],
)
def test_faults_forbidden_import_is_caught(file: str, line: str) -> None:
    assert len(faults(file, line)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("edm.py", "import torch\nfrom lightning_blocktrain.errors import explain"),
        ("models/base.py", "from lightning_blocktrain.metrics import BitsPerToken\nfrom . import transformer"),
        ("strategies/blocktrain.py", "from lightning_blocktrain.partition import partition"),
        ("registration.py", "from lightning_blocktrain.strategies import BlockTrainStrategy"),
    ],
)
def test_faults_allowed_import_is_let_pass(file: str, line: str) -> None:
    assert faults(file, line) == []


@pytest.mark.parametrize("file", ["tools.py", "utils/text.py"])
def test_faults_file_without_a_level_is_caught(file: str) -> None:
    assert faults(file, "") == [f"{file} has no level: add it to LEVELS"]


@pytest.mark.slow  # a fresh interpreter imports all of lightning
def test_import_of_the_package_brings_no_heavy_library() -> None:
    # Lightning itself imports some of them (matplotlib, through torchmetrics): only what we add counts.
    code = f"""
import sys, lightning
before = set(sys.modules)
import lightning_blocktrain
from lightning_blocktrain import callbacks, data, models
print(sorted({{name.split(".")[0] for name in set(sys.modules) - before}} & set({HEAVY!r})))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.strip() == "[]"
