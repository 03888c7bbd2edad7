"""Numbers of the device on the host, some steps late and without waiting for the device.

A loop that prints or checks its loss must not wait for it: what is read here is the newest copy that has
arrived. The host may run at most `depth` steps ahead of the device, which bounds how late a value is, and
waits then for a step that lies `depth` back, never for the queue to drain.
"""

import torch


class LateReader:
    """Copies of a few device numbers, step by step.

    num_values: how many FP32 numbers a step has. exact: always read the step `depth - 1` back, waiting for it, so that
    several ranks read the same step at the same place.
    """

    def __init__(self, device: torch.device, num_values: int, depth: int = 3, exact: bool = False):
        self.exact = exact
        self.on_cuda = torch.device(device).type == "cuda"
        self.slots = [torch.zeros(num_values, pin_memory=self.on_cuda) for _ in range(depth)]
        self.events = [torch.cuda.Event() if self.on_cuda else None for _ in range(depth)]
        self.reset()

    def reset(self) -> None:
        """Forget what was pushed."""
        self.num_pushed = 0
        self.indices = [None] * len(self.slots)

    def push(self, index: int, values: torch.Tensor) -> None:
        """Start the copy of `values` (FP32 [num_values], on the device) of step `index`."""
        place = self.num_pushed % len(self.slots)
        if self.on_cuda:
            self.events[place].synchronize()
        self.slots[place].copy_(values, non_blocking=True)
        if self.on_cuda:
            self.events[place].record()
        self.indices[place] = index
        self.num_pushed += 1

    def latest(self):
        """(index, values as floats) of the newest step that has arrived, without the one pushed last; None: none has.

        On the CPU, where every copy arrives at once, that is the step before.
        """
        if self.exact:
            number = self.num_pushed - len(self.slots)
            return self._read(number, wait=True) if number >= 0 else None
        for number in range(self.num_pushed - 2, max(-1, self.num_pushed - 1 - len(self.slots)), -1):
            found = self._read(number, wait=False)
            if found:
                return found
        return None

    def _read(self, number, wait):
        place = number % len(self.slots)
        if self.on_cuda:
            if wait:
                self.events[place].synchronize()
            elif not self.events[place].query():
                return None
        return self.indices[place], self.slots[place].tolist()
