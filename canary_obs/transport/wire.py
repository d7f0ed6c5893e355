"""The bytes between an engine and the service: a four-byte header (magic, version), then msgpack."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from canary_obs.errors import WireError
from canary_obs.records import Command, EngineMessage

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 16 << 20

_MAGIC = b"kvc"
_HEADER = _MAGIC + bytes([PROTOCOL_VERSION])
_ENCODER = msgspec.msgpack.Encoder()
_MESSAGES: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

Decoded = TypeVar("Decoded")


def encode(message: EngineMessage | Command) -> bytes:
    """One frame. Raises WireError when it would be larger than MAX_MESSAGE_BYTES or cannot be written."""
    try:
        frame = _HEADER + _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"a {type(message).__name__} cannot be encoded: {error}") from error
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"a {type(message).__name__} of {len(frame)} bytes is over the limit of {MAX_MESSAGE_BYTES}; "
            "send it in smaller parts"
        )
    return frame


def decode_message(frame: bytes) -> EngineMessage:
    """What an engine sent. Raises WireError."""
    return _decode(frame, _MESSAGES)


def decode_command(frame: bytes) -> Command:
    """What the service sent. Raises WireError."""
    return _decode(frame, _COMMANDS)


def _decode(frame: bytes, decoder: msgspec.msgpack.Decoder[Decoded]) -> Decoded:
    size = len(frame)
    if size > MAX_MESSAGE_BYTES:
        raise WireError(f"a frame of {size} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    if size < len(_HEADER) or not frame.startswith(_MAGIC):
        raise WireError(f"a frame of {size} bytes does not start like one of ours; another program sent it")
    version = frame[len(_MAGIC)]
    if version != PROTOCOL_VERSION:
        raise WireError(
            f"protocol version {version}, this side speaks {PROTOCOL_VERSION}; "
            "run the same canary_obs release in the engine and in the service"
        )
    try:
        return decoder.decode(memoryview(frame)[len(_HEADER) :])
    # Bad UTF-8 and deep nesting have their own exceptions in msgspec.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        # The text of a msgspec error names the path and the type, never the content.
        raise WireError(f"a frame of {size} bytes does not fit the schema: {error}") from error
