"""``python -m torchrl_hts.testing``."""

import sys

from torchrl_hts.testing.checks import main

sys.exit(main())
