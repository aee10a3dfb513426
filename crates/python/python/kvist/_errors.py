"""The errors of kvist. Their texts are the engine's own."""


class Error(Exception):
    """Base of all errors that kvist raises on purpose."""


class ArgumentError(Error, ValueError):
    """An argument is wrong; nothing was done."""


class ModelError(Error):
    """A model's files cannot be read, or are not those of a model that kvist runs."""


class FileError(Error):
    """A saved session or a frozen prefix cannot be written, cannot be read, is torn or has changed; nothing of it is used. Or the
    directory of a tier cannot be used."""


class MismatchError(FileError):
    """A saved session or a frozen prefix was made with other weights or another cache; nothing of it is used."""


class OutOfMemory(Error, MemoryError):
    """Weights or cache do not fit into the memory budget; nothing was allocated."""


class Refused(Error):
    """A cache cannot do what was asked, and has not changed."""


class NoSpace(Refused):
    """Too few cells of the cache are free."""


class Busy(Error):
    """Another thread uses the object, or a step is in flight; nothing has changed."""
