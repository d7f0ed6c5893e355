"""Frames between an engine and the service: a four-byte header (magic, version), then msgpack."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from canary_obs.errors import WireError
from canary_obs.records import Command, EngineMessage

PROTOCOL_VERSION = 3
MAX_MESSAGE_BYTES = 4 << 20  # 1024 violations have at most 3.4 MB, a snapshot of 64 groups a tenth

_MAGIC = b"kvc"
_HEADER = _MAGIC + bytes([PROTOCOL_VERSION])
_ENCODER = msgspec.msgpack.Encoder()
_MESSAGES: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

Decoded = TypeVar("Decoded")


def encode(message: EngineMessage | Command) -> bytes:
    """Encode one frame. Raises WireError when it cannot be encoded or is larger than MAX_MESSAGE_BYTES."""
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
    """Decode a frame of an engine. Raises WireError."""
    return _decode(frame, _MESSAGES)


def decode_command(frame: bytes) -> Command:
    """Decode a frame of the service. Raises WireError."""
    return _decode(frame, _COMMANDS)


def _decode(frame: bytes, decoder: msgspec.msgpack.Decoder[Decoded]) -> Decoded:
    size = len(frame)
    if size > MAX_MESSAGE_BYTES:
        raise WireError(f"a frame of {size} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    if size < len(_HEADER) or not frame.startswith(_MAGIC):
        raise WireError(f"a frame of {size} bytes has no canary_obs header; another program sent it")
    version = frame[len(_MAGIC)]
    if version != PROTOCOL_VERSION:
        raise WireError(
            f"protocol version {version}, this side speaks {PROTOCOL_VERSION}; "
            "run the same canary_obs release in the engine and in the service"
        )
    try:
        return decoder.decode(memoryview(frame)[len(_HEADER) :])
    # Besides DecodeError, msgspec raises these for bad UTF-8, deep nesting and large integers.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        # The text of a msgspec error contains the path and the type, never the content.
        raise WireError(f"a frame of {size} bytes does not fit the schema: {error}") from error
