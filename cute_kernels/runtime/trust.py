"""The files that code may be loaded from: those that nobody but this user and root can write or replace.

A file is checked after it is opened, not by name: a name may mean another file a moment later. Directories are checked
by name, since the same check refuses every user who could make these names mean something else.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shlex
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SHARED_MEMORY = "/dev/shm"  # to make and remove a directory takes 0.02 ms there, 4 ms on ext4
_MOST_LINKS = 40  # most links on one path: the limit of Linux
_MFD_CLOEXEC, _MFD_NOEXEC_SEAL = 1, 8


class Untrusted(OSError):
    """A file or directory that another user could have written or replaced.

    Attributes:
        remedy: a command that repairs it, or "" if this user cannot.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


def check_directory(path: Path) -> None:
    """Checks that nobody but this user and root can write a directory or replace it.

    Raises:
        Untrusted: somebody else can.
        OSError: there is no such directory.
    """
    real = check_path(path)
    found = os.lstat(real)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), real)
    _check_owner(real, found, {0, os.geteuid()})
    if found.st_mode & 0o022:
        # a sticky directory such as /tmp is shared on purpose: its mode is right, but entries do not belong there
        raise _writable(real, found, "" if found.st_mode & stat.S_ISVTX else f"chmod go-w {shlex.quote(real)}")


def check_path(path: Path) -> str:
    """Checks every directory and link on the way to `path`, and `path` itself.

    Each must belong to this user or root. Others may write a directory only if it is sticky, so that they cannot rename
    files of this user; a group may only if this user is its one member.

    Returns:
        The path without links.

    Raises:
        Untrusted: another user could replace what is on the path.
        OSError: there is no such path.
    """
    root = os.lstat("/").st_uid  # the host's root has another number in a user namespace; the owner of / owns all below
    owners = {0, root, os.geteuid()}
    here, links = "/", 0
    absolute = path if path.is_absolute() else Path.cwd() / path  # cwd() fails if the current directory was removed
    todo = list(reversed(absolute.parts))
    while todo:
        part = todo.pop()
        place = os.path.dirname(here) if part == ".." else os.path.join(here, part)
        found = os.lstat(place)
        if stat.S_ISLNK(found.st_mode):
            _check_owner(place, found, owners)
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            todo.extend(reversed(Path(os.readlink(place)).parts))
            continue
        if stat.S_ISDIR(found.st_mode):
            _check_owner(place, found, owners)
            _check_replaceable(place, found)
        here = place
    return here


def make_directory(path: Path) -> None:
    """Makes a directory and its missing parents, with access for this user only, and checks it.

    Raises:
        Untrusted: as `check_directory`; nothing is made below a directory that others may write.
        OSError: it cannot be made.
    """
    missing = []
    found = path
    while not found.exists():
        missing.append(found)
        found = found.parent
    check_path(found)
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process has just made it
            directory.mkdir(mode=0o700)
    check_directory(path)


def open_file(path: Path, flags: int) -> int:
    """Opens a regular file, not a link, that nobody but this user and root can write.

    Args:
        path: in a directory that `check_directory` accepts.
        flags: those of `os.open`; a new file has mode 0600.

    Returns:
        The file descriptor, which the caller closes.

    Raises:
        Untrusted: it is not a regular file, or somebody else can write it.
        OSError: it cannot be opened.
    """
    remedy = f"rm -r {shlex.quote(str(path))}"
    try:
        # O_NONBLOCK: to open a pipe would wait for its other end
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a directory, a socket
            raise Untrusted(f"{path} is no regular file", remedy) from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Untrusted(f"{path} is no regular file", remedy)
        _check_owner(str(path), found, {0, os.geteuid()}, remedy)
        if found.st_mode & 0o022:
            raise _writable(str(path), found, remedy)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def private_path(data: bytes, suffix: str, *spare: Path) -> Iterator[Path]:
    """Yields a new path to a file with content `data` that only this process can reach. Both are gone at exit.

    The data is in memory, so a temporary directory that forbids execution (noexec) works too. The path is a link in a
    new directory, because dlopen does not read a file whose path it knows: it returns the library that it has loaded
    from there. /proc/self/fd/N would be such a path as soon as N is used again for another file.

    Args:
        data: content of the file.
        suffix: suffix of the file's name.
        spare: directories for the link if neither /dev/shm nor the temporary directory can be used.

    Raises:
        Untrusted: others could replace every directory that exists for the link.
        OSError: no directory exists for the link.
    """
    descriptor = _memory_file()
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        with _private_directory(*spare) as directory:
            path = Path(directory) / f"kernel{suffix}"
            path.symlink_to(f"/proc/self/fd/{descriptor}")
            yield path
    finally:
        os.close(descriptor)


def _private_directory(*spare: Path) -> tempfile.TemporaryDirectory[str]:
    failure = OSError()
    for find in (lambda: _SHARED_MEMORY, tempfile.gettempdir, *(lambda path=path: path for path in spare)):
        try:
            base = check_path(Path(find()))
            return tempfile.TemporaryDirectory(prefix="cute_kernels.", dir=base, ignore_cleanup_errors=True)
        except OSError as error:
            failure = error
    raise failure


def _memory_file() -> int:
    # called in the C library, which has it since glibc 2.27: a Python built with an older one lacks os.memfd_create
    library = ctypes.CDLL(None, use_errno=True)
    # the seal forbids exec, not dlopen; Linux may require it (vm.memfd_noexec), and before 6.3 it does not know it
    for flags in (_MFD_CLOEXEC | _MFD_NOEXEC_SEAL, _MFD_CLOEXEC):
        descriptor = library.memfd_create(b"cute_kernels", flags)
        if descriptor >= 0:
            return descriptor
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "memfd_create")


def _check_owner(path: str, found: os.stat_result, owners: set[int], remedy: str = "") -> None:
    if found.st_uid not in owners:
        user = f"user {found.st_uid}, who is neither root nor this user ({os.geteuid()})"
        raise Untrusted(f"{path} belongs to {user}", remedy)


def _check_replaceable(path: str, found: os.stat_result) -> None:
    if found.st_mode & stat.S_ISVTX or not found.st_mode & 0o022:
        return
    if not found.st_mode & 0o002 and not _has_access_list(path) and _is_group_of_this_user(found):
        return
    raise _writable(path, found, f"chmod go-w {shlex.quote(path)}")


def _writable(path: str, found: os.stat_result, remedy: str) -> Untrusted:
    mode = f"mode {stat.S_IMODE(found.st_mode):04o}"
    return Untrusted(f"{path} may be written by other users ({mode})", remedy)


def _has_access_list(path: str) -> bool:
    # if there is an access list, the group's bits apply to all users that it names
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except OSError:
        return False  # a file system without access lists


def _is_group_of_this_user(found: os.stat_result) -> bool:
    """Whether this user is the group's only member: many systems make a group for each user and set umask 002."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    # group 0 never counts: containers run users of any number in it, and no database lists them
    own = found.st_gid != 0 and found.st_gid == user.pw_gid and group.gr_name == user.pw_name
    return own and set(group.gr_mem) <= {user.pw_name}
