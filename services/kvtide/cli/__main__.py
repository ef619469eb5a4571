"""`python -m kvtide.cli`: the same as `kvtide`."""

import sys

from kvtide.cli.main import main

sys.exit(main())
