"""Published drafters: whole versions only, in order, and none that was changed."""

import shutil
from pathlib import Path
from unittest import mock

import pytest

from sglang_hyperdflash.draft import published
from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.draft.published import Version, current, publish, withdraw
from sglang_hyperdflash.tools.atomic import WriteFailed
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from tests.conftest import EXAMPLE
from tests.unit.training.store.small import files_of, flip

DRAFTER = EXAMPLE / "drafter"


def versions(folder) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.is_dir())


def test_versions_follow_one_another_and_the_newest_and_current_ones_stay(tmp_path):
    folder = tmp_path / "published"
    assert current(folder) is None
    for number in range(1, 6):
        assert publish(folder, DRAFTER) == number
        newest = current(folder)
        assert newest == Version(number, folder / f"{number:06}")
        newest.check()
    assert load_config(newest.path) == load_config(DRAFTER)
    assert versions(folder) == [3, 4, 5]
    (folder / "current").write_text("000003\n")  # by hand, to go back
    assert publish(folder, DRAFTER) == 6 and versions(folder) == [3, 4, 5, 6]
    assert publish(folder, folder / "000003") == 7  # a source is not removed
    assert publish(folder, DRAFTER) == 8 and versions(folder) == [6, 7, 8]
    for number in (6, 7, 8):
        Version(number, folder / f"{number:06}").check()


def failing(step: int | str):
    """A file may have so many bytes, or the named step of a publication fails."""
    if isinstance(step, int):
        return files_of(step)
    return mock.patch.object(published, step, side_effect=WriteFailed(step))


@pytest.mark.parametrize(
    "step",
    [64, 4096, "write_json", "write_text"],
    ids=["no room at all", "room for the config alone", "no manifest", "no pointer"],
)
def test_a_version_that_was_not_finished_is_never_seen(tmp_path, step):
    publish(tmp_path, DRAFTER)
    for _ in range(2):
        with failing(step), pytest.raises(WriteFailed):
            publish(tmp_path, DRAFTER)
    assert current(tmp_path).number == 1
    current(tmp_path).check()
    # Its number is not used again; what was written in part goes when no call can be writing it.
    assert publish(tmp_path, DRAFTER) == 4
    assert versions(tmp_path) == ([1, 2, 3, 4] if step == "write_text" else [1, 3, 4])
    current(tmp_path).check()
    assert publish(tmp_path, DRAFTER) == 5 and 2 not in versions(tmp_path)


def test_a_version_that_a_server_has_left_is_not_current(tmp_path):
    for _ in range(3):
        publish(tmp_path, DRAFTER)
    for number, expected in ((3, 2), (1, 2), (2, None)):
        withdraw(tmp_path, number, "it is worse")
        version = current(tmp_path)
        assert (version and version.number) == expected
    assert publish(tmp_path, DRAFTER) == 4 and current(tmp_path).number == 4
    for _ in range(3):  # the current one stays, however old
        withdraw(tmp_path, publish(tmp_path, DRAFTER), "it is worse")
        assert current(tmp_path).number == 4 and current(tmp_path).check() is None


@pytest.mark.parametrize(
    "file, damage",
    [
        ("000001/model.safetensors", flip),
        ("000001/config.json", flip),
        ("000001/config.json", Path.unlink),
        *(("000001/version.json", new) for new in (b"[]", b'{"sha256": ["x"]}', b'{"sha256": {}}')),
        ("000001/version.json", b"{"),
        *(("current", new) for new in (b"000007", b"../drafter", b"", b"\xff", b"1" * 5000)),
    ],
)
def test_damage_to_a_version_or_to_the_pointer_is_noticed(tmp_path, file, damage):
    publish(tmp_path, DRAFTER)
    if callable(damage):
        damage(tmp_path / file)
    else:
        (tmp_path / file).write_bytes(damage)
    with pytest.raises(HyperDFlashConfigError, match=f"{tmp_path}/{file.split('/')[0]}"):
        current(tmp_path).check()


def test_what_is_no_drafter_is_not_published(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "published"
    source.mkdir()
    with pytest.raises(HyperDFlashConfigError, match=r"config\.json"):
        publish(folder, source)
    shutil.copy(DRAFTER / "config.json", source)
    with pytest.raises(HyperDFlashConfigError, match="safetensors"):
        publish(folder, source)
    assert current(folder) is None
