"""A run that a test kills: python tests/support/short_run.py POLICY SERVICES_URL OUT, until it is stopped."""

import logging
import sys
from pathlib import Path

import torch

from salesrl_trl.telemetry.instruments import Instruments, InstrumentSettings
from support.loopback import action, build_reward
from support.scripted import build_trainer, default_rows


def main(policy, url, out):
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows = default_rows()
    texts = tuple(action(query=f"q{index}") for index in range(4000))
    instruments = Instruments(InstrumentSettings(trace_steps=range(1, 1000)), torch.device("cpu"), Path(out))
    trainer = build_trainer(
        policy, build_reward(url, rows), texts, rows, out, instruments=instruments, report_to="tensorboard",
        max_steps=900,
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
