"""Every error that bucketrl raises on purpose.

BucketrlError
├── UserError          wrong input; the command prints one line and exits with 2; never retried
├── StoreError         the store failed after all retries; the caller may try again later
│   ├── NotFound       no object has this key (yet)
│   ├── AlreadyExists  create-if-absent found an object
│   └── Unsupported    the store lacks this primitive; choose another way, do not approximate it
├── IntegrityError     an object is torn, foreign or corrupt: quarantine it, never train on it
│   └── Missing        an object is named by a commit and is not there
└── Fenced             a newer learner owns the run: stop at once, change nothing
"""


class BucketrlError(Exception):
    """Base of all of them."""


class UserError(BucketrlError):
    """Wrong input. The message is one line: which field, what was found, what to do."""


class StoreError(BucketrlError):
    """The object store failed after all retries."""


class NotFound(StoreError):
    """No object has this key."""


class AlreadyExists(StoreError):
    """Create-if-absent found an object under this key."""


class Unsupported(StoreError):
    """The store cannot do this atomically."""


class IntegrityError(BucketrlError):
    """An object's size, digest, schema or run does not match what names it."""


class Missing(IntegrityError):
    """A commit names an object that is not in the bucket."""


class Fenced(BucketrlError):
    """The log holds a higher epoch: another learner has taken over."""
