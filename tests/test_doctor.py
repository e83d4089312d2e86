"""The doctor: what it finds on made-up machines, and that it leaves this one as it was."""

from __future__ import annotations

import errno
import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from echelon import doctor
from echelon.cli import main
from echelon.doctor import links, machine, software, storage
from echelon.doctor.finding import Finding, missing, ok, warning

FULL: dict[str, Any] = {
    "torch": {"version": "2.13.0+cpu", "seconds": 2.2},
    "numpy": {"version": "2.4.6", "seconds": 0.1},
    "safetensors": {"version": "0.8.0", "seconds": 0.1},
    "distributed": True,
    "nccl": False,
    "cuda_build": None,
    "gpus": [],
}


def refuse(*args: Any, **options: Any) -> Any:
    raise OSError(errno.EACCES, "Permission denied")


# --- what a finding is -----------------------------------------------------------------------------------------------


def test_only_something_needed_that_is_missing_prevents_training() -> None:
    assert doctor.can_train([ok("a", ""), warning("b", "", "c"), missing("d", "", "e")])
    assert not doctor.can_train([ok("a", ""), missing("d", "", "e", needed=True)])


def test_a_line_says_what_is_there_and_what_to_do() -> None:
    assert doctor.line(ok("cores", "2 of 2 usable")) == "ok       cores        2 of 2 usable"
    assert doctor.line(warning("disk", "1 GiB", "make room")).splitlines()[1].strip() == "-> make room"


def test_the_verdict_names_what_is_in_the_way() -> None:
    assert doctor.verdict([ok("a", "")]) == "ready to train"
    assert doctor.verdict([ok("a", ""), warning("b", "", "c")]) == "ready to train (1 warning above)"
    assert doctor.verdict([missing("torch", "", "c", needed=True)]) == "training cannot run here yet: torch"


# --- software --------------------------------------------------------------------------------------------------------


def by_name(findings: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_what_is_needed_and_there_is_ok() -> None:
    assert {finding.status for finding in software.check_needed(FULL)} == {"ok"}


@pytest.mark.parametrize(
    ("name", "seen", "advice"),
    [
        ("torch", {"version": "2.9.1", "seconds": 1.0}, "torch>=2.11"),
        ("numpy", {"error": "ModuleNotFoundError: No module named 'numpy'"}, "pip install 'numpy>=1.26'"),
        ("safetensors", {"error": "ImportError: glibc"}, "safetensors>=0.5"),
    ],
)
def test_what_is_needed_and_not_there_is_missing_and_says_how_to_get_it(
    name: str, seen: dict[str, Any], advice: str
) -> None:
    finding = by_name(software.check_needed({**FULL, name: seen}))[name]
    assert (finding.status, finding.needed) == ("missing", True)
    assert advice in finding.advice


def test_a_torch_without_distributed_cannot_train() -> None:
    assert not doctor.can_train(list(software.check_needed({**FULL, "distributed": False})))


def test_versions_are_compared_as_numbers() -> None:
    assert software.numbers("2.13.0+cpu") == (2, 13, 0)
    assert software.numbers("2.9.1") < (2, 11)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os.abort()", "ended the interpreter"),
        ("print('[1]')", "said nothing"),
        ("import time; time.sleep(60)", "within 0.5 s"),
    ],
)
def test_a_torch_that_ends_or_blocks_the_interpreter_is_a_finding(code: str, why: str) -> None:
    seen = software.probe(code, limit_s=0.5 if "sleep" in code else 30)
    (finding,) = software.check_needed(seen)
    assert why in finding.detail
    assert finding.needed


def test_an_optional_package_that_is_not_there_is_a_warning_with_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(software.OPTIONAL, "no-such-package", ("a thing", "extra"))
    finding = by_name(software.check_optional(FULL))["no-such-package"]
    assert finding.status == "warning"
    assert "a thing" in finding.detail
    assert "pip install 'echelon[extra]'" in finding.advice


@pytest.mark.parametrize(("compiled", "status"), [(True, "ok"), (False, "warning")])
def test_whether_exact_sums_are_compiled_is_said(compiled: bool, status: str) -> None:
    finding = by_name(software.check_optional({**FULL, "kernel": compiled}))["exact sums"]
    assert finding.status == status
    assert compiled or "gcc" in finding.advice


def test_an_old_python_cannot_train(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.check_python().status == "ok"
    monkeypatch.setattr(software, "OLDEST_PYTHON", (9, 0))
    assert software.check_python().needed


# --- machine ---------------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 1.5), ("max 100000", None), ("", None), ("x y", None)])
def test_a_quota_of_cgroup_2_is_read(tmp_path: Path, text: str, cores: float | None) -> None:
    write(tmp_path / "cpu.max", text)
    assert machine.cpu_quota(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("50000", 0.5), ("-1", None)])
def test_a_quota_of_cgroup_1_is_read(tmp_path: Path, quota: str, cores: float | None) -> None:
    write(tmp_path / "cpu/cpu.cfs_quota_us", quota)
    write(tmp_path / "cpu/cpu.cfs_period_us", "100000")
    assert machine.cpu_quota(tmp_path) == cores


def test_a_quota_below_the_cores_says_how_many_workers_make_sense(tmp_path: Path) -> None:
    write(tmp_path / "cpu.max", "50000 100000")
    assert "at most 1 workers" in machine.check_cores(tmp_path).advice
    assert machine.check_cores(tmp_path / "none").status == "ok"


def meminfo(tmp_path: Path, free_kib: int) -> Path:
    write(tmp_path / "meminfo", f"MemTotal:       16777216 kB\nMemAvailable:   {free_kib} kB\n")
    return tmp_path / "meminfo"


def test_memory_is_what_is_free_on_the_machine(tmp_path: Path) -> None:
    finding = machine.check_memory(tmp_path, meminfo(tmp_path, 8 << 20))
    assert (finding.status, finding.detail) == ("ok", "8.0 of 16.0 GiB free")
    assert machine.check_memory(tmp_path, meminfo(tmp_path, 1024)).status == "warning"


def test_memory_is_what_the_container_leaves(tmp_path: Path) -> None:
    write(tmp_path / "memory.max", str(2 << 30))
    write(tmp_path / "memory.current", str(1 << 30))
    assert "1.0 GiB free, of 2.0" in machine.check_memory(tmp_path, meminfo(tmp_path, 8 << 20)).detail


def test_no_limit_of_the_container_is_no_limit(tmp_path: Path) -> None:
    write(tmp_path / "memory.max", "max")
    assert machine.memory_limit(tmp_path) is None
    (tmp_path / "memory.max").unlink()
    write(tmp_path / "memory/memory.limit_in_bytes", "9223372036854771712")
    assert machine.memory_limit(tmp_path) is None


@pytest.mark.parametrize("text", ["", "MemTotal: many\n"])
def test_a_memory_that_cannot_be_read_is_a_warning(tmp_path: Path, text: str) -> None:
    write(tmp_path / "meminfo", text)
    assert machine.check_memory(tmp_path, tmp_path / "meminfo").status == "warning"


def test_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {**FULL, "gpus": [{"name": "H200", "bytes": 139 << 30}], "nccl": True}
    assert machine.check_gpus(gpus).detail == "H200 (139 GiB)"
    assert machine.check_gpus({**gpus, "nccl": False}).status == "warning"
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.check_gpus(FULL).status == "ok"


def test_a_driver_without_a_cuda_torch_is_worth_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "CPU build" in machine.check_gpus(FULL).detail
    assert "too old" in machine.check_gpus({**FULL, "cuda_build": "13.0", "gpu_error": "driver too old"}).detail


@pytest.mark.parametrize(("soft", "status"), [(64, "warning"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_low_limits_are_worth_a_warning(monkeypatch: pytest.MonkeyPatch, soft: int, status: str) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (soft, soft))
    assert {finding.status for finding in machine.check_limits()} == {status}


def test_where_forking_is_forbidden_nothing_can_train(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.check_fork().status == "ok"
    monkeypatch.setattr(machine.os, "fork", refuse)
    assert machine.check_fork().needed


# --- links -----------------------------------------------------------------------------------------------------------


def test_the_loopback_of_this_machine_works_and_is_measured() -> None:
    finding = links.check_loopback()
    assert finding.status in ("ok", "warning")
    assert "GB/s" in finding.detail


@pytest.mark.parametrize("check", [links.check_ports, links.check_loopback])
def test_a_loopback_that_may_not_be_used_cannot_train(monkeypatch: pytest.MonkeyPatch, check: Any) -> None:
    monkeypatch.setattr(links.socket, "create_server", refuse)
    assert check().needed


def test_a_loopback_that_falls_silent_is_a_finding_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "WAIT_S", 0.2)
    monkeypatch.setattr(links, "_echo", lambda server: None)
    assert links.check_loopback().needed


def test_looking_at_ports_holds_none_of_them() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert links.check_ports().status == "ok"
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_interfaces_are_listed_without_psutil_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert links.check_interfaces().detail.startswith("lo")
    monkeypatch.setattr(links.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(links.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth7")])
    assert links.check_interfaces().detail == "lo, eth7"
    monkeypatch.setattr(links.socket, "if_nameindex", lambda: [(2, "eth7")])
    assert links.check_interfaces().needed
    monkeypatch.setattr(links.socket, "if_nameindex", refuse)
    assert links.check_interfaces().status == "warning"


# --- storage ---------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_yet_is_judged_by_what_is_above_it_and_nothing_is_left(tmp_path: Path) -> None:
    findings = by_name(storage.check_folder(tmp_path / "runs" / "deep"))
    assert set(findings) == {"disk", "writing"}
    assert "MB/s" in findings["writing"].detail
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_is_a_file_cannot_be_used(tmp_path: Path) -> None:
    write(tmp_path / "runs", "")
    (finding,) = storage.check_folder(tmp_path / "runs")
    assert finding.needed


def test_a_folder_that_cannot_be_written_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.tempfile, "TemporaryFile", refuse)
    (finding,) = storage.check_folder(tmp_path)
    assert "Permission denied" in finding.detail
    assert finding.needed


def test_a_full_or_slow_disk_is_worth_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 20}))
    monkeypatch.setattr(storage, "write_speed", lambda folder, size: 1e6)
    assert [finding.status for finding in storage.check_folder(tmp_path)] == ["warning", "warning"]


def test_a_shared_memory_of_the_usual_container_size_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert storage.check_shared_memory(tmp_path / "none").status == "warning"
    monkeypatch.setattr(
        storage.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 26, "total": 1 << 26})
    )
    assert "--shm-size" in storage.check_shared_memory(tmp_path).advice


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_whether_this_machine_can_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(software, "probe", lambda: FULL)
    assert main(["doctor", "--out", str(tmp_path)]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("ready to train")
    monkeypatch.setattr(software, "probe", lambda: {**FULL, "distributed": False})
    assert main(["doctor", "--json", "--out", str(tmp_path)]) == 2
    values = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert values["ok"] is False
    assert [finding["name"] for finding in values["findings"] if finding["needed"]] == ["distributed"]


def test_the_doctor_itself_never_imports_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "probe", lambda: FULL)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails now
    assert doctor.can_train(list(doctor.examine(tmp_path)))


def test_a_real_look_at_this_machine_finds_that_it_can_train() -> None:
    seen = software.probe()
    assert doctor.can_train(list(software.check_needed(seen)))
