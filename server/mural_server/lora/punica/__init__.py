"""Which adapter each row of a batch goes through, and the calls that apply it."""

from mural_server.lora.punica.base import PunicaWrapper
from mural_server.lora.punica.kernel_meta import LoRAKernelMeta
from mural_server.lora.punica.selector import get_punica_wrapper

__all__ = ["LoRAKernelMeta", "PunicaWrapper", "get_punica_wrapper"]
