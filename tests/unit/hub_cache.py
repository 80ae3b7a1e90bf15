"""The hub's cache with one model in it, as ``HF_HOME`` holds it, and no network."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants


def hub_home(home: Path, model: Path, name: str) -> Path:
    """Copy a model's files to where huggingface_hub keeps those of a hub id; gives that folder.

    ``home`` is what ``HF_HOME`` would be.
    """
    commit, repository = "0" * 40, home / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(model, repository / "snapshots" / commit))


def use_hub_home(patch: pytest.MonkeyPatch, home: Path) -> None:
    """``HF_HOME`` and ``HF_HUB_OFFLINE`` for this process, which read them while it imported."""
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_HUB_OFFLINE", True)
