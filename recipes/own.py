"""Train on rows of one's own by reward functions of one's own, with the settings of own.yaml; its header says how."""

from pathlib import Path

from salesrl_trl.launch.process import begin_run

if __name__ == "__main__":
    begin_run()
    from salesrl_trl.launch.train import main

    main(Path(__file__).with_suffix(".yaml"))
