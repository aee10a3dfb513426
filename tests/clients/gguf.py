"""A GGUF file with one more text among its metadata; tensors are copied as they are.

Only what this takes of the format (version 3, little-endian) is read here.
"""
import struct

STRING, ARRAY = 8, 9
# Bytes of a value, by its type.
FIXED = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
ALIGNMENT = "general.alignment"


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, form):
        value, = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def text(self):
        n = self.take("Q")
        self.at += n
        return self.data[self.at - n:self.at].decode()

    def skip(self, kind):
        if kind == STRING:
            self.text()
        elif kind == ARRAY:
            item, n = self.take("I"), self.take("Q")
            if item in FIXED:
                self.at += FIXED[item] * n
            else:
                for _ in range(n):
                    self.skip(item)
        else:
            self.at += FIXED[kind]


def with_text(data, key, text):
    """The file `data` with `key` set to `text`; it must not have that key yet."""
    read = Reader(data)
    magic, version = data[:4], struct.unpack_from("<I", data, 4)[0]
    assert (magic, version) == (b"GGUF", 3), (magic, version)
    read.at = 8
    n_tensors, n_keys = read.take("Q"), read.take("Q")
    alignment = 32
    for _ in range(n_keys):
        name, kind = read.text(), read.take("I")
        assert name != key, f"{key} is there already"
        if name == ALIGNMENT:
            alignment = struct.unpack_from("<I", data, read.at)[0]
        read.skip(kind)
    keys_end = read.at
    for _ in range(n_tensors):
        read.text()
        n_dimensions = read.take("I")
        read.at += 8 * n_dimensions + 4 + 8  # shape, type, offset in the data
    tensors_end = read.at

    def padded(n):
        return -(-n // alignment) * alignment

    key, text = key.encode(), text.encode()
    pair = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", STRING, len(text)) + text
    head = data[:8] + struct.pack("<QQ", n_tensors, n_keys + 1) + data[24:keys_end] + pair + data[keys_end:tensors_end]
    return head + bytes(padded(len(head)) - len(head)) + data[padded(tensors_end):]
