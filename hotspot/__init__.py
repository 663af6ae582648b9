"""Where does the time go? Profiles read or captured, classified and ranked."""

from hotspot.capture import NSYS_OPTIONS, capture
from hotspot.classify import classify
from hotspot.compare import ProfileComparison, compare
from hotspot.ledger import LedgerRow, ledger
from hotspot.ncu import ncu_finding
from hotspot.nsys import find_nsys, nsys_environment, nsys_finding
from hotspot.profile import Gpu, Hotspot, KernelStat, Profile, ProfileWarning
from hotspot.read import read

__all__ = [
    "NSYS_OPTIONS",
    "Gpu",
    "Hotspot",
    "KernelStat",
    "LedgerRow",
    "Profile",
    "ProfileComparison",
    "ProfileWarning",
    "capture",
    "classify",
    "compare",
    "find_nsys",
    "ledger",
    "ncu_finding",
    "nsys_environment",
    "nsys_finding",
    "read",
]
