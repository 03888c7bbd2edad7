"""Parameterized launches: captured graphs without a private pool, static inputs or copies."""

from common.capture.parameterized.errors import RegionRefused
from common.capture.parameterized.region import Parameterized, parameterize

__all__ = ["Parameterized", "RegionRefused", "parameterize"]
