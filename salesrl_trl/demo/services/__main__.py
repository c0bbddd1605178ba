"""`python -m salesrl_trl.demo.services`: see `salesrl_trl.demo.services.demo_server`."""

import os
import sys

from salesrl_trl.ground.process import NO_ACCELERATOR

if __name__ == "__main__":
    os.environ |= NO_ACCELERATOR  # also where it is started by hand; before the server's imports, which may bring JAX
    from salesrl_trl.demo.services.demo_server import main

    sys.exit(main())
