"""Imported inside vLLM's worker processes before they load a model: makes our weight transfer known to vLLM there."""

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from .transfer import HeadwayTransfer

WeightTransferEngineFactory.register_engine("headway", HeadwayTransfer)


class WeightExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`) for what its API does not tell."""

    weight_transfer_engine: HeadwayTransfer

    def headway_outcome(self, wants_fingerprints: bool) -> tuple[str, tuple[bytes, bytes] | None]:
        """Why the last update failed here, or ""; then, if wanted and known, what this process holds of the tensors of
        the update, in their order: the bytes of `Held`'s arrays."""
        transfer = self.weight_transfer_engine
        held = transfer.held() if wants_fingerprints and not transfer.failure else None
        return transfer.failure, None if held is None else (held.fingerprints_N.tobytes(), held.elements_N.tobytes())

    def headway_before_sleep(self) -> None:
        """Save what vLLM's deepest sleep would lose and no version brings back."""
        self.weight_transfer_engine.before_sleep()

    def headway_after_wake(self) -> None:
        """Put it back."""
        self.weight_transfer_engine.after_wake()
