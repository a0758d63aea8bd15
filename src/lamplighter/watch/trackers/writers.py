"""The five trackers, each behind the same few methods, written through its own library.

In:  entries, alerts and texts of one tracker run (NAME, or NAME~2 after a roll-back).
Out: TensorBoard event files, a W&B run, a trackio run, an MLflow run, CSV files. `mark` says how far they are safe; `go_back` takes away what
     was written after a mark by a follower that was killed, so that nothing stands there twice.
"""

from __future__ import annotations

import contextlib
import csv
import html
import io
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lamplighter.errors import InputMissing
from lamplighter.watch.trackers.history import TrackerEntry

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "csv")
_FLUSH_S = 60.0
_STORED_S = 20.0  # for trackio to store what it was given
_MLFLOW_BATCH = 1000  # values that MLflow takes at a time
_MLFLOW_PARAMS = 100  # settings likewise
_MLFLOW_PARAM = 500  # letters of a setting, as its oldest servers take them


@dataclass(frozen=True)
class Setting:
    """One tracker run: where it goes and what it is called."""

    run_name: str
    folder: Path  # of this tracker in the run's folder: RUN/track/NAME
    project: str = ""
    name: str = ""
    tags: tuple[str, ...] = ()
    group: str = ""
    offline: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    branch: int = 1
    from_step: int = 0
    id: str = ""

    @property
    def title(self) -> str:
        name = self.name or self.run_name
        return name if self.branch == 1 else f"{name}~{self.branch}"

    @property
    def described(self) -> dict[str, Any]:
        """The run's settings, and where this part of it begins."""
        linked = {"continues": self._before, "from_step": self.from_step} if self.branch > 1 else {}
        return {**self.config, "lamp": {"run": self.run_name, **linked}}

    @property
    def _before(self) -> str:
        name = self.name or self.run_name
        return name if self.branch == 2 else f"{name}~{self.branch - 1}"


class Writer(Protocol):
    """One open tracker run."""

    def log(self, entry: TrackerEntry) -> None: ...
    def tell(self, kind: str, step: int, title: str, text: str) -> None:
        """A text: `alert` (a verdict), `sample`, `checkpoint`, `config`, `plan`, `report`."""
        ...

    def mark(self) -> dict[str, Any]:
        """All that was given is safe now; what `go_back` needs."""
        ...

    def close(self) -> None: ...


def open_writer(to: str, setting: Setting, mark: Mapping[str, Any]) -> Writer:
    """A tracker run, new or gone on with; InputMissing where its library is not installed."""
    kinds: dict[str, type[Any]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
        "trackio": Trackio,
        "mlflow": MLflow,
        "csv": Csv,
    }
    try:
        writer: Writer = kinds[to](setting, mark)
    except ImportError as error:
        raise InputMissing(
            f"{to} is not installed here",
            str(error),
            f"pip install 'lamplighter[{'mlflow' if to == 'mlflow' else 'track'}]', then: lamp track RUN --to {to}",
        ) from error
    return writer


def is_gone(to: str, setting: Setting, mark: Mapping[str, Any]) -> bool:
    """Whether files that a follower has marked as written are no longer there, or shorter. Only of those that write beside the run."""
    folder = setting.folder / setting.title
    if to == "mlflow":
        database = mark.get("database")
        return isinstance(database, str) and bool(database) and not Path(database).is_file()
    if to == "csv":
        wanted = {f"{name}.csv": mark.get(name) for name in ("metrics", "texts")}
    elif to == "tensorboard":
        wanted = dict(mark.get("files") or {})
    else:
        return False
    if not any(wanted.values()):  # its mark is not kept any more: the folder must be there
        return not folder.is_dir()
    return any(isinstance(size, int) and _size(folder / name) < size for name, size in wanted.items())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):  # that is the answer
        return -1


# ---------------------------------------------------------------- CSV


class Csv:
    """metrics.csv in long form (step, name, value), so that no column is ever missing; texts.csv beside it."""

    def __init__(self, setting: Setting, mark: Mapping[str, Any]) -> None:
        folder = setting.folder / setting.title
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(setting.described, indent=1, default=str) + "\n")
        self.metrics = _open_cut(folder / "metrics.csv", mark.get("metrics"), "step,t,name,value\n")
        self.texts = _open_cut(folder / "texts.csv", mark.get("texts"), "step,kind,title,text\n")

    def log(self, entry: TrackerEntry) -> None:
        rows = [f"{entry.step},{entry.t!r},{name},{value!r}\n" for name, value in entry.values.items()]
        self.metrics.write("".join(rows))

    def tell(self, kind: str, step: int, title: str, text: str) -> None:
        csv.writer(self.texts, lineterminator="\n").writerow([step, kind, title, text])

    def mark(self) -> dict[str, Any]:
        for file in (self.metrics, self.texts):
            file.flush()
            os.fsync(file.fileno())
        return {"metrics": self.metrics.tell(), "texts": self.texts.tell()}

    def close(self) -> None:
        self.mark()
        self.metrics.close()
        self.texts.close()


def _open_cut(path: Path, size: object, head: str) -> io.TextIOWrapper:
    """Our own file, without what was written after the last mark."""
    with open(path, "ab") as file:
        if isinstance(size, int) and file.tell() > size:
            file.truncate(size)
        elif not isinstance(size, int):
            file.truncate(0)
    opened = open(path, "a", encoding="utf-8", errors="backslashreplace", newline="")
    if opened.tell() == 0:
        opened.write(head)
    return opened


# ---------------------------------------------------------------- TensorBoard


class TensorBoard:
    """Event files, by TensorBoard's own writer; torch's would load torch."""

    def __init__(self, setting: Setting, mark: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.event, self.summary = Event, Summary
        folder = setting.folder / setting.title
        folder.mkdir(parents=True, exist_ok=True)
        self.sizes = {str(name): int(size) for name, size in dict(mark.get("files") or {}).items()}
        for path in folder.glob("events.out.tfevents.*"):
            if (size := self.sizes.get(path.name, 0)) < path.stat().st_size:
                if size:
                    os.truncate(path, size)
                else:
                    path.unlink()
        self.folder = folder
        self.writer = EventFileWriter(str(folder), max_queue_size=1000, flush_secs=int(_FLUSH_S))
        if not self.sizes:
            self.tell(
                "config", 0, f"the settings of {setting.title}", json.dumps(setting.described, indent=1, default=str)
            )

    def log(self, entry: TrackerEntry) -> None:
        values = [self.summary.Value(tag=name, simple_value=value) for name, value in entry.values.items()]
        self.writer.add_event(self.event(wall_time=entry.t, step=entry.step, summary=self.summary(value=values)))

    def tell(self, kind: str, step: int, title: str, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        body = f"**{title}**\n\n{_as_block(text)}".encode("utf-8", "replace")
        value = self.summary.Value(
            tag=f"text/{kind}",
            metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
            tensor=TensorProto(dtype="DT_STRING", string_val=[body], tensor_shape=shape),
        )
        self.writer.add_event(self.event(wall_time=time.time(), step=step, summary=self.summary(value=[value])))

    def mark(self) -> dict[str, Any]:
        self.writer.flush()
        return {"files": {path.name: path.stat().st_size for path in self.folder.glob("events.out.tfevents.*")}}

    def close(self) -> None:
        self.writer.close()


def _as_block(text: str) -> str:
    """Markdown that shows a text as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


# ---------------------------------------------------------------- Weights & Biases


class WeightsAndBiases:
    """A run of W&B; its own environment variables count wherever a setting is not given."""

    def __init__(self, setting: Setting, mark: Mapping[str, Any]) -> None:
        import wandb

        self.wandb = wandb
        quiet = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True)
        setting.folder.mkdir(parents=True, exist_ok=True)
        named = setting.title if setting.branch > 1 or setting.name or "WANDB_NAME" not in os.environ else None
        group = setting.group or os.environ.get("WANDB_RUN_GROUP") or (setting.run_name if setting.branch > 1 else None)
        self.run = wandb.init(
            project=setting.project or os.environ.get("WANDB_PROJECT") or "lamplighter",
            name=named,
            id=setting.id,
            group=group,
            tags=list(setting.tags) or None,
            notes=f"continues {setting.described['lamp'].get('continues')} from step {setting.from_step}"
            if setting.branch > 1
            else None,
            config=dict(setting.described),
            allow_val_change=True,
            dir=os.environ.get("WANDB_DIR") or str(setting.folder),
            mode="offline" if setting.offline else None,
            resume="allow",
            settings=quiet,
        )
        self.run.define_metric("*", step_metric="train/iter")
        self.run.define_metric("eval/*", step_metric="eval/iter")
        self.rows = int(mark.get("rows") or 0)
        self.checkpoints: list[str] = []

    def log(self, entry: TrackerEntry) -> None:
        x = "train/iter" if any(name.startswith("train/") for name in entry.values) else "eval/iter"
        self._log({x: entry.step, **entry.values})

    def _log(self, values: Mapping[str, Any]) -> None:
        """W&B's own step never goes back, and a late evaluation does: so it counts rows, and the x of a panel is in the row.

        A follower that is killed sends the same rows under the same numbers again, which W&B drops.
        """
        self.rows += 1
        self.run.log(dict(values), step=self.rows)

    def tell(self, kind: str, step: int, title: str, text: str) -> None:
        if kind == "alert":
            level = "WARN" if not title.startswith(("dead", "stuck", "diverged")) else "ERROR"
            self.run.alert(title=title[:60], text=text, level=level)
        elif kind == "checkpoint":
            self.checkpoints.append(title)
            self.run.summary["checkpoints"] = self.checkpoints[-100:]
        elif kind == "sample":
            self._log({"train/iter": step, "sample": self.wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)})
        else:
            self.run.summary[kind] = text[:20_000]

    def mark(self) -> dict[str, Any]:
        url = "" if self.run.offline else self.run.url  # offline, W&B warns of the question
        return {"url": str(url or ""), "rows": self.rows}

    def close(self) -> None:
        self.run.finish()


# ---------------------------------------------------------------- trackio


class Trackio:
    """A run of trackio, in its local database or where its environment variables say."""

    def __init__(self, setting: Setting, mark: Mapping[str, Any]) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self.trackio: Any = trackio
        self.project = setting.project or os.environ.get("TRACKIO_PROJECT") or "lamplighter"
        self.title = setting.title
        group = setting.group or (setting.run_name if setting.branch > 1 else None)
        self.database = Path(SQLiteStorage.get_project_db_path(self.project))
        self.run: Any = trackio.init(
            project=self.project,
            name=self.title,
            group=group,
            config=_plain({**setting.described, "tags": list(setting.tags)}),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # A space of the hub or a server has no database here, and drops by its own log id what it has; a failed write is only warned of.
        self.readable = bool(getattr(self.run, "_is_local", True)) and getattr(self.run, "_storage_mode", "") != "jsonl"
        if self.readable:
            self.database.parent.mkdir(
                parents=True, exist_ok=True
            )  # fails at once, with the reason, where nothing can be stored
        self.since = int(mark.get("step") or 0)
        self.read_to = max((row[0] for row in self._rows("SELECT max(id) FROM metrics") if row[0]), default=0)
        self.there = self._stored() if mark.get("open") else set()
        self.sent: set[tuple[int, str]] = set()

    def _stored(self) -> set[tuple[int, str]]:
        """What its database has from the last mark on: of a follower that was killed after sending and before marking."""
        rows = self._rows("SELECT step, metrics FROM metrics WHERE run_name = ? AND step >= ?", self.title, self.since)
        return {(step, name) for step, metrics in rows for name in json.loads(metrics)}

    def _arrived(self) -> set[tuple[int, str]]:
        """What it has of ours since the last look, by the number of the row: neither names nor steps of runs are indexed there."""
        rows = self._rows("SELECT id, run_name, step, metrics FROM metrics WHERE id > ? ORDER BY id", self.read_to)
        self.read_to = rows[-1][0] if rows else self.read_to
        return {(step, name) for _, run, step, metrics in rows if run == self.title for name in json.loads(metrics)}

    def _rows(self, query: str, *values: object) -> list[Any]:
        import sqlite3

        if not self.readable:
            return []
        try:
            with contextlib.closing(
                sqlite3.connect(f"{self.database.as_uri()}?mode=ro", uri=True, timeout=5)
            ) as database:
                return database.execute(query, values).fetchall()
        except sqlite3.Error:  # not made yet, or not to be read: then nothing has arrived, which `mark` says
            return []

    def log(self, entry: TrackerEntry) -> None:
        values = {name: value for name, value in entry.values.items() if (entry.step, name) not in self.there}
        if values:
            self.run.log(values, step=entry.step)
            self.sent |= {(entry.step, name) for name in values}
            self.since = max(self.since, entry.step)

    def tell(self, kind: str, step: int, title: str, text: str) -> None:
        if kind == "alert":
            self.run.alert(title=title, text=text)
        elif (max(step, 0), kind) not in self.there:  # a sample, a checkpoint, the plan, the report
            self.run.log({kind: self.trackio.Markdown(f"### {title}\n\n{_as_block(text)}")}, step=max(step, 0))
            self.sent.add((max(step, 0), kind))

    def mark(self) -> dict[str, Any]:
        """Its sender writes every half second: wait until the last of ours is there. OSError where it does not come."""
        deadline = time.monotonic() + _STORED_S
        while self.readable and self.sent:
            self.sent -= self._arrived()
            if self.sent and time.monotonic() > deadline:
                raise OSError(f"{len(self.sent):,} values are not in {self.database} after {_STORED_S:.0f} s")
            if self.sent:
                time.sleep(0.2)
        self.sent.clear()
        return {"step": self.since, "open": True}

    def close(self) -> None:
        self.run.finish()


# ---------------------------------------------------------------- MLflow


class MLflow:
    """A run of MLflow: at the server that its environment variable names, else in a database beside the runs.

    It keeps one row for each name, step, time and value: what a follower that was killed sends again is there already.
    """

    def __init__(self, setting: Setting, mark: Mapping[str, Any]) -> None:
        for name, value in (("MLFLOW_DISABLE_TELEMETRY", "true"), ("MLFLOW_LOGGING_LEVEL", "WARNING")):
            os.environ.setdefault(name, value)
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self.metric = Metric
        beside = setting.folder.resolve().parents[2] / ".mlflow"  # of all runs: setting.folder is RUNS/RUN/track/mlflow
        address = "" if setting.offline else os.environ.get("MLFLOW_TRACKING_URI", "")
        self.database = "" if address else str(beside / "mlflow.db")
        if self.database:
            beside.mkdir(parents=True, exist_ok=True)
        self.client: Any = MlflowClient(address or f"sqlite:///{self.database}")
        experiment = self._experiment(setting, None if address else (beside / "artifacts").as_uri())
        self.url = f"{address.rstrip('/')}/#/experiments/{experiment}/runs/" if address.startswith("http") else ""
        known = self.client.search_runs([experiment], f"tags.lamp_id = '{setting.id}'", max_results=1) if setting.id else []  # fmt: skip
        self.id: str = known[0].info.run_id if known else self._new_run(setting, experiment)
        self._tell_settings(setting, known[0].data.params if known else {})
        self.client.update_run(self.id, status="RUNNING")  # also where it was over, and goes on now
        self.waiting: list[Any] = []

    def _experiment(self, setting: Setting, artifacts: str | None) -> str:
        """By its name, made where it is not there; another follower may make it in the same moment."""
        from mlflow.exceptions import MlflowException

        name = setting.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "lamplighter"
        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self.client.create_experiment(name, artifact_location=artifacts))
            except MlflowException:
                found = self.client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _new_run(self, setting: Setting, experiment: str) -> str:
        linked = setting.described["lamp"]
        group = setting.group or (setting.run_name if setting.branch > 1 else "")
        tags = {"lamp_id": setting.id, **{f"lamp_{name}": str(value) for name, value in linked.items()}, **dict.fromkeys(setting.tags, "true")}  # fmt: skip
        made = self.client.create_run(experiment, run_name=setting.title, tags={**tags, **({"group": group} if group else {})})  # fmt: skip
        return str(made.info.run_id)

    def _tell_settings(self, setting: Setting, there: Mapping[str, str]) -> None:
        """As the run began: what it has of a setting cannot be changed."""
        from mlflow.entities import Param

        params = [Param(name, value[:_MLFLOW_PARAM]) for name, value in _flat(setting.config) if name not in there]
        for first in range(0, len(params), _MLFLOW_PARAMS):
            self.client.log_batch(self.id, params=params[first : first + _MLFLOW_PARAMS])

    def log(self, entry: TrackerEntry) -> None:
        at = int(entry.t * 1000)
        self.waiting += [self.metric(_mlflow_name(name), value, at, entry.step) for name, value in entry.values.items()]
        while len(self.waiting) >= _MLFLOW_BATCH:
            self._send()

    def _send(self) -> None:
        self.client.log_batch(self.id, metrics=self.waiting[:_MLFLOW_BATCH])
        del self.waiting[:_MLFLOW_BATCH]

    def tell(self, kind: str, step: int, title: str, text: str) -> None:
        """A file of the run; of a verdict a tag as well, which stands in the table of runs."""
        words = re.sub(r"\W+", "-", title)[:60].strip("-") or kind
        if kind == "alert":
            self.client.set_tag(self.id, "lamp_alert", title[:_MLFLOW_PARAM])
        self.client.log_text(self.id, f"{title}\n\n{text}\n", f"{kind}/{max(step, 0):08d}-{words}.txt")

    def mark(self) -> dict[str, Any]:
        while self.waiting:
            self._send()
        return {"database": self.database, "url": f"{self.url}{self.id}" if self.url else ""}

    def close(self) -> None:
        self.mark()
        self.client.set_terminated(self.id, "FINISHED")


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Settings as names with dots; MLflow keeps texts only."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield _mlflow_name(f"{before}{name}"), str(value)


def _mlflow_name(name: str) -> str:
    """It takes letters, digits and some marks."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250]


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """trackio keeps names that begin with an underscore for itself."""
    plain: dict[str, Any] = json.loads(
        json.dumps({name.lstrip("_"): value for name, value in config.items()}, default=str)
    )
    return plain
