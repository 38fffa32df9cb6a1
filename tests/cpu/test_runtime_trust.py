"""Code is loaded only from where nobody but this user and root can write, and what was checked is what is loaded."""

import contextlib
import ctypes
import os
import shutil
import struct
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cute_kernels.runtime import cache, compile, trust
from cute_kernels.runtime.cache import DiskCache, entry_name
from tests.cpu.tiny_spec import TinySpec
from tests.kit.kernel_place import Place

SPEC = TinySpec()
STRANGER = 12345  # a user and a group that own nothing here

Spoil = Callable[[Path, Path], str]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user, or act as one")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An entry of SPEC as `store` writes it."""
    disk, name = DiskCache(tmp_path_factory.mktemp("sound")), entry_name(SPEC)
    compiled = compile.compile_kernel(SPEC)
    assert disk.store(name, lambda path, symbol: compiled.export_to_c(path, function_name=symbol))
    return (disk.root / f"{name}.so").read_bytes()


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can reach; pytest's directories are closed to others."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


@pytest.fixture
def nested(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """`place` below two directories that belong to the test."""
    place.directory = place.directory / "inner" / "kernels"
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(place.directory))
    return place


@contextlib.contextmanager
def user(number: int) -> Iterator[None]:
    """Runs this process, which is root's, as another user."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(number)
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def plant(directory: Path, data: bytes) -> Path:
    """A sound entry of SPEC in `directory`, as this process would have stored it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    entry = directory / f"{entry_name(SPEC)}.so"
    entry.write_bytes(data)
    return entry


def seen(path: Path) -> tuple[int, int, int, int]:
    """What changes if a file is replaced or written."""
    found = os.lstat(path)
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns


class InMemory:
    """The compiler's result if nothing of it may be kept."""

    def __call__(self) -> None: ...

    def export_to_c(self, path: str, function_name: str) -> None:
        pytest.fail(f"{function_name} was to be kept")


def gets_in_memory(place: Place, *specs: TinySpec) -> str:
    """Requests kernels twice, requires that each is compiled and none kept, and returns the warning that says why.

    Without `specs` the directory itself is wrong, and not even a lock may be made there.
    """
    compiled = []
    untouched = "*.so" if specs else "*"

    def compile_kernel(spec: TinySpec, *options: object, **more: object) -> InMemory:
        compiled.append(spec)
        return InMemory()

    specs = specs or (SPEC, TinySpec(64))
    before = {path: seen(path) for path in place.directory.glob(untouched)}
    with warnings.catch_warnings(record=True) as said, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(compile, "_compile", compile_kernel)
        for spec in 2 * specs:
            assert isinstance(compile.get_kernel(spec), InMemory)
            compile._kernels.clear()
    assert compiled == [*specs, *specs]
    assert {path: seen(path) for path in place.directory.glob(untouched)} == before
    (warning,) = said
    assert warning.category is RuntimeWarning and "CUTE_KERNELS_CACHE_DIR" in str(warning.message)
    return str(warning.message)


def loads(place: Place) -> None:
    """Requires that SPEC comes from disk without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert callable(compile.get_kernel(SPEC))
    assert place.compilations() == 0


# --- what others could change: each function spoils a path, and returns what the warning says of it


def opened(mode: int) -> Spoil:
    def spoil(path: Path, base: Path) -> str:
        path.chmod(mode)
        return f"{path} may be written by other users (mode {mode:04o})"

    return spoil


def given_away(path: Path, base: Path) -> str:
    os.lchown(path, STRANGER, -1)
    return f"{path} belongs to user {STRANGER}"


def linked(path: Path, base: Path) -> str:
    path.rename(base / "elsewhere")
    path.symlink_to(base / "elsewhere")
    return f"{path} is no regular file"


def linked_to_nothing(path: Path, base: Path) -> str:
    path.unlink()
    path.symlink_to(base / "nothing")
    return f"{path} is no regular file"


def remade(make: Callable[[Path], None]) -> Spoil:
    def spoil(path: Path, base: Path) -> str:
        path.unlink()
        make(path)
        return f"{path} is no regular file"

    return spoil


def link_that_others_could_replace(path: Path, base: Path) -> str:
    """Both ends are sound, but not the link between them."""
    loose = base / "loose"
    loose.mkdir()
    linked(path, base)
    path.rename(loose / "link")
    path.symlink_to(loose / "link")
    return opened(0o777)(loose, base)


def link_of_another_user(path: Path, base: Path) -> str:
    """In a sticky directory the link's owner can replace it, wherever it leads now."""
    link_that_others_could_replace(path, base)
    (base / "loose").chmod(0o1777)
    return given_away(base / "loose" / "link", base)


def above(levels: int, spoil: Spoil) -> Spoil:
    """Whoever may write a directory further up may put another one in this place."""
    return lambda path, base: spoil(path.parents[levels - 1], base)


MODES = (0o777, 0o775, 0o757, 0o720, 0o1777)
DIRECTORIES = [
    *(pytest.param(opened(mode), id=f"{mode:o}") for mode in MODES),
    *(pytest.param(above(2, opened(mode)), id=f"below {mode:o}") for mode in (0o777, 0o757)),
    link_that_others_could_replace,
    pytest.param(given_away, marks=as_root),
    pytest.param(above(1, given_away), marks=as_root, id="below another user's"),
    pytest.param(link_of_another_user, marks=as_root),
]
FILES = [
    *(pytest.param(opened(mode), id=f"{mode:o}") for mode in (0o666, 0o664, 0o646)),
    *(pytest.param(remade(make), id=make.__name__) for make in (os.mkfifo, os.mkdir)),
    linked,
    linked_to_nothing,
    pytest.param(given_away, marks=as_root),
]


@pytest.mark.parametrize("spoil", DIRECTORIES)
def test_a_directory_that_others_could_change_is_refused(
    nested: Place, sound: bytes, tmp_path: Path, spoil: Spoil
) -> None:
    plant(nested.directory, sound)
    expected = spoil(nested.directory, tmp_path)
    said = gets_in_memory(nested)
    assert expected in said
    # nobody should follow such advice for /tmp
    assert ("chmod go-w" in said) == ("may be written" in expected and "1777" not in expected)


@pytest.mark.parametrize("suffix", [".so", ".lock"])
@pytest.mark.parametrize("spoil", FILES)
def test_a_file_that_others_could_change_is_refused(
    place: Place, sound: bytes, tmp_path: Path, spoil: Spoil, suffix: str
) -> None:
    """The target of a link is neither loaded, nor truncated, nor created."""
    entry = plant(place.directory, sound)
    path = entry.rename(entry.with_suffix(suffix))
    expected = spoil(path, tmp_path)
    said = gets_in_memory(place, SPEC)
    assert expected in said
    assert suffix == ".lock" or "may be written" not in expected or f"rm -r {entry}" in said
    assert not (tmp_path / "nothing").exists()
    assert spoil is not linked or (path.is_symlink() and (tmp_path / "elsewhere").read_bytes() == sound)


def test_nothing_is_made_below_a_directory_that_others_may_write(nested: Place) -> None:
    base = nested.directory.parents[1]
    base.mkdir()
    base.chmod(0o777)
    gets_in_memory(nested)
    assert list(base.iterdir()) == []


def test_directory_below_a_sticky_one_loads(nested: Place, sound: bytes) -> None:
    """In /tmp everybody may write, but nobody may rename another user's files."""
    plant(nested.directory, sound)
    nested.directory.parent.chmod(0o1777)
    loads(nested)


def test_directory_through_a_link_loads(place: Place, sound: bytes, tmp_path: Path) -> None:
    plant(tmp_path / "elsewhere", sound)
    place.directory.symlink_to("elsewhere/../elsewhere")
    loads(place)


@as_root
def test_owner_of_the_root_directory_may_own_what_leads_to_the_cache(
    nested: Place, sound: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a user namespace the host's root has another number, which other users share: it may not own the cache."""
    lstat = os.lstat
    fields = list(lstat("/"))
    fields[4] = STRANGER
    slash = os.stat_result(fields)
    monkeypatch.setattr(os, "lstat", lambda path, **how: slash if path == "/" else lstat(path, **how))
    plant(nested.directory, sound)
    os.chown(nested.directory.parent, STRANGER, -1)
    assert DiskCache(nested.directory).load(entry_name(SPEC)) is not None
    os.chown(nested.directory, STRANGER, -1)
    assert f"{nested.directory} belongs to user {STRANGER}" in gets_in_memory(nested)


def test_links_in_a_circle_are_no_directory(place: Place) -> None:
    place.directory.symlink_to(place.directory)
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        assert callable(compile.get_kernel(SPEC))


@pytest.mark.parametrize("private", [True, False])
def test_parent_of_a_private_group_loads(
    nested: Place, sound: bytes, private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With umask 002, for users who each have their own group, the group may write ~/.cache."""
    monkeypatch.setattr(trust, "_is_group_of_this_user", lambda found: private)
    plant(nested.directory, sound)
    nested.directory.parent.chmod(0o775)
    if private:
        loads(nested)
    else:
        assert f"{nested.directory.parent} may be written" in gets_in_memory(nested)


@pytest.mark.parametrize(
    "group_name, members, expected",
    [("ann", [], True), ("ann", ["ann"], True), ("ann", ["ann", "bob"], False), ("users", [], False)],
)
def test_private_group_is_named_as_its_only_member(
    group_name: str, members: list[str], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import grp
    import pwd

    fields = list(os.stat(tmp_path))
    fields[5] = 1000
    found = os.stat_result(fields)
    ann = pwd.struct_passwd(("ann", "x", 1000, 1000, "", "/home/ann", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda number: ann)
    monkeypatch.setattr(grp, "getgrgid", lambda number: grp.struct_group((group_name, "x", number, members)))
    assert trust._is_group_of_this_user(found) == expected
    fields[5] = 1001  # a group that is not this user's own
    assert not trust._is_group_of_this_user(os.stat_result(fields))


def test_parent_with_an_access_list_is_not_private(
    nested: Place, sound: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list lets another user write, and its mask shows as the bits of a group that has no other member."""
    monkeypatch.setattr(trust, "_is_group_of_this_user", lambda found: True)
    plant(nested.directory, sound)
    parent = nested.directory.parent
    nobody = 0xFFFFFFFF
    owner, named, group, mask, others = (
        (1, 7, nobody),
        (2, 7, STRANGER),
        (4, 5, nobody),
        (16, 7, nobody),
        (32, 5, nobody),
    )
    entries = b"".join(struct.pack("<HHI", *entry) for entry in (owner, named, group, mask, others))
    try:
        os.setxattr(parent, "system.posix_acl_access", struct.pack("<I", 2) + entries)
    except OSError as error:
        pytest.skip(f"this file system has no access lists ({error})")
    assert parent.stat().st_mode & 0o777 == 0o775
    assert f"{parent} may be written" in gets_in_memory(nested)


def test_group_of_root_is_not_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run users of any number in group 0, and no database lists them."""
    fields = list(os.stat(tmp_path))
    fields[5] = 0
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert not trust._is_group_of_this_user(os.stat_result(fields))


# --- entries and locks


def test_damaged_entry_through_a_link_is_neither_removed_nor_written(place: Place, tmp_path: Path) -> None:
    target = plant(tmp_path / "elsewhere", b"not an entry")
    place.directory.mkdir(mode=0o700)
    (place.directory / target.name).symlink_to(target)
    gets_in_memory(place, SPEC)
    assert target.read_bytes() == b"not an entry"


def test_load_says_what_it_refuses(place: Place, sound: bytes) -> None:
    """A read-only cache has no lock that would report it."""
    plant(place.directory, sound).chmod(0o666)
    with pytest.warns(RuntimeWarning, match="may be written by other users"):
        assert DiskCache(place.directory).load(entry_name(SPEC)) is None


def test_other_entries_are_kept_beside_one_that_is_refused(place: Place, sound: bytes) -> None:
    plant(place.directory, sound).chmod(0o666)
    gets_in_memory(place, SPEC)
    for _ in range(2):
        compile.get_kernel(TinySpec(64))
        compile._kernels.clear()
    assert place.compilations() == 1


def test_lock_keeps_what_it_holds(place: Place) -> None:
    place.directory.mkdir(mode=0o700)
    lock = place.directory / f"{entry_name(SPEC)}.lock"
    lock.write_text("kept")
    with DiskCache(place.directory).lock(entry_name(SPEC)) as writable:
        assert writable
    assert lock.read_text() == "kept"


def test_scratch_that_is_a_link_is_removed_and_not_followed(place: Place, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    place.directory.mkdir(mode=0o700)
    name = entry_name(SPEC)
    (place.directory / f".{name}.link").symlink_to(tmp_path / "elsewhere")
    (place.directory / f".{name}.killed").mkdir()
    (place.directory / f".{name}.killed" / "inner").symlink_to(tmp_path / "elsewhere")
    with DiskCache(place.directory).lock(name):
        assert place.files() == []
    assert (tmp_path / "elsewhere" / "file").exists()


# --- whose it is, and its modes


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o002], ids=oct)
def test_modes_do_not_follow_the_umask(nested: Place, umask: int) -> None:
    os.umask(umask)
    compile.get_kernel(SPEC)
    modes = {path.suffix: path.stat().st_mode & 0o7777 for path in nested.directory.iterdir()}
    assert modes == {".so": 0o644, ".lock": 0o600}
    for path in (nested.directory, *nested.directory.parents[:2]):
        assert path.stat().st_mode & 0o7777 == 0o700
    compile._kernels.clear()
    compile.get_kernel(SPEC)
    assert nested.compilations() == 1


@as_root
@pytest.mark.parametrize("number", [0, STRANGER])
def test_read_only_cache_of_root_loads(place: Place, sound: bytes, public: Path, number: int) -> None:
    """An image of a container has such a cache: filled when it was built, used by whoever runs in it."""
    entry = plant(public / "kernels", sound)
    entry.chmod(0o444)
    entry.parent.chmod(0o555)
    disk = DiskCache(entry.parent)
    assert disk.load(entry_name(SPEC)) is not None  # also import what the entry needs while this user can read it
    with user(number), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert disk.load(entry_name(SPEC)) is not None


@as_root
def test_user_keeps_nothing_in_the_cache_of_root(place: Place, sound: bytes, public: Path) -> None:
    entry = plant(public / "kernels", sound)
    entry.parent.chmod(0o755)
    with user(STRANGER), pytest.warns(RuntimeWarning, match="cannot be kept"):
        with DiskCache(entry.parent).lock(entry_name(TinySpec(64))) as writable:
            assert not writable


@as_root
@pytest.mark.parametrize("owner, trusted", [(STRANGER, True), (STRANGER + 1, False)])
def test_user_loads_what_is_his_own(
    place: Place, sound: bytes, public: Path, owner: int, trusted: bool, recwarn: pytest.WarningsRecorder
) -> None:
    entry = plant(public / "kernels", sound)
    entry.parent.chmod(0o755)
    assert DiskCache(entry.parent).load(entry_name(SPEC)) is not None
    for path in (entry, entry.parent):
        os.chown(path, owner, -1)
    with user(STRANGER):
        assert (DiskCache(entry.parent).load(entry_name(SPEC)) is not None) == trusted
    assert len(recwarn) == (not trusted)


# --- what was checked is what is loaded


@pytest.mark.parametrize("suffix", [".so", ".o"])
def test_file_that_changes_after_the_check_changes_nothing(
    place: Place, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if suffix == ".o":
        monkeypatch.setattr(cache, "_link", lambda object_file: None)
    compile.get_kernel(SPEC)
    (entry,) = place.directory.glob(f"*{suffix}")
    is_sealed = cache._is_sealed

    def check_then_change(data: bytes) -> bool:
        sealed = is_sealed(data)
        entry.write_bytes(b"another's code")
        return sealed

    monkeypatch.setattr(cache, "_is_sealed", check_then_change)
    assert DiskCache(place.directory).load(entry_name(SPEC)) is not None
    assert entry.read_bytes() == b"another's code"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_second_library_is_not_taken_for_the_first(tmp_path: Path) -> None:
    """The loader takes a library of a known name for the one that it has, so no name may come twice."""
    found, names, descriptors = [], set(), set()
    for number in range(4):
        source, library = tmp_path / f"{number}.c", tmp_path / f"{number}.so"
        source.write_text(f"int number(void) {{ return {number}; }}\n")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        with trust.private_path(library.read_bytes(), ".so") as path:
            names.add(path)
            descriptors.add(os.readlink(path))
            found.append(ctypes.CDLL(str(path)))
    assert [library.number() for library in found] == [0, 1, 2, 3]
    assert len(names) == 4
    assert len(descriptors) == 1  # their numbers are equal, so a number cannot serve as a name


def test_private_path_is_closed_to_others_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_SHARED_MEMORY", str(tmp_path))
    open_before = os.listdir("/proc/self/fd")
    with trust.private_path(b"data", ".o") as path:
        assert path.read_bytes() == b"data" and path.suffix == ".o"
        assert path.parent.parent == tmp_path
        assert path.parent.stat().st_mode & 0o7777 == 0o700 and path.parent.stat().st_uid == os.geteuid()
    assert list(tmp_path.iterdir()) == []
    assert os.listdir("/proc/self/fd") == open_before


def test_private_path_avoids_directories_that_others_could_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loose, temporary, spare = (tmp_path / name for name in ("loose", "temporary", "spare"))
    for path in (loose, temporary, spare):
        path.mkdir()
    loose.chmod(0o777)
    monkeypatch.setattr(trust, "_SHARED_MEMORY", str(loose))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with trust.private_path(b"data", ".so", spare) as path:
        assert path.parent.parent == temporary and path.read_bytes() == b"data"
    temporary.chmod(0o777)
    with trust.private_path(b"data", ".so", spare) as path:
        assert path.parent.parent == spare and path.read_bytes() == b"data"
    with pytest.raises(OSError, match="may be written by other users"):
        with trust.private_path(b"data", ".so"):
            pass


def test_kernel_loads_where_no_temporary_directory_is(
    place: Place, sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    monkeypatch.setattr(trust, "_SHARED_MEMORY", str(tmp_path / "none"))
    plant(place.directory, sound)
    loads(place)
    assert place.files() == [f"{entry_name(SPEC)}.so"]


def test_load_takes_milliseconds(place: Place, sound: bytes) -> None:
    """A compilation takes seconds, so 50 ms are far from both, even on a busy machine."""
    plant(place.directory, sound)
    disk, name = DiskCache(place.directory), entry_name(SPEC)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        assert disk.load(name) is not None
        seconds.append(time.perf_counter() - start)
    assert sorted(seconds)[10] < 0.05
