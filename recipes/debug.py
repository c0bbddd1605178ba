"""Train with the settings of debug.yaml; its header holds the launch command."""

from pathlib import Path

from salesrl_trl.launch.process import begin_run

if __name__ == "__main__":
    begin_run()
    from salesrl_trl.launch.train import main

    main(Path(__file__).with_suffix(".yaml"))
