"""Where does the time go? This package reads or captures a profile and ranks its kernels."""

from patcher.hotspot.capture import NSYS_OPTIONS, capture, capture_batches
from patcher.hotspot.classify import classify
from patcher.hotspot.compare import ProfileComparison, compare
from patcher.hotspot.ledger import LedgerRow, ledger
from patcher.hotspot.ncu import ncu_finding
from patcher.hotspot.nsys import find_nsys, nsys_environment, nsys_finding
from patcher.hotspot.profile import Gpu, Hotspot, KernelStat, Profile, ProfileWarning
from patcher.hotspot.read import read
from patcher.hotspot.roofline import Places
from patcher.hotspot.shorten import shortened
from patcher.hotspot.step_record import StepLedger

__all__ = [
    "NSYS_OPTIONS",
    "Gpu",
    "Hotspot",
    "KernelStat",
    "LedgerRow",
    "Places",
    "Profile",
    "ProfileComparison",
    "ProfileWarning",
    "StepLedger",
    "capture",
    "capture_batches",
    "classify",
    "compare",
    "find_nsys",
    "ledger",
    "ncu_finding",
    "nsys_environment",
    "nsys_finding",
    "read",
    "shortened",
]
