"""Train a seller against a simulated customer, with the settings of dialogue.yaml."""

from pathlib import Path

from salesrl_trl.launch.process import begin_run

if __name__ == "__main__":
    begin_run()
    from salesrl_trl.launch.train import main

    main(Path(__file__).with_suffix(".yaml"))
