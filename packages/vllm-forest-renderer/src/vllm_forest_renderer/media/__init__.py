"""Media of captured calls: what a processor made of each image, where it lies, what is kept.

Guarantees: nothing of a request's media is stored before the call is committed; a retained image
is compared with what was captured, field by field and byte by byte, before inference.
"""
