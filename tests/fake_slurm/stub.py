"""What the stub programs in bin/ have in common. They need nothing but the standard library.

Put bin/ first on PATH. The environment steers all of them:

    FAKE_SLURM_LOG            a file: each call appends one JSON line {"program", "argv", "cwd"}
    FAKE_SLURM_ANSWERS        a folder: the n-th call of a program prints the bytes of NAME.<n> there (n from 1), and of
                              NAME when there is no such file; the last line of NAME.<n>.exit, or NAME.exit, is its
                              exit code, and NAME.<n>.err or NAME.err goes to stderr
    FAKE_<NAME>_STDOUT        what the program prints when the folder has nothing for it
    FAKE_<NAME>_STDERR        what it prints on stderr
    FAKE_<NAME>_EXIT          its exit code (default 0)
    FAKE_<NAME>_SLEEP         seconds to wait before it answers
"""

import fcntl
import json
import os
import sys
import time
from pathlib import Path


def record(program: str, kind: str = "") -> int:
    """Append this call to the log; return how many calls there have been, this one included.

    With `kind`, the calls whose first argument is `kind` are counted.
    """
    log = os.environ.get("FAKE_SLURM_LOG")
    if not log:
        return 1
    with open(log, "a+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        calls = [call for call in map(json.loads, stream) if call["program"] == program]
        earlier = sum(not kind or call["argv"][:1] == [kind] for call in calls)
        entry = {"program": program, "argv": sys.argv[1:], "cwd": os.getcwd()}
        stream.write(json.dumps(entry).encode() + b"\n")
    return earlier + 1


def setting(program: str, name: str, default: str = "") -> str:
    return os.environ.get(f"FAKE_{program.upper()}_{name}", default)


def answer(program: str, call: int, default: str = "") -> int:
    """Print the prepared answer of this call (see above), else `default`; return the exit code."""
    time.sleep(float(setting(program, "SLEEP", "0")))
    stdout = _prepared(program, call, "")
    if stdout is None:
        stdout = os.fsencode(setting(program, "STDOUT", default))
    stderr = _prepared(program, call, ".err")
    if stderr is None:
        stderr = os.fsencode(setting(program, "STDERR"))
    code = _prepared(program, call, ".exit")
    _write(sys.stdout.buffer, stdout)
    _write(sys.stderr.buffer, stderr)
    return int(code if code is not None else setting(program, "EXIT", "0"))


def _prepared(program: str, call: int, suffix: str) -> "bytes | None":
    folder = os.environ.get("FAKE_SLURM_ANSWERS")
    if not folder:
        return None
    for name in (f"{program}.{call}{suffix}", f"{program}{suffix}"):
        path = Path(folder, name)
        if path.is_file():
            return path.read_bytes()
    return None


def _write(stream, data: bytes) -> None:
    if data and not data.endswith(b"\n"):
        data += b"\n"
    stream.write(data)
    stream.flush()
