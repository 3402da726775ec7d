"""Imported by vLLM's worker processes before they load a model: it registers Headway's weight transfer with vLLM
there."""

from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from . import adapters
from .transfer import HeadwayTransfer

WeightTransferEngineFactory.register_engine("headway", HeadwayTransfer)


class WeightExtension:
    """Methods mixed into vLLM's worker (`worker_extension_cls`), for what vLLM's API does not offer."""

    weight_transfer_engine: HeadwayTransfer
    model_runner: Any

    def headway_outcome(self, wants_fingerprints: bool) -> tuple[str, tuple[bytes, bytes] | None]:
        """Return why the last update failed here, or "". If wanted and known, also return what this process holds of
        the tensors of the update, in their order: the bytes of `Held`'s arrays."""
        transfer = self.weight_transfer_engine
        held = transfer.held() if wants_fingerprints and not transfer.failure else None
        return transfer.failure, None if held is None else (held.fingerprints_N.tobytes(), held.elements_N.tobytes())

    def headway_adapter(
        self, shared: bytes, scale: float, place: int, wants_fingerprints: bool
    ) -> tuple[str, tuple[bytes, bytes] | None]:
        """Take the adapter that `Handover` gave into a place, and return what `headway_outcome` does, of it."""
        try:
            tensors, lora = self.weight_transfer_engine.mapped(shared), self.model_runner.lora_manager
            adapters.take(lora, tensors, scale, place)
            held = adapters.held(lora, tensors, scale, place) if wants_fingerprints else None
        except Exception as error:  # noqa: BLE001 - see transfer.py
            return f"{type(error).__name__}: {error}", None
        return "", None if held is None else (held.fingerprints_N.tobytes(), held.elements_N.tobytes())

    def headway_before_sleep(self) -> None:
        """Save what vLLM's deepest sleep would lose and no version brings back."""
        self.weight_transfer_engine.before_sleep()

    def headway_after_wake(self) -> None:
        """Restore what was saved before the sleep."""
        self.weight_transfer_engine.after_wake()
