"""What the import before the fork leaves to the workers: the garbage collector at work, and nothing of the import in it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from hpc.errors import NeverStarted
from hpc.node import preload


@pytest.fixture(autouse=True)
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(preload, "TORCH", ())
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("collecting", [True, False])
def test_the_collector_rests_during_the_import_and_is_as_before_after_it(
    collecting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(preload.importlib, "import_module", lambda name: seen.append(gc.isenabled()))
    if not collecting:
        gc.disable()
    before = gc.get_freeze_count()
    preload.import_modules(["a", "b"], [], pytest.fail)
    assert seen == [False, False]
    assert gc.isenabled() is collecting
    assert gc.get_freeze_count() > before


def test_the_collector_is_back_after_an_import_that_failed() -> None:
    with pytest.raises(NeverStarted, match="no_such_module"):
        preload.import_modules(["no_such_module"], [], pytest.fail)
    assert gc.isenabled()
