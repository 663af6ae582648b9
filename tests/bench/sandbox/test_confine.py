"""The sandbox by its effects: small programs run confined and try what they must not reach."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patcher.bench.runner import confine
from patcher.bench.sandbox import policy as sandbox

ROOT = Path(__file__).resolve().parents[3]
SECRET = "a-secret-of-the-judge"
WITHOUT = {
    "all": (),
    "no namespaces": ("namespaces",),
    "no own /proc": ("proc",),
    "namespaces only": ("landlock", "seccomp"),
    "Landlock only": ("namespaces", "seccomp"),
}
FOUND = {name: sandbox.detect(without) for name, without in WITHOUT.items()}
every_rung = pytest.mark.parametrize("mode", ["all", "no namespaces"])


def needs(mode: str, *parts: str) -> None:
    for part in parts:
        if not any(name.startswith(part) for name in FOUND[mode].in_force):
            pytest.skip(f"{part} is not in force: {FOUND[mode].describe()}")


class Box:
    """Runs Python code confined, in a new folder each time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.marker = f"marker-{uuid.uuid4().hex}"

    def policy(self, **changes: Any) -> confine.Policy:
        folder = self.path / f"run-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        plain = sandbox.runner_policy(folder, device="cpu", memory_bytes=1 << 30)
        return dataclasses.replace(plain, **changes)

    def command(self, code: str, mode: str = "all", **changes: Any) -> list[str]:
        policy = self.policy(**changes)
        python = [sys.executable, "-IS", "-c", f"import os, json\n{code}", self.marker]
        return sandbox.command(policy, *python, without=WITHOUT[mode])

    def run(self, code: str, mode: str = "all", **changes: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(code, mode, **changes),
            env={"PATH": os.defpath},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def says(self, code: str, mode: str = "all", **changes: Any) -> Any:
        """What the code prints as JSON."""
        done = self.run(code, mode, **changes)
        assert done.returncode == 0, f"{FOUND[mode].describe()}: {done.returncode} {done.stderr}"
        return json.loads(done.stdout)

    def alive(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_bytes()
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if self.marker.encode() in line and state != "Z":
                    found.append(int(entry.name))
        return found

    def dies_out(self) -> bool:
        deadline = time.monotonic() + 20
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.alive()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    for pid in made.alive():
        os.kill(pid, signal.SIGKILL)


TRY = """
def attempt(action):
    try:
        return [True, str(action())]
    except OSError as error:
        return [False, error.strerror]
"""


every_way = pytest.mark.parametrize("mode", WITHOUT)


@every_way
def test_files_outside_are_out_of_reach(box: Box, mode: str) -> None:
    needs(mode, "mount namespace" if mode == "namespaces only" else "Landlock")
    secret = box.path / "secret"
    secret.write_text(SECRET)
    told = box.says(
        f"""{TRY}
paths = ["/etc/shadow", {str(secret)!r}, "/proc/{os.getpid()}/environ",
         "/proc/{os.getpid()}/cmdline", "/proc/{os.getpid()}/mem", "/proc/1/environ",
         "/proc/1/root/etc/shadow", {str(ROOT / "bench/judge/judge.py")!r}]
print(json.dumps({{path: attempt(lambda: open(path, "rb").read(9)) for path in paths}}))""",
        mode,
    )
    assert not [path for path, (read, _) in told.items() if read], FOUND[mode].describe()


def test_no_other_process_is_seen(box: Box) -> None:
    needs("all", "PID namespace", "own /proc")
    told = box.says("print(json.dumps([os.getpid(), os.listdir('/proc')]))")
    assert {name for name in told[1] if name.isdigit()} == {"1", str(told[0])}


@pytest.mark.parametrize("mode", ["all", "no namespaces", "no own /proc"])
def test_own_proc_works(box: Box, mode: str) -> None:
    told = box.says(
        """
import re
maps, facts = open("/proc/self/maps").read(), open("/proc/meminfo").read()
print(json.dumps(["python" in maps, "MemTotal" in facts, len(os.listdir("/proc/self/fd"))]))""",
        mode,
    )
    assert told[:2] == [True, True]


@every_way
def test_there_is_no_network(box: Box, mode: str) -> None:
    needs(mode, *{"namespaces only": ["network"], "Landlock only": ["Landlock"]}.get(mode, []))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        told = box.says(
            f"""{TRY}
import socket
def family(name):
    return lambda: socket.socket(getattr(socket, name), socket.SOCK_DGRAM).close()
def connect():
    socket.create_connection(("127.0.0.1", {port}), 5)
names = ["AF_INET", "AF_INET6", "AF_NETLINK", "AF_VSOCK"]
print(json.dumps([attempt(connect), *(attempt(family(name)) for name in names)]))
socket.socketpair()""",
            mode,
        )
    assert told[0][0] is False, FOUND[mode].describe()
    if "seccomp" in FOUND[mode].in_force:
        assert [done for done, _ in told] == [False] * 5


@every_way
def test_a_service_of_the_host_is_not_reached_through_its_socket(box: Box, mode: str) -> None:
    needs(mode, "network" if mode == "namespaces only" else "Landlock")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(str(box.path / "service"))
        server.listen()
        abstract.bind(f"\0{box.marker}")
        abstract.listen()
        told = box.says(
            f"""{TRY}
import socket
def connect(name):
    return lambda: socket.socket(socket.AF_UNIX).connect(name)
print(json.dumps([attempt(connect("\\0{box.marker}")),
                  attempt(connect({str(box.path / "service")!r}))]))""",
            mode,
        )
    assert told[0][0] is False, FOUND[mode].describe()
    if mode != "Landlock only":  # which knows no sockets with a path
        assert told[1][0] is False


@every_way
def test_no_signal_leaves(box: Box, mode: str) -> None:
    needs(mode, "PID" if mode == "namespaces only" else "Landlock")
    told = box.says(f"{TRY}\nprint(json.dumps(attempt(lambda: os.kill({os.getpid()}, 0))))", mode)
    assert told[0] is False, FOUND[mode].describe()


STATE = """
import resource
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
limits = {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1]
          for name in ("CORE", "CPU", "NOFILE", "FSIZE", "DATA", "AS", "NPROC", "SIGPENDING",
                       "MSGQUEUE", "RTPRIO")}
print(json.dumps({
    **{name: status[name].split() for name in ("NoNewPrivs", "CapPrm", "CapEff", "CapBnd",
                                               "Seccomp", "Uid", "Groups")},
    "limits": limits, "session": os.getsid(0), "pid": os.getpid(),
    "oom": open("/proc/self/oom_score_adj").read().strip(),
    "spaces": {name: os.readlink("/proc/self/ns/" + name)
               for name in ("mnt", "pid", "ipc", "net", "uts")},
    "mounts": [line.split()[4:6] for line in open("/proc/self/mountinfo")],
    "names": [os.uname().nodename, os.getcwd()]}))"""


@every_rung
def test_limits_and_privileges(box: Box, mode: str) -> None:
    told = box.says(STATE, mode, cpu_s=77, open_files=99)
    assert (told["NoNewPrivs"], told["Seccomp"]) == (["1"], ["2"])
    assert {int(told[name][0], 16) for name in ("CapPrm", "CapEff", "CapBnd")} == {0}
    assert told["limits"]["CORE"] == 0
    assert (told["limits"]["CPU"], told["limits"]["NOFILE"]) == (77, 99)
    assert [told["limits"][name] for name in ("SIGPENDING", "MSGQUEUE", "RTPRIO")] == [64, 0, 0]
    assert told["oom"] == "1000"
    # seen from inside of a PID namespace, the session's leader, the waiter, has no number
    assert told["session"] == (0 if mode == "all" else told["pid"])
    if "own user" in FOUND[mode].in_force:
        assert "0" not in told["Uid"]
        assert told["Groups"] == []


def test_namespaces_are_new_and_mounts_are_read_only(box: Box) -> None:
    needs("all", *confine._R1)
    policy = box.policy()
    code = f"import os, json{STATE}"
    command = sandbox.command(policy, sys.executable, "-IS", "-c", code)
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for name, space in told["spaces"].items():
        assert space != os.readlink(f"/proc/self/ns/{name}")
    assert told["names"] == ["sandbox", policy.folder]
    writable = {policy.folder, *confine._SCRATCH}
    assert [place for place, _ in told["mounts"]].count("/") == 1
    for place, options in told["mounts"]:
        given = options.split(",")
        assert "nosuid" in given, place
        assert place in policy.devices or "nodev" in given, place
        assert place in (*policy.devices, *writable) or "ro" in given, place


def test_a_foreign_instruction_set_has_no_calls(box: Box) -> None:
    needs("all", "seccomp")
    if os.uname().machine != "x86_64":
        pytest.skip("for x86_64")
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000" "cd80" "c3"))  # getpid by int 0x80
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()"""
    # SIGSEGV from a kernel without 32-bit calls
    assert box.run(code).returncode in (-signal.SIGSYS, -signal.SIGSEGV)


@every_rung
def test_writing_works_inside_and_fails_outside(box: Box, mode: str) -> None:
    needs(mode, "Landlock")
    outside = [str(box.path / "new"), "/usr/new", "/etc/new", "/new", f"{sys.prefix}/new"]
    told = box.says(
        f"""{TRY}
def write(path):
    return lambda: open(path, "w").write("x")
os.makedirs("a/b"); os.rename("a/b", "c"); os.symlink("c", "d"); open("e", "w").write("kept")
os.truncate("e", 2); open("/dev/null", "w").write("x")
print(json.dumps([attempt(write(path)) for path in {outside!r}]))""",
        mode,
    )
    assert [done for done, _ in told] == [False] * 5, FOUND[mode].describe()
    [kept] = box.path.glob("run-*/e")
    assert kept.read_text() == "ke"
    assert not any(os.path.exists(path) for path in outside)


def test_the_next_run_finds_nothing_of_the_last(box: Box) -> None:
    needs("all", "mount namespace")
    places = [f"{place}/{box.marker}" for place in ("/tmp", "/dev/shm", "/var/tmp", "/root")]
    box.says(f"[open(path, 'w').write('x') for path in {places!r}]; print(1)")
    assert not any(os.path.exists(path) for path in places)
    assert box.says(f"print(json.dumps([os.path.exists(path) for path in {places!r}]))") == (
        [False] * 4
    )


@every_rung
def test_calls_into_other_processes_and_the_kernel_are_denied(box: Box, mode: str) -> None:
    needs(mode, "seccomp")
    denied = confine._DENIED | confine._ON_CPU
    numbers = {name: number for name, number in denied.items() if number >= 0}
    told = box.says(
        f"""
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
def errno(*numbers):
    ctypes.set_errno(0)
    result = libc.syscall(*(ctypes.c_long(number) for number in numbers))
    return ctypes.get_errno() if result == -1 else 0
told = {{name: errno(number, 0, 0, 0, 0, 0, 0) for name, number in {numbers!r}.items()}}
told["clone of a user namespace"] = errno({confine._OTHERS["clone"]}, 0x10000000 | 17, 0, 0, 0, 0)
told["a second filter"] = errno({confine._OTHERS["prctl"]}, 22, 2, 0, 0, 0)
if os.uname().machine == "x86_64":
    told["x32"] = errno(0x40000000 | 39)
clone3 = errno({confine._OTHERS["clone3"]}, 0, 0)
print(json.dumps([told, clone3]))""",
        mode,
    )
    assert {name: code for name, code in told[0].items() if code != 1} == {}
    assert told[1] == 38  # ENOSYS: the C library falls back


def test_system_call_numbers_are_those_of_the_headers() -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if os.uname().machine != "x86_64" or not header.is_file():
        pytest.skip("no header of x86_64")
    words = [line.split() for line in header.read_text().splitlines()]
    known = {w[1][5:]: int(w[2]) for w in words if len(w) == 3 and w[1].startswith("__NR_")}
    ours = confine._DENIED | confine._WITHOUT_ROOT | confine._WITHOUT_PIDS | confine._OTHERS
    ours |= confine._ON_CPU
    assert {name: known[name] for name in ours if name in known} == {
        name: number for name, number in ours.items() if name in known
    }


@every_rung
def test_a_fork_bomb_is_bounded_and_the_group_dies(box: Box, mode: str) -> None:
    needs(mode, "limit on processes")
    code = """
import time
made = 0
for _ in range(400):
    try:
        child = os.fork()
    except OSError:
        break
    if not child:
        time.sleep(100)
    made += 1
print(made, flush=True)
time.sleep(100)"""
    command = box.command(code, mode, processes=40)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with process:
        assert process.stdout is not None
        assert 0 < int(process.stdout.readline()) <= 40
        assert len(box.alive()) > 10
        os.killpg(process.pid, signal.SIGKILL)
    assert box.dies_out(), FOUND[mode].describe()


DAEMON = """
import time
ready, said = os.pipe()
if not os.fork():
    os.setsid()
    if not os.fork():
        os.write(said, b"x")
        time.sleep(100)
    os._exit(0)
os.read(ready, 1)
print("up", flush=True)
"""


def test_a_daemon_dies_with_the_run(box: Box) -> None:
    needs("all", "PID namespace")
    done = subprocess.run(box.command(DAEMON), stdout=subprocess.DEVNULL, check=False, timeout=60)
    assert done.returncode == 0
    # nothing to wait for: the waiter ends after the namespace has
    assert not box.alive()


def test_a_daemon_dies_when_the_group_is_killed(box: Box) -> None:
    needs("all", "PID namespace")
    command = box.command(f"{DAEMON}\ntime.sleep(100)")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        os.killpg(process.pid, signal.SIGKILL)
    assert box.dies_out()


def test_where_a_group_is_all_nobody_leaves_it(box: Box) -> None:
    needs("no namespaces", "seccomp")
    code = f"""{TRY}
import time
print(json.dumps([attempt(os.setsid), attempt(lambda: os.setpgid(0, 0))]), flush=True)
if not os.fork():
    print(json.dumps([attempt(os.setsid), attempt(lambda: os.setpgid(0, 0))]), flush=True)
    time.sleep(100)
os.wait()"""
    command = box.command(code, "no namespaces")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with process:
        assert process.stdout is not None
        for _ in range(2):
            told = json.loads(process.stdout.readline())
            assert [done for done, _ in told] == [False, False]
        os.killpg(process.pid, signal.SIGKILL)
    assert box.dies_out()


@pytest.mark.parametrize("mode", ["all", "no namespaces", "no own /proc"])
def test_modes_of_files_outside_cannot_be_changed(box: Box, mode: str) -> None:
    needs(mode, "seccomp")
    secret = box.path / "secret"
    secret.write_text(SECRET)
    places = [str(secret), sys.executable, os.__file__, "/usr/bin/env", "/etc/passwd"]
    before = [os.stat(place).st_mode for place in places]
    told = box.says(
        f"""{TRY}
print(json.dumps([attempt(lambda: os.chmod(path, os.stat(path).st_mode & 0o7777))
                  for path in {places!r}]))""",
        mode,
    )
    assert [done for done, _ in told[:4]] == [False] * 4
    assert [os.stat(place).st_mode for place in places] == before


@every_rung
def test_sizes_and_memory_are_limited(box: Box, mode: str) -> None:
    told = box.says(
        f"""{TRY}
def fill(path, size):
    return lambda: [file.write(b"x" * size) for file in [open(path, "wb", buffering=0)]]
def grow():
    try:
        return len(bytearray(2 << 30))
    except MemoryError:
        return "no"
print(json.dumps([attempt(fill("big", 1 << 21)), attempt(fill("big", 1 << 21)), grow()]))""",
        mode,
        file_bytes=1 << 20,
    )
    [big] = box.path.glob("run-*/big")
    assert big.stat().st_size == 1 << 20
    assert told[2] == "no"


def test_scratch_is_small(box: Box) -> None:
    needs("all", "mount namespace")
    told = box.says(
        f"""{TRY}
def fill(path):
    def run():
        with open(path, "wb", buffering=0) as file:
            for _ in range(64):
                file.write(bytes(1 << 16))
    return run
print(json.dumps([attempt(fill(path)) for path in ("/tmp/a", "/dev/shm/a")]))""",
        scratch_bytes=1 << 20,
    )
    assert told == [[False, "No space left on device"]] * 2


def test_a_program_may_be_named_by_a_path_with_dots(tmp_path: Path) -> None:
    """An environment beside the folder that one works in: `../../.venv/bin/python`."""
    away = tmp_path / "one" / "two"
    away.mkdir(parents=True)
    folder = tmp_path / "run"
    folder.mkdir()
    python = os.path.join(away, os.path.relpath(sys.executable, away))
    command = sandbox.command(
        sandbox.runner_policy(folder, device="cpu"), python, "-IS", "-c", "print(6 * 7)"
    )
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert found.stdout == "42\n", found.stderr


@every_rung
def test_descriptors_are_not_inherited(box: Box, mode: str) -> None:
    with open(ROOT / "README.md") as file:
        done = subprocess.run(
            box.command(f"{TRY}\nprint(attempt(lambda: os.read({file.fileno()}, 9)))", mode),
            pass_fds=(file.fileno(),),
            capture_output=True,
            text=True,
            check=True,
        )
    assert "Bad file descriptor" in done.stdout


@every_rung
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("os._exit(3)", 3),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
        ("os.abort()", -signal.SIGABRT),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("raise SystemExit(0)", 0),
        ("[os.fork() or os._exit(7) for _ in range(20)]; os._exit(5)", 5),
    ],
)
def test_the_end_is_told_truly(box: Box, mode: str, code: str, expected: int) -> None:
    assert box.run(code, mode).returncode == expected, FOUND[mode].describe()


ZYGOTE = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import confine
told = json.loads(sys.argv[2])
child = os.fork()
if not child:
    for name in ("visible", "devices", "listed"):
        told[name] = tuple(told[name])
    found = confine.confine(confine.Policy(**told), without=tuple(json.loads(sys.argv[3])))
    open("/proc/self/environ", "rb").close()
    caps = [line.split()[1] for line in open("/proc/self/status") if line.startswith("Cap")]
    print(json.dumps([found.rung, os.getcwd(), [int(cap, 16) for cap in caps]]), flush=True)
    time.sleep(float(sys.argv[4]))
    os._exit(4)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def zygote(box: Box, mode: str, sleep: float) -> list[str]:
    copied = box.path / "copied"
    copied.mkdir()
    shutil.copy(confine.__file__, copied)
    policy = json.dumps(dataclasses.asdict(box.policy()))
    python = [sys.executable, "-IS", "-c", ZYGOTE, str(copied), policy]
    return [*python, json.dumps(WITHOUT[mode]), str(sleep), box.marker]


@every_rung
def test_a_forked_child_confines_itself_with_the_file_alone(box: Box, mode: str) -> None:
    done = subprocess.run(zygote(box, mode, 0), capture_output=True, text=True, check=True)
    inside, code = done.stdout.splitlines()
    [folder] = box.path.glob("run-*")
    rung, cwd, capabilities = json.loads(inside)
    assert (rung, cwd, code) == (FOUND[mode].rung, str(folder), "4")
    assert set(capabilities) == {0}


@every_rung
def test_who_kills_the_parent_takes_the_sandbox_along(box: Box, mode: str) -> None:
    command = zygote(box, mode, 100)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(box.alive()) > 1
        process.kill()
    assert box.dies_out(), FOUND[mode].describe()


def test_killing_the_waiter_alone_is_enough(box: Box) -> None:
    needs("all", "PID namespace")
    command = box.command("import time; print(1, flush=True); time.sleep(100)")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    assert box.dies_out()


FIND = f"""
import importlib.util, sys
found = [name for name in ("bench", "patcher", "hotspot", "integrate") if __import__(
    "importlib.util").util.find_spec(name)]
seen = [path for path in {[str(ROOT / name) for name in ("bench", "kernels", "tests")]!r}
        if os.path.exists(path)]  # the checkout's own folder may hold the environment
for place in sys.path:
    if os.path.isdir(place):
        seen += [name for name in os.listdir(place) if "patcher" in name or name == "bench"]
"""


def test_the_project_is_not_in_sight(box: Box) -> None:
    needs("all", "mount namespace")
    python = [sys.executable, "-c", f"import os, json{FIND}print(json.dumps([found, seen]))"]
    command = sandbox.command(box.policy(), *python)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], []]


@every_rung
def test_torch_computes_on_two_threads(box: Box, mode: str) -> None:
    code = """
import torch
torch.set_num_threads(2)
print(int((torch.ones(600, 600) @ torch.ones(600, 600)).sum()))
"""
    policy = box.policy(memory_bytes=8 << 30)
    done = subprocess.run(
        sandbox.command(policy, sys.executable, "-c", code, without=WITHOUT[mode]),
        env={"PATH": os.defpath, "HOME": policy.folder, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "216000000\n", f"{FOUND[mode].describe()}: {done.stderr}"


@every_way
def test_timers_are_few(box: Box, mode: str) -> None:
    """A stopped process's timers cost whoever runs when they expire 5 us each, of CPU time."""
    told = box.says(
        f"""{TRY}
import ctypes, signal
libc = ctypes.CDLL(None, use_errno=True)
made = sum(libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0 for _ in range(1000))
kept = sum(libc.timerfd_create(1, 0) >= 0 for _ in range(1000))
print(json.dumps([made, kept, attempt(lambda: signal.setitimer(signal.ITIMER_REAL, 60))[0],
                  signal.alarm(60)]))""",
        mode,
    )
    assert told[0] <= 64
    if "seccomp" in FOUND[mode].in_force:
        assert told == [0, 0, False, 0xFFFFFFFF]


@every_rung
def test_threads_that_openmp_would_bind_run_where_they_may(box: Box, mode: str) -> None:
    needs(mode, "seccomp")
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    source = box.path / "threads.cpp"
    source.write_text("""
#include <omp.h>
#include <sched.h>
#include <cstdio>
int main() {
  int sum = 0;
#pragma omp parallel num_threads(2) reduction(+ : sum)
  sum += omp_get_thread_num() + 1;
  cpu_set_t one, now;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  sched_getaffinity(0, sizeof now, &now);
  const int before = CPU_COUNT(&now), done = sched_setaffinity(0, sizeof one, &one);
  sched_getaffinity(0, sizeof now, &now);
  std::printf("%d %d %d\\n", sum, done, CPU_COUNT(&now) == before);
}""")
    subprocess.run(["g++", "-fopenmp", str(source), "-o", str(box.path / "threads")], check=True)
    policy = sandbox.runner_policy(
        Path(box.policy().folder), device="cpu", also=[box.path / "threads"]
    )
    done = subprocess.run(
        sandbox.command(policy, str(box.path / "threads"), without=WITHOUT[mode]),
        env={"PATH": os.defpath, "OMP_PROC_BIND": "close"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "3 0 1\n", done.stderr


def test_cuda_computes(box: Box) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    code = """
import torch
print(int((torch.ones(600, 600, device="cuda") @ torch.ones(600, 600, device="cuda")).sum()))
"""
    policy = sandbox.runner_policy(Path(box.policy().folder), device="cuda")
    done = subprocess.run(
        sandbox.command(policy, sys.executable, "-c", code),
        env={"PATH": os.defpath, "HOME": policy.folder},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "216000000\n", f"{FOUND['all'].describe()}: {done.stderr}"


@every_rung
def test_a_compiler_works(box: Box, mode: str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = box.path / "build"
    folder.mkdir()
    (folder / "unit.cpp").write_text("#include <vector>\nint f() { return std::vector(3, 1)[0]; }")
    compiler = [
        "g++",
        "-O1",
        "-fopenmp",
        "-shared",
        "-fPIC",
        "-std=c++17",
        "unit.cpp",
        "-o",
        "u.so",
    ]
    done = subprocess.run(
        sandbox.command(sandbox.build_policy(folder), *compiler, without=WITHOUT[mode]),
        env={"PATH": os.environ["PATH"], "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{FOUND[mode].describe()}: {done.stderr}"
    assert (folder / "u.so").is_file()


def test_an_ordinary_user_gets_a_user_namespace(box: Box, tmp_path_factory: Any) -> None:
    """Seen from root only with a Python that an ordinary user may run."""
    python = "/usr/bin/python3"
    if os.geteuid() != 0 or not os.access(python, os.X_OK):
        pytest.skip("for root, and a system Python")
    version = subprocess.run(
        [python, "-c", "import sys; print(sys.version_info >= (3, 11))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if version != "True\n":
        pytest.skip("the system's Python is older than 3.11")
    place = Path("/tmp") / box.marker
    place.mkdir(mode=0o755)
    try:
        shutil.copy(confine.__file__, place / "confine.py")
        (place / "run").mkdir()
        os.chown(place / "run", 54321, 54321)
        policy = dataclasses.replace(
            box.policy(), folder=str(place / "run"), visible=("/usr", "/lib", "/lib64", "/bin")
        )
        command = [python, "-IS", str(place / "confine.py"), json.dumps(dataclasses.asdict(policy))]
        run = {
            "user": 54321,
            "group": 54321,
            "extra_groups": [],
            "capture_output": True,
            "text": True,
            "check": True,
        }
        found = json.loads(subprocess.run(command, **run).stdout)
        if "user namespace" not in found["in_force"]:
            pytest.skip(f"not permitted here: {found['missing']}")
        told = {**json.loads(command[3]), "without": ["landlock", "seccomp"]}
        code = f"""import os, json, signal
{TRY}
os.kill(1, signal.SIGINT)
print(json.dumps([os.getuid(), os.path.exists("/etc/shadow"),
                  attempt(lambda: open("/proc/1/environ"))[0]]))"""
        command = [*command[:3], json.dumps(told), python, "-IS", "-c", code]
        done = subprocess.run(command, **run)
    finally:
        shutil.rmtree(place)
    assert json.loads(done.stdout) == [54321, False, False]
    assert "limit on processes" in found["in_force"]


def test_what_is_refused_is_told(box: Box) -> None:
    """In a sandbox whose filter refuses namespaces, as many containers do."""
    needs("no namespaces", "Landlock", "seccomp")
    inner = sandbox.command(box.policy())
    command = sandbox.command(box.policy(), *inner, without=("namespaces", "landlock"))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    found = confine.Confinement(
        told["rung"], tuple(told["in_force"]), tuple((part, why) for part, why in told["missing"])
    )
    assert found.describe().startswith("R0 + Landlock (ABI ")
    assert "namespaces" in found.describe()
    refused = [part for part, why in found.missing if why == "Operation not permitted"]
    assert {*confine._R1, "seccomp"} <= set(refused)
    assert not found.isolated


def test_with_everything_refused_it_is_r0_and_says_so() -> None:
    found = sandbox.detect(("namespaces", "landlock", "seccomp"))
    assert (found.rung, found.isolated) == ("R0", False)
    assert found.describe().startswith("R0: namespaces, Landlock")
    assert "switched off" in found.describe()


def test_rungs_are_named_by_what_is_in_force() -> None:
    attempts = confine._Attempts(())
    attempts.in_force += [*confine._R0]
    assert attempts.result().rung == "R0"
    attempts.in_force += [*confine._R1]
    assert attempts.result().rung == "R1"
    attempts.in_force += ["Landlock (ABI 4)", "seccomp"]
    assert attempts.result().describe() == "R2 (namespaces, Landlock (ABI 4), seccomp)"
    attempts.in_force.remove("network namespace")
    attempts.missing.append(("network namespace", "Operation not permitted"))
    assert attempts.result().rung == "R0"
    assert (
        attempts.result()
        .describe()
        .endswith("seccomp: network namespace not permitted (Operation not permitted)")
    )


def test_a_folder_with_something_hidden_is_shown_entry_by_entry(tmp_path: Path) -> None:
    for name in ("lib/site/bench", "lib/site/numpy", "lib/other", "bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "lib64").symlink_to("lib")
    visible: dict[str, None] = {}
    listed: dict[str, None] = {}
    root = os.path.realpath(tmp_path)
    sandbox._show(root, {f"{root}/lib/site/bench"}, visible, listed)
    assert [path.removeprefix(root) for path in visible] == [
        "/bin",
        "/lib/other",
        "/lib/site/numpy",
    ]
    assert [path.removeprefix(root) for path in listed] == ["", "/lib", "/lib/site", "/lib64"]


def test_links_are_followed_as_the_kernel_does(tmp_path: Path) -> None:
    root = os.path.realpath(tmp_path)
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "lib").symlink_to("usr/lib")
    (tmp_path / "again").symlink_to(f"{root}/lib/../lib")
    links, end = confine._trace(f"{root}/again/./x")
    assert end == f"{root}/usr/lib/x"
    assert links == {f"{root}/again": f"{root}/lib/../lib", f"{root}/lib": "usr/lib"}
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        confine._trace(f"{root}/loop")
