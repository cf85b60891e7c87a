"""macOS's CPython in place of Linux's: names, platform, files of the kernel, counters, commands.

A process that starts with this folder and the root of the repository on PYTHONPATH is macOS's from
its first import on, and so are its children: ``sitecustomize.py`` calls :func:`substitute`. The C
library stays Linux's.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import io
import mmap
import os
import platform
import resource
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import time
import types
from collections.abc import Callable

MEMORY, PAGE = 8 << 30, 16384
RELEASE = "26.1"
HIDDEN = ("/proc", "/sys")
# Beginnings of names that CPython has on Linux and not on macOS, which has posix_spawn.
MISSING = {
    os: (
        "posix_fadvise", "POSIX_FADV_", "posix_fallocate", "fdatasync", "sched_getaffinity",
        "sched_setaffinity", "sched_getparam", "sched_setparam", "sched_getscheduler",
        "sched_setscheduler", "sched_rr_get_interval", "sched_param", "SCHED_BATCH", "SCHED_IDLE",
        "SCHED_RESET_ON_FORK", "O_DIRECT", "O_TMPFILE", "O_NOATIME", "O_PATH", "O_LARGEFILE",
        "O_RSYNC", "memfd_create", "MFD_", "getxattr", "setxattr", "listxattr", "removexattr",
        "XATTR_", "eventfd", "EFD_", "splice", "SPLICE_", "copy_file_range", "pidfd_open",
        "PIDFD_", "P_PIDFD", "getrandom", "GRND_", "pipe2", "RWF_", "getresuid", "getresgid",
        "setresuid", "setresgid", "setns", "unshare", "CLONE_", "timerfd_", "TFD_", "ST_APPEND",
        "ST_MANDLOCK", "ST_NOATIME", "ST_NODEV", "ST_NODIRATIME", "ST_NOEXEC", "ST_RELATIME",
        "ST_SYNCHRONOUS", "ST_WRITE",
    ),
    time: ("CLOCK_BOOTTIME", "CLOCK_TAI", "pthread_getcpuclockid"),
    mmap: (
        "MADV_DONTFORK", "MADV_DOFORK", "MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_MERGEABLE",
        "MADV_UNMERGEABLE", "MADV_REMOVE", "MADV_HWPOISON", "MADV_DONTDUMP", "MADV_DODUMP",
        "MADV_COLD", "MADV_PAGEOUT", "MAP_DENYWRITE", "MAP_EXECUTABLE", "MAP_POPULATE",
        "MAP_STACK",
    ),
    resource: (
        "prlimit", "RUSAGE_THREAD", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_RTTIME",
        "RLIMIT_SIGPENDING", "RLIMIT_MSGQUEUE", "RLIMIT_OFILE",
    ),
    select: ("epoll", "EPOLL", "POLLMSG", "POLLRDHUP"),
    signal: (
        "SIGRTM", "SIGPWR", "SIGPOLL", "SIGSTKFLT", "SIGCLD", "sigtimedwait", "sigwaitinfo",
        "pidfd_send_signal",
    ),
    fcntl: (
        "F_NOTIFY", "F_SETSIG", "F_GETSIG", "F_SETLEASE", "F_GETLEASE", "F_SETPIPE_SZ",
        "F_GETPIPE_SZ", "F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_", "F_EXLCK", "F_SHLCK", "DN_",
        "LOCK_MAND", "LOCK_READ", "LOCK_RW", "LOCK_WRITE",
    ),
    socket: (
        "AF_ALG", "AF_CAN", "AF_NETLINK", "AF_PACKET", "AF_TIPC", "AF_VSOCK", "SO_PEERCRED",
        "SO_BINDTODEVICE", "SO_MARK", "SOCK_NONBLOCK", "SOCK_CLOEXEC", "MSG_NOSIGNAL", "TCP_CORK",
        "TCP_DEFER_ACCEPT", "TCP_KEEPIDLE", "TCP_QUICKACK", "TCP_USER_TIMEOUT", "TCP_INFO",
    ),
}  # fmt: skip
# Modules of macOS alone, which call its libraries: of urllib, and of what httpx verifies with.
ONLY_THERE = {
    "_scproxy": ("_get_proxies", "_get_proxy_settings"),
    "truststore._macos": ("_configure_context", "_verify_peercerts_impl"),
}
NO_CACHE, FULL_FSYNC = 48, 51  # F_NOCACHE and F_FULLFSYNC of macOS

uncached: list[str] = []
"""Files whose page cache was switched off."""

Put = Callable[[object, str, object], None]
Take = Callable[[object, str], None]


def pages() -> dict[str, int]:
    """The counters of a Mac in use, in pages; free pages exclude speculative ones."""
    each = MEMORY // PAGE // 100
    return {
        "free": 6 * each,
        "active": 28 * each,
        "inactive": 26 * each,
        "speculative": 2 * each,
        "wired": 20 * each,
        "purgeable": 2 * each,
        "file-backed": 24 * each,
        "anonymous": 32 * each,
        "stored": 40 * each,
        "occupied": 16 * each,
    }


def sysctls() -> dict[str, int | str]:
    """Numbers and texts that the kernel keeps under these names."""
    now = pages()
    return {
        "hw.memsize": MEMORY,
        "hw.pagesize": PAGE,
        "hw.ncpu": 8,
        "hw.physicalcpu": 8,
        "hw.perflevel0.physicalcpu": 4,
        "hw.model": "MacBookPro17,1",
        "hw.optional.arm64": 1,
        "kern.osproductversion": RELEASE,
        "kern.osversion": "25B78",
        "kern.memorystatus_level": 62,
        "kern.memorystatus_vm_pressure_level": 1,
        "iogpu.wired_limit_mb": 0,
        "machdep.cpu.brand_string": "Apple M1",
        "vm.page_free_count": now["free"] + now["speculative"],
        "vm.page_speculative_count": now["speculative"],
        "vm.page_purgeable_count": now["purgeable"],
        "vm.page_pageable_internal_count": now["anonymous"],
        "vm.page_pageable_external_count": now["file-backed"],
        "vm.swapusage": "total = 0.00M  used = 0.00M  free = 0.00M  (encrypted)",
    }


def vm_stat() -> str:
    """Return the text that the command prints."""
    now = pages()
    counts = {
        "Pages free": now["free"],
        "Pages active": now["active"],
        "Pages inactive": now["inactive"],
        "Pages speculative": now["speculative"],
        "Pages throttled": 0,
        "Pages wired down": now["wired"],
        "Pages purgeable": now["purgeable"],
        '"Translation faults"': 172583391,
        "Pages copy-on-write": 9120563,
        "Pages zero filled": 83190427,
        "Pages reactivated": 6210398,
        "Pages purged": 1102987,
        "File-backed pages": now["file-backed"],
        "Anonymous pages": now["anonymous"],
        "Pages stored in compressor": now["stored"],
        "Pages occupied by compressor": now["occupied"],
        "Decompressions": 5193022,
        "Compressions": 8013945,
        "Pageins": 4420193,
        "Pageouts": 90122,
        "Swapins": 0,
        "Swapouts": 0,
    }
    head = f"Mach Virtual Memory Statistics: (page size of {PAGE} bytes)\n"
    return head + "".join(f"{name + ':':<30}{count:>12}.\n" for name, count in counts.items())


def printed(command: list[str]) -> str | None:
    """Return the text that a command of macOS prints; None: Linux runs it, or it fails."""
    name, *words = (os.path.basename(command[0]), *command[1:])
    if name == "vm_stat":
        return vm_stat()
    if name == "ioreg":
        return '+-o AGXAcceleratorG13G  <class AGXAcceleratorG13G>\n    "gpu-core-count" = 8\n'
    if name == "xcode-select":
        return "/Library/Developer/CommandLineTools\n"
    if name == "sw_vers":
        return f"ProductName:\t\tmacOS\nProductVersion:\t\t{RELEASE}\nBuildVersion:\t\t25B78\n"
    if name == "sysctl":
        known, bare = sysctls(), "-n" in words
        names = [word for word in words if not word.startswith("-")]
        if all(word in known for word in names):
            lines = (f"{known[w]}" if bare else f"{w}: {known[w]}" for w in names)
            return "".join(f"{line}\n" for line in lines)
    return None


def sysctlbyname(name: bytes, old, length, new, newlength) -> int:
    """macOS's function. old: None, or a ctypes object or a reference to one."""
    value = sysctls().get(name.decode())
    if value is None:
        ctypes.set_errno(errno.ENOENT)
        return -1
    if name == b"vm.swapusage":  # total, left, used, bytes of a page, encrypted
        data = struct.pack("<QQQII", 0, 0, 0, PAGE, 1)
    elif isinstance(value, int):
        data = value.to_bytes(8 if name == b"hw.memsize" else 4, "little")
    else:
        data = value.encode() + b"\0"
    length = getattr(length, "_obj", length)
    if old is not None:
        if length.value < len(data):
            ctypes.set_errno(errno.ENOMEM)
            return -1
        ctypes.memmove(ctypes.addressof(getattr(old, "_obj", old)), data, len(data))
    length.value = len(data)
    return 0


_open = io.open  # before the kernel's files are hidden


def proc_pid_rusage(pid: int, flavor: int, buffer) -> int:
    """macOS's function, of the record's version 0. buffer: A reference to it."""
    try:
        with _open(f"/proc/{pid}/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except (OSError, IndexError):
        return -1
    buffer._obj.phys_footprint = 4096 * pages
    return 0


def substitute(put: Put = setattr, take: Take = delattr) -> None:
    """Become macOS's Python, with `put` for attributes and `take` for those that it lacks."""
    if sys.platform == "darwin":
        return
    sysconfig.get_config_vars()  # reads a file that has the platform in its name, once
    # The emulator of kernels asks for what is really there.
    put(sys, "emulated_on", (sys.platform, platform.machine()))
    put(sys, "platform", "darwin")
    for module, beginnings in MISSING.items():
        for name in [name for name in vars(module) if name.startswith(beginnings)]:
            take(module, name)
    node, machine = os.uname().nodename, "arm64"
    kernel = ("Darwin", node, "25.1.0", "Darwin Kernel Version 25.1.0", machine)
    put(os, "uname", lambda: os.uname_result(kernel))
    put(platform, "_uname_cache", None)
    put(platform, "mac_ver", lambda *args, **kwargs: (RELEASE, ("", "", ""), machine))
    for name, functions in ONLY_THERE.items():
        module = sys.modules.setdefault(name, types.ModuleType(name))
        vars(module).update(dict.fromkeys(functions, dict))
    put(selectors, "DefaultSelector", selectors.PollSelector)  # kqueue is not Linux's
    _memory(put)
    _files(put)
    _commands(put)


def _memory(put: Put) -> None:
    for name in ("PAGESIZE", "ALLOCATIONGRANULARITY"):
        put(mmap, name, PAGE)
    call = os.sysconf
    known = {"SC_PHYS_PAGES": MEMORY // PAGE, "SC_PAGE_SIZE": PAGE, "SC_PAGESIZE": PAGE}

    def sysconf(name):
        if name == "SC_AVPHYS_PAGES":
            raise ValueError("unrecognized configuration name")
        return known.get(name) or call(name)

    put(os, "sysconf", sysconf)
    usage = resource.getrusage

    def getrusage(who):
        found = tuple(usage(who))
        return resource.struct_rusage((*found[:2], found[2] * 1024, *found[3:]))  # bytes, not KiB

    put(resource, "getrusage", getrusage)

    class Library(ctypes.CDLL):
        """A library; that of the process has :func:`sysctlbyname`."""

        def __init__(self, name=None, *args, **kwargs):
            system = str(name).startswith(("/usr/lib/libSystem", "/usr/lib/libc.", "libc.dylib"))
            super().__init__(None if system else name, *args, **kwargs)
            if self._name is None:
                # A function of Python has attributes, too, such as argtypes.
                self.sysctlbyname = lambda *given: sysctlbyname(*given)
                self.proc_pid_rusage = lambda *given: proc_pid_rusage(*given)

    put(ctypes, "CDLL", Library)


def _files(put: Put) -> None:
    """Hide the kernel's files from Python, and count files that pass the page cache by."""
    link = os.readlink

    def hidden(path) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False
        path = os.fsdecode(path)
        return path in HIDDEN or path.startswith(tuple(f"{folder}/" for folder in HIDDEN))

    def hiding(call):
        def checked(path=".", *args, **kwargs):
            if hidden(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return call(path, *args, **kwargs)

        return checked

    for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink"):
        call = getattr(os, name)
        put(os, name, hiding(call))
        for group in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
            if call in group:
                group.add(getattr(os, name))
    access = os.access
    put(
        os,
        "access",
        lambda path, *args, **kwargs: not hidden(path) and access(path, *args, **kwargs),
    )
    opened = hiding(io.open)
    put(io, "open", opened)
    put(builtins, "open", opened)
    control = fcntl.fcntl

    def controlled(fd, command, *arguments):
        if command == NO_CACHE:
            number = fd if isinstance(fd, int) else fd.fileno()
            return uncached.append(link(f"/proc/self/fd/{number}"))
        if command == FULL_FSYNC:
            return os.fsync(fd)
        return control(fd, command, *arguments)

    put(fcntl, "F_NOCACHE", NO_CACHE)
    put(fcntl, "F_FULLFSYNC", FULL_FSYNC)
    put(fcntl, "fcntl", controlled)


def _commands(put: Put) -> None:
    start = subprocess.Popen.__init__

    def started(self, args, *others, **kwargs):
        if isinstance(args, (list, tuple)) and args:
            text = printed([os.fsdecode(word) for word in args])
            if text is not None:
                args = ["printf", "%s", text]
        start(self, args, *others, **kwargs)

    put(subprocess.Popen, "__init__", started)
    spawn = os.posix_spawn

    def spawned(path, argv, *others, **kwargs):
        if path == "/usr/bin/caffeinate":
            waits = 'while kill -0 "$0" 2>/dev/null; do sleep 0.2; done'
            path, argv = "/bin/sh", ["sh", "-c", waits, argv[argv.index("-w") + 1]]
        return spawn(path, argv, *others, **kwargs)

    put(os, "posix_spawn", spawned)
