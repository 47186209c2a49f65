"""The walls: where a line runs decides where it lives, and what it may import."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GROUND = {
    "hpc",
    *(f"hpc.{name}" for name in ("beats", "command", "config", "errors", "exitcodes", "fields", "quantities", "ranks")),
    *(f"hpc.{name}" for name in ("ledger", "lines")),
    *(f"hpc.{name}" for name in ("rules", "rundir", "schema", "slurm", "snapshot", "yamltext")),
}
ROOMS = {  # room or door: what it may import besides the standard library, the ground and itself; late imports count too
    "hpc/submit.py": {"hpc.login"},
    "hpc/status.py": {"hpc.login"},
    "hpc/logs.py": {"hpc.login"},
    "hpc/doctor.py": {"hpc.login", "hpc.allocation"},
    "hpc/launch.py": {"hpc.allocation"},
    "hpc/clean.py": {"hpc.node", "hpc.allocation"},
    "hpc/__main__.py": set[str](),
    "hpc/slurm": set[str](),
    "hpc/login": {"submitit"},
    "hpc/allocation": set[str](),
    "hpc/node": {"psutil", "pynvml", "torch"},
    "hpc/train": {"torch", "rich"},
    "hpc/config.py": {"omegaconf"},
    "hpc/yamltext.py": {"yaml"},
    "hpc": set[str](),  # the rest of the ground
    "jobs": {"hpc.train", "torch", "numpy", "sklearn", "PIL"},
}
ONLY_IN = {  # a package that a room may import, but in one place of it
    "submitit": {"hpc/login/submitter.py"},
    "omegaconf": {"hpc/config.py"},
    "yaml": {"hpc/yamltext.py"},
    "pynvml": {"hpc/node/cores.py", "hpc/node/gpus.py", "hpc/node/gpuhealth.py"},
    "rich": {"hpc/train/progress.py"},
}
CROSSINGS = {  # the only sideways imports, each with its reason
    ("hpc/train/__main__.py", "hpc.node.environment"): "asked under a plain srun, to hand over to the agent",
}
READ_SLURM = re.compile(r"hpc/(node/environment|login/inherited|launch|allocation/\w+|slurm/\w+)\.py")
READ_SLURM_TOO = {
    "hpc/node/processes.py": "reads the marks in the environments of other processes, never its own",
    "hpc/node/sweep.py": "asks which node and cluster it runs on",
    "hpc/node/__main__.py": "asks whether the agent runs inside a job of the controller's",
}
TORCH_AT_THE_TOP = re.compile(r"hpc/train/\w+\.py|jobs/\w+/(?!config\b|__init__\b)\w+\.py")
TOP_LEVEL = {
    ".ci", ".gitignore", "CHANGELOG.md", "LICENSE", "README.md", "docs", "hpc", "jobs", "pyproject.toml", "sbin", "tests",
}  # fmt: skip


def tracked() -> list[str]:
    """Every file of the project, by its path from the top."""
    argv = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, check=True)
    return [name for name in os.fsdecode(done.stdout).split("\0") if name and (ROOT / name).exists()]


def sources(*folders: str) -> list[str]:
    """The Python files of these folders."""
    return [str(path.relative_to(ROOT)) for name in folders for path in sorted((ROOT / name).rglob("*.py"))]


def programs() -> list[str]:
    """Every file of the project that is Python, those without .py in their names too."""
    return [
        name
        for name in tracked()
        if name.endswith(".py") or (ROOT / name).read_bytes().startswith(b"#!/usr/bin/env py")
    ]


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"), name)


def imports(name: str, *, top_level: bool = False) -> Iterator[str]:
    """The modules that a file imports, whole names; those for type checkers only are left out of the top level."""
    module = tree(name)
    nodes = _at_import(module) if top_level else ast.walk(module)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: a relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                path = ROOT / submodule.replace(".", "/")
                yield submodule if path.is_dir() or path.with_suffix(".py").is_file() else str(node.module)


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _at_import(child)


def inside(module: str, packages: set[str]) -> bool:
    """Whether the module is one of these, or lies in one; `hpc` alone stands for nothing but itself."""
    return any(module == package or (package != "hpc" and module.startswith(package + ".")) for package in packages)


def room(name: str) -> str:
    return max((place for place in ROOMS if name == place or name.startswith(place + "/")), key=len)


def packages_of(name: str) -> set[str]:
    """What a file may import."""
    if re.fullmatch(r"jobs/\w+/config\.py", name):
        return {"hpc.errors"}
    place = room(name)
    own = place.removesuffix(".py").replace("/", ".")
    return GROUND | ROOMS[place] | ({own} if own != "hpc" else set())


@pytest.mark.parametrize("name", sources("hpc", "jobs"))
def test_no_import_crosses_a_wall(name: str) -> None:
    allowed = packages_of(name)
    foreign = {
        module
        for module in imports(name)
        if module.partition(".")[0] not in sys.stdlib_module_names
        and not inside(module, allowed)
        and (name, module) not in CROSSINGS
    }
    assert not foreign, f"{name} imports {sorted(foreign)}; it may import {sorted(allowed)}"


def test_what_is_excused_is_still_there() -> None:
    for (name, module), reason in CROSSINGS.items():
        assert module in set(imports(name)), f"{name} no longer imports {module} ({reason}): take it out of CROSSINGS"
    for name, reason in READ_SLURM_TOO.items():
        assert names_of_slurm(name), f"{name} reads no SLURM_* ({reason}): take it out of READ_SLURM_TOO"


@pytest.mark.parametrize(("package", "places"), ONLY_IN.items())
def test_a_package_of_one_place(package: str, places: set[str]) -> None:
    users = {name for name in sources("hpc") if package in {module.partition(".")[0] for module in imports(name)}}
    assert users == places


def test_torch_is_imported_at_the_top_only_where_workers_run() -> None:
    importers = {
        name
        for name in sources("hpc", "jobs")
        if "torch" in {module.partition(".")[0] for module in imports(name, top_level=True)}
    }
    assert "hpc/train/loop.py" in importers and "jobs/digits/job.py" in importers
    assert not {name for name in importers if not TORCH_AT_THE_TOP.fullmatch(name)}


def names_of_slurm(name: str) -> set[str]:
    """The names of Slurm's variables that a file holds as whole texts: those it reads or sets."""
    constants = (node.value for node in ast.walk(tree(name)) if isinstance(node, ast.Constant))
    return {text for text in constants if isinstance(text, str) and re.fullmatch(r"(SLURM|SBATCH)_[A-Z_]*", text)}


def test_variables_of_slurm_are_read_in_their_places() -> None:
    assert names_of_slurm("hpc/node/environment.py")
    readers = {name: names_of_slurm(name) for name in sources("hpc", "jobs") if not READ_SLURM.fullmatch(name)}
    assert not {name: found for name, found in readers.items() if found and name not in READ_SLURM_TOO}


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("name", programs())
def test_s2_nothing_is_given_to_a_shell_or_unpickled(name: str) -> None:
    for called, call in calls(name):
        where = f"{name}:{call.lineno}: {called}"
        last = called.rpartition(".")[2]
        assert last not in {"getoutput", "getstatusoutput", "popen", "create_subprocess_shell"}, where
        assert called not in {"os.system", "eval", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}, where
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        shell = keywords.get("shell")
        assert shell is None or (isinstance(shell, ast.Constant) and shell.value is False), where
        if called == "torch.load" and not name.startswith("tests/"):
            weights_only = keywords.get("weights_only")
            assert isinstance(weights_only, ast.Constant) and weights_only.value is True, where
    modules = {module.partition(".")[0] for module in imports(name)} if name.startswith(("hpc/", "jobs/")) else set()
    assert not modules & {"pickle", "shelve", "marshal", "dill", "cloudpickle"}, name


def test_the_top_level_and_the_names_of_modules() -> None:
    names = tracked()
    assert {name.partition("/")[0] for name in names} <= TOP_LEVEL
    parts = {part.partition(".")[0] for name in names for part in name.split("/")}
    assert not parts & {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
    assert "jobs/__init__.py" not in names, "jobs/ is a namespace: a user's own jobs/ and the toolkit's are one"
    for folder in {name.rpartition("/")[0] for name in names if re.fullmatch(r"jobs/\w+/job\.py", name)}:
        assert f"{folder}/config.py" in names, f"{folder} has no config.py: its parameters could not be checked"


def test_every_package_is_installed() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = set(re.findall(r'"((?:hpc|jobs)(?:\.\w+)*)"', text.partition("[tool.setuptools]")[2].partition("]")[0]))
    found = {name.rpartition("/")[0].replace("/", ".") for name in sources("hpc", "jobs")}
    assert listed == found


@pytest.mark.parametrize(
    ("argv", "absent"),
    [
        (["-m", "hpc.submit", "--help"], {"torch", "omegaconf", "submitit", "yaml", "psutil", "numpy"}),
        (["-m", "hpc.submit", "--dry-run"], {"torch", "psutil", "numpy"}),
        (["-m", "hpc.node", "--help"], {"torch", "omegaconf", "submitit", "numpy"}),
        (["-m", "hpc.launch", "--help"], {"torch", "submitit", "numpy"}),
    ],
)
def test_a_door_loads_only_what_it_needs(argv: list[str], absent: set[str], tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HPC_SITE_CONFIG": "", "HOME": str(tmp_path)}
    argv = [sys.executable, "-X", "importtime", *argv]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "hpc" in loaded and not loaded & absent


def test_login_node_and_batch_step_never_load_torch(tmp_path: Path) -> None:
    """What is imported late counts here too, as far as it stands in a module of theirs."""
    names = [name for name in sources("hpc") if room(name) not in ("hpc/node", "hpc/train")]
    modules = [name.removesuffix(".py").replace("/", ".") for name in names if not name.endswith("__.py")]
    assert "hpc.login.submitter" in modules and "hpc.allocation.controller" in modules
    code = "import sys\n" + "".join(f"import {module}\n" for module in modules) + "sys.exit('torch' in sys.modules)"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, check=True, timeout=60)
