"""Published drafters: whole versions only, in order, and none that was changed."""

from __future__ import annotations

import resource
import shutil

import pytest

from sglang_hyperdflash.draft import published
from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.draft.published import Version, current, publish, refuse
from sglang_hyperdflash.tools.atomic import WriteFailed
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from tests.conftest import ROOT

DRAFTER = ROOT / "examples" / "tiny_deepseek_v4" / "drafter"


def test_versions_follow_one_another_and_are_drafter_folders(tmp_path):
    folder = tmp_path / "published"
    assert current(folder) is None
    assert [publish(folder, DRAFTER), publish(folder, DRAFTER)] == [1, 2]
    newest = current(folder)
    assert newest == Version(2, folder / "000002")
    newest.check()
    assert load_config(newest.path) == load_config(DRAFTER)
    weights = "model.safetensors"
    assert (newest.path / weights).read_bytes() == (DRAFTER / weights).read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["000001", "000002", "current"]


@pytest.mark.parametrize("broken", ["replacing", "write_json", "write_text"])
def test_a_version_that_was_not_finished_is_never_seen(tmp_path, monkeypatch, broken):
    publish(tmp_path, DRAFTER)

    def full(path, *_, **__):
        raise WriteFailed(f"cannot write {path}")

    with monkeypatch.context() as patch, pytest.raises(WriteFailed):
        patch.setattr(published, broken, full)
        publish(tmp_path, DRAFTER)
    assert current(tmp_path).number == 1
    # Its number is not used again: someone may have looked into its folder.
    assert publish(tmp_path, DRAFTER) == 3
    current(tmp_path).check()


@pytest.mark.parametrize("room", [64, 4096])
def test_on_a_full_disk_the_version_before_stays(tmp_path, room):
    """With no room at all, and with room for the config alone."""
    publish(tmp_path, DRAFTER)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        for _ in range(2):
            with pytest.raises(WriteFailed, match=r"cannot write .*/00000[23]/.* Free space"):
                publish(tmp_path, DRAFTER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert current(tmp_path).number == 1
    current(tmp_path).check()
    # What was written in part is removed, when no other call can be writing it.
    assert publish(tmp_path, DRAFTER) == 4 and versions(tmp_path) == [1, 3, 4]
    assert publish(tmp_path, DRAFTER) == 5 and versions(tmp_path) == [1, 4, 5]


def versions(folder) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.is_dir())


def test_the_newest_versions_and_the_current_one_stay(tmp_path):
    for number in range(1, 6):
        assert publish(tmp_path, DRAFTER) == number
    assert versions(tmp_path) == [3, 4, 5]
    (tmp_path / "current").write_text("000003\n")  # by hand, to go back
    assert publish(tmp_path, DRAFTER) == 6 and versions(tmp_path) == [3, 4, 5, 6]
    assert publish(tmp_path, tmp_path / "000003") == 7  # a source is no rubbish
    assert publish(tmp_path, DRAFTER) == 8 and versions(tmp_path) == [6, 7, 8]
    for number in (6, 7, 8):
        Version(number, tmp_path / f"{number:06}").check()


def test_a_version_that_a_server_has_left_is_not_current(tmp_path):
    for _ in range(3):
        publish(tmp_path, DRAFTER)
    for number, expected in ((3, 2), (1, 2), (2, None)):
        refuse(tmp_path, number, "it is worse")
        found = current(tmp_path)
        assert (found and found.number) == expected
    assert publish(tmp_path, DRAFTER) == 4 and current(tmp_path).number == 4
    for _ in range(3):  # the current one stays, however old
        refuse(tmp_path, publish(tmp_path, DRAFTER), "it is worse")
        assert current(tmp_path).number == 4 and current(tmp_path).check() is None


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_damaged_version_is_told_from_a_whole_one(tmp_path, file):
    publish(tmp_path, DRAFTER)
    damaged = current(tmp_path).path / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(HyperDFlashConfigError, match=f"damaged: {file} differs"):
        current(tmp_path).check()
    damaged.unlink()
    with pytest.raises(HyperDFlashConfigError, match="cannot be read"):
        current(tmp_path).check()


def test_what_is_no_drafter_is_not_published(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "published"
    source.mkdir()
    with pytest.raises(HyperDFlashConfigError, match=r"no config\.json"):
        publish(folder, source)
    shutil.copy(DRAFTER / "config.json", source)
    with pytest.raises(HyperDFlashConfigError, match="holds no"):
        publish(folder, source)
    assert current(folder) is None


@pytest.mark.parametrize("text", ["[]", '{"sha256": ["config.json"]}', '{"sha256": {}}', "{", ""])
def test_a_torn_manifest_is_an_error(tmp_path, text):
    publish(tmp_path, DRAFTER)
    (tmp_path / "000001" / "version.json").write_text(text)
    with pytest.raises(HyperDFlashConfigError, match="Publish it again"):
        current(tmp_path).check()


@pytest.mark.parametrize("text", ["000007", "../drafter", "", "\udcff", "1" * 5000])
def test_a_pointer_to_nothing_is_an_error(tmp_path, text):
    publish(tmp_path, DRAFTER)
    (tmp_path / "current").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(HyperDFlashConfigError):
        current(tmp_path)
