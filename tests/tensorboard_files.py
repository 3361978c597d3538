"""What the examples wrote for TensorBoard."""

import struct

from tensorboardX.proto import event_pb2


def events(file):
    """The records of a TensorBoard file: length, its CRC, an Event, its CRC."""
    data, at = file.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length
