"""The processor of a policy that reads pictures: from chat messages with pictures to tokens and pixels.

Where torchvision is absent, transformers reads pictures with Pillow, but refuses to load the processor's part for
videos. This package sends no videos, so `NoVideos` takes the place of that part.
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
    """The settings of a video processor, which are saved as they were read. It processes nothing."""

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
    """While active, a processor without torchvision has `NoVideos` as its part for videos."""
    if is_torchvision_available():
        yield
        return
    auto = importlib.import_module("transformers.models.auto.video_processing_auto")  # the module itself, no dummy
    kinds = {**processing.MODALITY_TO_BASE_CLASS_MAPPING, "video_processor": "ImageProcessingMixin"}
    with patched(auto, "AutoVideoProcessor", NoVideos), patched(processing, "MODALITY_TO_BASE_CLASS_MAPPING", kinds):
        yield


def load_processor(
    name_or_path: str, revision: str | None = None, trust_remote_code: bool = False
) -> "ProcessorMixin":
    """The processor beside a model that reads pictures. Raises `ConfigError` if it or a package is missing."""
    try:
        with videos_left_out():
            processor = AutoProcessor.from_pretrained(
                name_or_path, revision=revision, trust_remote_code=trust_remote_code, padding_side="left"
            )
    except (ImportError, OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the model {name_or_path!r} reads pictures, and its processor could not be loaded "
            f"({type(error).__name__}). Expected preprocessor_config.json or processor_config.json beside the model's "
            "configuration, Pillow, and for some models torchvision, of the same build (CPU or CUDA) as torch."
        ) from error
    if not isinstance(processor, processing.ProcessorMixin) or processor.chat_template is None:
        raise ConfigError(
            f"the model {name_or_path!r} reads pictures, and beside it is a {type(processor).__name__} without a chat "
            "template, or alone. Expected an instruct model with its processor (preprocessor_config.json or "
            "processor_config.json). Save both there."
        )
    return processor
