"""`python -m salesrl_trl.services`: see `salesrl_trl.services.server`."""

import os
import sys

from salesrl_trl.services.launcher import NO_ACCELERATOR

if __name__ == "__main__":
    os.environ |= NO_ACCELERATOR  # also where it is started by hand; before the server's imports, which may bring JAX
    from salesrl_trl.services.server import main

    sys.exit(main())
