"""Where does the time go? Profiles read or captured, classified and ranked."""

from hotspot.capture import capture
from hotspot.classify import classify
from hotspot.nsys import find_nsys, nsys_finding, read
from hotspot.profile import Hotspot, KernelStat, Profile, ProfileWarning

__all__ = [
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
