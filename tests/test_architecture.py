"""Rules that every file of the source keeps, and for each rule a planted offence that it finds.

The order of the layers is checked by import-linter (`make lint`).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
FILES = sorted(SRC.rglob("*.py"))

LONGEST_FILE = 350
LONGEST_FUNCTION = 60
LONGEST_CLASS = 200
# Who may read or set environment variables: a worker's entry, the fork server, what starts it and the child it makes;
# and, for programs that have no entry of ours and use the backend alone, what torchrun says of an attempt.
READS_ENVIRONMENT = {
    *("worker.py", "fleet/from_template.py", "fleet/template.py", "fleet/child.py"),
    "comm/torchrun.py",
}
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing"}
# Collectives of torch.distributed for Python objects pickle them.
PICKLING_CALLS = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
VAGUE = {"util", "utils", "helper", "helpers", "manager", "managers", "misc", "common"}


def forbidden_pickle(tree: ast.Module, _place: str) -> Iterator[str]:
    for node in ast.walk(tree):
        for name in imported_names(node):
            if name.split(".")[0] in PICKLES or name.startswith(("torch.multiprocessing", "torch.distributed.rpc")):
                yield f"{line_of(node)}: imports {name}"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called in {"torch.save", "np.save", "numpy.save"} or called.split(".")[-1] in PICKLING_CALLS:
            yield f"{line_of(node)}: {called} pickles"
        if called == "torch.load" and given.get("weights_only") != "True":
            yield f"{line_of(node)}: torch.load without weights_only=True unpickles"
        if called in {"np.load", "numpy.load"} and given.get("allow_pickle", "False") != "False":
            yield f"{line_of(node)}: {called} with allow_pickle unpickles"


def forbidden_environment(tree: ast.Module, place: str) -> Iterator[str]:
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
    for node in ast.walk(tree):
        found = {ast.unparse(node)} if isinstance(node, ast.Attribute) else set(imported_names(node))
        if found & names and place not in READS_ENVIRONMENT:
            yield f"{line_of(node)}: {', '.join(found & names)} is for a worker's entry only"


def forbidden_global(tree: ast.Module, _place: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{line_of(node)}: global {', '.join(node.names)}"


def forbidden_size(tree: ast.Module, _place: str) -> Iterator[str]:
    last = max((node.end_lineno or 0 for node in tree.body), default=0)
    if last > LONGEST_FILE:
        yield f"{last} lines; at most {LONGEST_FILE}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound = LONGEST_CLASS if isinstance(node, ast.ClassDef) else LONGEST_FUNCTION
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > bound:
                yield f"{line_of(node)}: {node.name} has {lines} lines; at most {bound}"


def forbidden_wait(tree: ast.Module, _place: str) -> Iterator[str]:
    """Joining a thread or reading a process to its end without a bound. (Text is joined with an argument.)"""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            bounded = node.args or any(keyword.arg == "timeout" for keyword in node.keywords)
            if node.func.attr in {"join", "communicate"} and not bounded:
                yield f"{line_of(node)}: {ast.unparse(node)} may wait for ever"


def forbidden_name(tree: ast.Module, place: str) -> Iterator[str]:
    names = [(1, part) for part in Path(place).with_suffix("").parts]
    names += [(node.lineno, node.name) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for line, name in names:
        words = {word.lower() for word in split_words(name)}
        if words & VAGUE:
            yield f"{line}: {name} says nothing"


def split_words(name: str) -> list[str]:
    spaced = "".join(f" {letter}" if letter.isupper() else letter for letter in name)
    return spaced.replace("_", " ").split()


def imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def line_of(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


RULES = [
    forbidden_pickle,
    forbidden_environment,
    forbidden_global,
    forbidden_size,
    forbidden_wait,
    forbidden_name,
]


@pytest.mark.parametrize("rule", RULES)
def test_no_file_breaks_the_rule(rule: object) -> None:
    faults = [
        f"{path.relative_to(SRC)}:{fault}"
        for path in FILES
        for fault in rule(ast.parse(path.read_text()), path.relative_to(SRC / "echelon").as_posix())
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("rule", "source", "place"),
    [
        (forbidden_pickle, "import pickle", "a.py"),
        (forbidden_pickle, "def f():\n    from multiprocessing import Queue", "a.py"),
        (forbidden_pickle, "import torch.distributed.rpc as rpc", "a.py"),
        (forbidden_pickle, "x = torch.load(path)", "a.py"),
        (forbidden_pickle, "x = torch.load(path, weights_only=False)", "a.py"),
        (forbidden_pickle, "torch.save(x, path)", "a.py"),
        (forbidden_pickle, "np.load(path, allow_pickle=True)", "a.py"),
        (forbidden_pickle, "dist.all_gather_object(found, mine)", "a.py"),
        (forbidden_environment, "import os\nos.environ['RANK']", "comm/join.py"),
        (forbidden_environment, "from os import getenv", "job.py"),
        (forbidden_environment, "os.getenv('RANK')", "server/worker.py"),
        (forbidden_global, "def f():\n    global x\n    x = 1", "a.py"),
        (forbidden_size, "x = 1\n" * 351, "a.py"),
        (forbidden_size, "def f():\n" + "    x = 1\n" * 60, "a.py"),
        (forbidden_size, "class A:\n" + "    x = 1\n" * 200, "a.py"),
        (forbidden_wait, "thread.join()", "a.py"),
        (forbidden_wait, "process.communicate(input=text)", "a.py"),
        (forbidden_name, "x = 1", "fleet/utils.py"),
        (forbidden_name, "x = 1", "helpers/a.py"),
        (forbidden_name, "class ProcessGroupManager: ...", "a.py"),
    ],
)
def test_a_rule_finds_a_planted_offence(rule: object, source: str, place: str) -> None:
    assert list(rule(ast.parse(source), place))


@pytest.mark.parametrize(
    ("rule", "source", "place"),
    [
        (forbidden_pickle, "x = torch.load(path, weights_only=True)", "a.py"),
        (forbidden_pickle, "x = np.load(path)", "a.py"),
        (forbidden_environment, "os.environ['RANK']", "worker.py"),
        (forbidden_size, "def f():\n" + "    x = 1\n" * 59, "a.py"),
        (forbidden_wait, "','.join(words); thread.join(timeout=1); process.communicate(timeout=1)", "a.py"),
        (forbidden_name, "class Managed: ...", "commonality.py"),
    ],
)
def test_a_rule_lets_pass_what_is_right(rule: object, source: str, place: str) -> None:
    assert list(rule(ast.parse(source), place)) == []


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which module imports which, also inside functions; what only a type checker imports does not count."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        tree = ast.parse(source)
        typing_only = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            for statement in node.body
            for inner in ast.walk(statement)
        }
        imports = [node for node in ast.walk(tree) if node not in typing_only and imported_names(node)]
        graph[module] = {found for node in imports for found in imported_modules(node, sources)} - {module}
    return graph


def imported_modules(node: ast.AST, modules: dict[str, str]) -> set[str]:
    """`from package import name` is an import of package.name if that is a module, and of the package if not."""
    whole, *names = imported_names(node) if isinstance(node, ast.ImportFrom) else ("", *imported_names(node))
    return {name if name in modules else whole for name in names} & modules.keys()


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_file_imports_itself_by_way_of_others() -> None:
    sources = {}
    for path in FILES:
        parts = path.relative_to(SRC).with_suffix("").parts
        sources[".".join(parts).removesuffix(".__init__")] = path.read_text()
    graph = import_graph(sources)
    assert sum(len(found) for found in graph.values()) > len(graph) / 2, "the graph is too empty to prove anything"
    assert find_cycle(graph) == []


def test_a_cycle_would_be_found() -> None:
    sources = {"a": "import b", "b": "def f():\n    from c import d", "c": "from a import x", "a.x": ""}
    assert find_cycle(import_graph(sources)) == []
    del sources["a.x"]
    assert set(find_cycle(import_graph(sources))) == {"a", "b", "c"}
    assert find_cycle(import_graph(sources | {"c": "if TYPE_CHECKING:\n    from a import x"})) == []


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module", ["echelon", "echelon.cli", "echelon.plan", "echelon.job", "echelon.fleet", "echelon.bench"]
)
def test_importing_it_does_not_import_torch(module: str) -> None:
    heavy = "{'torch', 'numpy', 'safetensors', 'rich', 'psutil'}"
    assert run_python(f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_training_needs_torch_numpy_and_safetensors_only() -> None:
    """With every package hidden that torch itself does not need, all that a training run uses can still be imported."""
    hidden = ["rich", "psutil", "sklearn", "scipy", "pandas", "zmq", "msgspec", "tyro", "xxhash", "zstandard", "pytest"]
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden}))\n"
    code += "import echelon.api, echelon.worker, echelon.session, echelon.fleet.template, echelon.cli; print('fine')"
    assert run_python(code) == "fine"


def test_every_public_name_can_be_imported() -> None:
    code = (
        "import echelon; print(all(getattr(echelon, name) is not None for name in echelon.__all__), *echelon.__all__)"
    )
    found, *names = run_python(code).split()
    assert found == "True"
    assert {"Job", "Plan", "train"} <= set(names)
