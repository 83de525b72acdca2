"""Where in its stream a CUDA device must be before the host chooses the next pass.

    device:  | layer 1 | layer 2 | layer 3             | layer 1 | ...
    host:    launch, wait        | choose, launch, wait          | ...
                                 '-- the mark

If the host waited for the end of a pass, the device would idle until the next one is chosen and
launched. If the host did not wait at all, it would choose long before messages arrive.
"""

from __future__ import annotations

import torch


class PassMarker:
    """The point at which the last layer of a pass begins, on the current stream of a device.

    `mark` may be called by the threads of autograd.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.Event | None = None

    def mark(self) -> None:
        """Mark the current end of the stream; of several marks the last one counts."""
        self._event = torch.cuda.current_stream(self._device).record_event()

    def wait(self) -> None:
        """Let the host wait until the device reaches the mark.

        If no pass has set a mark since the last wait, because its model does not announce its last
        layer, the host waits for all launched work.
        """
        if self._event is None:
            self.mark()
        event, self._event = self._event, None
        assert event is not None
        event.synchronize()
