"""Train with the settings of fast_load.yaml; its header holds the launch command."""

from pathlib import Path

from salesrl_trl.train import main

if __name__ == "__main__":
    main(Path(__file__).with_suffix(".yaml"))
