"""Runs a program under limits, once for each input. A script: started by sandbox.py, not imported.

    python confined.py COMMAND_FD REPORT_FD RESULT_FD

The first line of commands is the job, each further one an input; reports and results are objects,
one a line.
Modules are loaded once, then every input gets two new processes. The outer one opens the
namespaces, forks, waits, and reports how the inner one ended; the inner one takes the limits on
itself and runs the program. Reports: "refused" (a limit cannot be had: nothing was run), "confined"
(what holds; the program starts now), "ended" (exit code, signal, seconds of CPU). Results, from the
inner process, which alone a program could forge: "value" (what a function returned), "failed" (what
was raised).

What holds and what does not is said in sandbox.py. Needs the standard library alone.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder: its code.py is not the standard library's

import builtins
import ctypes
import gc
import json
import os
import resource
import signal
import stat
import traceback
from collections.abc import Callable
from typing import Any

_CLONE_NEWNS, _CLONE_NEWUSER = 0x0002_0000, 0x1000_0000
_CLONE_NEWPID, _CLONE_NEWNET = 0x2000_0000, 0x4000_0000
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 1, 8, 38
_CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION_3 = 0x2008_0522
_MS_REC, _MS_PRIVATE = 0x4000, 0x4_0000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_FIRST_UID = 2_000_000_000  # nobody's: process limits are counted by user, so each run is its own
_FIRST_SMALL_UID = 61_440
_STACK = 64 << 20  # bytes; deep recursion is ordinary in contest code
_RECURSION = 50_000
_PRELUDE = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *(
        "statistics",
        "itertools",
        "functools",
        "operator",
        "io",
        "sys",
        "json",
        "builtins",
        "typing",
    ),
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SINKS = ("/dev/null", "/dev/stdout", "/dev/stderr")
_REFUSED = (
    *("os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system"),
    *("subprocess.Popen", "pty.spawn", "os.kill", "os.killpg", "resource.prlimit"),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr", "os.chflags"),
)

Report = Callable[[dict[str, Any]], None]


class _RefusedError(Exception):
    """A limit cannot be set here."""


def main() -> None:
    report_fd, result_fd = int(sys.argv[2]), int(sys.argv[3])
    libc = ctypes.CDLL(None, use_errno=True)
    _die_with_parent(libc)
    with os.fdopen(int(sys.argv[1]), "rb") as commands:
        job = json.loads(commands.readline())
        sys.path.extend(job["packages"])
        prelude = _prelude()
        gc.freeze()  # what is loaded here is never garbage; runs need not look at it, or copy it
        # readline, not iteration: nothing of a later input is read ahead
        while line := commands.readline():
            outer = os.fork()
            if outer == 0:
                commands.close()
                text = json.loads(line)
                _confined_fork(libc, job["limits"], text, _reporter(report_fd))
                break
            os.waitpid(outer, 0)
        else:
            return
    os.close(report_fd)
    _run(job, text, prelude, _reporter(result_fd))


def _confined_fork(libc: ctypes.CDLL, limits: dict[str, int], text: str, report: Report) -> None:
    """Returns in the inner process only, confined, with `text` as its standard input."""
    _die_with_parent(libc)
    uid = _own_uid()
    running = _tasks_of(uid)
    namespaces = _open_namespaces(libc)
    inner = os.fork()
    if inner == 0:
        _become_stdin(text)
        try:
            report({"confined": _confine(libc, limits, namespaces, uid, running)})
        except _RefusedError as refusal:
            report({"refused": str(refusal)})
            os._exit(0)
        return
    _, status, usage = os.wait4(inner, 0)
    report(
        {
            "ended": {
                "exit": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                "cpu_seconds": usage.ru_utime + usage.ru_stime,
            }
        }
    )
    os._exit(0)


def _reporter(descriptor: int) -> Report:
    def report(record: dict[str, Any]) -> None:
        data = json.dumps(record, default=_plain).encode() + b"\n"
        while data:
            data = data[os.write(descriptor, data) :]

    return report


def _die_with_parent(libc: ctypes.CDLL) -> None:
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG cannot be set")


def _become_stdin(text: str) -> None:
    """As a file, which ends where it ends however often it is read."""
    descriptor = os.memfd_create("stdin")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(text.encode("utf-8", errors="surrogatepass"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, 0)
    os.close(descriptor)


# ---- confinement ---------------------------------------------------------------------------------


def _open_namespaces(libc: ctypes.CDLL) -> bool:
    """Own mounts, network and processes from the next fork on; False if the kernel refuses."""
    flags = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        return bool(libc.unshare(flags) == 0)
    if libc.unshare(flags | _CLONE_NEWUSER) != 0:
        return False
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def _confine(
    libc: ctypes.CDLL, limits: dict[str, int], namespaces: bool, uid: int, running: int
) -> dict[str, bool]:
    """Takes the limits on this process, for good, and says which protections hold.

    The program runs as `uid`, who has `running` threads already.

    Raises:
        _RefusedError: one of the limits cannot be set.
    """
    read_only = namespaces and _make_read_only(libc)
    keep_reading = os.geteuid() == 0 and not _everyone_can_read_python()
    _limit("RLIMIT_CORE", 0)
    _limit("RLIMIT_CPU", limits["cpu_seconds"])
    _limit("RLIMIT_AS", limits["memory_bytes"])
    _limit("RLIMIT_FSIZE", limits["file_bytes"])
    _limit("RLIMIT_NOFILE", limits["open_files"])
    _limit("RLIMIT_NPROC", running + limits["processes"])
    _soft_stack()
    if os.geteuid() == 0:
        _drop_root(libc, uid, keep_reading)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise _RefusedError("PR_SET_NO_NEW_PRIVS cannot be set")
    _die_with_parent(libc)  # again: it is lost when the user changes
    return {"namespaces": namespaces, "read_only_files": read_only}


def _limit(name: str, value: int) -> None:
    number = getattr(resource, name)
    try:
        resource.setrlimit(number, (value, value))
    except (OSError, ValueError) as error:
        present = resource.getrlimit(number)
        raise _RefusedError(
            f"{name} cannot be set to {value} (it is {present}): {error}"
        ) from error


def _soft_stack() -> None:
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    soft = _STACK if hard == resource.RLIM_INFINITY else min(_STACK, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


def _make_read_only(libc: ctypes.CDLL) -> bool:
    """Every file system of this mount namespace; False on kernels before 5.12."""
    if libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None) != 0:
        return False
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)  # set, clear, propagation, fd
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    done = libc.syscall(
        *(ctypes.c_long(_SYS_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD), b"/"),
        *(ctypes.c_uint(_AT_RECURSIVE), ctypes.byref(attributes), size),
    )
    return bool(done == 0)


def _own_uid() -> int:
    """The user to run as: for root, whom no limit on processes binds, one that nobody else is."""
    if os.geteuid() != 0:
        return os.geteuid()
    with open("/proc/self/uid_map", encoding="ascii") as file:
        ranges = [[int(number) for number in line.split()] for line in file]
    wanted = _FIRST_UID + os.getpid()
    if any(first <= wanted < first + count for first, _, count in ranges):
        return wanted
    return _FIRST_SMALL_UID + os.getpid() % 4096  # a container that maps 65,536 users


def _tasks_of(uid: int) -> int:
    """Threads that `uid` runs already: the limit counts them too."""
    if uid >= _FIRST_UID:
        return 0
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == uid:
                    count += len(os.listdir(f"/proc/{entry.name}/task"))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
    return count


def _everyone_can_read_python() -> bool:
    """Whether another user could reach what this Python imports."""
    for entry in [sys.executable, *sys.path]:
        path = os.path.realpath(entry)
        if not os.path.isdir(path):
            path = os.path.dirname(path)
        while path != "/":
            if os.path.exists(path) and not os.stat(path).st_mode & stat.S_IXOTH:
                return False
            path = os.path.dirname(path)
    return True


def _drop_root(libc: ctypes.CDLL, uid: int, keep_reading: bool) -> None:
    """Becomes `uid`, without privileges but, with `keep_reading`, that of reading every file."""
    if keep_reading:
        libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        raise _RefusedError(
            f"no limit on processes binds root, and it cannot become another user here ({error}); "
            "run as an ordinary user"
        ) from error
    if keep_reading:
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        bit = 1 << _CAP_DAC_READ_SEARCH
        sets = (ctypes.c_uint32 * 6)(bit, bit, 0, 0, 0, 0)  # effective, permitted, inheritable
        if libc.capset(ctypes.byref(header), ctypes.byref(sets)) != 0:
            raise _RefusedError(
                f"started by root, the program runs as another user, who cannot read Python "
                f"({sys.executable}); install it where everyone can read it, or run as an ordinary "
                "user"
            )


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook: what no solution needs raises PermissionError in the program itself."""
    if event == "open":
        path, _, flags = arguments
        writes = isinstance(flags, int) and flags & _WRITING
        if writes and isinstance(path, (str, bytes)) and os.fsdecode(path) not in _SINKS:
            raise PermissionError("the sandbox lets a program write to standard output only")
    elif event == "socket.__new__":
        if arguments[1] != 1:  # AF_UNIX: event loops make pairs of these
            raise PermissionError("the sandbox has no network")
    elif event.startswith("socket."):
        raise PermissionError("the sandbox has no network")
    elif event in _REFUSED or event.startswith("shutil."):
        raise PermissionError(f"the sandbox does not allow {event}")


# ---- the program ---------------------------------------------------------------------------------


def _run(job: dict[str, Any], text: str, prelude: dict[str, Any], report: Report) -> None:
    """Returns when the program has; what it raises goes to standard error, and to `report`."""
    sys.argv = ["solution.py"]
    sys.setrecursionlimit(_RECURSION)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)  # the same on every Python
    sys.excepthook = _excepthook(report)
    sys.addaudithook(_refuse)
    function = job["function"]
    # The prelude stands where builtins do: a name the program does not define is not taken for
    # its function.
    names: dict[str, Any] = {
        "__name__": "solution" if function else "__main__",
        "__builtins__": prelude,
    }
    exec(compile(job["source"], "solution.py", "exec"), names)
    if function is not None:
        owner = names.get("Solution")
        target = names[function] if owner is None else getattr(owner(), function)
        arguments = [json.loads(line) for line in text.split("\n")]
        report({"value": target(*arguments)})


def _prelude() -> dict[str, Any]:
    """The builtins, and what LiveCodeBench imports for a solution: modules and their names."""
    modules = {name: __import__(name) for name in _PRELUDE}
    names = dict(vars(builtins))
    for module in modules.values():
        public = getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")])
        names.update({name: getattr(module, name) for name in public})
    return {**names, **modules}


def _excepthook(report: Report) -> Callable[[type[BaseException], BaseException, Any], None]:
    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        traceback.print_exception(kind, error, trace, limit=-4)
        report({"failed": kind.__name__, "message": str(error)[:300]})

    return hook


def _plain(value: Any) -> Any:
    """Numbers and arrays of other libraries as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"returned a {type(value).__name__}, need what JSON can hold")


if __name__ == "__main__":
    main()
