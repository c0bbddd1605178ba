"""The FLOPs of a step, for its MFU. `telemetry.flops` counts those of a token."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from salesrl_trl.telemetry.device import device_name
from salesrl_trl.telemetry.flops import UnknownFlops, model_flops
from salesrl_trl.telemetry.instruments import Instruments
from salesrl_trl.wiring.part import Part, PartContext

logger = logging.getLogger(__name__)


class FlopsCount(Part):
    """Counts the FLOPs of a token. Where they or the peak are unknown, a warning says why, and there is no MFU."""

    def connect(self, run: PartContext) -> None:
        self._trl, self._instruments = run.trl, run.instruments
        self._warn_once: Callable[[str], None] = functools.cache(logger.warning)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(self._instruments, Instruments):
            return
        if not self._instruments.has_peak:  # as on every CPU
            device = self._trl.accelerator.device
            if device.type != "cpu":
                name = device_name(device)
                self._warn_once(f"no MFU: the bf16 peak of {name!r} is not in the table. Set `peak_tflops`.")
            return
        try:
            self._instruments.flops = model_flops(self._trl.accelerator.unwrap_model(self._trl.model))
        except UnknownFlops as error:
            self._warn_once(f"no MFU: {error}")
        except Exception as error:  # an unknown kind of model must not end the training
            self._warn_once(f"no MFU: this model can't be counted ({type(error).__name__}: {error})")
