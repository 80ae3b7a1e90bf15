"""The wheel and the source distribution, built as for a release."""

import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.heavy
# Weights make no difference, and take long to compress.
LEFT_OUT = (".*", "build", "*.egg-info", "*.safetensors", "__pycache__")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of both files; the wheel is built from the source distribution."""
    folder = tmp_path_factory.mktemp("distributions")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*LEFT_OUT))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist"]
    done = subprocess.run([*command, folder / "source"], capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    return folder / "dist"


def test_a_wheel_has_the_two_packages_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name for name in names if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in packages} == {"sglang_hyperdflash", "triton_ops"}
    expected = {
        str(path.relative_to(ROOT))
        for package in ("sglang_hyperdflash", "triton_ops")
        for path in (ROOT / package).rglob("*.py")
    }
    assert packages == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_a_source_distribution_has_docs_tests_and_examples(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {"Makefile", "docs/README.md", "tests/unit/test_distributions.py"} <= names
    assert {"examples/tiny_deepseek_v4/target/config.json", "eval/__main__.py"} <= names
