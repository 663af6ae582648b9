"""Confine the calling process and its future children, as far as this machine allows.

It uses only the standard library, since it is copied next to the runner and works on its own.

    R0  limits, own session, no new privileges, no core dumps
    R1  + namespaces: mount (a new root), PID, IPC, network, UTS; user unless real root
    R2  + Landlock and seccomp

`python -IS confine.py POLICY [COMMAND ...]`, the policy as JSON text, runs the command (a compiler)
confined, or prints the `Confinement` as JSON. Kernel interfaces: landlock(7), seccomp(2),
namespaces(7), mount_setattr(2); the way to a new root is bubblewrap's.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import itertools
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """What a confined process may see and use. Paths are absolute; missing ones are skipped."""

    folder: str
    """The only folder that is writable and outlives the run: cwd, HOME, TMPDIR."""
    visible: tuple[str, ...]
    """Files and folders, with their contents, to read and execute."""
    devices: tuple[str, ...]
    """Devices to read and write."""
    cpu_only: bool
    """Whether limits on address space and locked memory apply; CUDA cannot work with them."""
    memory_bytes: int
    processes: int
    file_bytes: int
    cpu_s: int
    listed: tuple[str, ...] = ()
    """Folders that may be listed although only some of their entries are visible."""
    scratch_bytes: int = 256 << 20
    """Size in bytes of the private /tmp, /dev/shm, /home, /root and /var/tmp together."""
    open_files: int = 4096
    nested: bool = False
    """Whether a child of the process uses CUDA, not the process itself (a profiler's target)."""


@dataclass(frozen=True)
class Confinement:
    """The parts of the sandbox that are in force."""

    rung: str
    """`R2`, `R1`, `R0` or `below R0`."""
    in_force: tuple[str, ...]
    """Parts in force."""
    missing: tuple[tuple[str, str], ...]
    """Each part that is not in force, with the reason."""

    @property
    def isolated(self) -> bool:
        """Whether a verdict on foreign code can be trusted: R1 or better."""
        return self.rung in ("R1", "R2")

    def describe(self) -> str:
        """Describe the confinement in one line.

        Examples: `R2 (namespaces, own user, Landlock (ABI 7), seccomp)`, or `R0 + Landlock (ABI 4)
        + seccomp: namespaces not permitted (Operation not permitted)`.
        """
        parts = _named([part for part in self.in_force if part not in _QUIET])
        text = (
            f"{self.rung} ({', '.join(parts)})"
            if self.isolated
            else " + ".join([self.rung, *parts])
        )
        by_reason: dict[str, list[str]] = {}
        for part, reason in self.missing:
            by_reason.setdefault(reason, []).append(part)
        notes = []
        for reason, missing in by_reason.items():
            verb = "not permitted" if reason == os.strerror(errno.EPERM) else "not in force"
            notes.append(f"{', '.join(_named(missing))} {verb} ({reason})")
        return f"{text}: {'; '.join(notes)}" if notes else text


_R0 = ("limits", "own session", "no new privileges", "no core dumps")
_R1 = tuple(f"{kind} namespace" for kind in ("mount", "PID", "IPC", "network", "UTS"))
_QUIET = (
    *_R0,
    "limit on processes",
    "closed descriptors",
    "first to be killed",
    "user namespace",
    "own /proc",
    "no capabilities",
)
"""Parts that the description mentions only if they are missing."""


def _named(parts: list[str]) -> list[str]:
    if set(_R1) <= set(parts):
        return ["namespaces", *(part for part in parts if part not in _R1)]
    return parts


class _Attempts:
    """Puts parts of the sandbox in force and records the result of each."""

    def __init__(self, without: tuple[str, ...]) -> None:
        self.without = without
        self.in_force: list[str] = []
        self.missing: list[tuple[str, str]] = []

    def attempt(self, part: str, action: Callable[[], object], switch: str = "") -> bool:
        if switch in self.without:
            self.missing.append((part, "switched off"))
            return False
        try:
            action()
        except OSError as error:
            self.missing.append((part, error.strerror or str(error)))
            return False
        self.in_force.append(part)
        return True

    def result(self) -> Confinement:
        has = set(self.in_force)
        rung = "R0" if has >= set(_R0) else "below R0"
        if rung == "R0" and has >= set(_R1):
            rung = "R1"
            if "seccomp" in has and any(part.startswith("Landlock") for part in has):
                rung = "R2"
        return Confinement(rung, tuple(self.in_force), tuple(self.missing))


def confine(
    policy: Policy, keep: tuple[int, ...] = (0, 1, 2), without: tuple[str, ...] = ()
) -> Confinement:
    """Confine this process, which must have a single thread.

    Parts that the machine refuses are left out and reported. If PID namespaces are permitted, the
    calling process does not return: it waits, and ends as the confined process ends (same exit code
    or signal). A process in a new PID namespace returns instead. Killing the waiter kills
    everything inside.

    As real root, the process continues under its own unprivileged uid if all paths of the policy
    stay usable. `policy.folder` with its contents then belongs to that uid. Descriptors outside
    `keep` are closed; `without` leaves out namespaces, proc, landlock or seccomp, for tests.
    """
    parent, uid = os.getppid(), _own_uid()
    tasks = _tasks_of(uid if os.geteuid() == 0 else os.geteuid())
    done = _Attempts(without)
    done.attempt("closed descriptors", lambda: _close_but(keep))
    done.attempt("own session", _own_session)
    done.attempt("no core dumps", lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
    done.attempt("no new privileges", lambda: _prctl(_PR_SET_NO_NEW_PRIVS, 1))
    # the OOM killer ends this process before the judge
    done.attempt("first to be killed", lambda: _write("/proc/self/oom_score_adj", "1000"))
    inside, proc = False, "host"
    if _enter_namespaces(done):
        inside = "PID namespace" in done.in_force
        _die_with(parent)
        status = _split() if inside else -1
        try:
            proc = _new_root(policy, uid, own_pids=inside and "proc" not in without)
            done.in_force.append("mount namespace")
        except OSError as error:
            done.missing.append(("mount namespace", error.strerror or str(error)))
        if inside:
            _leave_reaper(status)
    own_root = "mount namespace" in done.in_force
    if proc == "own":
        done.in_force.append("own /proc")
    _empty_bounding_set()
    dropped = os.geteuid() == 0 and done.attempt("own user", lambda: _drop_user(policy, uid))
    fresh_count = "user namespace" in done.in_force and _kernel() >= (5, 14)
    done.attempt("no capabilities", _drop_capabilities)
    if dropped:
        # /proc/self belongs to root after a change of uid, until this
        _prctl(_PR_SET_DUMPABLE, 1)
    if not inside:
        _die_with(parent)
    _limit(done, policy, 0 if fresh_count else tasks)
    abi = _landlock_abi()
    done.attempt(
        f"Landlock (ABI {abi})" if abi > 0 else "Landlock",
        lambda: _landlock(policy, abi, own_root, proc),
        "landlock",
    )
    done.attempt("seccomp", lambda: _seccomp(policy, own_root, own_pids=inside), "seccomp")
    os.chdir(policy.folder)
    return done.result()


# ---- system calls ------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4


def _numbers(text: str) -> dict[str, int]:
    """Parse `name:x86_64:aarch64`. Numbers from 424 on agree; -1: aarch64 lacks the call."""
    column = {"x86_64": 1, "aarch64": -1}.get(os.uname().machine)
    if column is None:
        return {}
    return {word.split(":")[0]: int(word.split(":")[column]) for word in text.split()}


_DENIED = _numbers("""
    ptrace:101:117 syslog:103:116 personality:135:92 vhangup:153:58 modify_ldt:154:-1
    pivot_root:155:41 adjtimex:159:171 chroot:161:51 acct:163:89 settimeofday:164:170 mount:165:40
    umount2:166:39 swapon:167:224 swapoff:168:225 reboot:169:142 sethostname:170:161
    setdomainname:171:162 iopl:172:-1 ioperm:173:-1 init_module:175:105 delete_module:176:106
    quotactl:179:60 lookup_dcookie:212:18 clock_settime:227:112 kexec_load:246:104 add_key:248:217
    request_key:249:218 keyctl:250:219 unshare:272:97 perf_event_open:298:241
    fanotify_init:300:262 name_to_handle_at:303:264 open_by_handle_at:304:265
    clock_adjtime:305:266 setns:308:268 process_vm_readv:310:270 process_vm_writev:311:271
    kcmp:312:272 finit_module:313:273 seccomp:317:277 kexec_file_load:320:294 bpf:321:280
    userfaultfd:323:282 io_uring_setup:425 io_uring_enter:426 io_uring_register:427 open_tree:428
    move_mount:429 fsopen:430 fsconfig:431 fsmount:432 fspick:433 pidfd_getfd:438
    process_madvise:440 mount_setattr:442 quotactl_fd:443 open_tree_attr:467
""")
_WITHOUT_ROOT = _numbers("""
    chmod:90:-1 fchmod:91:52 chown:92:-1 fchown:93:55 lchown:94:-1 setxattr:188:5 lsetxattr:189:6
    fsetxattr:190:7 removexattr:197:14 lremovexattr:198:15 fremovexattr:199:16 fchownat:260:54
    fchmodat:268:53 fchmodat2:452 setxattrat:463 removexattrat:466
""")
"""Denied without an own root, since Landlock does not protect metadata of the user's files."""
_ON_CPU = _numbers("""
    alarm:37:-1 setitimer:38:103 timer_create:222:107 timerfd_create:283:85 memfd_create:319:279
    memfd_secret:447 shmget:29:194 semget:64:190 msgget:68:186 io_setup:206:0 sendmsg:46:211
    sendmmsg:307:269
""")
"""Denied on a CPU, where a stopped process must cost others nothing and hold only memory that is
counted: timers that run on, memory that no process maps, descriptors on their way in a socket."""
_WITHOUT_PIDS = _numbers("setpgid:109:154 setsid:112:157")
"""Denied without a PID namespace, where only a process group holds the run together."""
_OTHERS = _numbers("""
    sched_setaffinity:203:122 socket:41:198 clone:56:220 capset:126:91 prctl:157:167 clone3:435
    landlock_create_ruleset:444 landlock_add_rule:445 landlock_restrict_self:446
""")


def _number(name: str) -> int:
    try:
        return _DENIED[name] if name in _DENIED else _OTHERS[name]
    except KeyError:
        raise OSError(errno.ENOSYS, f"not known on {os.uname().machine}") from None


def _checked(result: int, about: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), about)
    return result


def _syscall(name: str, *arguments: int | bytes | None) -> int:
    # a variadic call would pass Python's integers as C int
    wide = [a if a is None or isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    _libc.syscall.restype = ctypes.c_long
    return _checked(_libc.syscall(ctypes.c_long(_number(name)), *wide), name)


def _prctl(option: int, *values: int) -> None:
    wide = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _checked(_libc.prctl(option, *wide), "prctl")


def _kernel() -> tuple[int, int]:
    major, minor, *_ = os.uname().release.split(".")
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _write(path: str, text: str) -> None:
    # not open(): the file of a codec may be inaccessible by now
    place = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(place, text.encode())
    finally:
        os.close(place)


def _close_but(keep: tuple[int, ...]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 20)
    edges = [-1, *sorted(set(keep)), last]
    for low, high in itertools.pairwise(edges):
        if low + 1 < high:  # an empty range from 0 closes everything
            os.closerange(low + 1, high)


# ---- limits and privileges ---------------------------------------------------------------------


def _limit(done: _Attempts, policy: Policy, tasks: int) -> None:
    def lower(kind: int, value: int) -> None:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))

    def plain() -> None:
        lower(resource.RLIMIT_FSIZE, policy.file_bytes)
        lower(resource.RLIMIT_CPU, policy.cpu_s)
        lower(resource.RLIMIT_NOFILE, policy.open_files)
        if policy.cpu_only:
            lower(resource.RLIMIT_MEMLOCK, 64 << 20)
            lower(resource.RLIMIT_DATA, policy.memory_bytes)
            # shared memory is not data; reserved address space is many times what is used
            lower(resource.RLIMIT_AS, 4 * policy.memory_bytes)
            lower(resource.RLIMIT_SIGPENDING, 64)  # bounds timers, too
            lower(resource.RLIMIT_MSGQUEUE, 0)
            lower(resource.RLIMIT_RTPRIO, 0)

    def processes() -> None:
        if os.geteuid() == 0:
            raise OSError(errno.EPERM, "root is not bound by it")
        before = resource.getrlimit(resource.RLIMIT_NPROC)
        # the limit counts all tasks of the user, including those outside
        resource.setrlimit(resource.RLIMIT_NPROC, (policy.processes + tasks, before[1]))
        try:
            trial = os.fork()
        except BlockingIOError:
            resource.setrlimit(resource.RLIMIT_NPROC, before)
            raise OSError(errno.EAGAIN, "unseen processes of this user count") from None
        if not trial:
            os._exit(0)
        os.waitpid(trial, 0)
        lower(resource.RLIMIT_NPROC, policy.processes + tasks)

    done.attempt("limits", plain)
    done.attempt("limit on processes", processes)


def _own_session() -> None:
    if os.getsid(0) != os.getpid():
        os.setsid()


def _own_uid() -> int:
    """A uid for this run, since the limit on processes counts by uid (systemd's dynamic range)."""
    return 61184 + os.getpid() % 4000


def _tasks_of(uid: int) -> int:
    """Number of the user's threads outside the run."""
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # the process has ended
    return count


def _drop_user(policy: Policy, uid: int) -> None:
    """Change from real root to an unprivileged uid, if all paths stay usable."""
    wanted = dict.fromkeys((*policy.visible, os.__file__), os.R_OK)
    wanted |= dict.fromkeys(policy.devices, os.R_OK | os.W_OK)
    wanted[os.path.dirname(policy.folder)] = os.X_OK
    wanted = {path: mode for path, mode in wanted.items() if os.path.exists(path)}
    os.setgroups([])
    os.setresgid(uid, uid, 0)
    os.setresuid(uid, uid, 0)
    usable = all(
        os.access(path, mode | (os.X_OK if os.path.isdir(path) else 0))
        for path, mode in wanted.items()
    )
    os.setresuid(0, 0, 0)
    if not usable:
        os.setresgid(0, 0, 0)
        raise OSError(errno.EACCES, "it could not read all that it needs")
    os.chown(policy.folder, uid, uid)
    for top, folders, files in os.walk(policy.folder):
        for name in folders + files:
            os.chown(os.path.join(top, name), uid, uid, follow_symlinks=False)
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _empty_bounding_set() -> None:
    """Drop the bounding set, so that no program can regain capabilities dropped afterwards."""
    for capability in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            break  # past the last capability, or not permitted and so nothing to drop


def _drop_capabilities() -> None:
    _syscall("capset", struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *[0] * 6))
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


# ---- namespaces --------------------------------------------------------------------------------

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
_NEWPID, _NEWNET, _NEWCGROUP = 0x20000000, 0x40000000, 0x2000000


def _enter_namespaces(done: _Attempts) -> bool:
    """Enter all namespaces but the mount namespace; return whether any is permitted."""
    if "namespaces" in done.without:
        done.missing += [(part, "switched off") for part in _R1]
        return False
    try:
        _syscall("unshare", _NEWUTS)
    except OSError:
        try:
            _user_namespace()
            _syscall("unshare", _NEWUTS)
        except OSError as error:
            done.missing += [(part, error.strerror or str(error)) for part in _R1]
            return False
        done.in_force.append("user namespace")
    done.in_force.append("UTS namespace")
    _libc.sethostname(b"sandbox", 7)
    for part, flag in (("IPC", _NEWIPC), ("network", _NEWNET), ("PID", _NEWPID)):
        done.attempt(f"{part} namespace", lambda flag=flag: _syscall("unshare", flag))  # type: ignore[misc]
    return True


def _user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _syscall("unshare", _NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        _write(f"/proc/self/{name}", text)


def _die_with(parent: int) -> None:
    """Kill this process when its parent ends. A change of uid or capabilities undoes this."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _split() -> int:
    """Fork: the calling process becomes the waiter, and pid 1 of the new namespace returns."""
    ended, status = os.pipe()
    init = os.fork()
    if init:
        _wait_outside(init, ended)
    os.close(ended)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # the parent's pid reads as 0 in here; a pipe without a reader shows that it has ended
    poll = select.poll()
    poll.register(status, 0)
    if poll.poll(0):
        os._exit(1)
    return status


def _wait_outside(init: int, ended: int) -> None:
    """Wait for the confined process and end as it ended, without holding its descriptors."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _close_but((ended,))
        _, code = os.waitpid(init, 0)
        data = os.read(ended, 4)
        if len(data) == 4:
            [code] = struct.unpack("=i", data)
        if os.WIFSIGNALED(code):
            number = os.WTERMSIG(code)
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
            os.kill(os.getpid(), number)
        os._exit(os.waitstatus_to_exitcode(code))
    finally:
        os._exit(70)


def _leave_reaper(status: int) -> None:
    """Fork: pid 1 stays as the reaper and the child returns.

    Pid 1 ends once the child has ended, which kills all other processes inside.
    """
    runner = os.fork()
    if not runner:
        os.close(status)
        return
    try:
        # pid 1 receives only signals that it handles; it keeps its capabilities, so that processes
        # without any cannot inspect it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _close_but((status,))
        while True:
            pid, code = os.wait()
            if pid == runner:
                os.write(status, struct.pack("=i", code))
                break
    finally:
        os._exit(0)


# ---- new root ---------------------------------------------------------------------------------

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_RELATIME = 4096, 16384, 1 << 18, 1 << 21
_SCRATCH = ("/tmp", "/var/tmp", "/dev/shm", "/home", "/root")
_PROC_FILES = ("meminfo", "cpuinfo", "stat", "sys", "driver", "devices", "modules", "version")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = [value and value.encode() for value in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), data.encode() or None)
    _checked(result, target)


def _restrict_mount(path: str, flags: int, deep: bool = True) -> None:
    """Add read-only, nosuid, nodev, noexec (their values agree with MOUNT_ATTR_*) to a mount."""
    try:
        at_recursive, at_fdcwd = 0x8000, -100
        attributes = struct.pack("=4Q", flags, 0, 0, 0)
        size = len(attributes)
        _syscall(
            "mount_setattr",
            at_fdcwd,
            path.encode(),
            at_recursive if deep else 0,
            attributes,
            size,
        )
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        # before Linux 5.12: this mount only, and its other flags must be repeated
        has = os.statvfs(path).f_flag
        other = has & 0xF | has & 3072 | (_MS_RELATIME if has & 4096 else 0)
        _mount("none", path, None, _MS_REMOUNT | _MS_BIND | other | flags)


def _new_root(policy: Policy, uid: int, own_pids: bool) -> str:
    """Replace the root by a tmpfs that holds only what the policy names; return the kind of /proc:
    `own`, `host` or `none`. On an OSError the old root is restored.
    """
    _syscall("unshare", _NEWNS)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    before = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _syscall("unshare", _NEWNS)
        try:
            return _build_root(policy, uid, own_pids)
        except BaseException:
            _syscall("setns", before, _NEWNS)
            raise
    finally:
        os.close(before)


def _build_root(policy: Policy, uid: int, own_pids: bool) -> str:
    links: dict[str, str] = {}

    def real(path: str) -> str:
        on_the_way, end = _trace(path)
        links.update(on_the_way)
        return end

    folder = real(policy.folder)
    scratch = dict.fromkeys(real(path) for path in _SCRATCH)
    visible = sorted({real(path) for path in policy.visible}, key=lambda path: path.count("/"))
    devices = dict.fromkeys(real(path) for path in policy.devices)
    for path in policy.listed:
        real(path)

    # the folder is only a mount point: after the pivot the old root, with the folder, is at /old
    quiet = _MS_NOSUID | _MS_NODEV
    _mount("tmpfs", folder, "tmpfs", quiet, "size=16m,nr_inodes=65536,mode=0755")
    for name in ("old", "new", "scratch"):
        os.mkdir(f"{folder}/{name}", 0o755)
    _mount(f"{folder}/new", f"{folder}/new", None, _MS_BIND)
    _syscall("pivot_root", folder.encode(), f"{folder}/old".encode())
    os.chdir("/")

    size = f"size={policy.scratch_bytes},nr_inodes=65536,mode=0755"
    _mount("tmpfs", "/scratch", "tmpfs", quiet, size)
    for path in scratch:
        room = f"/scratch{path}"
        _make(room, is_dir=True)
        os.chmod(room, 0o1777)
        _bind(room, path, quiet)
    bound: list[str] = []
    for path in visible:
        if os.path.exists(f"/old{path}") and not _beneath(path, bound):
            _bind(f"/old{path}", path, quiet | _MS_RDONLY)
            bound.append(path)
    for path in devices:
        if os.path.exists(f"/old{path}"):
            _bind(f"/old{path}", path, _MS_NOSUID | _MS_NOEXEC)
    proc = _new_proc(policy, own_pids)
    if not _beneath("/etc", bound):
        _write_users(policy, uid)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"/new/dev/{name}")
    for path, target in links.items():
        if not _beneath(path, bound) and not os.path.lexists(f"/new{path}"):
            _make(os.path.dirname(f"/new{path}"), is_dir=True)
            os.symlink(target, f"/new{path}")
    _bind(f"/old{folder}", folder, quiet)

    _restrict_mount("/new", quiet | _MS_RDONLY, deep=False)
    os.chdir("/new")
    _syscall("pivot_root", b".", b".")
    mnt_detach = 2
    _syscall("umount2", b".", mnt_detach)
    os.chdir("/")
    return proc


def _bind(source: str, path: str, flags: int) -> None:
    target = f"/new{path}"
    _make(target, is_dir=os.path.isdir(source))
    _mount(source, target, None, _MS_BIND | _MS_REC)
    _restrict_mount(target, flags)


def _make(path: str, is_dir: bool) -> None:
    if is_dir:
        os.makedirs(path, 0o755, exist_ok=True)
    elif not os.path.lexists(path):
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def _beneath(path: str, folders: list[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _trace(path: str) -> tuple[dict[str, str], str]:
    """Resolve a path: the symbolic links on the way, and the real path."""
    links: dict[str, str] = {}
    todo, at, hops = path.split("/"), "", 0
    while todo:
        part = todo.pop(0)
        here = f"{at}/{part}"
        if part in ("", "."):
            continue
        if part == "..":
            at = os.path.dirname(at).rstrip("/")
        elif not os.path.islink(here):
            at = here
        elif (hops := hops + 1) > 40:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        else:
            links[here] = target = os.readlink(here)
            todo = target.split("/") + todo
            at = "" if target.startswith("/") else at
    return links, at or "/"


def _new_proc(policy: Policy, own_pids: bool) -> str:
    """Mount a /proc of the new PID namespace.

    It is read-only unless CUDA is used, which names its threads there. If the mount is refused, the
    host's /proc is used if Landlock can cover it, else only the files about the machine.
    """
    os.mkdir("/new/proc", 0o555)
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    flags |= _MS_RDONLY if policy.cpu_only else 0
    if own_pids:
        try:
            _mount("proc", "/new/proc", "proc", flags)
            # these belong to the machine, not to a process
            for name in ("sys", "sysrq-trigger", "irq", "bus", "fs"):
                if not policy.cpu_only and os.path.exists(f"/new/proc/{name}"):
                    _bind(f"/new/proc/{name}", f"/proc/{name}", flags | _MS_RDONLY)
            return "own"
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EBUSY):
                raise
    if _landlock_abi() > 0:
        _bind("/old/proc", "/proc", flags)
        return "host"
    for name in _PROC_FILES:
        if os.path.exists(f"/old/proc/{name}"):
            _bind(f"/old/proc/{name}", f"/proc/{name}", flags)
    return "none"


def _write_users(policy: Policy, uid: int) -> None:
    """Write /etc/passwd and /etc/group, since libraries look up the user's name."""
    own = uid if os.geteuid() == 0 else os.geteuid()
    _make("/new/etc", is_dir=True)
    for name, line in (
        ("passwd", f"runner:x:{own}:{own}::{policy.folder}:/bin/false\n"),
        ("group", f"runner:x:{own}:\n"),
    ):
        if not os.path.exists(f"/new/etc/{name}"):
            _write(f"/new/etc/{name}", line)


# ---- Landlock ----------------------------------------------------------------------------------

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_BLOCK, _REFER, _TRUNCATE, _IOCTL_DEV = 1 << 6, 1 << 11, 1 << 13, 1 << 14, 1 << 15


def _landlock_abi() -> int:
    """Landlock's ABI version; 0 if the kernel has none, or it is disabled."""
    try:
        return _syscall("landlock_create_ruleset", None, 0, 1)
    except OSError:
        return 0


def _landlock(policy: Policy, abi: int, own_root: bool, proc: str) -> None:
    if abi <= 0:
        raise OSError(errno.ENOSYS, "not in this kernel")
    rights = _REFER - 1
    rights |= _REFER if abi >= 2 else 0
    rights |= _TRUNCATE if abi >= 3 else 0
    rights |= _IOCTL_DEV if abi >= 5 else 0
    # no TCP from ABI 4; from 6 no signals and no abstract sockets out of the domain
    attributes = struct.pack("=3Q", rights, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = _syscall("landlock_create_ruleset", attributes, len(attributes), 0)
    read = _EXECUTE | _READ_FILE | _READ_DIR
    write = rights & ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV)
    of_files = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

    def allow(path: str, wanted: int, pin: bool = False) -> None:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return  # not on this machine
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            wanted &= of_files
        path_beneath = 1
        rule = struct.pack("=Qi", wanted & rights, place)
        _syscall("landlock_add_rule", rules, path_beneath, rule, 0)
        if not pin:
            os.close(place)

    for path in policy.visible:
        allow(path, read)
    for path in policy.listed:
        allow(path, _READ_DIR)
    for path in policy.devices:
        allow(path, _READ_FILE | _WRITE_FILE | _READ_DIR | _TRUNCATE | _IOCTL_DEV)
    allow(policy.folder, write)
    if own_root:
        allow("/", _READ_DIR)
        for path in ("/etc/passwd", "/etc/group"):
            allow(path, read)
        for path in _SCRATCH:
            allow(path, write)
    # a rule applies to an inode; an open descriptor keeps /proc from creating another one.
    # CUDA names its threads in /proc/self/task/*/comm and does not start if it cannot
    allow("/proc/self", read | _WRITE_FILE | _TRUNCATE, pin=True)
    if proc == "own":
        allow("/proc", read | (_WRITE_FILE | _TRUNCATE if policy.nested else 0))
    for name in () if proc == "own" else _PROC_FILES:
        allow(f"/proc/{name}", read, pin=True)
    _syscall("landlock_restrict_self", rules, 0)
    os.close(rules)


# ---- seccomp -----------------------------------------------------------------------------------


def _seccomp(policy: Policy, own_root: bool, own_pids: bool) -> None:
    """Deny calls that reach into other processes or the kernel, and all but local sockets.

    Local sockets are denied too if the old root is visible, where services listen, unless CUDA is
    used, which does not start without them.
    """
    denied = list(_DENIED.values())
    denied += [] if own_root else _WITHOUT_ROOT.values()
    denied += [] if own_pids else _WITHOUT_PIDS.values()
    denied += _ON_CPU.values() if policy.cpu_only else []
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill = (give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x80000000)
    refuse, unknown = ((give, 0, 0, 0x50000 | code) for code in (errno.EPERM, errno.ENOSYS))
    is_x86 = os.uname().machine == "x86_64"
    load_arch, load_number, load_argument = ((load, 0, 0, offset) for offset in (4, 0, 16))

    code = [load_arch, (equal, 1, 0, 0xC000003E if is_x86 else 0xC00000B7), kill, load_number]
    if is_x86:
        code += [(at_least, 0, 1, 0x40000000), refuse]  # the x32 ABI
    for number in denied:
        if number >= 0:
            code += [(equal, 0, 1, number), refuse]
    # glibc falls back to clone, whose flags a filter can read
    code += [(equal, 0, 1, _number("clone3")), unknown]
    if policy.cpu_only:  # it stays on its CPUs, as in a cpuset; an error ends OpenMP's threads
        code += [(equal, 0, 1, _number("sched_setaffinity")), (give, 0, 0, 0x50000)]
    spaces = _NEWNS | _NEWUTS | _NEWIPC | _NEWUSER | _NEWPID | _NEWNET | _NEWCGROUP
    af_unix = 1 if own_root or not policy.cpu_only else 0xFFFFFFFF
    for name, test, yes, no in (
        ("clone", (any_bit, 0, 1, spaces), refuse, allow),
        ("prctl", (equal, 0, 1, 22), refuse, allow),  # PR_SET_SECCOMP
        ("socket", (equal, 0, 1, af_unix), allow, refuse),
    ):
        code += [(equal, 0, 4, _number(name)), load_argument, test, yes, no]
    code.append(allow)
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in code))
    fprog = struct.pack("@HP", len(code), ctypes.addressof(program))
    # all threads; without mitigations that would slow down timed code (default before Linux 5.16)
    set_mode_filter, tsync, spec_allow = 1, 1, 4
    _syscall("seccomp", set_mode_filter, tsync | spec_allow, fprog)


def main() -> None:
    fields = json.loads(sys.argv[1])
    without = tuple(fields.pop("without", ()))
    for name in ("visible", "devices", "listed"):
        fields[name] = tuple(fields[name])
    policy = Policy(**fields)
    confinement = confine(policy, without=without)
    if program := sys.argv[2:]:
        os.execvp(program[0], program)
    json.dump(dataclasses.asdict(confinement), sys.stdout)


if __name__ == "__main__":
    main()
