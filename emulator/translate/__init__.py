"""PTX to C++."""

from .module import TranslatedModule, translate
from .ptx import TranslationError

__all__ = ["TranslatedModule", "TranslationError", "translate"]
