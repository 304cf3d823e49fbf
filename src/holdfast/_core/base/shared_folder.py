"""Files in folders that other users may write to, such as those of roll calls.

An attacker may create a link, a FIFO or a huge file under any name there, or swap a folder for another. So a
folder is opened once, without following links, and must belong to this user or root; files are accessed only
relative to its descriptor. A file is created exclusively under a random name, readable by this user only, and
then renamed. Only regular files of this user or root, of bounded size, are read.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from io import BufferedReader
from typing import Self

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC


class SharedFolder:
    """An open folder. Use it as a context manager. All methods raise OSError."""

    def __init__(
        self, base: str, *names: str, make: bool = False, private: bool = True, of_anyone: bool = False
    ) -> None:
        """Open `base/names[0]/...`. Links are followed in `base` only, which the user chose.

        make: create missing folders.
        private: new folders and files are accessible to this user only; otherwise by the umask.
        of_anyone: accept folders and files of other users, too.
        """
        self.path = os.path.join(base, *names)
        self._mode = 0o600 if private else 0o666
        self._uids = None if of_anyone else {0, os.geteuid()}
        if make:
            os.makedirs(base, exist_ok=True)
        self._fd = os.open(base, _FOLDER)
        try:
            for name in names:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700 if private else 0o777, dir_fd=self._fd)
                inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self._fd)
                os.close(self._fd)
                self._fd = inner
                if not self._is_own(os.fstat(inner)):
                    raise PermissionError(errno.EPERM, "it belongs to another user", self.path)
        except BaseException:
            self.close()
            raise

    def _is_own(self, status: os.stat_result) -> bool:
        if self._uids is not None and status.st_uid not in self._uids:
            # A file server may give this user's files to another one (root_squash).
            with suppress(OSError):
                self._uids.add(self._made_by())
        return self._uids is None or status.st_uid in self._uids

    def _made_by(self) -> int:
        """Return the owner's uid of files that this process creates here."""
        name, fd = self._new()
        try:
            return os.fstat(fd).st_uid
        finally:
            os.close(fd)
            os.unlink(name, dir_fd=self._fd)

    def _new(self) -> tuple[str, int]:
        name = f".{secrets.token_hex(8)}.part"
        return name, os.open(name, _FILE | os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode, dir_fd=self._fd)

    def write(self, name: str, data: bytes, exclusive: bool = False) -> None:
        """Write a file atomically, replacing an existing one; `exclusive`: raise FileExistsError instead."""
        temporary, fd = self._new()
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            here = {"src_dir_fd": self._fd, "dst_dir_fd": self._fd}
            if exclusive:
                os.link(temporary, name, **here, follow_symlinks=False)
            else:
                os.replace(temporary, name, **here)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=self._fd)

    def append(self, name: str, data: bytes) -> int:
        """Append to a regular file of this user, created if missing; return its size."""
        flags = _FILE | os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        fd = self._open_plain(
            name, flags, links=1
        )  # a file with a second hard link may be any file of this user
        with os.fdopen(fd, "ab") as file:
            file.write(data)
            return file.tell()

    def _open_plain(self, name: str, flags: int, links: int = 0) -> int:
        """Open a regular file of an accepted user, with this number of hard links if `links` is given."""
        fd = os.open(name, flags, self._mode, dir_fd=self._fd)
        try:
            # Before `os.fdopen`, which raises for a folder and leaves its descriptor open.
            status = os.fstat(fd)
            if (
                not stat.S_ISREG(status.st_mode)
                or links not in (0, status.st_nlink)
                or not self._is_own(status)
            ):
                raise PermissionError(errno.EPERM, "no plain file of this user's", name)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def rename(self, name: str, other: str) -> None:
        os.replace(name, other, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def list(self) -> list[str]:
        return os.listdir(self._fd)

    def open(self, name: str) -> BufferedReader:
        """Open a regular file for reading. Raises OSError for other file types and other users' files."""
        # O_NONBLOCK, because opening a FIFO would wait for its other end.
        return os.fdopen(self._open_plain(name, _FILE | os.O_RDONLY | os.O_NONBLOCK), "rb")

    def read(self, name: str, most: int) -> bytes:
        """Return the content of a regular file, opened as by `open`. Raises OSError if it is larger than
        `most` bytes."""
        with self.open(name) as file:
            if os.fstat(file.fileno()).st_size > most:
                raise OSError(errno.EFBIG, "it is too large", name)
            return file.read(most)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
