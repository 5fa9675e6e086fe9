"""Closing the side channel to strangers: CURVE, with keys from files in pyzmq's certificate format.

A deployment has two pairs of keys. With the engines' pair every rank proves itself, to those whom it asks and
to those who ask it; with the routers' pair a router proves itself. A rank lets in whoever has a public key in
its directory (``*.key``), so that one party is shut out by removing its file and starting the engines again.
Nobody sends anything to a rank that cannot prove itself with the engines' secret key.
"""

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

ENGINES = "engines"
ROUTERS = "routers"
_PUBLIC, _SECRET = ".key", ".key_secret"
_DOMAIN = "dfirst"


class CurveKeys(msgspec.Struct, frozen=True):
    """What one party proves itself with, and whom it believes to be a rank."""

    directory: Path
    public_key: bytes
    secret_key: bytes
    engines_public_key: bytes

    def secure_asker(self, socket: "zmq.Socket[bytes]") -> None:
        """Let a socket connect to ranks of this deployment only. Before it connects."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public_key)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.engines_public_key)

    def secure_listener(self, socket: "zmq.Socket[bytes]") -> None:
        """Let a socket take connections from known parties only; needs ``gate`` to run. Before it binds."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public_key)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)
        # With a domain set, nobody is let in while no gate runs.
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def gate(self, context: "zmq.Context[zmq.Socket[bytes]]") -> ThreadAuthenticator:
        """Let in the parties whose public keys lie in the directory now; stop it before the context."""
        gate = ThreadAuthenticator(context)
        gate.configure_curve(_DOMAIN, self.directory)
        gate.start()
        return gate


def read_engine_keys(directory: str) -> CurveKeys:
    """Return what a rank needs; raise ``ValueError`` with one sentence if the files do not give it."""
    return _read(directory, ENGINES)


def read_router_keys(directory: str) -> CurveKeys:
    """Return what a router needs; raise ``ValueError`` with one sentence if the files do not give it."""
    return _read(directory, ROUTERS)


def make_keys(directory: Path) -> list[Path]:
    """Write both pairs and return the files; secret ones are for their owner only.

    Raises ``ValueError`` if there are keys already: running engines may use them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    there = [path for name in (ENGINES, ROUTERS) for path in directory.glob(f"{name}.key*")]
    if there:
        raise ValueError(f"{there[0]} is there already: give another directory, or remove the old keys first")
    written = []
    for name in (ENGINES, ROUTERS):
        with _for_owner_only():
            files = zmq.auth.create_certificates(directory, name)
        written += [Path(file) for file in files]
        written[-2].chmod(0o644)
    return written


@contextlib.contextmanager
def _for_owner_only() -> Iterator[None]:
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _read(directory: str, party: str) -> CurveKeys:
    folder = Path(directory)
    secret_file = folder / f"{party}{_SECRET}"
    public_key, secret_key = _load(secret_file)
    if secret_key is None:
        raise ValueError(
            f"curve keys: {secret_file} holds no secret-key: make keys with `dfirst keys {folder}`"
        )
    if zmq.curve_public(secret_key) != public_key:
        raise ValueError(f"curve keys: the two keys in {secret_file} are no pair: copy the file again, whole")
    for listed in sorted(folder.glob(f"*{_PUBLIC}")):
        _load(listed)
    engines_public_key, _ = _load(folder / f"{ENGINES}{_PUBLIC}")
    if party == ENGINES and engines_public_key != public_key:
        raise ValueError(
            f"curve keys: {ENGINES}{_PUBLIC} and {ENGINES}{_SECRET} in {folder} are of two pairs: copy both"
        )
    return CurveKeys(folder, public_key, secret_key, engines_public_key)


def _load(file: Path) -> tuple[bytes, bytes | None]:
    """Return the keys in a file, each checked to be one."""
    try:
        public_key, secret_key = zmq.auth.load_certificate(file)
    except (OSError, ValueError) as error:
        why = "there is no such file" if not file.exists() else str(error)
        raise ValueError(
            f"curve keys: {file} cannot be read ({why}): make keys with `dfirst keys {file.parent}` on one "
            "host; engines want engines.key, engines.key_secret and routers.key, routers engines.key and "
            "routers.key_secret"
        ) from error
    for kind, key in (("public", public_key), ("secret", secret_key)):
        if key is not None and not _is_key(key):
            raise ValueError(
                f"curve keys: the {kind}-key in {file} is no key of 40 Z85 characters: copy it again"
            )
    return public_key, secret_key


def _is_key(key: bytes) -> bool:
    try:
        return len(key) == 40 and len(z85.decode(key)) == 32
    except (KeyError, ValueError, struct.error):
        return False
