"""The errors of parameterized launches."""

from common.capture.checks import CaptureError


class RegionRefused(CaptureError):
    """A region cannot be launched on other memory: the message names the node and the reason."""
