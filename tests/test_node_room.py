"""An agent on a machine that has no room left, or whose other agents go at the worst moment: it says so and ends."""

import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from steps import JOB, Step, step_environ

from hpc.node.meeting import find_host
from hpc.node.rendezvous import candidate_ports

pytestmark = pytest.mark.slow

REFUSING = """
import errno, os, sys
fork, mkdir, left = os.fork, os.mkdir, int(sys.argv.pop(1))

def refuse():
    global left
    left -= 1
    if left < 0:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()

def full(path, *rest, **more):
    if "FULL_DISK" in os.environ and os.path.basename(path) == "tmpdir":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    mkdir(path, *rest, **more)

os.fork, os.mkdir = refuse, full
import runpy
runpy.run_module("hpc.node", run_name="__main__", alter_sys=True)
"""
"""An agent that the kernel refuses another process after so many."""
SLEEPER = "import time\nprint('here', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Step]:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    with Step(tmp_path) as step:
        yield step


@pytest.mark.parametrize(
    ("who", "forks", "line"),
    [
        (0, 0, "the store of"),
        (0, 1, "rank 0 could not be started"),
        (0, 2, "rank 1 could not be started"),
        (1, 0, "rank 2 could not be started"),
        (1, 1, "rank 3 could not be started"),
    ],
)
def test_a_limit_on_processes_is_told_in_one_line_and_ends_the_step(
    step: Step, who: int, forks: int, line: str
) -> None:
    arguments = ["--workers-per-node", "2", "--allow-loopback", "--", "sleeper.py"]
    for task in range(2):
        environ = step_environ(task, tasks_per_node=(1, 1))
        if task == who:
            step.start([sys.executable, "-c", REFUSING, str(forks), *arguments], environ)
        else:
            step.agent(environ, *arguments)
    ended = step.ends(60)
    assert [one.code for one in ended] == [69, 69], [one.stderr for one in ended]
    assert line in ended[0].stderr, ended
    assert "Resource temporarily unavailable; a limit on the number of processes is reached" in ended[0].stderr
    assert not any("Traceback" in one.stderr for one in ended), [one.stderr for one in ended]
    assert step.gone(5)


@pytest.mark.skipif(os.geteuid() != 0, reason="a user of its own needs root")
def test_a_real_limit_on_processes(step: Step) -> None:
    """ulimit -u of a user with no other process: there is room for the agent alone."""
    user = 50_000 + os.getpid() % 10_000
    with tempfile.TemporaryDirectory(prefix="room-") as home:
        os.chown(home, user, user)
        environ = {**step_environ(0, tasks_per_node=(1,)), "HOME": home, "TMPDIR": home}
        environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}  # NumPy's would end it: raise(SIGINT)
        caps = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        rights = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *caps]
        step.start(["prlimit", "--nproc=1:1", *rights, sys.executable, "-m", "hpc.node", "--", "sleeper.py"], environ)
        (ended,) = step.ends(60)
    assert ended.code == 69 and "a limit on the number of processes is reached" in ended.stderr, ended
    assert "Traceback" not in ended.stderr


def test_a_full_disk_leaves_the_temporary_folder_to_its_library(step: Step) -> None:
    (step.folder / "temporary.py").write_text("import tempfile\nprint(tempfile.gettempdir())\n")
    environ = {**step_environ(0, tasks_per_node=(1,)), "FULL_DISK": "yes"}
    step.start([sys.executable, "-c", REFUSING, "9", "--", "temporary.py"], environ)
    (ended,) = step.ends(60)
    assert ended.code == 0 and ended.stdout.strip() == "/tmp", ended
    assert "no TMPDIR can be made" in ended.stderr and "No space left on device" in ended.stderr


def test_an_agent_whose_last_question_comes_with_its_end_is_lost_and_no_fault(step: Step) -> None:
    """Both are read at once by rank zero's agent, which still starts its workers."""
    step.agent(step_environ(0), "--", "sleeper.py")
    key = f":{os.geteuid()}:{JOB}:None:0:0".encode()
    guest = find_host("127.0.0.1", candidate_ports(JOB, None, 0, "", "0"), key, time.monotonic() + 60)
    facts = {"task": 1, "host": "elsewhere", "node": 0, "workers": 1, "tasks": 2, "nodes": 1, "layout": "task-per-gpu"}
    guest.send(joined=facts)
    with selectors.DefaultSelector() as selector:
        selector.register(guest, selectors.EVENT_READ)
        messages: list[dict[str, object]] = []
        while not messages:
            selector.select(60)
            messages, gone = guest.receive()
            assert not gone, "rank zero's agent has ended"
    assert "go" in messages[0], messages
    guest.send(clock=1.0)
    guest.close()
    (ended,) = step.ends(60)
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.code == 69 and "the agent on elsewhere is gone" in ended.stderr, ended.stderr


def test_what_goes_away_while_it_is_looked_at_is_no_fault(tmp_path: Path) -> None:
    """Two agents that end at once clean the same folders."""
    code = """
import sys
from pathlib import Path
from hpc.node import residue
folder = Path(sys.argv[1])
for _ in range(1500):
    residue._inside(folder), residue._size(folder)
"""
    maker = f"for i in 1 2 3 4 5 6 7 8; do mkdir -p {tmp_path}/a/b/c/$i; done; rm -r {tmp_path}/a"
    looking = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=step_environ(0), stderr=subprocess.PIPE, text=True
    )
    while looking.poll() is None:
        subprocess.run(["sh", "-c", maker], check=True)
    assert looking.stderr is not None
    assert looking.returncode == 0, looking.stderr.read()
