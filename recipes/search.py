"""Train a policy that searches before it answers, with the settings of search.yaml."""

from pathlib import Path

from salesrl_trl.launch.process import begin_run

if __name__ == "__main__":
    begin_run()
    from salesrl_trl.launch.train import main

    main(Path(__file__).with_suffix(".yaml"))
