"""A line while a phase lasts long: its name, its seconds, and what to look at.

Owns the thread and the advice. Only reads the training thread's state. `instruments` starts it.
"""

import logging
import math
import threading
from collections.abc import Callable

from salesrl_trl.names import Phase, StartUp

logger = logging.getLogger(__name__)

ADVICE: dict[str, str] = {
    StartUp.PREPARE: "optimizer and data loader are set up, a checkpoint is read; DeepSpeed may compile an operator",
    StartUp.POLICY: "reading or making the policy; on a network disk this is the disk",
    StartUp.IMPORTS: "the disk that Python's packages lie on",
    StartUp.SERVICES: "the embedded services start",
    StartUp.ENGINE: "vLLM starts: the first time it compiles and captures CUDA graphs (enforce_eager of "
    "vllm_engine_kwargs skips that, compile_cache_dir keeps them)",
    StartUp.WARM_UP: "the services are asked once: are they up, and is the first call to them slow?",
    Phase.DATA_LOADING: "the data loader: dataloader_num_workers, and the disk that the dataset lies on",
    Phase.WEIGHT_PUSH: "weights are copied into vLLM; under ZeRO-3 they are gathered first. A late rank holds it up",
    Phase.GENERATION: "max_completion_length; of vLLM vllm_gpu_memory_utilization and vllm_engine_kwargs, and the "
    "first time it may compile; of tools their own code and services",
    Phase.OLD_LOGPROBS: "per_device_train_batch_size bounds the share of a batch that is computed at once",
    Phase.REFERENCE_LOGPROBS: "per_device_train_batch_size bounds the share of a batch that is computed at once",
    Phase.REWARD_WAIT: "what is named here: a function of your own, or the services and their logs, "
    "rag_max_concurrency, judge_max_concurrency, reward_deadline_s",
    Phase.ADVANTAGES: "ranks wait for each other here: look at the other ranks",
    Phase.FORWARD: "if the GPU idles, a rank waits for another one",
    Phase.BACKWARD: "if the GPU idles, a rank waits for another one; a first DeepSpeed run compiles an operator here",
    Phase.OPTIMIZER: "with an offloaded optimizer this is the host's memory",
    Phase.BATCHING: "a collective in which ranks wait for each other, or very long completions",
    Phase.LOGGING: "the disk under output_dir, and the other targets of report_to",
    Phase.UNACCOUNTED: "callbacks, and collectives in which ranks wait for each other",
    Phase.CHECKPOINT: "the disk under output_dir",
    Phase.EVALUATION: "the held-out rows: max_eval_rows, per_device_eval_batch_size, num_generations_eval",
}


class Heartbeat:
    """Logs a line about a phase that lasts: after `after_s`, then each time its seconds have doubled. `current`
    returns the phase of now and its seconds, `where` the text before it (`"step 3/100"`), `details` by phase more
    about it, and `sample` what the line says about the machine. Its thread calls them, once a second or more often."""

    def __init__(
        self,
        current: Callable[[], tuple[str, float] | None],
        after_s: float,
        where: Callable[[], str],
        details: dict[str, Callable[[], str]],
        sample: Callable[[], str] = str,
    ) -> None:
        self._current = current
        self._after_s = after_s
        self._where = where
        self._details = details
        self._sample = sample
        self._machine = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        logged, next_s = "", 0.0  # the phase of the last line, and the seconds for the next line
        last_seconds = 0.0
        while not self._stopped.wait(min(self._after_s / 4, 1.0)):
            self._machine = self._sample()
            now = self._current()
            if now is None:
                continue
            name, seconds = now
            if name != logged or seconds < last_seconds:
                logged, next_s = name, self._after_s
            last_seconds = seconds
            if seconds >= next_s:
                self._log(name, seconds)
                next_s = self._after_s * 2 ** (math.floor(math.log2(seconds / self._after_s)) + 1)

    def _log(self, phase: str, seconds: float) -> None:
        try:
            logger.info(self.line(phase, seconds))
        except Exception as error:  # a fault in the details must not end the thread
            logger.warning(f"[Heartbeat] {phase} for {seconds:.0f} s ({type(error).__name__} while asking for more)")

    def line(self, phase: str, seconds: float) -> str:
        """`[Heartbeat] step 1/21: reward_wait for 12 s: of 64 completions 52 in judge. Look at: ...`"""
        more = self._details[phase]() if phase in self._details else ""
        detail = f": {more}" if more else ""
        advice = f". Look at: {ADVICE[phase]}" if phase in ADVICE else ""
        machine = f" ({self._machine})" if self._machine else ""
        return f"[Heartbeat] {self._where()}: {phase} for {seconds:.0f} s{machine}{detail}{advice}"
