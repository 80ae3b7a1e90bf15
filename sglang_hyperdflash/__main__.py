"""``python -m sglang_hyperdflash``: the ``hyperdflash`` command."""

import sys

from sglang_hyperdflash.cli import main

sys.exit(main())
