"""Slurm's state names: each in one phase, and nothing unknown is success."""

import pytest

from hpc.slurm.states import JobState, parse_state


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("COMPLETED", JobState.COMPLETED),
        ("CD", JobState.COMPLETED),
        ("R", JobState.RUNNING),
        ("PD", JobState.PENDING),
        ("CG", JobState.COMPLETING),
        ("oom", JobState.OUT_OF_MEMORY),
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("OUT_OF_ME+", JobState.OUT_OF_MEMORY),
        ("NODE_FAIL\n", JobState.NODE_FAIL),
        ("FAILED,COMPLETING", JobState.COMPLETING),
        ("COMPLETED COMPLETING", JobState.COMPLETING),
        ("", JobState.UNKNOWN),
        ("?", JobState.UNKNOWN),
        ("COMPLETE", JobState.UNKNOWN),
        ("+", JobState.UNKNOWN),
        ("COMPLET+", JobState.COMPLETING),
        ("PRE+", JobState.PREEMPTED),
        ("FINE+", JobState.UNKNOWN),
        ("FAILED TIMEOUT", JobState.UNKNOWN),
        ("DAYDREAMING", JobState.UNKNOWN),
    ],
)
def test_texts(text: str, state: JobState) -> None:
    assert parse_state(text) is state


def test_each_known_state_is_in_exactly_one_phase() -> None:
    for state in JobState:
        phases = [state.is_pending, state.is_running, state.is_completing, state.is_finished]
        assert sum(phases) == (0 if state is JobState.UNKNOWN else 1), state


def test_only_completed_is_success() -> None:
    assert [state for state in JobState if state.succeeded] == [JobState.COMPLETED]


def test_f16_completing_is_not_the_end() -> None:
    assert not parse_state("COMPLETING").is_finished
    assert parse_state("COMPLETING").may_come_back
    assert parse_state("REQUEUED").is_pending


def test_a_preempted_job_may_come_back_and_a_cancelled_one_does_not() -> None:
    assert parse_state("PREEMPTED").may_come_back
    assert not parse_state("CANCELLED by 1000").may_come_back
