"""The bucket protocol: object stores, records, codecs, verification. `bucket_layout.md` specifies it."""
