import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc import quantities


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("1", 1),
        ("90:00", 90),
        ("1:30", 2),  # minutes and seconds: a started minute counts
        ("0:59", 1),
        ("1:30:00", 90),
        ("01:30:00", 90),
        ("12:00:00", 720),
        ("0:00:01", 1),
        ("2-0", 2880),
        ("2-12", 3600),
        ("2-12:30", 3630),
        ("2-00:00:00", 2880),
        ("1-00:00:01", 1441),
        (" 90 ", 90),
    ],
)
def test_time_is_what_sbatch_takes_it_for(text: str, minutes: int) -> None:
    assert quantities.slurm_minutes(text) == minutes
    assert quantities.slurm_time(text) == text.strip()


def test_s17_hours_where_minutes_are_counted() -> None:
    assert quantities.slurm_minutes("72:00:00") == 4320


@pytest.mark.parametrize("text", ["UNLIMITED", "infinite", "0"])
def test_no_limit(text: str) -> None:
    assert quantities.slurm_time(text) == "UNLIMITED"
    assert quantities.slurm_minutes(text) == 0


@pytest.mark.parametrize(
    "text", ["", "12h", "1:2:3:4", "-5", "1.5", "1-", "-1:00", "1-2-3", "43200.0", "12:00:00\n#", "١٢", "9" * 41, "1e3"]
)
def test_no_notation_of_time(text: str) -> None:
    with pytest.raises(ValueError, match="HH:MM:SS"):
        quantities.slurm_time(text)


@pytest.mark.parametrize("text", ["00:00", "0-0", "0:00:00"])
def test_a_limit_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="UNLIMITED"):
        quantities.slurm_time(text)


def test_a_limit_that_slurm_cannot_hold_is_refused() -> None:
    assert quantities.slurm_minutes("24855-00") == 24855 * 1440
    with pytest.raises(ValueError, match="68 years"):
        quantities.slurm_minutes("24856-00")


@given(st.integers(0, 30), st.integers(0, 400), st.integers(0, 400), st.integers(0, 400))
def test_every_notation_counts_alike(days: int, hours: int, minutes: int, seconds: int) -> None:
    total = seconds + 60 * (minutes + 60 * (hours + 24 * days))
    if total:
        assert quantities.slurm_minutes(f"{days}-{hours}:{minutes}:{seconds}") == -(-total // 60)
        assert quantities.slurm_minutes(f"0-0:0:{total}") == -(-total // 60)


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("64G", "64G"),
        ("64g", "64G"),
        ("64GB", "64G"),
        ("64 GiB", "64G"),
        ("65536", "65536"),
        ("512M", "512M"),
        ("1T", "1T"),
        ("1.5T", "1536G"),
        ("0.5G", "512M"),
        ("2.0G", "2G"),
        ("0", "0"),
    ],
)
def test_memory(text: str, memory: str) -> None:
    assert quantities.slurm_memory(text) == memory
    assert quantities.slurm_memory(memory) == memory


@pytest.mark.parametrize(
    "text", ["", "G", "-1G", "64X", "64GG", "1.5", "1e3", "64B", "0.3K", "6 4G", "9" * 30, "64G\n", "٦G"]
)
def test_no_memory(text: str) -> None:
    if text == "64G\n":
        assert quantities.slurm_memory(text) == "64G"  # blanks around are nothing
        return
    with pytest.raises(ValueError, match="memory|MiB"):
        quantities.slurm_memory(text)


@pytest.mark.parametrize(
    ("text", "kind", "count"),
    [
        ("4", None, 4),
        ("a100:4", "a100", 4),
        ("nvidia_a100-sxm4-80gb:2", "nvidia_a100-sxm4-80gb", 2),
        ("1g.5gb:7", "1g.5gb", 7),
    ],
)
def test_gpus(text: str, kind: str | None, count: int) -> None:
    assert quantities.gpu_request(text) == (kind, count)
    assert quantities.slurm_gpus(text) == text


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("0", "--workers-per-node"),
        ("a100:0", "--workers-per-node"),
        ("-1", "a100:4"),
        ("2.5", "a100:4"),
        ("4x", "a100:4"),
        ("", "a100:4"),
        ("a100", "a100:4"),
        ("h100", "h100:4"),
        ("gpu:a100:4", "write a100:4"),
        ("gpu:4", "write 4"),
        ("none", "write null"),
        ("a100:2,v100:2", "a100:4"),
        ("9999", "at most 1024"),
        ("9" * 5000, "at most 1024"),
        ("a100:4;x", "a100:4"),
    ],
)
def test_no_gpus(text: str, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        quantities.slurm_gpus(text)


@pytest.mark.parametrize("text", ["USR2", "SIGUSR2", "usr2", "sigusr2"])
def test_signal(text: str) -> None:
    assert quantities.signal_name(text) == "USR2"


@pytest.mark.parametrize("text", ["KILL", "SIGKILL", "STOP", "10", "USR3", "", "USR2\n#SBATCH --x"])
def test_q10_no_signal_for_a_handler(text: str) -> None:
    with pytest.raises(ValueError, match="USR1, USR2, TERM"):
        quantities.signal_name(text)


@pytest.mark.parametrize("text", ["USR2@5", "B:USR2@120", "SIGUSR2@5", "R:USR2"])
def test_q10_sbatchs_whole_notation_says_where_the_seconds_go(text: str) -> None:
    with pytest.raises(ValueError, match="name alone, USR2:.*signal_lead_s"):
        quantities.signal_name(text)
