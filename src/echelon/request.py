"""What a worker is asked to do: plain values that travel to its process, and how it comes by the job."""

from __future__ import annotations

import ast
import importlib.util
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echelon.errors import ConfigError, UserError, user_trace
from echelon.job import Job
from echelon.randomness import Generators

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
    spec = importlib.util.spec_from_file_location(MODULE, file)
    if spec is None or spec.loader is None:
        raise ConfigError("file", f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    folder = str(Path(file).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (ConfigError, KeyboardInterrupt):
        del sys.modules[MODULE]
        raise
    except BaseException as error:
        del sys.modules[MODULE]
        trace = user_trace(error)
        raise UserError(rank, f"{file} did not import: {type(error).__name__}: {error}", trace) from error
    return module


def names_bound_on_import(text: str) -> set[str]:
    """The module-level names that importing a file binds: not those under `if __name__ == "__main__":`."""
    bound: set[str] = set()
    waiting: list[ast.AST] = list(ast.parse(text).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and any(
            isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test)
        ):
            waiting += node.orelse
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif not isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            waiting += ast.iter_child_nodes(node)
    return bound


@dataclass(frozen=True, kw_only=True)
class Request:
    """One training run, as every worker is told of it. `record`: a folder to write each step's tensors to (verify)."""

    plan: str = "dp"
    exact: bool = False
    steps: int | None = None
    out: str = ""
    resume: bool = False
    merge: bool = True
    started: float = 0.0
    source: dict[str, Any] | None = None
    record: str | None = None
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
