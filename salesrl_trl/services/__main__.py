"""`python -m salesrl_trl.services`: see `salesrl_trl.services.server`."""

import sys

from salesrl_trl.services.server import main

if __name__ == "__main__":
    sys.exit(main())
