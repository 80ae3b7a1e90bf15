"""Servers of answers, and commands that must be refused."""

import pytest

from sglang_hyperdflash.cli import main
from tests.unit.commands.native_server import Answers


@pytest.fixture
def servers():
    both = [Answers(), Answers()]
    yield both
    for server in both:
        server.shutdown()


@pytest.fixture
def server(servers):
    return servers[0]


@pytest.fixture
def refused(capsys):
    """Runs a command that ends with exit code 2 and one line on standard error, which it gives."""

    def run(*words) -> str:
        capsys.readouterr()
        try:
            code = main(list(map(str, words)))
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr().err
        assert (code, said.count("\n")) == (2, 1), said
        return said

    return run
