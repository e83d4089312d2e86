"""How a worker comes by the job: a name in a file, found or refused with what to do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from echelon.errors import ConfigError, UserError
from echelon.job import Job
from echelon.request import MODULE, Request, Script, Source, import_file

JOB = "echelon.Job(model=list, loss=max, data=[1], optimizer=list, batch=8, steps=1)"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text, name="job.py"):
        monkeypatch.setitem(sys.modules, MODULE, None)
        monkeypatch.delitem(sys.modules, MODULE)
        path = tmp_path / name
        path.write_text("import echelon\n" + text)
        return str(path)

    return write


def test_a_request_survives_json():
    request = Request(plan="dp", exact=True, steps=3, out="x", source={"file": "f", "name": None}, seed=4)
    assert Request(**json.loads(json.dumps(request.to_dict()))) == request


@pytest.mark.parametrize(("suffix", "name"), [("", None), (":small", "small")])
def test_a_target_is_a_file_and_maybe_a_name(write, suffix, name):
    file = write("")
    assert Source.parse(file + suffix) == Source(file=file, name=name)


def test_a_colon_in_a_file_s_name_is_not_taken_for_a_job(write):
    file = write("", "my:job-1.py")
    assert Source.parse(file) == Source(file=file, name=None)


@pytest.mark.parametrize("target", ["missing.py", "missing.py:job", "", ":job", "."])
def test_a_file_that_is_not_there_is_refused(target):
    with pytest.raises(ConfigError, match="file"):
        Source.parse(target)


def test_the_name_job_is_found_among_several(write):
    source = Source.parse(write(f"other = {JOB}\njob = {JOB}"))
    assert source.load(0) is sys.modules[MODULE].job


def test_the_only_job_of_a_file_is_found_whatever_its_name(write):
    assert isinstance(Source.parse(write(f"tiny = {JOB}")).load(0), Job)


def test_a_named_job_is_the_one_that_is_loaded(write):
    file = write(f"a = {JOB}\nb = {JOB}")
    assert Source.parse(f"{file}:b").load(0) is sys.modules[MODULE].b


def test_two_jobs_and_no_name_say_which_there_are(write):
    with pytest.raises(ConfigError, match=r"it has a, b; say which, as job.py:NAME"):
        Source.parse(write(f"a = {JOB}\nb = {JOB}")).load(0)


def test_a_file_without_a_job_says_how_to_define_one(write):
    with pytest.raises(ConfigError, match=r"job = echelon.Job"):
        Source.parse(write("x = 1")).load(0)


def test_a_name_that_the_file_does_not_have_is_refused(write):
    with pytest.raises(ConfigError, match="has no 'other'"):
        Source.parse(write(f"job = {JOB}") + ":other").load(0)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("raise ValueError('no')", "ValueError"), ("def f(:", "SyntaxError"), ("import sys; sys.exit(3)", "SystemExit")],
)
def test_a_file_that_does_not_import_is_the_user_s_failure_with_its_traceback(write, text, kind):
    with pytest.raises(UserError) as caught:
        import_file(write(text), 3)
    assert caught.value.rank == 3
    assert kind in caught.value.why
    assert "job.py" in caught.value.trace


def test_a_ctrl_c_during_the_import_stays_one_and_one_that_the_file_makes_up_is_a_failure(write):
    file = write("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        import_file(file, 0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a worker of ours
    try:
        with pytest.raises(UserError, match="did not import: KeyboardInterrupt"):
            import_file(file, 0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert MODULE not in sys.modules


def test_a_file_whose_own_process_group_cannot_be_is_told_whose_it_is(write):
    text = (
        "import torch.distributed as dist\ndist.init_process_group('gloo', init_method='env://', rank=0, world_size=0)"
    )
    with pytest.raises(ConfigError, match=r"init_process_group: .* Echelon makes the process group itself"):
        import_file(write(text), 0)


def test_a_wrong_job_in_a_file_is_a_wrong_job(write):
    with pytest.raises(ConfigError, match="batch"):
        import_file(write(f"job = {JOB.replace('batch=8', 'batch=0')}"), 0)


def test_a_file_that_failed_is_tried_again_not_taken_for_whole(write):
    file = write("raise ValueError('no')")
    for _ in range(2):
        with pytest.raises(UserError):
            import_file(file, 0)


def test_modules_beside_the_file_can_be_imported(write, tmp_path):
    write("value = 7", "beside_the_job.py")
    assert import_file(write("from beside_the_job import value"), 0).value == 7


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a = 1\nb: int = 2\nc, (d, *e) = x", {"a", "b", "c", "d", "e"}),
        ("def f(): x = 1\nclass C: y = 2\nasync def g(): ...", {"f", "C", "g"}),
        ("import os.path, sys as s\nfrom a import b as c, d", {"os", "s", "c", "d"}),
        ("if x:\n a = 1\nelse:\n b = 2", {"a", "b"}),
        ("for i in x:\n a = i\nwith f() as g: pass\ntry:\n t = 1\nexcept E: pass", {"i", "a", "g", "t"}),
        ("if __name__ == '__main__':\n a = 1\nelse:\n b = 2", {"b"}),
        ("if '__main__' == __name__:\n a = 1", set()),
        ("a = [x for x in y]\nb = lambda z: (w := z)", {"a", "b"}),
        ("if (n := 3) > 2: pass", {"n"}),
    ],
)
def test_names_that_an_import_binds(text, names):
    assert Script.read(text.encode()).names == names


@pytest.mark.parametrize(
    "text",
    [
        "job = 1\nif __name__ == '__main__':\n job = 2",
        "job = 1\nif __name__ == '__main__':\n for job in x: pass",
        "job = 1\nif __name__ == '__main__':\n with f() as job: pass",
        "job = 1\nif __name__ == '__main__':\n def job(): pass",
        "job = 1\ndef sweep():\n global job\n job = 2",
    ],
)
def test_a_name_that_is_bound_anew_when_the_file_runs_is_not_what_an_import_finds(text):
    assert "job" not in Script.read(text.encode()).names


def test_the_lines_that_an_import_leaves_out():
    text = b"a = 1\nif __name__ == '__main__':\n    b = 2\n    f(\n        c)\nelse:\n    d = 3\n"
    assert Script.read(text).guarded == (range(3, 6),)


@pytest.mark.parametrize("text", [b"\xef\xbb\xbfjob = 1", "# coding: latin-1\njob = '\u00fc'".encode("latin-1")])
def test_a_file_in_any_encoding_that_python_reads(text):
    assert Script.read(text).names == {"job"}


def test_a_file_without_the_usual_ending_can_be_imported(write):
    assert import_file(write("job = 1", "script"), 0).job == 1


def test_asking_for_a_run_needs_no_torch():
    code = "import sys, echelon.api, echelon.request; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100, check=False).returncode == 0
