"""The loss scale of FP16 training."""

import torch


class LossScaler:
    """The loss scale of FP16 training as numbers on the device, updated without a host read.

    An overflow lowers the tracker by one. At zero it also halves the scale, though not below `floor`, and above zero it
    only starts the growth counter again. A finite step sets the tracker back to `hysteresis`, and `growth_interval`
    finite steps in a row double the scale. This is the rule of apex (update_scale_hysteresis), which the benchmark
    uses; the floor of 1 is ours.

    Attributes:
        scale: FP32 0-d.
        found_inf: FP32 0-d, 1 if a gradient of the step was not finite. The optimizer fills it.
        growth: Finite steps since the scale last changed. This and the others are int32 0-d.
        tracker: Overflows left until the scale halves.
        floor_overflows: Overflows in a row at the floor.
        num_skipped: Overflows since the start.
    """

    floor = 1.0
    STATE = ("scale", "growth", "tracker", "floor_overflows", "num_skipped")

    def __init__(self, device, scale: float, growth_interval: int, hysteresis: int):
        self.initial_scale = scale
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.scale, self.found_inf = (torch.zeros((), device=device) for _ in range(2))
        self.growth, self.tracker, self.floor_overflows, self.num_skipped = (
            torch.zeros((), dtype=torch.int32, device=device) for _ in range(4)
        )
        self.reset()

    def reset(self) -> None:
        """Start again, in place."""
        for _, tensor in self.named_state():
            tensor.zero_()
        self.found_inf.zero_()
        self.scale.fill_(self.initial_scale)
        self.tracker.fill_(self.hysteresis)

    @torch.no_grad()
    def update(self) -> None:
        """Set the scale of the next step by found_inf of this one."""
        overflow = self.found_inf > 0
        self.num_skipped.add_(overflow)
        at_floor = overflow & (self.scale <= self.floor)
        self.floor_overflows.copy_(torch.where(at_floor, self.floor_overflows + 1, 0))
        self.tracker.copy_(torch.where(overflow, (self.tracker - 1).clamp_(min=0), self.hysteresis))
        growth = torch.where(overflow, 0, self.growth + 1)
        grows = growth >= self.growth_interval
        self.growth.copy_(torch.where(grows, 0, growth))
        # A scale that would leave FP32 stays.
        grown = torch.where(torch.isfinite(self.scale * 2), self.scale * 2, self.scale)
        lowered = (self.scale / 2).clamp_(min=self.floor)
        lowers = overflow & (self.tracker <= 0)
        self.scale.copy_(torch.where(lowers, lowered, torch.where(grows, grown, self.scale)))

    def named_state(self):
        """Yield (name, tensor) of everything that lasts from step to step, for hashing."""
        for name in self.STATE:
            yield f"loss_scale.{name}", getattr(self, name)
