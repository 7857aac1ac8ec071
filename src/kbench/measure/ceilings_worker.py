"""The ceilings of the GPU as a command asks for them: measured in a process of their own, which a fault may cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from kbench.device.worker import Channel, Message, Worker, WorkerLost

if TYPE_CHECKING:
    from kbench.device.cuda.device import CudaDevice

# Measuring takes seconds, on a busy machine with nothing compiled a minute; beyond this something hangs.
_SECONDS = 600.0


def ask(again: bool, note: Callable[[str], None]) -> dict[str, Any]:
    """The device's description ("device"), `card.identity` ("card"), its ceilings as a dict ("ceilings"), whether they
    come from the cache ("cached"), and who else uses the GPU ("busy", "" for nobody).

    Raises KernelFault where measuring costs the process, and whatever opening the GPU raises.
    """
    worker = Worker("kbench.measure.ceilings_worker:serve", {}, note)
    try:
        answer: dict[str, Any] = worker.call({"again": again})
    except BaseException as error:
        worker.kill()  # it may be busy still
        if isinstance(error, WorkerLost):
            raise error.fault from None
        raise
    worker.close()
    return answer


class _Reporter:
    def __init__(self, channel: Channel):
        from kbench.device.open import open_device

        self._channel = channel
        with channel.limit(_SECONDS, "starting the GPU"):
            self._device = cast("CudaDevice", open_device("cuda"))

    def handle(self, request: Message) -> Any:
        from kbench.device.cuda import card
        from kbench.measure.ceilings import kept_or_measured

        device = self._device
        with self._channel.limit(_SECONDS, "measuring the GPU's ceilings"):
            used = card.busy(device.ordinal, idle=True)
            found, kept = kept_or_measured(device, self._channel.note, again=request["again"], beside=used)
        return {
            "device": device.describe(),
            "card": card.identity(device.ordinal),
            "ceilings": found.to_dict(),
            "cached": kept,
            "busy": used,
        }


def serve(channel: Channel) -> _Reporter:
    """The worker's entry: see `kbench.device.worker`."""
    return _Reporter(channel)
