"""Loss and gradient norm of each step on the device, and their late report to the host, which waits for nothing.

The host reads the newest copy that has arrived. It may run at most `depth` steps ahead of the device, which bounds how
late a value is, and waits then for a step that lies `depth` back, never for the queue to drain.
"""

import torch

from common.history import History


class DelayedReader:
    """Copies of a few device numbers, step by step.

    num_values: how many FP32 numbers a step has. exact: always read the step `depth - 1` back, waiting for it, so that
    several ranks read the same step at the same place.
    """

    def __init__(self, device: torch.device, num_values: int, depth: int = 3, exact: bool = False):
        self.exact = exact
        self.on_cuda = torch.device(device).type == "cuda"
        self.slots = [torch.zeros(num_values, pin_memory=self.on_cuda) for _ in range(depth)]
        self.events = [torch.cuda.Event() for _ in range(depth)] if self.on_cuda else []
        self.reset()

    def reset(self) -> None:
        """Forget what was pushed."""
        self.num_pushed = 0
        self.indices: list[int | None] = [None] * len(self.slots)

    def push(self, index: int, values: torch.Tensor) -> None:
        """Start the copy of `values` (FP32 [num_values], on the device) of step `index`."""
        slot = self.num_pushed % len(self.slots)
        if self.on_cuda:
            self.events[slot].synchronize()
        self.slots[slot].copy_(values, non_blocking=True)
        if self.on_cuda:
            self.events[slot].record()
        self.indices[slot] = index
        self.num_pushed += 1

    def latest(self) -> tuple[int, list[float]] | None:
        """(index, values as floats) of the newest step that has arrived, without the one pushed last; None: none has.

        On the CPU, where every copy arrives at once, that is the step before.
        """
        if self.exact:
            number = self.num_pushed - len(self.slots)
            return self._read(number, wait=True) if number >= 0 else None
        for number in range(self.num_pushed - 2, max(-1, self.num_pushed - 1 - len(self.slots)), -1):
            copy = self._read(number, wait=False)
            if copy:
                return copy
        return None

    def _read(self, number, wait):
        slot = number % len(self.slots)
        if self.on_cuda:
            if wait:
                self.events[slot].synchronize()
            elif not self.events[slot].query():
                return None
        return self.indices[slot], self.slots[slot].tolist()


class ScaledReport(History):
    """The host's late report of each step with a loss scale: losses, gradient norms, an overflow storm.

    fill is a part of the step and can be captured; end_step is not. exact: as for DelayedReader.
    """

    FIELDS = ("loss", "loss_scale", "grad_norm", "floor_overflows", "num_skipped")
    MIN_STEPS_JUDGED = 20

    def __init__(self, device: torch.device, scaler, max_floor_overflows: int, exact: bool = False):
        self.scaler, self.max_floor_overflows = scaler, max_floor_overflows
        self.values = torch.zeros(len(self.FIELDS), device=device)
        self.late = DelayedReader(device, len(self.FIELDS), exact=exact)
        super().__init__(device)

    def reset(self) -> None:
        """Forget all steps: losses and gradient norms are zero, nothing is on its way to the host."""
        self.late.reset()
        for tensor in (self.values, self.losses, self.grad_norms):
            tensor.zero_()

    @torch.no_grad()
    def fill(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Store this step's loss and norm, FP32 scalars on the device, and the loss scale of the next step."""
        scaler = self.scaler
        counts = (scaler.floor_overflows.float(), scaler.num_skipped.float())
        torch.stack((loss, scaler.scale, grad_norm, *counts), out=self.values)

    def end_step(self, index: int) -> None:
        """Keep loss and norm, start their copy to the host, and look at what has arrived of earlier steps.

        Raises FloatingPointError where the loss scale is at its floor and gradients overflow step after step.
        """
        slot = self.slot(index)
        self.losses[slot].copy_(self.values[0])
        self.grad_norms[slot].copy_(self.values[2])
        self.late.push(index, self.values)
        seen = self.late.latest()
        if not seen:
            return
        seen_index, values = seen
        overflows = int(values[self.FIELDS.index("floor_overflows")])
        if overflows >= self.max_floor_overflows:
            raise FloatingPointError(
                f"overflow storm: {overflows} steps in a row with the loss scale at {self.scaler.floor:g}, from step "
                f"{seen_index - overflows + 1} on, detected at step {index}: lower --lr, or train with --precision bf16"
            )

    def read_losses(self, count: int) -> list[float]:
        """Return the losses of steps 0 to count - 1; waits for the device.

        Raises FloatingPointError where none of many steps trained, which the loss alone does not show.
        """
        norms = self.grad_norms[: min(count, self.NUM_LOSSES)]
        if count >= self.MIN_STEPS_JUDGED and not torch.isfinite(norms).any():
            raise FloatingPointError(
                f"gradients overflowed in each of {count} steps, nothing was trained: lower --loss-scale"
            )
        return super().read_losses(count)

    def closing(self, dropped: list) -> dict:
        """Steps skipped since the last reset, and samples dropped, for the file of --record."""
        return {
            "num_skipped_steps": int(self.scaler.num_skipped),
            "num_dropped_samples": len(dropped),
            "dropped_samples": [str(one) for one in dropped[:20]],
        }
