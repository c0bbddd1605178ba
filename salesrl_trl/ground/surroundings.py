"""What a thread that calls a user's code has of the main thread: context variables, and torch's devices.

A new thread begins with GPU 0 and the CPU. Owns how the main thread's devices travel: in a context, which tasks hand
on. The reward and the record call it around a user's functions. Imports no torch: without torch nothing is carried.
"""

import contextvars
import sys

_TORCH: contextvars.ContextVar[tuple[int | None, object]] = contextvars.ContextVar("salesrl_trl_torch")


def here() -> contextvars.Context:
    """This thread's context and torch's devices, for another thread."""
    context = contextvars.copy_context()
    torch = sys.modules.get("torch")
    if torch is not None:
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        context.run(_TORCH.set, (index, torch.get_default_device()))
    return context


def enter() -> None:
    """Give this thread the devices that its context holds."""
    index, default = _TORCH.get((None, None))
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if index is not None and torch.cuda.current_device() != index:
        torch.cuda.set_device(index)
    if default is not None and torch.get_default_device() != default:
        torch.set_default_device(default)
