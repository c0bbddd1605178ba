"""Loads the processor of a vision policy, which converts chat messages with pictures to tokens and pixels.

Without torchvision, transformers reads pictures with Pillow, but refuses to load the processor's video component. This
package never sends videos, so `NoVideos` replaces that component.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import transformers.processing_utils as processing
from transformers import AutoProcessor
from transformers.image_processing_base import ImageProcessingMixin
from transformers.utils import is_torchvision_available
from transformers.video_processing_utils import BaseVideoProcessor

from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.process import patched

if TYPE_CHECKING:
    from transformers import ProcessorMixin


class NoVideos(ImageProcessingMixin):
    """Keeps the settings of a video processor so that they are saved unchanged. It processes nothing."""

    def __init__(self, settings: dict[str, object]) -> None:
        super().__init__()
        self._settings = settings

    def to_dict(self) -> dict[str, object]:
        return dict(self._settings)

    @classmethod
    def from_pretrained(cls, name_or_path: str, **kwargs: object) -> "NoVideos":
        settings, _ = BaseVideoProcessor.get_video_processor_dict(name_or_path, **kwargs)
        return cls(settings)


@contextlib.contextmanager
def videos_left_out() -> Iterator[None]:
    """While active, processors without torchvision use `NoVideos` as their video component."""
    if is_torchvision_available():
        yield
        return
    auto = importlib.import_module("transformers.models.auto.video_processing_auto")  # the module itself, not a dummy
    kinds = {**processing.MODALITY_TO_BASE_CLASS_MAPPING, "video_processor": "ImageProcessingMixin"}
    with patched(auto, "AutoVideoProcessor", NoVideos), patched(processing, "MODALITY_TO_BASE_CLASS_MAPPING", kinds):
        yield


def load_processor(
    name_or_path: str, revision: str | None = None, trust_remote_code: bool = False
) -> "ProcessorMixin":
    """The processor of a vision model. Raises `ConfigError` without it or a required package."""
    try:
        with videos_left_out():
            processor = AutoProcessor.from_pretrained(
                name_or_path, revision=revision, trust_remote_code=trust_remote_code, padding_side="left"
            )
    except (ImportError, OSError, ValueError, TypeError) as error:
        found = f"the processor of the vision model {name_or_path!r} could not be loaded ({type(error).__name__})"
        files = "preprocessor_config.json or processor_config.json beside the model's configuration"
        packages = "Pillow, and for some models torchvision, of the same build (CPU or CUDA) as torch"
        raise ConfigError(f"{found}. Expected {files}, {packages}.") from error
    if not isinstance(processor, processing.ProcessorMixin) or processor.chat_template is None:
        found = f"a {type(processor).__name__} without a chat template"
        raise ConfigError(f"the vision model {name_or_path!r} has {found}. Expected an instruct model's processor.")
    return processor
