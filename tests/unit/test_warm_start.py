"""Which servers and commands of tests may be forked from a process with imports done."""

import os

from tests.warm_start import client


def test_what_an_import_may_have_read_is_started_in_the_ordinary_way():
    template = object.__new__(client.Template)
    template.environment = dict(os.environ)
    assert template.gives({"env": template.environment | {"TEST_SAID": "so"}})
    assert not template.gives({"env": template.environment | {"OMP_NUM_THREADS": "33"}})
    assert not template.gives({"env": template.environment, "cwd": "/"})
