"""The copy of the code: what is taken, what never is, and what has changed since."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from hpc import snapshot


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        ["git", *identity, *words], cwd=folder, env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A git work tree with a tracked file, an ignored one, an untracked one and a sub-folder."""
    top = tmp_path / "tree é"
    (top / "sub").mkdir(parents=True)
    git(top, "init", "-q")
    (top / ".gitignore").write_text("ignored*\n")
    (top / "a.py").write_text("A = 1\n")
    (top / "sub" / "b.py").write_text("B = 1\n")
    git(top, "add", ".")
    git(top, "commit", "-q", "-m", "one")
    (top / "new file.py").write_text("NEW = 1\n")
    (top / "ignored.py").write_text("no\n")
    return top


def copied(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {".manifest.json"}


def test_git_tree_is_taken_with_its_untracked_files(tree: Path, tmp_path: Path) -> None:
    manifest = snapshot.take(tree / "sub", tmp_path / "code")
    assert copied(tmp_path / "code") == {".gitignore", "a.py", "sub/b.py", "new file.py"} == set(manifest.files)
    assert manifest.commit == git(tree, "rev-parse", "HEAD") and manifest.dirty
    assert (manifest.root, manifest.directory) == (str(tree), "sub")
    assert manifest.working_directory(tmp_path / "code") == tmp_path / "code" / "sub"
    assert snapshot.read(tmp_path / "code") == manifest
    assert (manifest.note, manifest.left_out) == (None, 0)


def test_clean_tree_and_tree_without_a_commit(tree: Path, tmp_path: Path) -> None:
    (tree / "new file.py").unlink()
    assert not snapshot.take(tree, tmp_path / "code").dirty
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    git(fresh, "init", "-q")
    (fresh / "x.py").write_text("")
    manifest = snapshot.take(fresh, tmp_path / "code2")
    assert manifest.commit is None and manifest.dirty and set(manifest.files) == {"x.py"}


def test_an_old_git_is_enough(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Login nodes have old ones: what came after 2.16 (2018), --deduplicate of ls-files among it, they do not know."""
    old, real = tmp_path / "bin" / "git", shutil.which("git")
    old.parent.mkdir()
    old.write_text(
        f'#!/bin/sh\nfor word; do case $word in --deduplicate|--format=*) echo "unknown option" >&2; exit 129;; esac; done\n'
        f'exec {real} "$@"\n'
    )
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old.parent}{os.pathsep}{os.environ['PATH']}")
    manifest = snapshot.take(tree / "sub", tmp_path / "code")
    assert set(manifest.files) == {".gitignore", "a.py", "sub/b.py", "new file.py"} and manifest.commit


def test_outside_git_only_source_files_are_taken(tmp_path: Path) -> None:
    source = tmp_path / "plain"
    for name in ("a.py", "b.yaml", "c.sh", "data.bin", "pkg/d.py", ".hidden/e.py", "venv/lib/f.py", "__pycache__/g.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("x")
    (source / "venv" / "pyvenv.cfg").write_text("")
    manifest = snapshot.take(source, tmp_path / "code")
    assert copied(tmp_path / "code") == {"a.py", "b.yaml", "c.sh", "pkg/d.py"}
    assert (manifest.commit, manifest.directory) == (None, ".")


@pytest.mark.parametrize("in_git", [True, False])
def test_links_out_runs_secrets_and_large_files_stay_behind(tree: Path, tmp_path: Path, in_git: bool) -> None:
    if not in_git:
        (tree / ".git").rename(tmp_path / "no.git")
    outside = tmp_path / "outside.py"
    outside.write_text("secret")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.py").write_text("secret")
    (tree / "link.py").symlink_to(outside)
    (tree / "linked").symlink_to(tmp_path / "folder")
    (tree / "inside.py").symlink_to("a.py")
    (tree / "large.py").write_text("#" * (snapshot.FILE_LIMIT_BYTES + 1))
    (tree / ".env").write_text("TOKEN=secret")
    os.mkfifo(tree / "pipe.py")
    run = tree / "out" / "earlier"
    (run / "code").mkdir(parents=True)
    (run / "record.jsonl").write_text("")
    (run / "code" / "old.py").write_text("")
    own = tree / "out" / "now"
    own.mkdir()
    (own / "job.sh").write_text("")
    manifest = snapshot.take(tree, own / "code")
    assert {"a.py", "inside.py", "sub/b.py"} <= set(manifest.files)
    taken = copied(own / "code")
    assert taken == set(manifest.files)
    assert not [name for name in taken if name.startswith((".env", "out", "link", "large", "pipe"))]
    assert (own / "code" / "inside.py").read_text() == "A = 1\n" and not (own / "code" / "inside.py").is_symlink()
    assert manifest.left_out >= 2


def test_rights_whatever_the_umask(tree: Path, tmp_path: Path) -> None:
    (tree / "tool.sh").write_text("#!/bin/sh\n")
    (tree / "tool.sh").chmod(0o777)
    before = os.umask(0)
    try:
        snapshot.take(tree, tmp_path / "code")
    finally:
        os.umask(before)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "code", *(tmp_path / "code").rglob("*")]
    }
    assert (modes["code"], modes["sub"], modes["a.py"], modes["tool.sh"]) == (0o700, 0o700, 0o600, 0o700)


def test_too_much_is_not_copied_and_said(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "FILES_LIMIT", 3)
    manifest = snapshot.take(tree, tmp_path / "code")
    assert not manifest.files and "more than 3 files" in (manifest.note or "") and manifest.commit
    monkeypatch.setattr(snapshot, "FILES_LIMIT", 100)
    monkeypatch.setattr(snapshot, "TOTAL_LIMIT_BYTES", 10)
    manifest = snapshot.take(tree, tmp_path / "code2")
    assert not manifest.files and "MiB" in (manifest.note or "") and not copied(tmp_path / "code2")
    monkeypatch.setattr(snapshot, "WALK_LIMIT", 3)
    (tree / ".git").rename(tmp_path / "no.git")
    assert snapshot.take(tree, tmp_path / "code3").note


def test_submodule_is_not_half_copied(tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    (other / "m.py").write_text("")
    git(other, "add", ".")
    git(other, "commit", "-q", "-m", "one")
    git(tree, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other), "mod")
    manifest = snapshot.take(tree, tmp_path / "code")
    assert "mod is a git submodule" in (manifest.note or "") and not manifest.files


def test_s23_changed_names_what_is_different_now(tree: Path, tmp_path: Path) -> None:
    manifest = snapshot.take(tree / "sub", tmp_path / "code")
    assert snapshot.changed(manifest, tree / "sub") == []
    (tree / "a.py").write_text("A = 2\n")
    (tree / "sub" / "b.py").unlink()
    (tree / "later.py").write_text("")
    assert snapshot.changed(manifest, tree / "sub") == ["a.py", "sub/b.py"]


def test_variables_and_hooks_of_git_have_no_say(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    (tree / "hook").write_text(f"#!/bin/sh\ntouch '{tmp_path}/CANARY'\n")
    (tree / "hook").chmod(0o755)
    git(tree, "config", "core.fsmonitor", str(tree / "hook"))
    assert snapshot.take(tree, tmp_path / "code").commit
    assert not (tmp_path / "CANARY").exists()


def test_damaged_manifest_is_none(tmp_path: Path) -> None:
    assert snapshot.read(tmp_path) is None
    (tmp_path / snapshot.MANIFEST_NAME).write_text('{"other": 1}')
    assert snapshot.read(tmp_path) is None
