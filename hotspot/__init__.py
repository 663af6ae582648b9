"""Where does the time go? Profiles read or captured, classified and ranked."""

from hotspot.capture import capture
from hotspot.classify import classify
from hotspot.kineto import read_kineto
from hotspot.ncu import attach, read_ncu
from hotspot.ncu_tool import find_ncu, ncu_finding
from hotspot.nsys import find_nsys, nsys_finding, read
from hotspot.profile import Hotspot, KernelStat, Profile, ProfileWarning

__all__ = [
    "Hotspot",
    "KernelStat",
    "Profile",
    "ProfileWarning",
    "attach",
    "capture",
    "classify",
    "find_ncu",
    "find_nsys",
    "ncu_finding",
    "nsys_finding",
    "read",
    "read_kineto",
    "read_ncu",
]
