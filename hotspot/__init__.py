"""Where does the time go? Profiles read or captured, classified and ranked."""

from hotspot.capture import capture
from hotspot.classify import classify
from hotspot.nsys import find_nsys, nsys_finding
from hotspot.profile import Gpu, Hotspot, KernelStat, Profile, ProfileWarning
from hotspot.read import read

__all__ = [
    "Gpu",
    "Hotspot",
    "KernelStat",
    "Profile",
    "ProfileWarning",
    "capture",
    "classify",
    "find_nsys",
    "nsys_finding",
    "read",
]
