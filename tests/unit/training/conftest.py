"""What tests of training share."""

from __future__ import annotations

import pytest

from sglang_hyperdflash.training.local_target import LocalTarget


@pytest.fixture(scope="module")
def target(target_dir):
    """The tiny target, in plain torch."""
    return LocalTarget(target_dir)
