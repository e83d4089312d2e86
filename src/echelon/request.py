"""What a worker is asked to do: plain values that travel to its process, and how it comes by the job."""

from __future__ import annotations

import ast
import importlib.util
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from echelon.errors import ConfigError, UserError, headline, user_trace
from echelon.job import Job
from echelon.randomness import Generators

BACKENDS = ("echelon", "gloo")
"""What may carry the bytes between workers; the first unless told otherwise."""
MODULE = "__echelon_job__"
IMPORT_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Source:
    """A module-level name of a file. `name` None: `job`, or the only Job in the file."""

    file: str
    name: str | None = None

    @classmethod
    def parse(cls, target: str) -> Source:
        """`FILE` or `FILE:name`."""
        file, colon, name = target.rpartition(":")
        if not colon or not name.isidentifier():
            file, name = target, ""
        path = Path(file)
        if not path.is_file():
            raise ConfigError(
                "file", f"{file} is not there; give the Python file that defines the job, as FILE or FILE:name"
            )
        return cls(file=str(path.resolve()), name=name or None)

    def load(self, rank: int) -> Any:
        """Import the file and return what the name stands for."""
        module = import_file(self.file, rank)
        from echelon.place import check_process  # by now torch is there; whoever only asks for a run needs none

        check_process()
        if self.name is not None:
            if not hasattr(module, self.name):
                raise ConfigError("file", f"{self.file} has no {self.name!r}")
            return getattr(module, self.name)
        found = {name: value for name, value in vars(module).items() if isinstance(value, Job)}
        if "job" in found:
            return found["job"]
        if len(found) != 1:
            names = (
                f"it has {', '.join(found)}; say which, as {Path(self.file).name}:NAME"
                if found
                else "define job = echelon.Job(...)"
            )
            raise ConfigError("file", f"{self.file} has no module-level name 'job'; {names}")
        return next(iter(found.values()))


def import_file(file: str, rank: int) -> Any:
    """Import a file as a module of its own; what it raises is the user's error.

    Random state is the same at every import, so that a module-level dataset drawn at random is the same on every
    worker.
    """
    if MODULE in sys.modules and sys.modules[MODULE].__file__ == file:
        return sys.modules[MODULE]
    Generators.of().set(IMPORT_SEED)
    loader = SourceFileLoader(MODULE, file)
    spec = importlib.util.spec_from_file_location(MODULE, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    folder = str(Path(file).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        loader.exec_module(module)
    except ConfigError:
        del sys.modules[MODULE]
        raise
    except BaseException as error:
        del sys.modules[MODULE]
        if any(frame.f_code.co_name == "init_process_group" for frame, _ in traceback.walk_tb(error.__traceback__)):
            from echelon.place import own_group

            raise own_group() from error
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise  # a real Ctrl-C; where a worker of ours leaves that to its launcher, the file raises it itself
        trace = user_trace(error)
        raise UserError(rank, f"{file} did not import: {headline(error)}", trace) from error
    return module


@dataclass(frozen=True, kw_only=True)
class Script:
    """What importing a file would do, told from its text: the names it binds and never binds anew when it is run as a
    script, and the lines that an import leaves out.
    """

    names: frozenset[str]
    guarded: tuple[range, ...]

    @classmethod
    def read(cls, text: bytes) -> Script:
        bound: set[str] = set()
        rebound: set[str] = set()
        guarded: list[range] = []
        tree = ast.parse(text)
        waiting: list[tuple[ast.AST, set[str]]] = [(node, bound) for node in tree.body]
        while waiting:
            node, names = waiting.pop()
            if isinstance(node, ast.If) and any(
                isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test)
            ):
                guarded.append(range(node.body[0].lineno, (node.body[-1].end_lineno or node.body[-1].lineno) + 1))
                waiting += [(child, rebound) for child in node.body] + [(child, names) for child in node.orelse]
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.alias):
                names.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif not isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
                waiting += [(child, names) for child in ast.iter_child_nodes(node)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                rebound.update(node.names)
        return cls(names=frozenset(bound - rebound), guarded=tuple(guarded))


@dataclass(frozen=True, kw_only=True)
class Request:
    """One training run, as every worker is told of it. `out` is its folder (empty: rank 0 knows), as people call it,
    seen from `base`, where the command was given: the job's file may go elsewhere. `name` is what a folder for it is
    called by. `record`: a folder to write each step's tensors to (verify). `backend`: what carries the bytes.
    """

    plan: str = "dp"
    backend: str = BACKENDS[0]
    exact: bool = False
    steps: int | None = None
    out: str = ""
    base: str = ""
    name: str = "job"
    resume: bool = False
    merge: bool = True
    started: float = 0.0
    source: dict[str, Any] | None = None
    record: str | None = None
    seed: int = 0

    @property
    def folder(self) -> Path:
        """Where the run folder is, whatever folder this process is in by now."""
        return Path(self.base, self.out)

    @property
    def one_thread(self) -> bool:
        """Exact bits need it; a recorded run is compared with one process on one thread, where only the order of slices
        may differ.
        """
        return self.exact or self.record is not None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
