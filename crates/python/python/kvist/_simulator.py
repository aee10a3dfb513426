"""The simulator, with results that draw themselves in a notebook."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import pathlib
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

from . import _native

if TYPE_CHECKING:
    import pandas

Option = Union[str, int, float, bool, "os.PathLike[str]", Sequence[Union[str, int, float]], None]

_IMAGE = '<img alt="{name}" style="max-width:100%" src="data:image/svg+xml;base64,{data}">'


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """``slo_ttft="2s"`` as ``--slo-ttft=2s``; a list is its flag for each item, ``True`` is a flag alone."""
    arguments = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            arguments.append(flag)
        elif isinstance(value, (list, tuple, set, frozenset)):
            # Not joined by commas: items of --tier have commas of their own.
            arguments.extend(f"{flag}={item}" for item in value)
        elif isinstance(value, (str, int, float, os.PathLike)):
            arguments.append(f"{flag}={value}")
        else:
            raise TypeError(f"`{name}`: expected a number, a string or a list, got {type(value).__name__}")
    return arguments


def _images(pictures: Iterable[tuple[str, str]]) -> str:
    encoded = ((name, base64.b64encode(svg.encode()).decode()) for name, svg in pictures)
    return "\n".join(_IMAGE.format(name=html.escape(name), data=data) for name, data in encoded)


class Simulation:
    """The result of a run.

    Attributes:
        report: the figures, as `kvist simulate --json` prints them (docs/json.md). Times are in seconds.
        pictures: the plots, by name, as SVG.
        page: the whole report as one HTML page.
        remarks: what the simulator had to say about the load and the options.
    """

    def __init__(self, native: _native.Simulation) -> None:
        self.report: dict[str, Any] = json.loads(native.report)
        self.pictures = dict(native.pictures)
        self.page = native.page
        self.remarks = list(native.remarks)
        self._text = native.text
        self._csv = native.requests_csv

    def to_dict(self) -> dict[str, Any]:
        """The report."""
        return self.report

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.report)

    def to_csv(self) -> str:
        """One row per request, as CSV text. Empty with ``zero_service=True``."""
        return self._csv

    def to_pandas(self) -> pandas.DataFrame:
        """One row per request, as a pandas DataFrame. Needs pandas."""
        import pandas

        return pandas.read_csv(io.StringIO(self._csv))

    def save(self, path: Union[str, os.PathLike[str]]) -> None:
        """Writes the page to a file."""
        pathlib.Path(path).write_text(self.page, encoding="utf-8")

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        requests = self.report["requests"]
        finished = requests["finished"] if isinstance(requests, dict) else requests
        return f"<kvist.Simulation of {finished} requests>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self._text)}</pre>\n{_images(self.pictures.items())}"


class Sweep:
    """The result of a sweep.

    Attributes:
        folder: where the cells, the table, the page and the plots are.
        rows: a dict for each combination: schedule, policy, capacity, seeds, and `figures`, each with its mean and the half
            width of its 95% interval over the seeds.
    """

    def __init__(self, folder: str, table: dict[str, Any]) -> None:
        self.folder = folder
        self.load: str = table["load"]
        self.rows: list[dict[str, Any]] = table["rows"]

    def to_pandas(self) -> pandas.DataFrame:
        """One row per combination, one column per figure (its mean). Needs pandas."""
        import pandas

        def flat(row: dict[str, Any]) -> dict[str, Any]:
            figures = {name: figure["mean"] for name, figure in row["figures"].items()}
            return {name: value for name, value in row.items() if name != "figures"} | figures

        return pandas.DataFrame([flat(row) for row in self.rows])

    def __repr__(self) -> str:
        return f"<kvist.Sweep of {len(self.rows)} combinations in {self.folder}>"

    def _repr_html_(self) -> str:
        files = sorted(pathlib.Path(self.folder).glob("*.svg"))
        return _images((file.stem, file.read_text(encoding="utf-8")) for file in files)


def simulate(**options: Option) -> Simulation:
    """Simulates a load in virtual time, with the scheduler and the bookkeeping that `kvist serve` runs on.

    The options are those of `kvist simulate`, with `_` for `-`: ``trace=`` or ``requests=, arrivals=, contents=``,
    ``hardware=, shape=``, ``capacity_blocks=, policy=, schedule=``, ``slo_ttft="2s"``, ``seed=``, and so on. Remarks of the
    simulator become warnings.

    Returns:
        Simulation

    Raises:
        ArgumentError: an option is wrong.
    """
    result = Simulation(_native.simulate(_arguments(options)))
    for remark in result.remarks:
        warnings.warn(remark, stacklevel=2)
    return result


def sweep(*, out: Union[str, os.PathLike[str], None] = None, **options: Option) -> Sweep:
    """Runs every combination of ``policies``, ``capacities`` and ``schedules``, over several seeds, on all cores.

    Each run leaves a file in the folder ``out``; a run whose file is there is not repeated, so a sweep that was stopped goes on
    where it was. Without ``out`` a temporary folder is made. The other options are those of `kvist simulate sweep`.

    Returns:
        Sweep
    """
    folder = os.fspath(out) if out is not None else tempfile.mkdtemp(prefix="kvist-sweep-")
    table = _native.sweep([*_arguments(options), f"--out={folder}"], _native.__file__)
    return Sweep(folder, json.loads(table))
