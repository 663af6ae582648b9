"""The store of applied patches where several processes change it, and on a full volume."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from feature_matrix import ANY, feature
from patch_sample import evaluation, make_patch

from patcher import bench
from patcher.bench import Candidate, Language
from patcher.integrate import Patch, Store


def other_patch(folder: Path) -> Patch:
    op = bench.load_op("rms_norm")
    candidate = Candidate(op=op.name, language=Language.CPP, source="// rms_norm\n")
    judged = evaluation(candidate).model_copy(update={"op": op.name})
    return Patch.create(folder, op, candidate, judged, engine="transformers", made_by="test")


@feature("`apply` and `revert` from several processes at once", "right", ANY)
@pytest.mark.parametrize("meanwhile", ["apply", "revert"])
def test_what_another_process_changes_meanwhile_is_kept(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    first, second = make_patch(tmp_path / "first"), other_patch(tmp_path / "second")
    if meanwhile == "revert":
        store.apply(second.folder)
    copying, changed = threading.Event(), threading.Event()
    copy, slow = shutil.copytree, threading.Thread(target=store.apply, args=(first.folder,))

    def copytree(*args: Any, **more: Any) -> Any:
        if threading.current_thread() is slow:  # the list was read, and is written later
            copying.set()
            changed.wait(0.5)
        return copy(*args, **more)

    monkeypatch.setattr(shutil, "copytree", copytree)
    slow.start()
    assert copying.wait(60)
    if meanwhile == "apply":
        Store(store.root).apply(second.folder)
    else:
        assert Store(store.root).revert(second.manifest.id)
    changed.set()
    slow.join()
    expected = {first.manifest.id} | ({second.manifest.id} if meanwhile == "apply" else set())
    assert {entry.id for entry in store.applied()} == expected
    assert {store.load(entry).manifest.id for entry in store.applied()} == expected
    assert {path.name for path in (store.root / "patches").iterdir()} == expected


@feature("a store on a full volume", "refused", ANY)
@pytest.mark.parametrize("full", ["copy", "list"])
def test_a_full_volume_leaves_the_store_as_it_was(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    patch = make_patch(tmp_path / "patch")
    entry = store.apply(patch.folder)
    changed = make_patch(tmp_path / "changed")
    path = changed.folder / "manifest.json"
    path.write_text(path.read_text().replace('"made_by": "test"', '"made_by": "another"'))
    assert Patch.load(changed.folder).digest != patch.digest
    before = sorted(store.root.rglob("*"))

    def no_room(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device", "a")

    with monkeypatch.context() as patched:
        if full == "copy":
            patched.setattr(shutil, "copy2", no_room)
            patched.setattr(shutil.copytree, "__defaults__", (False, None, no_room, False, False))
        else:
            patched.setattr(Path, "write_text", no_room)
        with pytest.raises(bench.UsageError, match=r"No space left on device$"):
            store.apply(changed.folder)
        if full == "list":
            with pytest.raises(bench.UsageError, match=r"No space left on device$"):
                store.revert(entry.id)
    assert store.applied() == (entry,)
    assert store.load(entry).digest == patch.digest
    assert sorted(store.root.rglob("*")) == before
