"""Notices and the agreed stop: every rank stops after the same step, with one checkpoint, and goes on exactly."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from rank_server import ROOT, Ranks, Trial
from test_train_loop import EVERY_STEP, RUN, equal, final_states, lines, losses, made

from hpc.train.checkpoint import Checkpoints
from hpc.train.limit import MARGIN_S, TimeLimit
from hpc.train.sampler import EpochSampler
from hpc.train.stop import Stop

# 7 steps per epoch, 140 in all: quick up to the notice, slow from there on, so that no machine is too slow to stop
STEPS = ("toy", RUN, EVERY_STEP, "samples=53", "train.batch_size=8", "train.epochs=20", "dropout=0.3", "held_out=0")
SLOW = "slow_after_s=0.1"
WANTS_ANOTHER = 75


def checkpoints(folder: Path) -> list[int]:
    return Checkpoints(folder / "run/checkpoints").steps()


def stopped(trial: Trial, signal_name: str, ranks: int = 1) -> int:
    """The step that all ranks stopped at, with one line on rank 0 and none elsewhere."""
    assert trial.codes == [WANTS_ANOTHER] * ranks, trial.text()
    last = trial.logs[0].splitlines()[-1]
    head, _, rest = last.partition(f" on notice ({signal_name}): checkpoint run/checkpoints/step-")
    assert head.startswith("stopped at step ") and rest, trial.text()
    assert all(log == "" for log in trial.logs[1:]), trial.text()
    step = int(head.removeprefix("stopped at step "))
    assert rest.split(";")[0] == str(step)
    return step


class Heard:
    """Notices without signals, for ranks that are threads."""

    def __init__(self) -> None:
        self.first: str | None = None
        self.on_notice: Callable[[], None] | None = None

    def learn(self, name: str) -> None:
        pass

    def settle(self) -> None:
        pass


@pytest.mark.parametrize("seed", range(12))
def test_c07_ranks_that_meet_in_every_step_agree_whoever_hears_it(seed: int) -> None:
    chance = random.Random(seed)
    size, at, speakers = 3, chance.randrange(1, 40), chance.sample(range(3), chance.randrange(1, 4))
    store, meeting = dist.HashStore(), threading.Barrier(3)
    ends: dict[int, tuple[int, str | None]] = {}

    def rank(number: int) -> None:
        heard, pace = Heard(), random.Random(f"{seed} {number}")
        with Stop(heard, number, size, store) as stop:  # type: ignore[arg-type]
            step = 0
            while not stop.here():
                if number in speakers and step == at:
                    heard.first = "SIGTERM"
                    assert heard.on_notice is not None
                    heard.on_notice()
                time.sleep(pace.random() * 0.01)
                meeting.wait(20)  # as gradients are exchanged: a rank that is held elsewhere would break it
                step += 1
            ends[number] = (step, stop.reason)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(ends) == size and len(set(ends.values())) == 1, ends
    assert ends[0][0] >= at and ends[0][1] == "SIGTERM"


def test_a_run_that_ends_before_the_agreement_is_not_kept() -> None:
    heard, store = Heard(), dist.HashStore()
    stops = [Stop(heard, number, 2, store).__enter__() for number in range(2)]  # type: ignore[arg-type]
    assert [stop.here() for stop in stops] == [False, False]
    heard.first = "SIGTERM"
    began = time.monotonic()
    for stop in stops:
        stop.__exit__(None, None, None)
    assert time.monotonic() - began < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_q03_stopped_again_and_again_equals_the_uninterrupted_run(ranks: Ranks, tmp_path: Path, number: int) -> None:
    straight, broken = made(tmp_path, "straight"), made(tmp_path, "broken")
    more = ("optimizer=adamw", "noise=0.2", "held_out=10", "train.eval_every_epochs=4")
    ranks(straight, *STEPS, *more, ranks=number).check()
    chance, at = random.Random(number), 0
    for _ in range(3):
        trouble = ("trouble=notice TERM", f"trouble_step={chance.randrange(1, 25)}", "trouble_rank=-1", SLOW)
        before, at = at, stopped(ranks(broken, *STEPS, *more, *trouble, ranks=number), "SIGTERM", number)
        assert at > before and checkpoints(broken)[-1] == at
    ranks(broken, *STEPS, *more, ranks=number).check()
    for one, two in zip(final_states(straight), final_states(broken), strict=True):
        assert equal(one, two)
    assert losses(straight) == losses(broken)
    assert lines(straight, "eval") == lines(broken, "eval")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "name", "speaker"),
    [
        ("USR2 TERM", "SIGUSR2", 0),
        ("TERM CONT", "SIGTERM", 1),
        ("TERM", "SIGTERM", 1),
        ("USR2 USR2", "SIGUSR2", -1),
    ],
)
def test_q06_any_order_of_signals_is_one_stop_and_one_save(
    ranks: Ranks, tmp_path: Path, signals: str, name: str, speaker: int
) -> None:
    trouble = (f"trouble=notice {signals}", "trouble_step=3", f"trouble_rank={speaker}", SLOW)
    step = stopped(ranks(tmp_path, *STEPS, *trouble, ranks=2), name, 2)
    assert checkpoints(tmp_path) == [step]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["USR1", "HUP"])
def test_q10_the_configured_signal_is_the_notice(ranks: Ranks, tmp_path: Path, name: str) -> None:
    trouble = (f"slurm.signal={name}", f"trouble=notice {name}", "trouble_step=3", SLOW)
    stopped(ranks(tmp_path, *STEPS, *trouble), f"SIG{name}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_q19_a_notice_in_the_last_step_leaves_a_finished_run(ranks: Ranks, tmp_path: Path, number: int) -> None:
    arguments = ("toy", RUN, "samples=24", "train.batch_size=8", "trouble=notice TERM", "trouble_step=3")
    trial = ranks(tmp_path, *arguments, "trouble_rank=-1", ranks=number)
    assert trial.codes == [0] * number and trial.logs[0].splitlines()[-1].startswith("done: 3 steps, "), trial.text()
    assert len(lines(tmp_path, "eval")) == 1
    again = ranks(tmp_path, *arguments, ranks=number).check()
    assert again.logs[0].splitlines()[-1].startswith("already finished: 3 steps")


@pytest.mark.slow
def test_c06_loader_workers_outlive_a_notice_to_the_group_and_not_their_rank(ranks: Ranks, tmp_path: Path) -> None:
    more = ("train.loader_workers=2", "trouble=group TERM USR2 TERM", "trouble_step=3", SLOW)
    step = stopped(ranks(tmp_path, *STEPS, *more), "SIGTERM")
    assert checkpoints(tmp_path) == [step]
    assert not [process for process in psutil.process_iter() if is_loader_of(process, tmp_path)]


def is_loader_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return False


@pytest.mark.slow
def test_c05_a_loader_that_hangs_is_gone_with_its_rank(ranks: Ranks, tmp_path: Path) -> None:
    """The rank waits for the sample, so no stop can be agreed on: the deadline ends the rank, the kernel its loader."""
    hung = EpochSampler(53, batch_size=8).order().tolist()[0]
    more = ("train.loader_workers=1", f"stuck_sample={hung}", "launch.grace_s=2", "slurm.signal_lead_s=3")
    trial = ranks(tmp_path, *STEPS, *more, notice="USR2 TERM", notice_file="stuck.pid")
    assert trial.codes == [128 + signal.SIGTERM] and "no agreed stop in the time" in trial.logs[0], trial.text()
    assert gone(int((tmp_path / "stuck.pid").read_text()))


@pytest.mark.slow
def test_c05_a_loader_that_hangs_does_not_outlive_a_crash(ranks: Ranks, tmp_path: Path) -> None:
    hung = EpochSampler(53, batch_size=8).order().tolist()[8]
    more = ("train.loader_workers=1", f"stuck_sample={hung}", "trouble=raise", "trouble_step=1")
    trial = ranks(tmp_path, *STEPS, *more)
    assert trial.codes == [1] and trial.logs[0].endswith("ValueError: bad batch 17\n"), trial.text()
    assert not (tmp_path / "stuck.pid").exists() or gone(int((tmp_path / "stuck.pid").read_text()))


@pytest.mark.slow
def test_c05_a_loader_that_hangs_does_not_hold_up_a_stop(ranks: Ranks, tmp_path: Path) -> None:
    hung = EpochSampler(53, batch_size=8).order().tolist()[16]  # the first of the third step
    more = ("train.loader_workers=2", f"stuck_sample={hung}", "trouble=group TERM", "trouble_step=1", SLOW)
    trial = ranks(tmp_path, *STEPS, *more)
    assert stopped(trial, "SIGTERM") in (1, 2)
    assert not (tmp_path / "stuck.pid").exists() or gone(int((tmp_path / "stuck.pid").read_text()))


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_c07_rank_zero_alone_hears_it_while_others_are_slow(ranks: Ranks, tmp_path: Path) -> None:
    more = ("trouble=notice USR2", "trouble_step=3", "slow_elsewhere_s=0.4")
    step = stopped(ranks(tmp_path, *STEPS, *more, ranks=3), "SIGUSR2", 3)
    assert 3 <= step <= 6 and checkpoints(tmp_path) == [step]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_an_evaluation_is_stopped_and_made_up(ranks: Ranks, tmp_path: Path, number: int) -> None:
    straight, broken = made(tmp_path, "straight"), made(tmp_path, "broken")
    more = ("held_out=79", "batchnorm=true", "train.epochs=3", "train.drop_last=true")
    ranks(straight, *STEPS, *more, ranks=number).check()
    trouble = ("trouble=notice TERM", "trouble_at=evaluate", "trouble_step=2", "slow_after_s=0.5")
    assert stopped(ranks(broken, *STEPS, *more, *trouble, ranks=number), "SIGTERM", number) == 6
    assert lines(broken, "eval") == []
    ranks(broken, *STEPS, *more, ranks=number).check()
    assert lines(broken, "eval") == lines(straight, "eval") and len(lines(broken, "eval")) == 3
    for one, two in zip(final_states(straight), final_states(broken), strict=True):
        assert equal(one, two)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_a_notice_in_data_set_up_stops_before_the_first_step(ranks: Ranks, tmp_path: Path, number: int) -> None:
    trouble = ("trouble=notice TERM", "trouble_at=data", "trouble_step=1", "slow_after_s=1")
    trial = ranks(tmp_path, *STEPS, *trouble, ranks=number)
    assert trial.codes == [WANTS_ANOTHER] * number
    assert trial.logs[0].endswith("stopped at step 0 on notice (SIGTERM): no step was made, so no checkpoint\n")
    assert checkpoints(tmp_path) == []
    ranks(tmp_path, *STEPS, "train.epochs=1", ranks=number).check()
    assert stopped(ranks(tmp_path, *STEPS, *trouble, ranks=number), "SIGTERM", number) == 7
    assert checkpoints(tmp_path) == [7]


@pytest.mark.slow
def test_a_save_that_is_under_way_is_finished_first(ranks: Ranks, tmp_path: Path) -> None:
    more = ("train.save_every_steps=5", "trouble=notice TERM", "trouble_at=sync", "trouble_step=2", "slow_sync_s=0.2")
    step = stopped(ranks(tmp_path, *STEPS, *more), "SIGTERM")  # the first sync is that of the try before the first step
    assert step >= 5 and checkpoints(tmp_path)[-1] == step and not [*(tmp_path / "run/checkpoints").glob(".*")]


@pytest.mark.slow
def test_a_rank_in_a_collective_leaves_when_the_time_is_over(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 hangs and rank 0 waits for it in C++; only rank 0 hears the notice."""
    more = ("launch.grace_s=2", "trouble=notice TERM", "trouble_step=1", "slow_elsewhere_s=600")
    trial = ranks(tmp_path, *STEPS, *more, ranks=2)
    assert trial.codes == [128 + signal.SIGTERM] * 2, trial.text()
    assert all("no agreed stop in the time" in log for log in trial.logs)


@pytest.mark.slow
def test_a_run_stops_by_itself_while_a_save_still_fits_into_the_time(ranks: Ranks, tmp_path: Path) -> None:
    ranks(made(tmp_path, "before"), "toy", "samples=8").check()  # so that nothing is imported any more
    ends = time.time() + 2.5 * MARGIN_S
    environ = {"HPC_END_TIME": str(ends)}
    more = ("train.epochs=2000", "trouble=notice CONT", "trouble_step=1", SLOW)
    trial = ranks(tmp_path, *STEPS, *more, ranks=2, env=environ)
    step = stopped(trial, "TIME", 2)
    assert checkpoints(tmp_path)[-1] == step and time.time() < ends


def test_the_time_limit_is_told_once_and_what_lead_would_do(caplog: pytest.LogCaptureFixture) -> None:
    limit = TimeLimit(time.time() + 1e6, lead_s=20)
    limit.save_s = lambda: 40.0
    for _ in range(3):
        assert not limit.is_near()
        limit._next_look = 0.0
    assert len(caplog.records) == 1 and "slurm.signal_lead_s=50 would do" in caplog.text
    limit = TimeLimit(time.time() + 45)
    limit.save_s = lambda: 40.0
    assert limit.is_near() and not TimeLimit(None).is_near() and not TimeLimit(None).is_known


@pytest.mark.slow
def test_the_first_interrupt_is_a_notice_that_says_how_to_go_on(ranks: Ranks, tmp_path: Path) -> None:
    trial = ranks(tmp_path, *STEPS, "trouble=notice INT", "trouble_step=3", SLOW)
    stopped(trial, "SIGINT")
    assert "notice (SIGINT): stopping after the step under way; Ctrl-C again ends it at once" in trial.logs[0]
    assert trial.logs[0].endswith("; the same command with run_dir=run goes on from there\n")


@pytest.mark.slow
def test_the_second_interrupt_ends_at_once(ranks: Ranks, tmp_path: Path) -> None:
    trial = ranks(tmp_path, *STEPS, "trouble=notice INT INT", "trouble_step=3", "slow_after_s=30")
    assert trial.codes == [128 + signal.SIGINT] and trial.seconds < 25, trial.text()
    assert checkpoints(tmp_path) == []


@pytest.mark.slow
def test_a_notice_while_torch_is_imported_is_heard(tmp_path: Path) -> None:
    env: dict[str, Any] = {k: v for k, v in os.environ.items() if not k.startswith(("HPC_", "SLURM_"))}
    env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "HPC_SITE_CONFIG": ""}
    child = subprocess.Popen(
        [sys.executable, "-m", "hpc.train", *STEPS], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while not listens(child.pid, signal.SIGTERM):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.005)
    assert "libtorch" not in Path(f"/proc/{child.pid}/maps").read_text()  # so the import of torch is still ahead
    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate(timeout=90)
    assert child.returncode == WANTS_ANOTHER, out
    assert "stopped at step 0 on notice (SIGTERM)" in out


def listens(pid: int, number: signal.Signals) -> bool:
    text = Path(f"/proc/{pid}/status").read_text()
    caught = int(text.split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (number - 1) & 1)
